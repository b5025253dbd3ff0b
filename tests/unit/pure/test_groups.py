"""Flat groups: layouts that depend on the model alone, and pieces that tile every tensor."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.pure.families import FAMILIES, PRESETS, ModelShape, unit_specs
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


SMALL = {
    "gpt2": {},
    "bloom": {},
    "llama": {"kv_heads": 2, "tie_embeddings": True},
    "mistral": {"kv_heads": 4, "sliding_window": 4},
    "qwen2": {"kv_heads": 8},
    "qwen3": {"kv_heads": 2},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_boxes_of_all_ranks_tile_every_tensor_of_every_family(
    family: str, tp: int, sequence: bool
) -> None:
    # 61 words are no multiple of any degree: the last rank's part of the vocabulary is short.
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 61, "max_seq": 8} | SMALL.get(family, {})
    units = unit_specs(ModelShape(family=family, **sizes))
    names: list[list[str]] = []
    for dp in (1, 2, 3):
        seen = {t.name: np.zeros(t.shape, np.int64) for u in units for t in u.tensors if t.tied_to is None}
        copies: dict[str, int] = {}
        for tp_rank in range(tp):
            groups = flat_groups(units, tp=tp, tp_rank=tp_rank, sequence=sequence)
            names.append([g.name for g in groups])
            for group in groups:
                shard = group.shard_numel(dp)
                for rank in range(dp):
                    for piece in group.pieces(rank * shard, (rank + 1) * shard):
                        copies[piece.tensor.name] = group.copies
                        assert sum(b.volume for b in piece.boxes) == piece.stop - piece.start
                        for box in piece.boxes:
                            seen[piece.tensor.name][box.slices] += 1
        for name, count in seen.items():
            assert (count == copies[name]).all(), (name, count)
    # Sums over groups are in one order on all ranks.
    assert all(n == names[0] for n in names)


def test_what_gradients_are_sums_over_copies_follows_from_the_placement() -> None:
    shape = ModelShape(
        family="qwen3", layers=1, hidden=64, heads=8, kv_heads=2, vocab=61, max_seq=8, head_dim=8
    )

    def partial(tp: int, sequence: bool) -> set[str]:
        return {
            slot.tensor.local
            for g in flat_groups(unit_specs(shape), tp=tp, sequence=sequence)
            if g.partial
            for slot in g.slots
        }

    norms = {"attn.q_norm.weight", "attn.k_norm.weight"}
    assert partial(1, False) == set()
    assert partial(2, False) == norms
    assert partial(4, False) == norms | {"attn.k_proj.weight", "attn.v_proj.weight"}
    assert partial(2, True) == norms | {"norm1.weight", "norm2.weight", "norm.weight"}


def test_packs_are_a_dimension_before_the_one_that_is_split() -> None:
    units = unit_specs(ModelShape(family="gpt2", layers=1, hidden=16, heads=4, vocab=61, max_seq=8))
    leaves = {
        leaf.tensor.local: leaf
        for g in flat_groups(units, tp=2, tp_rank=1)
        for leaf in g.leaves
        if leaf.tensor.local.startswith("attn.qkv")
    }
    assert leaves["attn.qkv_proj.weight"].size == (16, 3, 8)
    assert leaves["attn.qkv_proj.bias"].size == (3, 8)
    group = next(g for g in flat_groups(units, tp=2, tp_rank=1) if g.name == "block.0/decay")
    whole = np.arange(16 * 48).reshape(16, 48)
    flat = np.full(group.numel, -1)
    for piece in group.pieces(0, group.numel):
        if piece.tensor.local == "attn.qkv_proj.weight":
            values = np.concatenate([whole[box.slices].ravel() for box in piece.boxes])
            flat[piece.flat : piece.flat + len(values)] = values
    leaf = leaves["attn.qkv_proj.weight"]
    view = np.lib.stride_tricks.as_strided(flat[leaf.start :], leaf.size, [8 * s for s in leaf.stride])
    assert (view == whole.reshape(16, 3, 2, 8)[:, :, 1]).all()


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
