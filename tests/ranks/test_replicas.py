"""Weights that two ranks hold in full are compared by digest; one flipped bit ends the run with rank and group."""

import pytest
import torch
import torch.distributed as dist

from sirara.errors import CheckpointError
from sirara.train.state import Counters, TrainState
from tests.harness import RankFailed, run_ranks
from tests.toy import assemble


def compare(zero: int, what: str) -> bool:
    rank = dist.get_rank()
    stage, mesh, _ = assemble(zero=zero, microbatches=2)
    state = TrainState(stage=stage, mesh=mesh, state_names=lambda _: ("exp_avg",), counters=Counters())
    state.reset_optimizer()
    if rank == 1 and what == "weights":
        stage.zero.groups[1].weights_P.view(torch.int32)[3] ^= 1
    if rank == 1 and what == "exp_avg":
        stage.zero.groups[1].state["exp_avg"][3] = -0.0
    state.check_replicas()
    return True


@pytest.mark.parametrize("zero", [0, 1])
def test_equal_replicas_pass(zero: int) -> None:
    assert run_ranks(2, compare, zero, "nothing") == [True, True]


@pytest.mark.parametrize(("zero", "what"), [(0, "weights"), (1, "weights"), (0, "exp_avg")])
def test_one_flipped_bit_names_the_group_and_the_rank(zero: int, what: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, compare, zero, what)
    assert isinstance(failure.value.error, CheckpointError)
    assert "replicas of group block.0/decay differ: rank 1" in str(failure.value.error)
