"""The copies of a snapshot against the image that the plan describes, taken apart by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.checkpoint.image import image_plan
from sirara.checkpoint.stage import Stager
from sirara.errors import InvariantError
from sirara.pure.layout import Box
from sirara.pure.saveplan import plan_save
from tests.checkpoints import bits, flat_cuts, plan_of, ranges_of, replicated, small_state


def staged(state, boxes, rank, ranges=None):
    """(plan, image plan, the image after one snapshot)"""
    plan = plan_save(plan_of(state, boxes), node_of=lambda r: 0)
    image = image_plan(plan, rank)
    data = bytearray(image.total)
    stager = Stager(plan, image, ranges if ranges is not None else ranges_of(state, boxes, rank))
    stager.copy(memoryview(data))
    assert stager.done()
    return plan, image, bytes(data), stager


def check(state, boxes, world):
    for rank in range(world):
        plan, image, data, _ = staged(state, boxes, rank)
        for piece, at in zip(plan.pieces_of.get(rank, ()), image.position.tolist(), strict=True):
            tensor = state[plan.tensors[piece.tensor].name]
            assert data[at : at + piece.length] == bits(tensor[piece.box.slices])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=4))
def test_an_image_holds_every_piece_of_any_cut_at_its_place(cuts):
    state = small_state()
    check(state, flat_cuts(state, cuts), len(cuts) + 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_image_holds_this_ranks_share_of_replicas(world):
    state = small_state(3)
    check(state, replicated(state, world), world)


def test_pieces_of_strided_shards_are_gathered(tmp_path):
    state = {"w": torch.arange(60.0).reshape(6, 10), "w/m": torch.arange(60.0).reshape(6, 10) + 100}
    halves = {name: {r: (Box((0, 5 * r), (6, 5)),) for r in range(2)} for name in state}
    check(state, halves, 2)


def test_neighbours_in_both_memories_become_one_copy():
    # Three tensors of one kind in one flat shard, as flat groups lay them: pieces follow each other in the file.
    flat = torch.arange(3 * 64, dtype=torch.float32)
    state = {f"{i}/exp_avg": flat[64 * i : 64 * (i + 1)].view(8, 8) for i in range(3)}
    boxes = flat_cuts(state, [])
    ranges = [
        r.__class__(tensor=r.tensor, shape=r.shape, boxes=r.boxes, data=state[r.tensor].view(-1))
        for r in ranges_of(state, boxes, 0)
    ]
    _, _, data, stager = staged(state, boxes, 0, ranges)
    assert len(stager._joined) == 1
    assert data[: 3 * 256] == flat.numpy().tobytes()


def test_a_large_stretch_is_copied_bit_for_bit():
    g = torch.Generator().manual_seed(1)
    state = {"w": torch.randint(-(2**31), 2**31 - 1, (700, 1000), generator=g, dtype=torch.int32)}
    _, image, data, _ = staged(state, flat_cuts(state, []), 0)
    at = int(image.position[0])
    assert np.array_equal(np.frombuffer(data, np.int32, 700_000, at), state["w"].numpy().reshape(-1))


def test_the_copies_follow_the_live_tensors_and_notice_new_ones():
    state = small_state()
    boxes = flat_cuts(state, [])
    ranges = ranges_of(state, boxes, 0)
    plan, image, before, stager = staged(state, boxes, 0, ranges)
    assert stager.fits(ranges)
    for r in ranges:
        r.data.add_(1)
    after = bytearray(image.total)
    stager.copy(memoryview(after))
    assert bytes(after) != before
    moved = [r.__class__(tensor=r.tensor, shape=r.shape, boxes=r.boxes, data=r.data.clone()) for r in ranges]
    assert not stager.fits(moved)
    assert bytes(after) == staged(state, boxes, 0, moved)[2]
    assert plan.total_bytes > 0


def test_a_range_that_is_missing_is_named():
    state = small_state()
    boxes = flat_cuts(state, [])
    with pytest.raises(InvariantError, match="gave no range that holds it"):
        staged(state, boxes, 0, ranges_of(state, boxes, 0)[1:])
