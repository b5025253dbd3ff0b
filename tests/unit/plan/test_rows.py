"""Rows of published runs: what they state is read, what they do not say is noted or refused with the reason."""

from dataclasses import fields

import numpy as np
import pytest

from sirara.errors import ConfigError
from sirara.plan.hardware import DTYPES
from sirara.plan.points import Attention, Kind, Launch, Loss, Points, Recompute, Schedule, sizes
from sirara.plan.rows import from_records, read

BLOOM = {
    "core_id": "88", "source": "BLOOM 176B prequel chronicles", "model": "GPT 181B", "layers": "72", "hidden": "14336",
    "ffn": "57344", "heads": "64", "vocab": "250000", "seq": "2048", "gpus": "384", "gpu_type": "A100-SXM-80GB",
    "tp": "4", "pp": "12", "dp": "8", "zero_stage": "1", "micro_batch": "2", "global_batch": "2048",
    "recompute": "full", "precision": "fp16", "schedule_or_impl": "Megatron-DeepSpeed 1F1B",
    "notes": "Omni-Path 4x100 Gb per 8-GPU node", "step_time_s": "110.48", "memory": "44.0",
    "memory_unit": "peak GB (nvidia-smi)", "fits": "",
}  # fmt: skip
TITAN = {
    "core_id": "881", "source": "torchtitan Dec 2024 Table 3", "model": "Llama 3.1 8B", "layers": "32",
    "hidden": "4096", "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "seq": "8192", "gpus": "128",
    "gpu_type": "H100-SXM-96GB HBM2e (500 W)", "tp": "1", "pp": "1", "dp": "128", "zero_stage": "3",
    "micro_batch": "2", "global_batch": "256", "recompute": "selective", "precision": "bf16",
    "schedule_or_impl": "FSDP + torch.compile", "step_time_s": "2.5152", "memory": "62.0",
    "memory_unit": "peak GiB (torch max reserved, max rank)",
}  # fmt: skip
DEEPSEEK = {
    "core_id": "421", "source": "Megatron-Bridge 26.06 NeMo Container", "model": "DeepSeekV3", "layers": "61",
    "hidden": "7168", "ffn": "2048", "heads": "128", "kv_heads": "128", "vocab": "129280", "experts": "256",
    "topk": "8", "seq": "4096", "gpus": "256", "gpu_type": "GB200", "tp": "1", "pp": "4", "vpp": "4", "ep": "64",
    "dp": "64", "micro_batch": "1", "global_batch": "4096", "precision": "MXFP8", "step_time_s": "13.18897",
}  # fmt: skip


def one(row, **changes):
    return from_records([{**row, **changes}])


def test_deepspeed_row_has_the_network_of_its_notes_and_the_conventions_of_its_program():
    rows = one(BLOOM)
    p = rows.points
    assert p.out_bytes_per_s[0] == pytest.approx(135e9 / 8 / 8 / 0.6) and p.per_node[0] == 8
    assert (p.kind[0], p.attention[0], p.recompute[0]) == (Kind.DEEPSPEED, Attention.PLAIN, Recompute.FULL)
    assert (p.zero[0], p.grad_bytes[0], p.gated[0], p.learned[0]) == (1, 2, 0, 1)
    assert rows.memory_bytes[0] == 44e9 and rows.memory_level == ("device",) and rows.fits[0] == 1
    assert one(BLOOM, precision="bf16 + fp32 grad accumulation").points.grad_bytes[0] == 6


def test_torchtitan_row_keeps_every_second_matmul_and_is_measured_as_reserved():
    rows = one(TITAN)
    p = rows.points
    assert (p.recompute[0], p.loss[0], p.launch[0]) == (Recompute.OPS, Loss.TORCH, Launch.FUSED)
    assert rows.memory_level == ("reserved",) and rows.memory_bytes[0] == 62 * 2**30
    assert rows.assumed == ((),)
    assert one(TITAN, schedule_or_impl="FSDP").points.launch[0] == Launch.EAGER


def test_named_mixture_gets_what_its_published_configuration_says():
    rows = one(DEEPSEEK)
    p = rows.points
    assert (p.kv_rank[0], p.shared_ffn[0], p.dense_layers[0], p.predict_ahead[0]) == (512, 2048, 3, 1)
    assert p.dtype[0] == DTYPES.index("fp8") and p.schedule[0] == Schedule.INTERLEAVED
    assert sizes(p).total(p)[0] == pytest.approx(682e9, rel=0.01)
    assert rows.open_recompute[0]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("LLAMA2-7B", 6.74), ("Llama 3.1 70B", 70.6), ("Qwen2.5 32B", 32.8), ("Mixtral 8x7B", 46.7), ("GPT3-20B", 20.3),
     ("GPT-OSS 20B", 20.9), ("Qwen3 30B-A3B", 30.5), ("DeepSeek-V3", 671.0), ("Llama-like 8.86B", 8.86)],
)  # fmt: skip
def test_a_named_model_without_a_shape_has_the_published_one_and_its_number_of_parameters(name, billions):
    none = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk"), "")
    rows = one({**DEEPSEEK, **none, "model": name, "ep": "8", "pp": "1", "vpp": "1", "gpus": "64"})
    assert not rows.refused and any("published configuration" in a for a in rows.assumed[0])
    p = rows.points.with_(predict_ahead=0)
    assert sizes(p).total(p)[0] / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_stated_shape_is_not_completed_from_a_name():
    rows = one(
        {**DEEPSEEK, "model": "Llama 3 8B", "experts": "", "topk": "", "ep": "1", "vocab": "", "layers": "16"}
    )
    assert (rows.points.layers[0], rows.points.vocab[0]) == (16, 51200)


