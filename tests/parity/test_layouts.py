"""Every layout computes what one process computes: equal bits where tp = 1, the bounds of `close` where tp > 1.

`make test` runs a covering set: every legal pair of values of any two knobs is in one of its rows, 4 steps each.
The full matrix of axes, ZeRO stages and schedules, 20 steps, is `long`.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.parity.layouts import (
    FAMILIES,
    KNOBS,
    LONG_STEPS,
    PLAIN,
    RULES,
    SMALL,
    STEPS,
    check,
    make_store,
    name_of,
    oracle,
    ranks_of,
    run,
)
from tests.parity.pairs import Row, covering_set, legal_rows, pairs_of

COVERING = covering_set(KNOBS, RULES)
# Neighbours share their oracle and the number of ranks that are kept warm.
COVERING.sort(key=lambda row: (ranks_of(row), name_of(row)))

LARGE: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "dp": 2, "zero": 3, "family": "llama, 2 kv heads", "sequence": True},
    {
        "pp": 2,
        "tp": 2,
        "dp": 2,
        "zero": 2,
        "family": "gpt2",
        "schedule": "zb-v",
        "dropout": 0.1,
        "optimizer": "muon",
    },
    {"pp": 2, "dp": 3, "zero": 3, "family": "bloom", "schedule": "interleaved", "microbatches": 4},
    {"pp": 4, "tp": 2, "zero": 1, "family": "qwen3", "schedule": "zb-h1", "tied": False},
    {"tp": 2, "dp": 3, "zero": 3, "family": "bloom", "gather": "step", "sequence": True, "tied": False},
    {"tp": 4, "family": "llama, 2 kv heads", "schedule": "zb-h1", "dropout": 0.1},
    {"tp": 4, "family": "gpt2", "sequence": True, "recompute": "full"},
    {"tp": 4, "family": "llama, 1 kv head", "sequence": True, "tied": False, "optimizer": "muon"},
    {"tp": 4, "family": "llama", "vocab": SMALL, "smoothing": 0.1},
]
"""More than four ranks, and tp 4: sums of more than two, two kv heads on four ranks, vocabulary 17 17 17 16."""


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder)
    return folder


def test_the_covering_set_holds_every_legal_pair_of_values() -> None:
    # The rules are asked about whole rows only, so that this shares nothing with the generator; knobs that are in no
    # rule go with everything.
    ruled = {knob: KNOBS[knob] for rule in RULES for knob in rule.knobs}
    legal = {pair for row in legal_rows(ruled, RULES) for pair in pairs_of(row)}
    values = {(knob, value) for a, x, b, y in legal for knob, value in ((a, x), (b, y))}
    free = {(knob, value) for knob in KNOBS if knob not in ruled for value in KNOBS[knob]}
    expected = {frozenset(((a, x), (b, y))) for a, x, b, y in legal}
    expected |= {frozenset((one, two)) for one in free for two in values | free if one[0] != two[0]}
    covered = {frozenset(((a, x), (b, y))) for row in COVERING for a, x, b, y in pairs_of(row)}
    assert expected == covered
    assert values | free == {(knob, value) for knob in KNOBS for value in KNOBS[knob]}
    assert covering_set(KNOBS, RULES) == covering_set(KNOBS, RULES)


@pytest.mark.parametrize("case", COVERING, ids=name_of)
def test_a_layout_of_the_covering_set_equals_one_process(case: Row, stores: Path) -> None:
    check(case, stores, STEPS)


@pytest.mark.parametrize("change", LARGE, ids=lambda change: name_of(PLAIN | change))
def test_many_ranks_equal_one_process(change: Row, stores: Path) -> None:
    check(PLAIN | change, stores, STEPS)


LOWER: list[Row] = [
    {"pp": 2, "dp": 2, "zero": 3},
    {"pp": 4, "zero": 1, "schedule": "zb-v"},
    {"dp": 2, "zero": 1, "microbatches": 4},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LOWER, ids=str)
def test_lower_precisions_have_the_bits_of_one_process(precision: str, layout: Row, stores: Path) -> None:
    check(PLAIN | layout | {"precision": precision, "dropout": 0.1}, stores, STEPS)


def test_initial_weights_and_the_first_loss_know_nothing_of_the_layout(stores: Path) -> None:
    expected = oracle(PLAIN, stores, 2)
    for layout in (
        {"tp": 4},
        {"tp": 2, "pp": 2, "zero": 3, "sequence": True},
        {"pp": 4},
        {"dp": 3, "zero": 3},
    ):
        got = run(PLAIN | layout, stores, 2)
        assert got.begin == expected.begin
        first, true = (float.fromhex(trace.steps[0][0]) for trace in (got, expected))
        assert first == true if "tp" not in layout else abs(first - true) <= 1e-14 * true


def test_copies_over_tp_stay_equal_in_bf16(stores: Path) -> None:
    # `run` compares the replicas; rounding differs over tp, so the losses only come near.
    case = PLAIN | {"family": "qwen3", "precision": "bf16", "tp": 2, "dp": 2, "zero": 1, "sequence": True}
    got, expected = run(case, stores, STEPS), oracle(case, stores, STEPS)
    for (a, _), (b, _) in zip(got.steps, expected.steps, strict=True):
        assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-2)


def test_tensor_parallelism_in_fp32_stays_within_1e_5_of_one_process(stores: Path) -> None:
    for layout in ({"tp": 2, "dp": 2, "zero": 2}, {"tp": 2, "pp": 2, "sequence": True}):
        case = PLAIN | layout | {"precision": "fp32", "microbatches": 1}
        got, expected = run(case, stores, LONG_STEPS), oracle(case, stores, LONG_STEPS)
        for there, here in zip(got.steps, expected.steps, strict=True):
            for a, b in zip(there, here, strict=True):
                assert float.fromhex(a) == pytest.approx(float.fromhex(b), rel=1e-5)


# ------------------------------------------------------------ the full matrix

MESHES = [(1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
MODELS = [
    *product(("gpt2", "bloom", "llama"), (True, False)),
    *(("llama, 2 kv heads", True), ("llama, 1 kv head", False), ("qwen3", True)),
]


def matrix(family: str, tied: bool, mesh: tuple[int, int, int]) -> list[Row]:
    """Every ZeRO stage and schedule on one mesh; the other knobs go round, so that all their values come up."""
    pp, tp, dp = mesh
    rows: list[Row] = []
    turn = 7 * list(FAMILIES).index(family) + 3 * tied + 5 * MESHES.index(mesh)
    for n, (zero, schedule) in enumerate(product(KNOBS["zero"], KNOBS["schedule"])):
        row = PLAIN | {"family": family, "tied": tied, "pp": pp, "tp": tp, "dp": dp}
        row |= {"zero": zero, "schedule": schedule}
        # Few oracles: what is computed changes twice within a mesh.
        row["optimizer"] = KNOBS["optimizer"][(turn + n // 10) % 3]
        row["dropout"] = KNOBS["dropout"][(turn + n // 10) % 2]
        row["smoothing"] = KNOBS["smoothing"][(turn + n // 10 + 1) % 2]
        row["microbatches"] = KNOBS["microbatches"][(turn + n // 10) % 2]
        for step, knob in enumerate(("sequence", "recompute", "gather", "split", "block", "evaluate"), 1):
            value = KNOBS[knob][(turn + n * step + n // 5) % len(KNOBS[knob])]
            if not any(rule.broken_by(row | {knob: value}) for rule in RULES):
                row[knob] = value
        rows.append(row)
    return rows


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "pp{}_tp{}_dp{}".format(*m))
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_full_matrix_equals_one_process(
    family: str, tied: bool, mesh: tuple[int, int, int], stores: Path
) -> None:
    failed: list[str] = []
    for case in matrix(family, tied, mesh):
        try:
            check(case, stores, LONG_STEPS)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)


def test_the_full_matrix_brings_up_every_value_of_every_knob() -> None:
    rows = [row for (family, tied), mesh in product(MODELS, MESHES) for row in matrix(family, tied, mesh)]
    assert len({name_of(row) for row in rows}) == len(rows) == len(MODELS) * len(MESHES) * 20
    for knob in KNOBS.keys() - {"frozen", "microbatches"}:
        assert {row[knob] for row in rows} == set(KNOBS[knob]), knob
    assert not any(rule.broken_by(row) for row in rows for rule in RULES)
