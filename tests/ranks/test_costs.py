"""What docs/parallelism.md says that a layout sends and holds is what the communicators and buffers count."""

from math import ceil, log2
from typing import Any

import pytest
import torch

from sirara.pure.schedule import chunks_of
from sirara.train.optim import make_optimizer
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step
from tests.harness import run_ranks
from tests.ranks.test_step import B, batch
from tests.ranks.test_tensor import cut, gradients, initialised, open_axis, shape_of
from tests.toy import BLOCKS, HIDDEN, LENGTH, assemble

WIDTH = {"fp32": 4, "bf16": 2}


def steps(options: dict[str, Any]) -> dict[str, float]:
    """Two steps; of the second: bytes sent over dp (per padded parameter) and pp, gathers; and the gradient buffers."""
    stage, mesh, dealt = assemble(tied=False, **options)
    optimizer = make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    TrainState(stage=stage, mesh=mesh, state_names=optimizer.states_of, counters=Counters()).reset_optimizer()
    step = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optimizer, clip=0.5)
    zero, comms = stage.zero, stage.comms
    window = zero.window
    before = (0, 0, 0)
    for n in range(2):
        before = (comms.dp.bytes_sent, comms.pp.bytes_sent, window.gathers if window else 0)
        inputs = {i: batch(n, i) for i in dealt.mine(mesh.coordinate("dp"))}
        losses = step.accumulate(inputs, valid_targets=100, keys=None)
        step.finish(losses, valid_targets=100, lr=1e-2, update=n + 1, request=0)
    padded = sum(flat.group.shard_numel(comms.dp.size) * comms.dp.size for flat in zero.groups)
    return {
        "dp": (comms.dp.bytes_sent - before[0]) / padded,
        "pp": comms.pp.bytes_sent - before[1],
        "gathers": (window.gathers if window else 0) - before[2],
        "buffers": zero.pool.bytes_made / padded,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("zero", "keep"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_bytes_over_dp_are_those_of_the_table(zero: int, keep: bool, precision: str) -> None:
    d, m, k = 2, 8, 3 if zero < 2 else 0
    w, f = WIDTH[precision], (d - 1) / d
    gradients_sent = f * (4 if k else w) * m / 2**k + (f * 4 if zero == 0 else 0)
    weights_sent = f * w * {0: 0, 1: 1, 2: 1, 3: 1 if keep else 2 * m}[zero]
    for got in run_ranks(
        d, steps, {"zero": zero, "keep": keep, "precision": precision, "microbatches": d * m}
    ):
        if zero == 3 and not keep:
            # Units that are still in the window at a turn are not gathered.
            assert got["gathers"] == 2 * m * BLOCKS + 2
            assert gradients_sent < got["dp"] < gradients_sent + weights_sent
        else:
            assert got["dp"] == gradients_sent + weights_sent


@pytest.mark.parametrize(
    ("zero", "microbatches", "d", "block"),
    [
        (1, 2, 2, 1),
        (1, 16, 2, "auto"),
        (1, 64, 2, "auto"),
        (1, 16, 4, "auto"),
        (2, 16, 2, 1),
        (0, 8, 1, "auto"),
    ],
)
def test_buffers_of_the_exact_reduction_are_at_most_those_of_the_formula(
    zero: int, microbatches: int, d: int, block: int | str
) -> None:
    options = {"zero": zero, "microbatches": microbatches, "block": block}
    got = run_ranks(d, steps, options)[0]["buffers"] if d > 1 else steps(options)["buffers"]
    k = {1: 0, "auto": 3 if microbatches > 4 * d or d == 1 else 2}[block]
    rounds = ceil(ceil(microbatches / 2**k) / d)
    full = max(1, k) + (rounds > 1)
    shards = ceil(log2(rounds)) + d - 1 if d > 1 else 0
    if zero < 2:
        # A shard that waits for the update is lent to the next group, so a little less may do.
        assert 0.9 * 4 * (full + shards / d) < got <= 4 * (full + shards / d)
    else:
        assert got < 4 * (shards / d + 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_each_boundary_sends_a_hidden_state_and_its_gradient_per_microbatch(schedule: str) -> None:
    boundaries = 2 * chunks_of(schedule) - (2 if schedule == "zb-v" else 1)
    sent = sum(got["pp"] for got in run_ranks(2, steps, {"pp": 2, "schedule": schedule, "microbatches": 4}))
    assert sent == boundaries * 4 * 2 * B * LENGTH * HIDDEN * 4


def sent_over_tp(sequence: bool) -> tuple[float, float]:
    """(bytes that this rank sent, bytes of one hidden state) for one microbatch."""
    torch.set_num_threads(1)
    shape, length = shape_of("llama", kv_heads=4), 32
    axis, decoder = open_axis(sequence=sequence), initialised(shape)
    cut(decoder, axis)
    before = axis.comm.bytes_sent
    losses, _ = gradients(decoder, axis, None, length=length)
    small = 2 * losses.numel() * losses.element_size() * (axis.size - 1)
    return axis.comm.bytes_sent - before - small, losses.numel() * shape.hidden * losses.element_size()


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_over_tp_are_those_of_the_table(t: int, sequence: bool) -> None:
    layers = shape_of("llama").layers
    g = (t - 1) / t
    # Embedding and head: a sum each, or a gather and a scattered sum each.
    states = g * (layers * 10 + 4) if sequence else g * (layers * 8 + 4)
    for sent, state in run_ranks(t, sent_over_tp, sequence):
        assert sent == pytest.approx(states * state, rel=1e-12)
