from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.errors import InvariantError
from sirara.pure.layout import Box, box_runs, cut_box, difference, intersection, range_boxes, whole
from tests.checkpoints import elements_of

SHAPES = [(), (1,), (7,), (3, 5), (1, 6), (6, 1), (2, 3, 4), (3, 1, 5), (1, 1, 1), (2, 2, 2, 3), (0,), (2, 0)]


@st.composite
def boxed(draw, shape=None):
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple)) if shape is None else shape
    low = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)]
    return shape, Box(tuple(low), tuple(size))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_of_a_tensor_is_its_boxes_laid_end_to_end(shape):
    total = prod(shape)
    for start, stop in product(range(total + 1), repeat=2):
        if start > stop:
            continue
        boxes = range_boxes(shape, start, stop)
        assert [i for box in boxes for i in elements_of(shape, box)] == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_outside_the_tensor_is_refused():
    for start, stop in [(-1, 2), (0, 7), (4, 3)]:
        with pytest.raises(InvariantError, match="outside a tensor of shape"):
            range_boxes((2, 3), start, stop)


@given(boxed())
def test_runs_are_the_elements_of_a_box_in_order_and_cannot_be_joined(case):
    shape, box = case
    runs = box_runs(shape, box)
    assert [i for start, stop in runs for i in range(start, stop)] == elements_of(shape, box).tolist()
    assert all(a[1] < b[0] for a, b in pairwise(runs))


def test_runs_of_a_box_that_sticks_out_are_refused():
    with pytest.raises(InvariantError, match=r"\[1:4\] lies outside"):
        box_runs((3,), Box((1,), (3,)))


@given(boxed(), st.integers(1, 50))
def test_parts_of_a_cut_box_are_small_and_laid_end_to_end_are_the_box(case, most):
    shape, box = case
    parts = cut_box(box, most)
    assert all(part.volume <= most for part in parts)
    assert [i for p in parts for i in elements_of(shape, p)] == elements_of(shape, box).tolist()


@given(st.data())
def test_intersection_and_difference_share_out_the_elements(data):
    shape, a = data.draw(boxed())
    _, b = data.draw(boxed(shape=shape))
    inside = intersection(a, b)
    common = set() if inside is None else set(elements_of(shape, inside).tolist())
    assert common == set(elements_of(shape, a)) & set(elements_of(shape, b))
    rest = [i for part in difference(a, b) for i in elements_of(shape, part)]
    assert sorted([*rest, *common]) == sorted(elements_of(shape, a).tolist())


def test_a_box_prints_as_a_slice_and_knows_its_frame():
    box = Box((2, 0), (3, 4))
    assert str(box) == "[2:5,0:4]"
    assert box.volume == 12
    assert box.within(whole((5, 4))) and not box.within(whole((4, 4)))
    assert box.relative_to(Box((1, 0), (9, 9))).moved((1, 0)) == box
    assert np.arange(20).reshape(5, 4)[box.slices].shape == (3, 4)
