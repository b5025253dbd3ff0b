"""Weights that two ranks hold in full are compared by digest; one flipped bit ends the run with rank and group."""

import pytest
import torch
import torch.distributed as dist

from sirara.comm.world import World, world_comm
from sirara.errors import CheckpointError
from sirara.parallel.parallelize import Layout, parallelize
from sirara.pure.families import init_slice
from sirara.pure.tree import deal
from sirara.train.state import Counters, TrainState
from tests.harness import RankFailed, run_ranks
from tests.toy import Toy, specs


def compare(zero: int, what: str) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    comm = world_comm(world, timeout_s=20)
    layout = Layout(zero=zero, deal=deal(2, size), weights=torch.float32, sums=torch.float32)
    stage = parallelize(Toy(), specs(tied=True), layout, comm=comm, device=torch.device("cpu"))
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 7, a, b)))
    state = TrainState(zero=stage.zero, comm=comm, state_names=("exp_avg",), counters=Counters())
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