def test_blocks_of_mamba_are_refused_by_name():
    (refusal,) = one(DEEPSEEK, model="Nemotron_3_Nano").refused
    assert "Mamba" in refusal.reason


def test_release_that_a_source_names_changes_nothing():
    late, early = one(DEEPSEEK).points, one(DEEPSEEK, source="Megatron-Bridge 26.04 NeMo Container").points
    assert all((getattr(late, f.name) == getattr(early, f.name)).all() for f in fields(Points))


def test_automodel_runs_fused_modules_and_no_blocks_that_predict_further_tokens():
    row = one(
        DEEPSEEK,
        source="NeMo AutoModel",
        zero_stage="FSDP2",
        schedule_or_impl="TE + DeepEP",
        precision="bf16",
    )
    p = row.points
    assert (p.kind[0], p.zero[0], p.predict_ahead[0], p.weight_bytes[0]) == (Kind.FSDP2_TE, 3, 0, 2)
    assert one(DEEPSEEK).points.predict_ahead[0] == 1


def test_gpt_oss_is_gated_and_gpt_is_not():
    oss = one(DEEPSEEK, model="GPT OSS 120B", layers="36", hidden="2880", ffn="2880", heads="64", kv_heads="8",
              vocab="201088", experts="128", topk="4", pp="1", vpp="", dp="256").points  # fmt: skip
    assert oss.gated[0] == 1 and sizes(oss).total(oss)[0] == pytest.approx(117e9, rel=0.01)
    assert one(BLOOM).points.gated[0] == 0


def test_table_is_shared_where_that_is_nearer_to_the_stated_number_of_parameters():
    small = {**TITAN, "source": "nanotron", "layers": "28", "hidden": "3072", "ffn": "8192", "kv_heads": "",
             "vocab": "131072", "params_b": "3.57"}  # fmt: skip
    assert one(small).points.tied[0] == 1
    assert one(small, params_b="3.98").points.tied[0] == 0


def test_row_without_micro_batch_is_open_and_says_so():
    rows = one(BLOOM, micro_batch="")
    assert rows.open_micro_batch[0] and any("micro_batch" in a for a in rows.assumed[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "layers and hidden are not stated"),
        ({"gpu_type": ""}, "gpu_type is not stated"),
        ({"gpu_type": "Abacus"}, "not in the table"),
        ({"gpus": ""}, "gpus are not stated"),
        ({"gpus": "100"}, "is not 100 gpus"),
        ({"global_batch": ""}, "global_batch is not stated"),
    ],
)
def test_row_that_does_not_say_what_is_needed_is_refused_with_the_reason(changes, reason):
    rows = one(BLOOM, **changes)
    assert len(rows) == 0
    assert rows.refused[0].id == "88" and reason in rows.refused[0].reason


def test_label_without_a_step_time_is_kept():
    rows = one(BLOOM, step_time_s="", memory="", fits="0")
    assert rows.fits[0] == 0 and np.isnan(rows.step_s[0]) and np.isnan(rows.memory_bytes[0])


def test_file_that_has_other_columns_or_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a file"):
        read(tmp_path / "rows.csv")
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="gpu_type") as error:
        read(file)
    assert error.value.code == "SR213"


def test_row_of_an_old_program_that_does_not_state_recompute_is_taken_as_full_and_stays_so():
    rows = one(BLOOM, recompute="")
    assert rows.points.recompute[0] == Recompute.FULL and not rows.open_recompute[0]
    assert rows.assumed[0] == ("full recompute, as its program was used",)


@pytest.mark.parametrize("key", ["step_time_s", "memory"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast"])
def test_a_measurement_that_is_none_is_refused(key, value):
    rows = one(TITAN, **{key: value})
    assert len(rows) == 0 and rows.refused[0].reason == f"{key} is {value!r}"


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfe\x00", "no CSV"), (b"", "no column"), (b"a,b\n1,2\n", "no column"),
     (b"layers,hidden,gpus,gpu_type,step_time_s\n", "no rows")],
)  # fmt: skip
def test_a_file_without_runs_is_refused(tmp_path, content, says):
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as error:
        read(file)
    assert error.value.code == "SR213"
