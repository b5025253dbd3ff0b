"""What holds of every prediction, whatever the accelerator, schedule or program: finite, and ordered as work is."""

import itertools

import numpy as np
import pytest

from sirara.plan.constants import fitted
from sirara.plan.cost import step_time
from sirara.plan.hardware import index_of, shipped, shipped_table
from sirara.plan.memory import memory
from sirara.plan.points import Kind, Schedule, points
from sirara.plan.rows import from_records
from sirara.plan.validate import resolve

ROW = {
    "core_id": "1", "source": "Alpha", "model": "Llama", "layers": "32", "hidden": "4096", "ffn": "14336",
    "heads": "32", "kv_heads": "8", "vocab": "128256", "seq": "4096", "gpus": "64", "gpu_type": "h100-sxm", "tp": "4",
    "pp": "2", "dp": "8", "micro_batch": "1", "global_batch": "64", "precision": "bf16", "recompute": "none",
    "schedule_or_impl": "Megatron-LM 1F1B",
}  # fmt: skip
MIXTURE = {**ROW, "model": "", "experts": "8", "topk": "2", "ep": "4", "ffn": "1024"}
PROGRAMS = (
    "Megatron-LM 1F1B", "Megatron-DeepSpeed 1F1B", "interleaved 1F1B", "GPipe", "AFAB", "1F1B-I", "ZB-1p", "ZB-2p",
    "ZB-V", "tp-comm-overlap", "",
)  # fmt: skip


def step_and_memory(row):
    rows = from_records([row])
    assert len(rows) == 1, rows.refused
    p = resolve(rows, shipped_table(), fitted())
    return (
        step_time(p, shipped_table(), fitted()).step_s[0],
        memory(p, shipped_table(), fitted()).device[0],
    )


@pytest.mark.parametrize("row", [ROW, MIXTURE], ids=["dense", "mixture"])
def test_every_accelerator_precision_and_program_has_a_finite_prediction(row):
    kinds = itertools.product(shipped(), ("", "bf16", "fp16", "MXFP8", "NVFP4"))
    changes = [{"gpu_type": g, "precision": p} for g, p in kinds]
    changes += [{"schedule_or_impl": text} for text in PROGRAMS]
    changes += [
        {"source": s, "pp": "1", "dp": "16", "zero_stage": "3"}
        for s in ("torchtitan", "llm-foundry", "AutoModel")
    ]
    rows = from_records([{**row, **change, "core_id": str(change)} for change in changes])
    assert len(rows) == len(changes)
    step = step_time(rows.points, shipped_table(), fitted()).step_s
    device = memory(rows.points, shipped_table(), fitted()).device
    wrong = [
        rows.ids[i]
        for i in np.flatnonzero(~(np.isfinite(step) & (step > 0) & np.isfinite(device) & (device > 0)))
    ]
    assert wrong == []


@pytest.mark.parametrize("key", ["kv_heads", "heads", "ffn", "vocab", "dp", "micro_batch", "precision", "recompute",
                                 "schedule_or_impl", "source", "model"])  # fmt: skip
def test_column_that_may_be_left_out_leaves_a_prediction_that_is_near(key):
    full, _ = step_and_memory(ROW)
    for row in ({**ROW, key: ""}, {k: v for k, v in ROW.items() if k != key}):
        assert 0.6 < step_and_memory(row)[0] / full < 1.6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": "0"}, "layers is '0'"),
        ({"hidden": "inf"}, "hidden is 'inf'"),
        ({"micro_batch": "0.5"}, "micro_batch is '0.5'"),
        ({"seq": "-5"}, "seq is '-5'"),
        ({"tp": "four"}, "tp is 'four'"),
        ({"kv_heads": "3"}, "kv_heads 3 do not divide heads 32"),
        ({"experts": "8"}, "topk is not stated"),
        ({"experts": "8", "topk": "9"}, "a token goes to 9 of 8 experts"),
        ({"experts": "8", "topk": "2", "ep": "3"}, "ep 3 does not divide 8 experts"),
        ({"vpp": "40"}, "pp 2 * vpp 40 is more than 32 layers have"),
        ({"micro_batch": "16"}, "global_batch 64 is less than a microbatch on each of dp 8"),
        ({"precision": "int8"}, "precision 'int8' is not predicted"),
        ({"recompute": "every other"}, "recompute 'every other' is not predicted"),
        ({"zero_stage": "HSDP"}, "zero_stage 'HSDP' is not predicted"),
        ({"schedule_or_impl": "DualPipe"}, "schedule_or_impl 'DualPipe' is not predicted"),
    ],
)
def test_row_that_would_be_predicted_as_something_else_is_refused_with_the_reason(changes, reason):
    rows = from_records([{**ROW, **changes}])
    assert len(rows) == 0 and reason in rows.refused[0].reason


def test_last_microbatch_that_is_not_full_is_noted():
    assert from_records([{**ROW, "global_batch": "68"}]).assumed[0] == (
        "9 microbatches, the last not full on every rank",
    )


def grid():
    """Layouts of 64 devices over accelerators, kinds and schedules; `more` is what a test changes."""
    made = [
        {"tp": t, "pp": p, "dp": 64 // (t * p), "zero": z, "schedule": int(s), "kind": int(k),
         "accelerator": index_of(a)}
        for t, p, z, s, k, a in itertools.product(
            (1, 4, 8), (1, 4), (0, 1, 3), (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1),
            (Kind.SIRARA, Kind.MEGATRON),
            ("v100-32gb", "a100-80gb", "h100-sxm", "gb200", "mi300x", "tpu-v5p"),
        )
        if not (z == 3 and p > 1)
    ]  # fmt: skip
    return {k: [row[k] for row in made] for k in made[0]}


def step(**columns):
    base = {"layers": 32, "hidden": 4096, "ffn": 14336, "gated": 1, "heads": 32, "kv_heads": 8, "vocab": 128256,
            "seq": 4096, "micro_batch": 1, "global_batch": 1024, "attention": 2}  # fmt: skip
    return step_time(points({**base, **grid(), **columns}), shipped_table(), fitted())


@pytest.mark.parametrize(
    "less, more",
    [
        ({"seq": 2048}, {"seq": 4096}),
        ({"seq": 8192}, {"seq": 32768}),
        ({"layers": 32}, {"layers": 64}),
        ({"hidden": 4096}, {"hidden": 8192}),
        ({"ffn": 8192}, {"ffn": 16384}),
        ({"vocab": 32000}, {"vocab": 256000}),
        ({"global_batch": 1024}, {"global_batch": 2048}),
        ({"recompute": 0}, {"recompute": 64}),
        ({"out_bytes_per_s": 50e9}, {"out_bytes_per_s": 6.25e9}),
    ],
)
def test_more_to_do_never_takes_less_time(less, more):
    assert (step(**more).step_s >= step(**less).step_s).all()


def test_more_devices_at_a_fixed_batch_never_compute_longer():
    few, many = step(), step(dp=[2 * d for d in grid()["dp"]])
    for term in ("matmul", "attention", "memory_bound"):
        assert (getattr(many, term) <= getattr(few, term) * (1 + 1e-9)).all(), term


def test_sharding_more_never_holds_more_before_gathered_weights():
    base = {
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "vocab": 128256,
        "seq": 4096,
        "dp": 8,
        "global_batch": 64,
    }
    held = []
    for zero in range(4):
        m = memory(points({**base, "zero": zero}), shipped_table(), fitted())
        held.append(float((m.weights + m.gradients + m.optimizer)[0]))
    assert held == sorted(held, reverse=True) and held[0] > held[1] > held[3]
