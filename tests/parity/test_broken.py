"""Each exchange between ranks, broken in turn for one parameter, one unit or one call, is noticed by the comparison.

What arrives is thrown away (tests/parity/faults.py).  So a suite that passes has seen every exchange do its work; and
every kind of exchange that a step makes is broken here, or told below why not.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sirara.train.meter import FACTS
from tests.parity import layouts
from tests.parity.layouts import (
    PLAIN,
    Trace,
    differences,
    first_difference,
    make_store,
    oracle,
    run,
)
from tests.parity.pairs import Row

STEPS = 2
BASE = PLAIN | {"microbatches": 4, "evaluate": True}
LAYOUTS: dict[str, Row] = {
    "pp 2, dp 2, zero 0": {"pp": 2, "dp": 2, "zero": 0},
    "dp 3, zero 1": {"dp": 3, "zero": 1},
    "pp 2, dp 2, zero 2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v"},
    "pp 2, dp 2, zero 3, muon": {"pp": 2, "dp": 2, "zero": 3, "optimizer": "muon"},
    "dp 2, zero 3, once per step": {"dp": 2, "zero": 3, "gather": "step"},
    "tp 2": {"tp": 2, "family": "gpt2"},
    "tp 2, sequence": {"tp": 2, "sequence": True, "family": "bloom"},
    "tp 4": {"tp": 4, "family": "llama, 2 kv heads"},
    "tp 2, heads": {"tp": 2, "family": "qwen3"},
}
LOSSES = 3 + len(FACTS)
"""Where losses begin in the row by which ranks agree on a step (train/agree.py)."""
CHECKS = {
    "dp: compare replicas",
    "copies: compare replicas",
    "ties: compare tied weights",
}
"""They change no number; tests/ranks/test_replicas.py shows that they see."""

FAULTS: list[tuple[str, dict[str, Any]]] = [
    # (layout, fault): gradients of one group, one use of a tied one, one microbatch
    *(
        ("dp 3, zero 1", {"kind": "dp: reduce", "what": what})
        for what in (
            r" embed/tied$",
            r" embed/tied#1$",
            r"block\.0/decay",
            r"block\.3/plain",
            r"block\.5/decay",
            r"head/plain",
        )
    ),
    *(
        (layout, {"kind": "dp: reduce", "what": r"block\.2/decay", "calls": [call]})
        for layout in ("pp 2, dp 2, zero 2", "pp 2, dp 2, zero 3, muon")
        for call in (0, 1)
    ),
    ("pp 2, dp 2, zero 0", {"kind": "dp: reduce", "what": r"block\.4/plain"}),
    # weights after the update
    *(
        ("dp 3, zero 1", {"kind": "dp: publish", "what": what, "calls": [0]})
        for what in ("embed/tied", r"block\.0/plain", r"block\.3/decay", "head/plain")
    ),
    ("pp 2, dp 2, zero 2", {"kind": "dp: publish", "what": r"block\.5/decay", "calls": [0]}),
    ("pp 2, dp 2, zero 0", {"kind": "dp: publish", "what": "embed/tied", "calls": [0]}),
    # gradients that stage 0 needs in full
    *(
        ("pp 2, dp 2, zero 0", {"kind": "dp: gradients", "what": what})
        for what in ("embed/tied", r"block\.1/decay", r"block\.5/plain")
    ),
    # weights that stage 3 gathers before use
    *(
        ("dp 2, zero 3, once per step", {"kind": "dp: gather", "what": what})
        for what in ("embed/tied", r"block\.2/decay", r"block\.2/plain", "head/plain")
    ),
    *(
        ("pp 2, dp 2, zero 3, muon", {"kind": "dp: gather", "what": r"block\.1/decay", "calls": [call]})
        for call in (0, 1)
    ),
    # tied weights between stages, both ways
    ("pp 2, dp 2, zero 0", {"kind": "ties: tied"}),
    ("pp 2, dp 2, zero 3, muon", {"kind": "ties: tied", "calls": [0]}),
    ("pp 2, dp 2, zero 0", {"kind": "ties: publish", "calls": [0]}),
    ("pp 2, dp 2, zero 3, muon", {"kind": "ties: publish", "calls": [0]}),
    # gradients of what several tp ranks hold
    *(
        ("tp 2, sequence", {"kind": "copies: copies", "what": what})
        for what in (r"embed/plain", r"block\.0/plain", r"block\.5/plain", "head/plain")
    ),
    ("tp 4", {"kind": "copies: copies", "what": r"block\.1/decay"}),
    ("tp 2, heads", {"kind": "copies: copies", "what": r"block\.4/plain"}),
    # inside a layer: the embedding, the first and the last sums of a step, forward and backward
    *(("tp 2", {"kind": "tp: sum over tp", "calls": [call]}) for call in (0, 1, 2, 7, 12, 13, 14, 25)),
    *(
        ("tp 2, sequence", {"kind": "tp: scatter sum over tp", "calls": [call]})
        for call in (0, 1, 12, 13, 20)
    ),
    *(
        ("tp 2, sequence", {"kind": "tp: gather tokens over tp", "calls": [call]})
        for call in (0, 5, 13, 14, 30)
    ),
    *(("tp 4", {"kind": "tp: sum over tp", "calls": [call]}) for call in (0, 9, 17)),
    *(("tp 4", {"kind": "tp: spread sum over tp", "calls": [call]}) for call in (0, 9, 17)),
    *(("tp 2", {"kind": "tp: gather rows over tp", "calls": [call]}) for call in (0, 1)),
    ("tp 2, sequence", {"kind": "tp: gather rows over tp", "calls": [0]}),
    # between stages
    *(
        (layout, {"kind": kind, "what": what})
        for layout in ("pp 2, dp 2, zero 0", "pp 2, dp 2, zero 2")
        for kind in ("mail: output", "mail: gradient")
        for what in ("microbatch 0", "microbatch 3")
    ),
    # scalars: losses, norm sums
    ("pp 2, dp 2, zero 0", {"kind": "world: agree on the step", "columns": (LOSSES, LOSSES + 2), "but": 0}),
    ("dp 3, zero 1", {"kind": "world: agree on the step", "columns": (LOSSES, LOSSES + 1), "but": 1}),
    ("dp 3, zero 1", {"kind": "world: agree on the step", "columns": (LOSSES + 2, 1000), "but": 1}),
    ("tp 2", {"kind": "world: agree on the step", "columns": (LOSSES + 4, 1000), "but": 0}),
    ("dp 3, zero 1", {"kind": "world: evaluate"}),
    ("dp 3, zero 1", {"kind": "world: state digest"}),
    # matrices of Muon
    ("pp 2, dp 2, zero 3, muon", {"kind": "plane: gather matrices", "calls": [2]}),
    ("pp 2, dp 2, zero 3, muon", {"kind": "plane: return matrices", "calls": [2]}),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder)
    return folder


@pytest.fixture(scope="module")
def intact(stores: Path) -> dict[str, Trace]:
    """The layouts as they are."""
    return {name: run(BASE | layout, stores, STEPS, keep=True) for name, layout in LAYOUTS.items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_wrong_with_the_layouts_as_they_are(layout: str, stores: Path, intact: Any) -> None:
    case = BASE | LAYOUTS[layout]
    assert differences(case, intact[layout], oracle(case, stores, STEPS)) == []


def test_every_kind_of_exchange_is_broken_below(intact: dict[str, Trace]) -> None:
    made = {kind for trace in intact.values() for kind in trace.kinds}
    assert made == {fault["kind"] for _, fault in FAULTS} | CHECKS
    for layout, fault in FAULTS:
        assert fault["kind"] in intact[layout].kinds


def name_of(layout: str, fault: dict[str, Any]) -> str:
    rest = " ".join(f"{key}={value}" for key, value in fault.items() if key != "kind")
    return f"{fault['kind']} {rest} ({layout})".replace("/", ".")


@pytest.mark.parametrize(("layout", "fault"), FAULTS, ids=[name_of(*one) for one in FAULTS])
def test_a_broken_exchange_is_noticed(layout: str, fault: dict[str, Any], stores: Path) -> None:
    case = BASE | LAYOUTS[layout]
    try:
        got = run(case, stores, STEPS, keep=case["tp"] > 1, fault=fault)
    except AssertionError as error:
        # Ranks that know different numbers are noticed even without an oracle.
        assert "other numbers than rank 0" in str(error)
        return
    assert differences(case, got, oracle(case, stores, STEPS))


# ------------------------------------------------------------ where it was

PLACES: list[tuple[str, dict[str, Any], str]] = [
    (
        "dp 3, zero 1",
        {"kind": "dp: reduce", "what": r"block\.3/plain"},
        "step 0: the gradient of transformer.h.3.ln_1.weight differs first",
    ),
    (
        "pp 2, dp 2, zero 0",
        {"kind": "ties: tied"},
        "step 0: the gradient of transformer.wte.weight differs first",
    ),
    (
        "dp 2, zero 3, once per step",
        {"kind": "dp: gather", "what": r"block\.2/decay"},
        "step 0: microbatch 0 differs first in the output of block 2",
    ),
    (
        "dp 3, zero 1",
        {"kind": "dp: publish", "what": r"block\.4/decay"},
        "step 1: microbatch 0 differs first in the output of block 4",
    ),
    (
        "pp 2, dp 2, zero 0",
        {"kind": "dp: gradients", "what": r"block\.1/decay"},
        "step 1: microbatch 0 differs first in the output of block 1",
    ),
    (
        # The embedding sums once, each block twice.
        "tp 2",
        {"kind": "tp: sum over tp", "calls": [3]},
        "step 0: microbatch 0 differs first in the output of block 1",
    ),
    (
        "tp 2, sequence",
        {"kind": "copies: copies", "what": r"block\.5/plain"},
        "step 0: the gradient of transformer.h.5.",
    ),
]


@pytest.mark.parametrize(("layout", "fault", "story"), PLACES, ids=[story for _, _, story in PLACES])
def test_the_comparison_names_the_first_layer_that_differs(
    layout: str, fault: dict[str, Any], story: str, stores: Path, intact: dict[str, Trace]
) -> None:
    case = BASE | LAYOUTS[layout]
    expected = oracle(case, stores, STEPS)
    assert "the update does" in first_difference(case, intact[layout], expected)
    got = run(case, stores, STEPS, keep=True, fault=fault)
    assert first_difference(case, got, expected).startswith(story)


def test_a_failed_case_tells_its_story(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BASE | LAYOUTS["dp 3, zero 1"]
    broken = partial(run, fault={"kind": "dp: reduce", "what": r"block\.3/plain"})
    monkeypatch.setattr(layouts, "run", broken)
    with pytest.raises(
        AssertionError, match=r"the gradient of transformer\.h\.3\.ln_1\.weight differs first"
    ):
        layouts.check(case, stores, STEPS)
