"""Who holds what: the boxes of all ranks as disjoint boxes, each with the ranks that hold it.

    rank 0  [0, 4)  [4, 8)             [0, 4) of 0    [4, 6) of 0, 1    [6, 8) of 0, 1, 2
    rank 1          [4, 8)       ─►
    rank 2             [6, 8)

All of it on columns: D is the most dimensions of any tensor, shorter shapes are filled up with ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sirara.errors import InvariantError
from sirara.pure.layout import Box, difference, intersection
from sirara.pure.planned import ITEM_BYTES, PlannedTensor
from sirara.pure.reshard import SavedBoxes, collisions

_PAIRWISE = 256  # up to so many boxes of a tensor are compared each with each


class Shapes:
    """The tensors as columns: shape_TD, strides_TD, item bytes, elements, and where their elements begin when all
    tensors are laid end to end."""

    def __init__(self, tensors: Sequence[PlannedTensor]) -> None:
        self.tensors = tensors
        self.dims = np.array([len(t.shape) for t in tensors], np.int64)
        self.D = max(1, int(self.dims.max(initial=0)))
        self.shape = np.array([t.shape + (1,) * (self.D - len(t.shape)) for t in tensors], np.int64).reshape(
            -1, self.D
        )
        self.item = np.array([ITEM_BYTES[t.dtype] for t in tensors], np.int64)
        self.numel = self.shape.prod(axis=1)
        self.base = np.concatenate([[0], np.cumsum(np.maximum(self.numel, 1))])[:-1]
        inner = np.cumprod(self.shape[:, ::-1], axis=1)[:, ::-1]
        self.strides = np.concatenate([inner[:, 1:], np.ones((len(tensors), 1), np.int64)], axis=1)

    def box(self, tensor: int, offset: np.ndarray, size: np.ndarray) -> Box:
        n = int(self.dims[tensor])
        return Box(tuple(offset[:n].tolist()), tuple(size[:n].tolist()))

    def ragged(self, tensor: np.ndarray, columns_ND: np.ndarray) -> np.ndarray:
        """The coordinates end to end, without the fill."""
        return columns_ND[np.arange(self.D) < self.dims[tensor][:, None]]

    def padded(self, tensor: np.ndarray, flat: Sequence[int], fill: int) -> np.ndarray:
        columns_ND = np.full((len(tensor), self.D), fill, np.int64)
        columns_ND[np.arange(self.D) < self.dims[tensor][:, None]] = flat
        return columns_ND


@dataclass(frozen=True, kw_only=True)
class Held:
    """N disjoint boxes, by tensor and offset; holders: ranks end to end, box i's are [bounds[i], bounds[i + 1])."""

    tensor: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    holders: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    volume: np.ndarray
    is_run: np.ndarray

    @cached_property
    def count(self) -> np.ndarray:
        return np.diff(self.bounds)

    def ranks(self, i: int) -> tuple[int, ...]:
        return tuple(self.holders[self.bounds[i] : self.bounds[i + 1]].tolist())


def held_by_ranks(tensors: Sequence[PlannedTensor], shapes: Shapes) -> Held:
    """All elements of the tensors, each in one box.

    Raises:  InvariantError when the boxes of a tensor leave a hole or stick out of it.
    """
    cut: dict[int, Mapping[int, Sequence[Box]]] = {}
    held = _grouped(tensors, shapes, cut)
    overlapping = _overlapping(held, shapes)
    if overlapping:
        for t in overlapping:
            cut[t] = _split(held, shapes, t)
        held = _grouped(tensors, shapes, cut)
    covered = np.zeros(len(tensors), np.int64)
    np.add.at(covered, held.tensor, held.volume)
    for t in np.flatnonzero(covered != shapes.numel).tolist():
        raise InvariantError(
            f"{tensors[t].name}: the ranks' boxes leave {shapes.numel[t] - covered[t]} of {shapes.numel[t]} "
            "elements out"
        )
    return held


def _grouped(
    tensors: Sequence[PlannedTensor], shapes: Shapes, instead: Mapping[int, Mapping[int, Sequence[Box]]]
) -> Held:
    """Equal boxes of several ranks become one with several holders."""
    tensor, rank, offset, size = _listed(tensors, shapes, instead)
    first = (offset * shapes.strides[tensor]).sum(axis=1)
    place = shapes.base[tensor] + first
    if (np.diff(place) <= 0).any():
        order = np.lexsort((rank, *size.T, place))
        tensor, rank, offset, size, first, place = (
            column[order] for column in (tensor, rank, offset, size, first, place)
        )
    fresh = np.ones(len(tensor), bool)
    fresh[1:] = (np.diff(place) != 0) | (np.diff(size, axis=0) != 0).any(axis=1)
    again = np.zeros(len(tensor), bool)
    again[1:] = ~fresh[1:] & (np.diff(rank) == 0)  # a rank that lists a box twice
    group = np.cumsum(fresh)[~again] - 1
    at = np.flatnonzero(fresh)
    tensor, offset, size = tensor[at], offset[at], size[at]
    return Held(
        tensor=tensor,
        offset=offset,
        size=size,
        holders=rank[~again],
        bounds=np.searchsorted(group, np.arange(len(at) + 1)),
        first=first[at],
        volume=size.prod(axis=1),
        is_run=are_runs(size, shapes.shape[tensor]),
    )


