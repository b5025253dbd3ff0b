import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sirara.pure.layout import Box, cut_box, range_boxes, whole
from sirara.pure.reshard import SavedBoxes, collisions, overlaps
from tests.checkpoints import elements_of


def saved_of(boxes, dims):
    offset = np.array([b.offset for b in boxes], np.int64).reshape(len(boxes), dims)
    size = np.array([b.size for b in boxes], np.int64).reshape(len(boxes), dims)
    return SavedBoxes(offset, size)


@st.composite
def partition(draw, shape):
    """Disjoint boxes that cover a tensor: cuts along a dimension, flat cuts, and cuts of the cuts."""
    total = int(np.prod(shape))
    ends = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=6))})
    boxes = [b for lo, hi in itertools.pairwise(ends) for b in range_boxes(shape, lo, hi)]
    most = draw(st.integers(1, max(1, total)))
    boxes = [part for box in boxes for part in cut_box(box, most)]
    return draw(st.permutations(boxes)) if len(boxes) < 50 else boxes


@given(st.data())
def test_the_overlaps_of_any_two_partitions_fill_every_wanted_element_once(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 7, 8]), min_size=0, max_size=3).map(tuple))
    saved, wanted = data.draw(partition(shape)), data.draw(partition(shape))
    reads, holes = overlaps(saved_of(saved, len(shape)), wanted)
    assert not holes
    for w, box in enumerate(wanted):
        filled = [i for r in reads if r.wanted == w for i in elements_of(shape, r.box)]
        assert sorted(filled) == elements_of(shape, box).tolist()
    assert all(r.box.within(saved[r.saved]) and r.box.within(wanted[r.wanted]) for r in reads)


@given(st.data())
def test_a_missing_piece_is_a_hole_with_the_number_of_missing_elements(data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    saved = data.draw(partition(shape))
    lost = data.draw(st.integers(0, len(saved) - 1))
    left = [b for i, b in enumerate(saved) if i != lost]
    _, holes = overlaps(saved_of(left, len(shape)), [whole(shape)])
    assert holes == [(whole(shape), saved[lost].volume)]


def test_an_empty_target_needs_nothing_and_an_empty_save_gives_nothing():
    nothing = saved_of([], 2)
    assert overlaps(nothing, [Box((0, 0), (0, 3))]) == ([], [])
    assert overlaps(nothing, [Box((0, 0), (2, 3))]) == ([], [(Box((0, 0), (2, 3)), 6)])


@given(st.data())
def test_collisions_are_the_pairs_that_share_an_element(data):
    shape = (5, 6)
    boxes = data.draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 5)).flatmap(
                lambda o: st.tuples(st.integers(1, 5 - o[0]), st.integers(1, 6 - o[1])).map(
                    lambda n: Box(o, n)
                )
            ),
            max_size=6,
        )
    )
    found = set(collisions(saved_of(boxes, 2), boxes))
    sets = [set(elements_of(shape, b).tolist()) for b in boxes]
    assert found == {(i, j) for i in range(len(boxes)) for j in range(i + 1, len(boxes)) if sets[i] & sets[j]}
