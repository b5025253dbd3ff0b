"""The plan of Muon, by enumeration: each element of a matrix reaches its owner once and returns to all who hold it."""

from itertools import product

import numpy as np
import pytest

from sirara.pure.families import ModelShape, unit_specs
from sirara.pure.groups import flat_groups
from sirara.pure.muon import MuonPlan, is_matrices, muon_plan, newton_schulz_flops

SHAPES = {
    "gpt2": ModelShape(family="gpt2", layers=3, hidden=48, heads=4, vocab=101, max_seq=16),
    "bloom": ModelShape(family="bloom", layers=2, hidden=32, heads=4, vocab=101, max_seq=16),
    "llama": ModelShape(
        family="llama", layers=3, hidden=48, heads=4, kv_heads=2, ffn=80, vocab=101, max_seq=16
    ),
    "qwen3": ModelShape(
        family="qwen3", layers=2, hidden=40, heads=4, kv_heads=1, head_dim=16, ffn=72, vocab=33, max_seq=16
    ),
}
LAYOUTS = [*product(SHAPES, (1, 2, 3, 5), (1, 2, 4), (False, True))]


def plan_of(family: str, dp: int, tp: int, sharded: bool) -> MuonPlan:
    units = unit_specs(SHAPES[family])
    return muon_plan([flat_groups(units, tp=tp, tp_rank=rank) for rank in range(tp)], dp=dp, sharded=sharded)


@pytest.mark.parametrize(("family", "dp", "tp", "sharded"), LAYOUTS)
def test_each_element_of_a_matrix_is_sent_once(family, dp, tp, sharded):
    plan = plan_of(family, dp, tp, sharded)
    for m, matrix in enumerate(plan.matrices):
        seen = np.zeros(matrix.shape, dtype=int)
        for place in range(plan.places):
            for part in plan.sent(m, place):
                assert sum(box.volume for box in part.boxes) == part.stop - part.start
                for box in part.boxes:
                    seen[box.slices] += 1
        assert (seen == 1).all(), matrix.name


@pytest.mark.parametrize(("family", "dp", "tp", "sharded"), LAYOUTS)
def test_what_comes_back_is_what_a_place_updates_and_padding_stays(family, dp, tp, sharded):
    plan = plan_of(family, dp, tp, sharded)
    for place in range(plan.places):
        groups = plan.groups[place % tp]
        for g, group in enumerate(groups):
            parts = [
                part
                for m, matrix in enumerate(plan.matrices)
                if matrix.group == g
                for part in plan.held(m, place)
            ]
            lo, hi = plan.updated(g, place)
            expected = {
                flat
                for slot in group.slots
                for flat in range(max(lo, slot.start), min(hi, slot.start + slot.numel))
            }
            flats = [flat for part in parts for flat in range(part.start, part.stop)]
            assert len(flats) == len(set(flats))
            assert set(flats) == (expected if is_matrices(group) else set())


@pytest.mark.parametrize(("family", "dp", "tp", "sharded"), LAYOUTS)
def test_elements_that_are_sent_lie_in_the_group_where_their_boxes_say(family, dp, tp, sharded):
    """Groups filled with each element's number in its tensor: what travels must be the matrix itself."""
    plan = plan_of(family, dp, tp, sharded)
    flat: dict[tuple[int, int], np.ndarray] = {}
    for (t, row), g in product(enumerate(plan.groups), range(len(plan.groups[0]))):
        flat[t, g] = np.full(row[g].shard_numel(dp) * dp, -1)
        for slot in row[g].slots:
            numbers = np.arange(np.prod(slot.tensor.shape)).reshape(slot.tensor.shape)
            flat[t, g][slot.start : slot.start + slot.numel] = numbers[slot.box.slices].ravel()
    for m, matrix in enumerate(plan.matrices):
        for place in range(plan.places):
            for part in plan.held(m, place):
                numbers = np.arange(np.prod(matrix.shape)).reshape(matrix.shape)
                expected = np.concatenate([numbers[box.slices].ravel() for box in part.boxes])
                assert (flat[place % tp, matrix.group][part.start : part.stop] == expected).all()


@pytest.mark.parametrize("family", SHAPES)
def test_matrices_are_the_2_d_tensors_of_blocks(family):
    units = unit_specs(SHAPES[family])
    expected = {t.name for unit in units[1:-1] for t in unit.tensors if len(t.shape) == 2}
    assert {m.name for m in plan_of(family, 2, 2, True).matrices} == expected


@pytest.mark.parametrize(("dp", "tp"), [*product((1, 2, 3, 5), (1, 2, 4))])
def test_work_is_dealt_by_flops_within_the_bound_of_longest_first(dp, tp):
    plan = plan_of("llama", dp, tp, True)
    flops = [newton_schulz_flops(m.shape, 5) for m in plan.matrices]
    loads = [0] * plan.places
    for matrix, cost in zip(plan.matrices, flops, strict=True):
        loads[matrix.owner] += cost
    # Graham: the busiest place had the least work when it took its last matrix.
    assert max(loads) <= sum(flops) / plan.places + max(flops)
    assert plan.places > len(flops) or min(loads) > 0


@pytest.mark.parametrize(("family", "dp", "tp", "sharded"), LAYOUTS)
def test_a_place_owns_at_most_one_matrix_of_a_round(family, dp, tp, sharded):
    plan = plan_of(family, dp, tp, sharded)
    assert sorted(m for one in plan.rounds for m in one) == [*range(len(plan.matrices))]
    for one in plan.rounds:
        owners = [plan.matrices[m].owner for m in one]
        assert len(owners) == len(set(owners))


def test_copies_of_key_value_heads_send_from_the_owner_when_it_holds_them():
    plan = plan_of("qwen3", 1, 4, True)
    for m, matrix in enumerate(plan.matrices):
        if ".k_proj." in matrix.name:
            assert [place for place in range(4) if plan.sent(m, place)] == [matrix.owner]
            assert all(plan.held(m, place) for place in range(4))


def test_no_matrices_make_an_empty_plan():
    units = unit_specs(SHAPES["gpt2"])
    head_alone = [group for group in flat_groups(units) if group.name.startswith("head")]
    plan = muon_plan([head_alone], dp=2, sharded=True)
    assert plan.matrices == () and plan.rounds == ()


def test_cost_counts_the_products_of_each_step():
    assert newton_schulz_flops((3, 7), 2) == 2 * (2 * 3 * 3 * 7 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 7)
    assert newton_schulz_flops((7, 3), 1) == newton_schulz_flops((3, 7), 1)
