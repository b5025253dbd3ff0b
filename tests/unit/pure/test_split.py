"""Units over stages: every split is contiguous and complete, and none that exists is cheaper."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.errors import LayoutError
from sirara.pure.families import PRESETS, unit_specs
from sirara.pure.schedule import rank_of
from sirara.pure.split import blocks_per_stage, split_units, unit_costs


def dearest_rank(costs: Sequence[float], split: Sequence[range], owners: Sequence[int]) -> float:
    ranks = dict.fromkeys(owners, 0.0)
    for units, rank in zip(split, owners, strict=True):
        ranks[rank] += sum(costs[u] for u in units)
    return max(ranks.values())


def all_splits(units: int, stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in pairwise((0, *cuts, units)))
        for cuts in combinations(range(1, units), stages - 1)
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=11), st.data())
def test_no_other_split_has_a_cheaper_dearest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    split = split_units(costs, stages)
    assert split in all_splits(len(costs), stages)
    best = min(dearest_rank(costs, s, range(stages)) for s in all_splits(len(costs), stages))
    assert dearest_rank(costs, split, range(stages)) == best


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("zb-v", 2, 2), ("zb-v", 3, 2), ("interleaved", 2, 2), ("interleaved", 2, 3)],
)
@pytest.mark.parametrize("head", [0.25, 1.0, 2.5])
def test_no_other_split_of_equal_blocks_has_a_cheaper_dearest_rank(
    name: str, ranks: int, chunks: int, head: float
) -> None:
    stages = ranks * chunks
    owners = [rank_of(name, ranks, s) for s in range(stages)]
    for blocks in range(stages - 2, 11):
        costs = [0.125, *[1.0] * blocks, head]
        split = split_units(costs, stages, owners=owners)
        assert split in all_splits(len(costs), stages)
        best = min(dearest_rank(costs, s, owners) for s in all_splits(len(costs), stages))
        assert dearest_rank(costs, split, owners) == best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=12), st.sampled_from(["zb-v", "interleaved"]))
def test_the_heuristic_for_unequal_blocks_is_never_worse_than_levelling_stages(
    costs: list[int], name: str
) -> None:
    owners = [rank_of(name, 3, s) for s in range(6)]
    split = split_units(costs, 6, owners=owners)
    assert split in all_splits(len(costs), 6)
    assert dearest_rank(costs, split, owners) <= dearest_rank(costs, split_units(costs, 6), owners)


def test_embedding_and_head_are_counted() -> None:
    # The drawing in the module's docstring.
    assert split_units([0.1, *[1.0] * 8, 2.0], 4) == (range(3), range(3, 5), range(5, 8), range(8, 10))


def test_a_dear_head_stands_alone() -> None:
    assert blocks_per_stage(split_units([0.1, *[1.0] * 6, 5.0], 3)) == [3, 3, 0]


def test_costs_are_flops_of_forward_and_backward() -> None:
    shape = PRESETS["llama3-8b"]
    units = unit_specs(shape)
    costs = unit_costs(units, shape.hidden)
    assert costs[1:] == tuple(3.0 * u.flops_per_token for u in units[1:])
    assert 0 < costs[0] < 0.01 * costs[1]
    again = unit_costs(units, shape.hidden, recomputed=1.0)
    assert again[1] == 4.0 * units[1].flops_per_token and (again[0], again[-1]) == (costs[0], costs[-1])


def test_bloom_176b_on_12_stages_leaves_the_last_lighter_by_its_head() -> None:
    shape = PRESETS["bloom-176b"]
    split = split_units(unit_costs(unit_specs(shape), shape.hidden), 12)
    # The head costs about 1.4 blocks: 70 + 1.4 over 12 stages is at least 6 blocks on the dearest one.
    assert sum(blocks_per_stage(split)) == 70 and max(blocks_per_stage(split)) == 6
    assert blocks_per_stage(split)[-1] <= 5


def test_an_explicit_split_is_obeyed() -> None:
    costs = [0.0] + [1.0] * 22 + [1.0]
    assert split_units(costs, 4, [5, 6, 6, 5]) == (range(6), range(6, 12), range(12, 18), range(18, 24))
    assert blocks_per_stage(split_units(costs, 4, [0, 11, 11, 0])) == [0, 11, 11, 0]


@pytest.mark.parametrize(
    ("explicit", "fault"),
    [
        ([5, 6, 6, 5], "adds up to 22 layers, the model has 24"),
        ([8, 8, 8], "has 3 entries for 4 stages"),
        ([12, 0, 6, 6], "leaves a stage without a unit"),
        ([-1, 13, 6, 6], "leaves a stage without a unit"),
    ],
)
def test_an_explicit_split_that_does_not_fit_is_refused_with_one_that_does(
    explicit: list[int], fault: str
) -> None:
    costs = [0.0] + [1.0] * 24 + [1.0]
    with pytest.raises(LayoutError, match=r"mesh\.split") as caught:
        split_units(costs, 4, explicit)
    assert fault in str(caught.value) and caught.value.where == "mesh.split"
    valid = caught.value.try_[1]
    assert valid == "mesh.split=[6, 6, 6, 6]"
    split_units(costs, 4, [6, 6, 6, 6])


def test_more_stages_than_units_are_refused_with_the_number_of_units() -> None:
    assert len(split_units([1.0] * 8, 8)) == 8
    with pytest.raises(LayoutError, match="9 pipeline stages are more than the model's 8 units"):
        split_units([1.0] * 8, 9)
