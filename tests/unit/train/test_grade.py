"""Grades: what keeps bits, what does not, and that it is said."""

from pathlib import Path
from typing import Any

import pytest

from sirara.config.load import load
from sirara.train.grade import arithmetic, grade

LAYOUT = {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "zero": 1, "world": 2}


def of(tmp_path: Path, *overrides: str, threads: int = 1, layout: dict[str, int] = LAYOUT) -> dict[str, Any]:
    file = tmp_path / "sirara.yaml"
    file.write_text(
        "schema: 1\nname: g\nmodel: {family: llama, layers: 1, hidden: 32, heads: 2, vocab: 50, max_seq: 16}\n"
        f"data: {{train: [{{path: {tmp_path / 'a'}}}], seq_len: 8}}\n"
        "train: {steps: 10, global_batch: 8, micro_batch: 2}\n"
    )
    return arithmetic(load(file, overrides).config, device="cpu", threads=threads, layout=layout)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.zero=0"],
        ["mesh.block=2"],
        ["checkpoint.every=3", "checkpoint.keep_last=9"],
        ["log.every=7"],
        ["train.eval_every=3"],
        ["data.eval=[{path: /held, name: held}]"],
        ["data.train=[{path: /elsewhere}]"],
        ["run_dir=/elsewhere"],
        ["train.steps=20"],
    ],
)
def test_what_is_outside_the_arithmetic_keeps_the_grade(overrides: list[str], tmp_path: Path) -> None:
    wider = LAYOUT | {"dp": 4, "world": 4, "zero": 0}
    assert str(grade(of(tmp_path), of(tmp_path, *overrides, layout=wider))) == "exact"


def test_which_tokens_a_tensor_parallel_rank_sums_enters_the_arithmetic(tmp_path: Path) -> None:
    split = LAYOUT | {"tp": 2}
    plain = of(tmp_path, "mesh.tp=2", layout=split)
    shared = of(tmp_path, "mesh.tp=2", "mesh.sequence_parallel=true", layout=split)
    assert grade(plain, shared).why == ("mesh.sequence_parallel absent -> True",)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.global_batch=16", "train.global_batch 8 -> 16"),
        ("train.micro_batch=4", "train.micro_batch 2 -> 4"),
        ("train.optimizer.lr=0.5", "train.optimizer.lr 0.0003 -> 0.5"),
        ("train.precision=bf16", "train.precision fp32 -> bf16"),
        ("numerics=fast", "numerics exact -> fast"),
        ("seed=7", "seed 1234 -> 7"),
        ("model.dropout=0.5", "model.dropout 0.0 -> 0.5"),
        ("train.label_smoothing=0.1", "train.label_smoothing 0.0 -> 0.1"),
    ],
)
def test_what_enters_the_arithmetic_is_named_with_both_values(
    override: str, words: str, tmp_path: Path
) -> None:
    got = grade(of(tmp_path), of(tmp_path, override))
    assert (got.name, words in got.why) == ("close", True)


def test_another_end_of_a_decaying_schedule_is_another_arithmetic(tmp_path: Path) -> None:
    cosine = "train.lr_schedule={name: cosine}"
    assert (
        str(grade(of(tmp_path, cosine), of(tmp_path, cosine, "train.steps=20")))
        == "close (train.steps 10 -> 20)"
    )


def test_threads_and_tensor_parallel_degree_are_part_of_the_arithmetic(tmp_path: Path) -> None:
    assert grade(of(tmp_path), of(tmp_path, threads=2)).why == ("launch.threads 1 -> 2",)
    assert grade(of(tmp_path), of(tmp_path, layout=LAYOUT | {"tp": 2})).why == ("mesh.tp 1 -> 2",)


def test_fast_numerics_never_promise_equal_bits(tmp_path: Path) -> None:
    assert (
        str(grade(of(tmp_path, "numerics=fast"), of(tmp_path, "numerics=fast"))) == "close (numerics: fast)"
    )
