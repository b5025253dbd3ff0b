"""Buffers of gradients over many steps: as many after the fifth step as after the second, on every path."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.comm.world import World, world_comm
from sirara.parallel.parallelize import Layout, parallelize
from sirara.pure.families import init_slice
from sirara.pure.tree import deal
from sirara.train.optim import make_optimizer
from sirara.train.precision import precision_of
from sirara.train.step import Step
from tests.harness import run_ranks
from tests.ranks.test_step import batch
from tests.toy import Toy, specs

STEPS = 5


def steps(
    zero: int, block: Any, precision: str, microbatches: int, fast: bool
) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses, and bytes that the pool has made and keeps, after each step on the ranks of the current group."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    comm = world_comm(
        World(rank=rank, size=size, local_rank=rank, local_size=size, node=0), timeout_s=20, direct=True
    )
    kind, dealt = precision_of(precision), deal(microbatches, size, block)
    layout = Layout(zero=zero, deal=dealt, weights=kind.weights, sums=kind.sums, fast=fast)
    stage = parallelize(Toy(), specs(tied=True), layout, comm=comm, device=torch.device("cpu"))
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 7, a, b)))
    optim = make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for flat in stage.zero.groups:
        flat.state = {name: torch.zeros_like(flat.master_U) for name in optim.state_names}
    step = Step(stage=stage, comm=comm, deal=dealt, optimizer=optim, clip=0.5)
    losses, pools = [], []
    for n in range(STEPS):
        inputs = {i: batch(n, i) for i in dealt.mine(rank)}
        mine = step.accumulate(inputs, valid_targets=100, keys=None)
        losses.append(step.finish(mine, valid_targets=100, lr=1e-2, update=n + 1, request=0).loss)
        kept = sum(t.nbytes for buffers in stage.zero.pool.free.values() for t in buffers)
        pools.append((stage.zero.pool.bytes_made, kept))
    stage.zero.wait_all()
    comm.gather_rows("end", torch.zeros(1))
    return losses, pools


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("precision", "block", "microbatches"), [("fp32", "auto", 12), ("bf16", 1, 5)])
def test_the_pool_stops_growing_after_the_first_step(
    fast: bool, zero: int, precision: str, block: Any, microbatches: int
) -> None:
    # `numerics: fast` gave a buffer to the pool in every step that it had not taken from there.
    for size in (1, 3):
        args = (zero, block, precision, microbatches, fast)
        for _, pools in run_ranks(size, steps, *args) if size > 1 else [steps(*args)]:
            assert pools[1:] == [pools[1]] * (STEPS - 1)
            # Nothing is in use between steps: what was made is what is kept.
            assert all(made == kept for made, kept in pools)


@pytest.mark.parametrize("zero", [0, 1])
def test_fast_numerics_give_the_losses_of_one_exact_process_but_for_rounding(zero: int) -> None:
    expected, _ = steps(0, "auto", "fp64", 12, False)
    for losses, _ in run_ranks(3, steps, zero, "auto", "fp64", 12, True):
        assert losses == pytest.approx(expected, rel=1e-12)
