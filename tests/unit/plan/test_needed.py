"""Recompute as needed: each stage's own knapsack, cheaper than any one setting for all, and it fits."""

import numpy as np
import pytest

from sirara.plan.exact import configured, counted
from sirara.plan.from_config import as_points, layout_columns, model_columns
from sirara.plan.layouts import NEEDED, Space
from sirara.plan.memory import activations, let_go, memory
from sirara.plan.needed import recipe, room_bytes, shares
from sirara.plan.points import PIECES, pieces_of
from sirara.plan.search import search
from sirara.plan.verdict import plan
from sirara.pure.families import PRESETS
from sirara.pure.recompute import all_kinds, kinds_of_blocks
from tests.unit.plan.test_search import config, setting

SHAPE = PRESETS["llama2-7b"]
PIPED = ("mesh={pp: 4, dp: 2}",)
GIB = 2.0**30


def ceiling(gib: float):
    return setting(8, ceiling_bytes=gib * GIB)


def planned(gib: float, *words: str):
    return plan(configured(config(), (*PIPED, *words)), SHAPE, ceiling(gib), dp=2, lower=False)


def needed(gib: float, words: tuple[str, ...] = PIPED):
    return counted(config(), SHAPE, ceiling(gib), (*words, "train.recompute=none"), dp=2, needed=True)


def test_what_a_block_keeps_is_its_whole_less_its_pieces():
    c = configured(config(), PIPED)
    for setting_, kinds in (("full", {"full"}), ("selective", {"norm", "act"})):
        columns = layout_columns(c.model_copy(update={
            "train": c.train.model_copy(update={"recompute": setting_})}), SHAPE, dp=2)  # fmt: skip
        coded = as_points({**model_columns(c, SHAPE), **columns}, setting(8).cluster)
        by_piece = coded.with_(recompute=0, again=pieces_of(kinds))
        a, b = (memory(p, setting(8).table, setting(8).constants).activations[0] for p in (coded, by_piece))
        assert a == pytest.approx(b, rel=1e-12)
    gone = let_go(coded, activations(coded))[0]
    assert (gone > 0).all() and gone[PIECES.index("block")] == max(gone)


@pytest.mark.parametrize("gib", [55.5, 56.0, 58.0, 60.0])
def test_each_stage_makes_again_what_it_needs_and_no_more(gib):
    without = planned(gib)
    assert not without.fits
    found, words = needed(gib)
    assert found.fits and words[-1].startswith("train.recompute=")
    again = found.config.train.recompute
    least = [s.activations for s in found.held.stages]
    for before, after, kept in zip(without.held.stages, found.held.stages, least, strict=True):
        room = room_bytes(
            without.point, ceiling(gib).table, ceiling(gib).constants, ceiling(gib).capacity_bytes
        )[0]
        if before.step <= room:
            assert kept == before.activations
        assert after.step <= room
    # The last stage holds one microbatch, the first four.
    blocks = [s.blocks for s in found.held.stages]
    counts = [sum(bool(k) for k in kinds_of_blocks(again, stage=s, blocks=b)) for s, b in enumerate(blocks)]
    assert counts[0] >= counts[-1]
    same_for_all = [
        p.step_s
        for r in ("selective", "full", "mlp", "attention", "norm+mlp", "norm+attention", *range(1, 9))
        if (p := planned(gib, f"train.recompute={r}")).fits
    ]
    assert same_for_all and found.step_s <= min(same_for_all) * (1 + 1e-9)


def test_hardware_flops_count_what_recipes_make_again():
    def extra(recompute) -> float:
        found = planned(80.0, f"train.recompute={recompute}")
        return (found.hfu - found.mfu) * found.step_s

    full = extra("full")
    assert full > 0 == extra("norm+act")
    assert extra("[full, full, full, full]") == pytest.approx(full) == pytest.approx(extra(8))
    assert extra("[full, none, none, none]") == pytest.approx(full / 4)
    assert extra("mlp") + extra("attention") < full
    # llama2-7b, 2048 tokens: gate and up are 2 * 11008 * 4096 of 4 * 4096^2 + 3 * 11008 * 4096 products of a block.
    matrices = 4 * 4096**2 + 3 * 11008 * 4096
    assert extra("mlp") / full == pytest.approx(2 * 11008 * 4096 / (matrices + 2049 * 4096), rel=1e-3)


def test_where_whole_blocks_are_not_enough_there_is_no_recipe():
    low = planned(40.0)
    assert recipe(low.point, low.held, ceiling(40).table, ceiling(40).constants, 38 * GIB) is None
    found, words = needed(40.0)
    assert not found.fits and words[-1] == "train.recompute=none"


@pytest.mark.parametrize(
    ("schedule", "gib"),
    [("interleaved, virtual_stages: 2", 58.0), ("interleaved, virtual_stages: 2", 56.0), ("zb-v", 60.0)],
)
def test_a_recipe_has_an_entry_for_each_virtual_stage(schedule, gib):
    found, _ = needed(gib, (f"mesh={{pp: 4, dp: 2, schedule: {schedule}}}",))
    again = found.config.train.recompute
    assert found.fits and isinstance(again, list) and len(again) == 8 and all_kinds(again)


def test_the_closed_form_takes_off_what_is_too_much_on_each_stage():
    base = configured(config(), PIPED)
    columns = {**model_columns(base, SHAPE), **layout_columns(base, SHAPE, dp=2)}
    capacities = np.array([54.5, 56.0, 58.0, 64.0]) * GIB
    p = as_points(columns, setting(8).cluster)
    for capacity in capacities:
        there = setting(8, ceiling_bytes=float(capacity))
        found = shares(p, there.table, there.constants, float(capacity))
        room = room_bytes(p, there.table, there.constants, float(capacity))[0]
        before = memory(p, there.table, there.constants).by_stage[0]
        after = memory(p.with_(again=found), there.table, there.constants).by_stage[0]
        assert (after <= room * (1 + 1e-6)).all()
        # No more than needed: stages that make something again are full, others are as they were.
        for n in range(3):
            assert after[n] == before[n] or after[n] >= 0.9 * room
    assert (shares(p, there.table, there.constants, float(capacities[-1])) == 0).all()


def test_the_search_takes_it_where_it_is_the_fastest_that_fits():
    space = Space(
        gpus=8, pp=(4,), tp=(1,), zero=(1,), micro_batch=(1,), sequence_parallel=(0,),
        recompute=((0, 1.0), (6, 1.0), (NEEDED, 1.0), (64, 1.0)),
    )  # fmt: skip
    found = search(config(numerics="fast"), SHAPE, ceiling(30), space)
    assert found.best_now is not None and found.best_now.fits
    again = found.best_now.config.train.recompute
    assert isinstance(again, list) and len(again) == 4
    assert f"train.recompute=[{', '.join(map(str, again))}]" in found.now_overrides
    rows = {s.value: s for s in found.sensitivity if s.knob == "recompute"}
    assert rows["none"].reason and rows["as needed"].step_s < rows["full"].step_s
    roomy = search(config(numerics="fast"), SHAPE, setting(8), space)
    assert roomy.best.config.train.recompute == "none"