def _listed(
    tensors: Sequence[PlannedTensor], shapes: Shapes, instead: Mapping[int, Mapping[int, Sequence[Box]]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tensor, rank, offset, size) of every box that is not empty."""
    tensor: list[int] = []
    ranks: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for t, planned in enumerate(tensors):
        dims = len(planned.shape)
        boxes = instead.get(t, planned.boxes)
        for rank in sorted(boxes):
            for box in boxes[rank]:
                if len(box.offset) != dims:
                    raise _outside(planned, box, rank)
                tensor.append(t)
                ranks.append(rank)
                offsets.extend(box.offset)
                sizes.extend(box.size)
    of = np.array(tensor, np.int64)
    rank = np.array(ranks, np.int64)
    offset, size = shapes.padded(of, offsets, 0), shapes.padded(of, sizes, 1)
    outside = ((offset < 0) | (size < 0) | (offset + size > shapes.shape[of])).any(axis=1)
    for i in np.flatnonzero(outside).tolist():
        raise _outside(tensors[of[i]], shapes.box(of[i], offset[i], size[i]), int(rank[i]))
    full = (size > 0).all(axis=1)
    return of[full], rank[full], offset[full], size[full]


def _outside(tensor: PlannedTensor, box: Box, rank: int) -> InvariantError:
    return InvariantError(f"{tensor.name}: box {box} of rank {rank} lies outside shape {tensor.shape}")


def are_runs(size_ND: np.ndarray, shape_ND: np.ndarray) -> np.ndarray:
    """Whether the elements of each box follow each other in its tensor."""
    whole = size_ND == shape_ND
    runs = np.zeros(len(size_ND), bool)
    for d in range(size_ND.shape[1]):
        runs |= (size_ND[:, :d] == 1).all(axis=1) & whole[:, d + 1 :].all(axis=1)
    return runs


def _overlapping(held: Held, shapes: Shapes) -> list[int]:
    """The tensors of which two boxes share an element."""
    same = held.tensor[1:] == held.tensor[:-1]
    both = held.is_run[1:] & held.is_run[:-1]
    late = held.first[:-1] + held.volume[:-1] > held.first[1:]
    found = set(held.tensor[1:][same & both & late].tolist())
    clear: set[bytes] = set()
    bounds = np.searchsorted(held.tensor, np.arange(len(shapes.tensors) + 1))
    for t in np.unique(held.tensor[1:][same & ~both]).tolist():
        offset, size = held.offset[bounds[t] : bounds[t + 1]], held.size[bounds[t] : bounds[t + 1]]
        pattern = offset.tobytes() + size.tobytes()  # the layers of a model are all cut alike
        if t in found or pattern in clear:
            continue
        if _any_overlap(offset, size):
            found.add(t)
        else:
            clear.add(pattern)
    return sorted(found)


def _any_overlap(offset: np.ndarray, size: np.ndarray) -> bool:
    if len(offset) > _PAIRWISE:
        boxes = [Box(tuple(o), tuple(s)) for o, s in zip(offset.tolist(), size.tolist(), strict=True)]
        return next(collisions(SavedBoxes(offset, size), boxes), None) is not None
    end = offset + size
    meet = (offset[:, None] < end[None]).all(axis=2)
    return int((meet & meet.T).sum()) > len(offset)


def _split(held: Held, shapes: Shapes, tensor: int) -> dict[int, list[Box]]:
    """Boxes that overlap in part are cut where they meet: a region has one set of holders. By rank again."""
    parts: list[tuple[Box, tuple[int, ...]]] = []
    for i in np.flatnonzero(held.tensor == tensor).tolist():
        box, ranks = shapes.box(tensor, held.offset[i], held.size[i]), held.ranks(i)
        fresh = [box]
        merged: list[tuple[Box, tuple[int, ...]]] = []
        for other, others in parts:
            common = intersection(box, other)
            if common is None:
                merged.append((other, others))
                continue
            merged.append((common, tuple(sorted({*ranks, *others}))))
            merged.extend((rest, others) for rest in difference(other, common))
            fresh = [rest for f in fresh for rest in difference(f, common)]
        parts = merged + [(f, ranks) for f in fresh]
    by_rank: dict[int, list[Box]] = {}
    for box, ranks in parts:
        for rank in ranks:
            by_rank.setdefault(rank, []).append(box)
    return by_rank
