"""Buffers of gradients over many steps: as many after the fifth step as after the second, on every path."""

from typing import Any

import pytest
import torch

from sirara.train.optim import make_optimizer
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step
from tests.harness import run_ranks
from tests.ranks.test_step import batch
from tests.toy import assemble

STEPS = 5


def steps(
    zero: int, block: Any, precision: str, microbatches: int, fast: bool
) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses, and bytes that the pool has made and keeps, after each step on the ranks of the current group."""
    stage, mesh, dealt = assemble(
        zero=zero, microbatches=microbatches, block=block, precision=precision, fast=fast
    )
    optim = make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    TrainState(stage=stage, mesh=mesh, state_names=optim.states_of, counters=Counters()).reset_optimizer()
    step = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optim, clip=0.5)
    losses, pools = [], []
    for n in range(STEPS):
        inputs = {i: batch(n, i) for i in dealt.mine(mesh.coordinate("dp"))}
        mine = step.accumulate(inputs, valid_targets=100, keys=None)
        losses.append(step.finish(mine, valid_targets=100, lr=1e-2, update=n + 1, request=0).loss)
        kept = sum(t.nbytes for buffers in stage.zero.pool.free.values() for t in buffers)
        pools.append((stage.zero.pool.bytes_made, kept))
    stage.zero.wait_all()
    stage.comms.world.gather_rows("end", torch.zeros(1))
    return losses, pools


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
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


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_fast_numerics_give_the_losses_of_one_exact_process_but_for_rounding(zero: int) -> None:
    expected, _ = steps(0, "auto", "fp64", 12, False)
    for losses, _ in run_ranks(3, steps, zero, "auto", "fp64", 12, True):
        assert losses == pytest.approx(expected, rel=1e-12)
