"""Weights that two ranks hold in full are compared by digest; one flipped bit ends the run with rank and group."""

import pytest
import torch
import torch.distributed as dist

from sirara.errors import CheckpointError
from sirara.pure.families import TensorSpec
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


def drawn_again(zero: int) -> tuple[set[str], list[torch.Tensor]]:
    """Names of the tensors that this rank is asked to draw, and its tied weights afterwards."""
    stage, _, _ = assemble(microbatches=2, zero=zero, pp=2, tied=True)
    names: set[str] = set()

    def draw(spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        names.add(spec.name)
        return torch.arange(start, stop, dtype=torch.float64)

    stage.zero.initialise(draw)
    return names, [flat.weights_S for flat in stage.zero.groups if len(flat.group.uses) > 1]


@pytest.mark.parametrize("zero", [1, 3])
def test_only_the_stage_that_owns_a_tied_weight_draws_it(zero: int) -> None:
    # The last stage drew the whole vocabulary too, only to be sent the same values.
    (first, [owned]), (last, [copy]) = run_ranks(2, drawn_again, zero)
    assert first and last and not first & last
    assert owned.any() and torch.equal(owned, copy)
