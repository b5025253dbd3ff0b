"""Flat groups: layouts that depend on the model alone, and pieces that tile every tensor."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.pure.families import PRESETS, unit_specs
from sirara.pure.groups import ALIGN, GRAIN, flat_groups
from tests.toy import specs


@pytest.mark.parametrize("preset", ["gpt2", "bloom-560m", "llama3-8b", "qwen3-0.6b", "smollm2-135m"])
@pytest.mark.parametrize("dp", [1, 2, 3, 7])
def test_shards_tile_every_tensor_once(preset: str, dp: int) -> None:
    units = unit_specs(PRESETS[preset])
    covered: dict[str, int] = {}
    for group in flat_groups(units):
        shard = group.shard_numel(dp)
        assert shard % GRAIN == 0 and shard * dp >= group.numel
        for rank in range(dp):
            for piece in group.pieces(rank * shard, (rank + 1) * shard):
                assert piece.start == covered.get(piece.tensor.name, 0)
                covered[piece.tensor.name] = piece.stop
    owned = {t.name: prod(t.shape) for u in units for t in u.tensors if t.tied_to is None}
    assert covered == owned


def test_a_tied_tensor_is_one_group_with_two_uses() -> None:
    groups = flat_groups(specs(tied=True))
    tied = [g for g in groups if len(g.uses) == 2]
    assert [(g.name, [u.unit for u in g.uses]) for g in tied] == [("embed/tied", [0, 4])]
    assert all(len(g.uses) == 1 for g in flat_groups(specs(tied=False)))


def test_tensors_that_decay_and_those_that_do_not_lie_apart() -> None:
    for group in flat_groups(unit_specs(PRESETS["gpt2"])):
        assert all((len(slot.tensor.shape) > 1) == group.decay for slot in group.slots)


@given(st.integers(1, 12))
def test_slots_are_aligned_and_do_not_overlap(dp: int) -> None:
    for group in flat_groups(unit_specs(PRESETS["qwen3-0.6b"])):
        end = 0
        for slot in group.slots:
            assert slot.start % ALIGN == 0 and slot.start >= end
            end = slot.start + slot.numel
        assert group.numel >= end and group.numel % GRAIN == 0
