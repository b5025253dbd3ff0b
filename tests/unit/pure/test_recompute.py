"""Recipes of recompute: which block of which stage makes what again."""

from itertools import product

import pytest

from sirara.pure.recompute import (
    FULL,
    MODULES,
    NONE,
    all_kinds,
    kinds_of_blocks,
    most_blocks,
    parse,
    recipe_of,
)

SELECTIVE = frozenset({"norm", "act"})
MLP = frozenset({"mlp"})


def dealt(setting, blocks, stage=0):
    return kinds_of_blocks(setting, stage=stage, blocks=blocks)


def test_a_recipe_deals_kinds_to_blocks_in_order():
    assert dealt("none", 2) == (NONE, NONE)
    assert dealt("selective", 2) == (SELECTIVE, SELECTIVE) == dealt("act+norm", 2)
    assert dealt(1, 3) == (FULL, NONE, NONE) == dealt("full:1", 3)
    assert dealt("full:1 mlp:2 norm+act", 5) == (FULL, MLP, MLP, SELECTIVE, SELECTIVE)
    assert dealt("full:4 mlp", 2) == (FULL, FULL)
    assert dealt("full", 0) == ()


def test_a_list_has_a_recipe_for_each_stage():
    setting = [2, "mlp:1 none", "none"]
    assert [dealt(setting, 2, stage) for stage in range(3)] == [(FULL, FULL), (MLP, NONE), (NONE, NONE)]
    assert all_kinds(setting) == {FULL, MLP}
    assert all_kinds([0, "full:0", "none"]) == frozenset()


def test_blocks_that_are_counted_out():
    assert [most_blocks(r) for r in (3, "full", "full:2 mlp:3 norm", "none")] == [3, 0, 5, 0]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("", "empty"), ("norm act", "nothing can follow"), ("mlp:", "number of blocks"), ("mlp:-1", "number of"),
        ("full+norm", "'full'"), ("heads", "norm, act, attention, mlp"), (-1, "fewer than none"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_says_why(recipe, says):
    with pytest.raises(ValueError, match=says):
        parse(recipe)


def test_every_deal_can_be_spelt_and_is_read_back():
    sets = (NONE, SELECTIVE, MLP, FULL, frozenset(MODULES))
    for first, second in product(sets, sets):
        for a, b, blocks in product(range(4), range(4), range(7)):
            if a + b > blocks:
                continue
            want = (*[first] * a, *[second] * b, *[NONE] * (blocks - a - b))
            assert dealt(recipe_of([(first, a), (second, b)], blocks), blocks) == want
