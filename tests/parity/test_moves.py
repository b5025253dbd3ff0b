"""A run that is saved on one layout, continued on a second and finished on a third has the numbers of one process.

Through real checkpoints: tensor, pipeline and data parallel degrees, ZeRO stages and schedules change on the way.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import RankFailed, run_ranks
from tests.parity.faults import plant
from tests.parity.layouts import (
    PLAIN,
    SMALL,
    Trace,
    differences,
    joined,
    keep_state,
    make_run,
    make_store,
    merged,
    open_trainer,
    oracle,
    ranks_of,
    watch,
)
from tests.parity.pairs import Row

CUTS = (2, 4, 6)
STEPS = CUTS[-1]

ALONE: Row = {}
JOURNEYS: dict[str, tuple[Row, tuple[Row, Row, Row]]] = {
    "tied weights over stages": (
        {"family": "llama", "dropout": 0.1},
        ({"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-v"}, {"dp": 3, "zero": 1}, {"pp": 4}),
    ),
    "muon": (
        {"family": "gpt2", "tied": False, "optimizer": "muon", "microbatches": 4},
        ({"dp": 2, "zero": 2}, {"pp": 2, "zero": 3, "schedule": "interleaved"}, ALONE),
    ),
    "masters of bf16": (
        {"family": "bloom", "precision": "bf16"},
        ({"pp": 4, "zero": 1, "schedule": "zb-h1"}, {"dp": 3, "zero": 3}, {"pp": 2, "dp": 2}),
    ),
    "frozen and lion": (
        {"family": "qwen3", "optimizer": "lion", "frozen": True, "microbatches": 4},
        ({"pp": 2, "zero": 3, "gather": "step"}, {"dp": 2}, {"pp": 4, "zero": 2, "schedule": "gpipe"}),
    ),
    "frozen without masters": (
        {"family": "gpt2", "precision": "bf16", "frozen": True, "microbatches": 4},
        ({"pp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 2, "pp": 2}),
    ),
    "packed c_attn and an uneven vocabulary": (
        {"family": "gpt2", "dropout": 0.1, "microbatches": 4},
        (
            {"tp": 2, "dp": 2, "zero": 3},
            {"tp": 2, "pp": 2, "zero": 1, "sequence": True},
            {"dp": 3, "zero": 2},
        ),
    ),
    "one kv head": (
        {"family": "llama, 1 kv head", "tied": False, "microbatches": 4},
        (ALONE, {"tp": 4}, {"tp": 2, "pp": 2, "zero": 3}),
    ),
    "muon over tp": (
        {"family": "bloom", "optimizer": "muon", "microbatches": 4},
        ({"tp": 2, "pp": 2, "zero": 1}, {"tp": 4, "sequence": True}, {"dp": 2, "zero": 2}),
    ),
    "two kv heads, norms of heads": (
        {"family": "qwen3", "tied": False, "microbatches": 4},
        ({"pp": 4, "zero": 3}, {"tp": 2, "dp": 2, "zero": 2}, {"tp": 4}),
    ),
    "ranks without vocabulary": (
        {"family": "llama, 2 kv heads", "vocab": SMALL, "microbatches": 4, "smoothing": 0.1},
        ({"tp": 4, "zero": 1}, {"tp": 2, "dp": 2, "zero": 0}, {"pp": 2, "dp": 2, "zero": 1}),
    ),
    "frozen over tp": (
        {"family": "gpt2", "optimizer": "lion", "frozen": True, "microbatches": 4},
        ({"tp": 2, "zero": 3}, {"pp": 2}, {"tp": 2, "pp": 2, "zero": 2, "sequence": True}),
    ),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder)
    return folder


def leg(case: Row, stores: str, home: str, number: int) -> tuple[Trace, dict[str, Any]]:
    """One part of the journey on the ranks of the current group: resume or start, train, save."""
    trainer = open_trainer(case, Path(stores), STEPS, home=Path(home), attempt=number)
    try:
        found = trainer.resume().step if number else trainer.start()
        trace = Trace(begin=str(trainer.digest()))
        watch(trainer, trace)
        while trainer.step < CUTS[number]:
            result = trainer.train_step()
            trace.steps.append((result.loss.hex(), result.grad_norm.hex()))
        trace.digest = str(trainer.save())
        keep_state(trainer, trace)
        return trace, {"from": found or 0, "grade": str(trainer.grade)}
    finally:
        trainer.end(clean=True)


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_run_that_changes_its_layout_twice_has_the_numbers_of_one_process(
    name: str, stores: Path, tmp_path: Path
) -> None:
    model, layouts = JOURNEYS[name]
    make_run(tmp_path)
    whole = Trace()
    for number, layout in enumerate(layouts):
        case = PLAIN | model | layout
        args = (case, str(stores), str(tmp_path), number)
        ranks = ranks_of(case)
        answers = [leg(*args)] if ranks == 1 else run_ranks(ranks, leg, *args)
        trace, said = merged([trace for trace, _ in answers]), answers[0][1]
        assert said["from"] == (CUTS[number - 1] if number else 0)
        if number:
            # One logical state has one digest, whoever holds which part of it.
            assert trace.begin == whole.digest
            before, after = (PLAIN | one for one in layouts[number - 1 : number + 1])
            same = (before["tp"], before["sequence"]) == (after["tp"], after["sequence"])
            assert said["grade"].startswith("exact" if same else "close (mesh."), said["grade"]
        else:
            whole.begin = trace.begin
        whole.steps += trace.steps
        whole.gradients += trace.gradients
        whole.digest, whole.state = trace.digest, trace.state
    case = PLAIN | model | {"tp": max(layout.get("tp", 1) for layout in layouts)}
    assert differences(case, whole, oracle(case, stores, STEPS)) == []


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_frozen_weights_are_continued_in_another_precision(
    before: str, after: str, stores: Path, tmp_path: Path
) -> None:
    # They have no masters; on a resume in bf16 they used to be left out.
    make_run(tmp_path)
    case = PLAIN | {"family": "gpt2", "frozen": True, "microbatches": 1}
    weights = []
    for number, precision in enumerate((before, after)):
        trace, said = leg(case | {"precision": precision}, str(stores), str(tmp_path), number)
        weights.append(joined(trace.state)["transformer.h.1.mlp.c_fc.weight"])
    assert said["from"] == CUTS[0]
    assert said["grade"] == f"close (train.precision {before} -> {after})"
    if before == "bf16":
        assert (weights[0] == weights[1]).all()
    else:
        assert abs(weights[0] - weights[1]).max() <= abs(weights[0]).max() / 256
        assert abs(weights[0] - weights[1]).max() > 0


def broken_resume(case: Row, stores: str, home: str, fault: dict[str, Any]) -> set[str]:
    """A resume that lacks an exchange; the kinds of exchange that it made."""
    trainer = open_trainer(case, Path(stores), STEPS, home=Path(home), attempt=1)
    kinds: set[str] = set()
    plant(trainer, fault, kinds)
    try:
        assert trainer.resume().step == CUTS[0]
        trainer.state.check_replicas()
        return kinds
    finally:
        trainer.end(clean=True)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ({"dp": 2}, {"kind": "dp: masters", "what": r"block\.1/decay"}),
        ({"dp": 2}, {"kind": "dp: exp_avg", "what": r"block\.1/plain"}),
        ({"dp": 2}, {"kind": "dp: publish", "what": r"block\.1/decay"}),
        ({"dp": 2, "zero": 1}, {"kind": "dp: publish", "what": "embed/tied"}),
        ({"pp": 2, "zero": 3}, {"kind": "ties: publish"}),
    ],
    ids=str,
)
def test_a_resume_that_lacks_an_exchange_is_noticed(
    layout: Row, fault: dict[str, Any], stores: Path, tmp_path: Path
) -> None:
    make_run(tmp_path)
    case = PLAIN | {"microbatches": 1, "precision": "bf16"}
    leg(case, str(stores), str(tmp_path), 0)
    args = (case | layout, str(stores), str(tmp_path))
    assert all(fault["kind"] in kinds for kinds in run_ranks(2, broken_resume, *args, {}))
    with pytest.raises(RankFailed, match=f"replicas of group {fault.get('what', 'embed/tied')} differ"):
        run_ranks(2, broken_resume, *args, fault)
