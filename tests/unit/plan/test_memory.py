"""Closed forms of memory: the figures of the papers they come from, and what must hold for all configurations."""

import numpy as np

from sirara.plan.constants import Constants
from sirara.plan.hardware import index_of, shipped_table
from sirara.plan.memory import memory
from sirara.plan.points import Attention, Kind, Loss, Recompute, Schedule, points

GPT_22B = {
    "layers": 48, "hidden": 6144, "ffn": 24576, "heads": 64, "vocab": 51200, "seq": 2048, "micro_batch": 4,
    "global_batch": 4, "tp": 8, "dropout": 1, "attention": int(Attention.PLAIN), "kind": int(Kind.MEGATRON_2021),
    "loss": int(Loss.PARALLEL), "layer_norm": 1, "tied": 1,
}  # fmt: skip


def held(**columns):
    return memory(points(columns), shipped_table(), Constants())


def test_model_states_of_7_5_billion_parameters_on_64_devices_are_those_of_the_zero_paper():
    """arXiv:1910.02054, figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    # A model that is nearly all table, so that nothing is gathered or kept beside it.
    sizes = {"layers": 1, "hidden": 8, "ffn": 8, "heads": 1, "vocab": 7.5e9 / 8, "seq": 1, "tied": 1}
    m = held(zero=[0, 1, 2, 3], dp=64, grad_bytes=2, global_batch=64, **sizes)
    states = (m.weights + m.gradients + m.optimizer) / 1e9
    np.testing.assert_allclose(states, [120, 31.4, 16.6, 1.9], rtol=0.02)


def test_activations_of_a_block_are_those_of_korthikanti():
    """arXiv:2205.05198, table 2, bytes of one block: with tp, + sp, + selective; full recompute keeps its input."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    expected = [
        s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        s * b * h / t * (34 + 5 * a * s / h),
        s * b * h / t * 34,
        2 * s * b * h / t,
    ]
    m = held(
        **GPT_22B,
        sequence_parallel=[0, 1, 1, 1],
        recompute=[0, 0, int(Recompute.CORE), int(Recompute.FULL)],
    )
    masks = b * s * h / np.array([1, t, t, t])  # of the embedding's dropout
    np.testing.assert_allclose((m.activations - masks) / 48, expected, rtol=1e-12)


def test_microbatches_in_flight_are_those_of_the_schedules():
    """1F1B holds p on the first stage, GPipe m, ZB-H1 p everywhere, ZB-H2 2p - 1, interleaved p + (p - 1) / v."""
    kinds = [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1, Schedule.ZB_H2, Schedule.INTERLEAVED]
    m = held(
        layers=8, hidden=1024, ffn=4096, heads=16, seq=1024, vocab=1000, pp=4, vpp=[1, 1, 1, 1, 2],
        global_batch=32, schedule=[int(k) for k in kinds], kind=int(Kind.MEGATRON),
    )  # fmt: skip
    sizes = {"layers": 8, "hidden": 1024, "ffn": 4096, "heads": 16, "seq": 1024, "vocab": 1000}
    one = held(**sizes, pp=1, global_batch=1, kind=int(Kind.MEGATRON))
    per_stage = one.activations[0] / 4
    # Of the interleaved: (v - 1) p + 2 (p - 1) + 1 chunks of half a stage.
    np.testing.assert_allclose(m.activations / per_stage, [4, 32, 4, 7, 5.5], rtol=1e-12)


def test_more_sharding_never_takes_more_state_and_recompute_never_more_activations():
    every = [int(r) for r in (Recompute.NONE, Recompute.NORM, Recompute.ACT, Recompute.MLP, Recompute.FULL)]
    zero, recompute = (x.ravel() for x in np.meshgrid([0, 1, 2, 3], every))
    m = held(
        layers=16, hidden=2048, ffn=8192, heads=16, vocab=32000, seq=2048, dp=8, global_batch=8, gated=1,
        zero=zero, recompute=recompute, exact=1,
    )  # fmt: skip
    states = (m.weights + m.gradients + m.optimizer).reshape(len(every), 4)
    assert (np.diff(states, axis=1) <= 0).all()
    kept = m.activations.reshape(len(every), 4)[:, 0]
    assert (kept[1:] < kept[0]).all() and kept[-1] == kept.min()


def test_exact_numerics_hold_the_buffers_of_the_reduction_tree():
    sizes = {"layers": 4, "hidden": 512, "ffn": 2048, "heads": 8, "vocab": 1000, "seq": 128}
    m = held(exact=[0, 1, 1], block=[0, 0, 3], zero=1, dp=4, global_batch=64, **sizes)
    assert m.tree[0] == 0
    whole = m.weights[0] / 2 * 4
    # 64 leaves: log2(64) + 1 shards of a quarter.  8 blocks of 2^3: log2(8) + 1 of them, and two more whole buffers.
    np.testing.assert_allclose(m.tree[1:] / whole, [7 / 4, 4 / 4 + 2], rtol=1e-12)


def test_terms_add_up_and_device_exceeds_reserved_exceeds_allocated():
    rng = np.random.default_rng(7)
    n = 500
    m = held(
        layers=rng.integers(1, 12, n) * 8, hidden=rng.integers(1, 16, n) * 512, heads=8, ffn=4096, vocab=32000,
        seq=1024, pp=rng.choice([1, 2, 4, 8], n), tp=rng.choice([1, 2, 4, 8], n), zero=rng.integers(0, 4, n),
        dp=rng.choice([1, 4, 16], n), global_batch=256, gated=rng.integers(0, 2, n),
        recompute=rng.choice([0, 1, 8, 64], n), accelerator=index_of("h100-sxm"),
    )  # fmt: skip
    parts = (
        m.weights
        + m.gradients
        + m.optimizer
        + m.tree
        + m.gathered
        + m.stand_ins
        + m.activations
        + m.transient
    )
    np.testing.assert_allclose(parts, m.allocated, rtol=1e-12)
    assert (m.reserved >= m.allocated).all() and (m.device > m.reserved).all()
    np.testing.assert_array_equal(m.allocated, m.by_stage.max(axis=1))
