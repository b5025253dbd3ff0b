"""A gradient that is not finite: every layout names the same parameter, no rank updates, and the run goes on.

The fault is planted where one rank computes one unit's gradient of one microbatch, in the second of four steps; or in
the hidden state of a unit, from where it spreads to all gradients below.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sirara.train.own_loop import Trainer
from tests.harness import run_ranks
from tests.parity.layouts import LAYERS, PLAIN, make_store, open_trainer, ranks_of
from tests.parity.pairs import Row

STEPS, BAD_STEP, BAD_MICROBATCH = 4, 1, 2
BASE = PLAIN | {"family": "qwen3", "microbatches": 4}
LAYOUTS: list[Row] = [
    {"dp": 2},
    {"dp": 3, "zero": 1, "block": 1},
    {"dp": 2, "zero": 2, "pp": 2, "schedule": "zb-v"},
    {"dp": 3, "zero": 3},
    {"pp": 2, "dp": 2},
    {"pp": 4, "zero": 3, "schedule": "zb-h1", "recompute": "full"},
    {"pp": 2, "schedule": "interleaved", "optimizer": "muon"},
    {"tp": 2},
    {"tp": 2, "dp": 2, "zero": 3, "sequence": True},
    {"tp": 2, "pp": 2, "zero": 1, "sequence": True},
    {"tp": 4, "zero": 2},
]
PLACES = [
    # (unit, a tensor of it as it is named there)
    (0, "model.embed_tokens.weight"),
    (2, "model.layers.1.self_attn.k_proj.weight"),
    (3, "model.layers.2.self_attn.q_norm.weight"),
    (4, "model.layers.3.post_attention_layernorm.weight"),
    (6, "model.layers.5.mlp.down_proj.weight"),
    (7, "model.embed_tokens.weight"),
    (7, "model.norm.weight"),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder)
    return folder


def train(case: Row, stores: str, unit: int, tensor: str | None, value: float) -> list[Any]:
    """Per step what came out and the digest; in the bad one `value` is planted."""
    trainer = open_trainer(case, Path(stores), STEPS)
    try:
        trainer.start()
        out: list[Any] = []
        for step in range(STEPS):
            undo = poison(trainer, unit, tensor, value) if step == BAD_STEP else None
            result = trainer.train_step()
            if undo:
                undo()
            counters = trainer.state.counters
            out.append(
                (result.loss, result.grad_norm, result.bad_parameter, result.lr, str(trainer.digest()))
            )
            out.append((counters.step, counters.updates, counters.skipped, counters.samples))
        trainer.state.check_replicas()
        pool = trainer.state.zero.pool
        assert sum(t.nbytes for kept in pool.free.values() for t in kept) == pool.bytes_made
        return out
    finally:
        trainer.end(clean=True)


def poison(trainer: Trainer, unit: int, tensor: str | None, value: float) -> Any:
    """Plants the value where this unit and microbatch are; of tensor-parallel ranks with parts of it, on the last."""
    zero, mine = trainer.state.zero, trainer.deal.mine(trainer.mesh.coordinate("dp"))
    chunks = [chunk for chunk in trainer.stepper.stage.chunks.values() if unit in chunk.units]
    if not chunks or BAD_MICROBATCH not in mine:
        return None
    last = trainer.mesh.coordinate("tp") == trainer.mesh.tp - 1
    place, seen = mine.index(BAD_MICROBATCH), [0]
    if tensor is None:
        return in_the_output(chunks[0], unit, place, seen, value) if last else None
    groups = [zero.groups[place].group for place, _, _ in zero._routes[unit]]
    leaves = [(leaf.tensor.name, group) for group in groups for leaf in group.leaves]
    names = [name for name, _ in leaves]
    group = leaves[names.index(tensor)][1]
    if not last and not (group.copies > 1 and not group.partial):
        # What several ranks compute alike is bad on all of them.
        return None
    add = zero.add

    def added(which: int, grads: Any, *rest: Any) -> None:
        if which == unit:
            if seen[0] == place:
                grads = [None if g is None else g.to_dense().clone() for g in grads]
                grads[names.index(tensor)].view(-1)[-1] = value
            seen[0] += 1
        add(which, grads, *rest)

    zero.add = added  # type: ignore[method-assign]
    return lambda: setattr(zero, "add", add)


def in_the_output(chunk: Any, unit: int, place: int, seen: list[int], value: float) -> Any:
    module, calls = chunk.units[unit], seen

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * value if calls[0] - 1 == place else output

    handle = module.register_forward_hook(spoil)
    return handle.remove


@lru_cache
def one_process(optimizer: str, stores: Path, unit: int, tensor: str | None, value: float) -> list[Any]:
    return train(BASE | {"optimizer": optimizer}, str(stores), unit, tensor, value)


def run(case: Row, *args: Any) -> list[Any]:
    first, *others = run_ranks(ranks_of(case), train, case, *args)
    assert all(same(other, first, 0.0) for other in others)
    return first


def same(got: list[Any], expected: list[Any], bound: float) -> bool:
    """Equal, where a number is NaN on both sides too; with a bound the digests are left out."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, float) and isinstance(b, float):
            both = not math.isfinite(a) and not math.isfinite(b)
            return a == b or both or abs(a - b) <= bound * abs(b)
        return a == b or bool(bound and isinstance(a, str) and len(a) == len(b) == 32)

    pairs = [pair for row, other in zip(got, expected, strict=True) for pair in zip(row, other, strict=True)]
    return all(equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_bad_gradient_is_named_alike_and_nothing_changes(layout: Row, stores: Path) -> None:
    case = BASE | layout
    # Every layout sees some of the places, and all places are seen by several layouts.
    start = LAYOUTS.index(layout)
    for n in range(2):
        unit, tensor = PLACES[(start + 3 * n) % len(PLACES)]
        value = (math.nan, math.inf)[(start + n) % 2]
        expected = one_process(case["optimizer"], stores, unit, tensor, value)
        got = run(case, str(stores), unit, tensor, value)
        assert same(got, expected, 1e-12 if case["tp"] > 1 else 0.0)
        bad, before = got[2 * BAD_STEP], got[2 * BAD_STEP - 2]
        assert bad[2] == tensor
        assert bad[3] == 0.0 and bad[4] == before[4]
        assert got[2 * BAD_STEP + 1][1:3] == (1, 1) and got[-1][1:3] == (STEPS - 1, 1)
        assert got[-2][2] is None and got[-2][4] != before[4]


@pytest.mark.parametrize("layout", LAYOUTS[4::3], ids=str)
def test_a_bad_hidden_state_is_named_alike_and_nothing_changes(layout: Row, stores: Path) -> None:
    case = BASE | layout
    for unit in (0, LAYERS // 2):
        expected = one_process(case["optimizer"], stores, unit, None, math.inf)
        assert expected[2 * BAD_STEP][2] == "model.embed_tokens.weight"
        got = run(case, str(stores), unit, None, math.inf)
        assert same(got, expected, 1e-12 if case["tp"] > 1 else 0.0)
        assert got[2 * BAD_STEP][4] == got[2 * BAD_STEP - 2][4]


def test_the_comparison_of_this_page_can_fail() -> None:
    row = [(1.0, math.nan, None, 0.1, "a" * 32)]
    assert same(row, row, 0.0)
    assert not same(row, [(1.0, 2.0, None, 0.1, "a" * 32)], 1e-12)
    assert not same(row, [(1.0, math.nan, "x", 0.1, "a" * 32)], 1e-12)
    assert not same(row, [(1.0, math.nan, None, 0.1, "b" * 32)], 0.0)
