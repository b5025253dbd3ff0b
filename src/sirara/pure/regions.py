"""Who writes which elements: the boxes of all ranks as disjoint regions, each with one writer.

    boxes of all ranks ─► disjoint regions with their holders ─► one writer each

A region held by one rank is that rank's work; what several hold is cut and dealt to the holder with least work,
fewest holders first, then largest first, ties to the lowest rank.

A weight lies in its file row after row, so a rank that holds columns of it (a row-parallel layer) holds many
short runs. Where one node holds all columns, such rows become one zone: blocks of whole rows, dealt to the
holders on that node, whose parts the others copy into the writer's image when the snapshot is taken.

        rank 0  rank 1                 zone
      ┌───────┬───────┐          ┌───────────────┐
      │ a0 b0 │ c0 d0 │          │ a0 b0   c0 d0 │  block of rank 0, one part by rank 1
      │ a1 b1 │ c1 d1 │          ├───────────────┤
      │ a2 b2 │ c2 d2 │          │ a2 b2   c2 d2 │  block of rank 1, one part by rank 0
      └───────┴───────┘          └───────────────┘

All of it on columns: D is the most dimensions of any tensor, shorter shapes are filled up with ones.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from sirara.errors import InvariantError
from sirara.pure.layout import Box, cut_box, difference, intersection
from sirara.pure.planned import ITEM_BYTES, PlannedTensor
from sirara.pure.reshard import SavedBoxes, collisions

SHARE_BYTES = 1 << 20  # replicated regions below this are not split among their holders

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
class Regions:
    """N regions by tensor, then offset.

    first: [N], of the region's first element among those of its tensor.  is_run: its elements follow each other in
    the tensor.  block: [N], index in `blocks` of a region that its writer assembles, -1 for all others.
    """

    tensor: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    rank: np.ndarray
    bytes: np.ndarray
    first: np.ndarray
    is_run: np.ndarray
    block: np.ndarray
    blocks: list["Block"]


@dataclass(frozen=True, slots=True)
class Block:
    """Whole rows that their writer assembles from parts: (box, rank that holds it)."""

    box: Box
    parts: list[tuple[Box, int]]


def assign(
    tensors: Sequence[PlannedTensor],
    shapes: Shapes,
    *,
    piece_bytes: int,
    node_of: Callable[[int], int],
    assemble: bool,
) -> Regions:
    """Every element once, with its writer. Raises InvariantError when the boxes of a tensor leave a hole or stick
    out of it."""
    held = _held(tensors, shapes)
    zones = _zones(held, shapes, node_of) if assemble else []
    deal = _Deal(held, shapes, piece_bytes, node_of)
    deal.alone({i for zone in zones for i in zone.replaced})
    deal.shared(zones)
    return deal.regions()


# ---- what the ranks hold, as disjoint boxes


@dataclass(frozen=True, kw_only=True)
class _Held:
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


def _held(tensors: Sequence[PlannedTensor], shapes: Shapes) -> _Held:
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
) -> _Held:
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
    return _Held(
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


def _overlapping(held: _Held, shapes: Shapes) -> list[int]:
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


def _split(held: _Held, shapes: Shapes, tensor: int) -> dict[int, list[Box]]:
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


# ---- zones: rows whose columns lie with several ranks


@dataclass(frozen=True, slots=True)
class _Zone:
    """Rows [start, stop) of a tensor. members: held boxes that fill them; replaced: those and the boxes that `rest`
    now stands for; rest: (held box, rows) outside of zones.  owners: who may write blocks of it."""

    tensor: int
    start: int
    stop: int
    members: tuple[int, ...]
    owners: tuple[int, ...]
    replaced: tuple[int, ...]
    rest: tuple[tuple[int, int, int], ...]


def _zones(held: _Held, shapes: Shapes, node_of: Callable[[int], int]) -> list[_Zone]:
    zones: list[_Zone] = []
    bounds = np.searchsorted(held.tensor, np.arange(len(shapes.tensors) + 1))
    known: dict[bytes, tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, int]]]] = {}
    for t in np.unique(held.tensor[~held.is_run]).tolist():
        if not shapes.tensors[t].is_weight:
            continue
        low, high = int(bounds[t]), int(bounds[t + 1])
        offset, size = held.offset[low:high], held.size[low:high]
        pattern = shapes.shape[t].tobytes() + offset.tobytes() + size.tobytes()
        if pattern not in known:
            known[pattern] = _strips(offset, size, shapes.shape[t])
        strips, rest = known[pattern]
        found = []
        for start, stop, members in strips:
            owners = _owners([held.ranks(low + m) for m in members], node_of)
            if not owners:
                break
            found.append((start, stop, tuple(low + m for m in members), owners))
        else:
            everything = tuple(range(low, high))
            for k, (start, stop, members, owners) in enumerate(found):
                left = tuple((low + m, a, b) for m, a, b in rest) if k == 0 else ()
                zones.append(_Zone(t, start, stop, members, owners, everything, left))
    return zones


def _strips(
    offset: np.ndarray, size: np.ndarray, shape: np.ndarray
) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, int]]]:
    """The tensor's rows as zones (start, stop, boxes that fill them) and as what is left: (box, start, stop)."""
    low, high = offset[:, 0], offset[:, 0] + size[:, 0]
    cuts = np.unique(np.concatenate([low, high])).tolist()
    zones: list[tuple[int, int, list[int]]] = []
    rest: list[tuple[int, int, int]] = []
    group: list[tuple[int, int, list[int]]] = []

    def close() -> None:
        if not group:
            return
        strided = False
        for a, b, members in group:
            rows = size[members].copy()
            rows[:, 0] = b - a
            strided |= not are_runs(rows, np.broadcast_to(shape, rows.shape)).all()
        if strided:
            zones.append((group[0][0], group[-1][1], sorted({m for _, _, members in group for m in members})))
        else:
            rest.extend((m, a, b) for a, b, members in group for m in members)
        group.clear()

    for a, b in pairwise(cuts):
        members = np.flatnonzero((low <= a) & (high >= b)).tolist()
        if len(members) > 1:
            group.append((a, b, members))
            continue
        close()
        rest.extend((m, a, b) for m in members)
    close()
    return zones, _joined(rest)


def _joined(rest: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring rows of one box as one."""
    out: list[tuple[int, int, int]] = []
    for m, a, b in sorted(rest):
        if out and out[-1][0] == m and out[-1][2] == a:
            out[-1] = (m, out[-1][1], b)
        else:
            out.append((m, a, b))
    return out


def _owners(holders: Sequence[tuple[int, ...]], node_of: Callable[[int], int]) -> tuple[int, ...]:
    """The holders on nodes that hold every member; none when the columns are spread over nodes."""
    nodes = set.intersection(*({node_of(r) for r in ranks} for ranks in holders))
    return tuple(sorted({r for ranks in holders for r in ranks if node_of(r) in nodes}))


# ---- one writer per region


class _Deal:
    def __init__(self, held: _Held, shapes: Shapes, piece_bytes: int, node_of: Callable[[int], int]) -> None:
        self._held, self._shapes, self._piece_bytes, self._node_of = held, shapes, piece_bytes, node_of
        self._bytes = held.volume * shapes.item[held.tensor]
        self._load: dict[int, int] = {}
        self._copied: dict[int, int] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._writer = np.full(len(held.tensor), -1, np.int64)  # of boxes that stay as they are
        self._cut: list[tuple[int, Box, int, int]] = []  # (tensor, box, rank, block or -1)
        self._blocks: list[Block] = []
        self._open = np.ones(len(held.tensor), bool)

    def alone(self, replaced: set[int]) -> None:
        """Boxes that one rank holds."""
        held = self._held
        self._open[sorted(replaced)] = False
        mine = (held.count == 1) & self._open
        ranks = held.holders[held.bounds[:-1][mine]]
        self._writer[mine] = ranks
        for rank, size in zip(*_summed(ranks, self._bytes[mine]), strict=True):
            self._load[rank] = size

    def shared(self, zones: Sequence[_Zone]) -> None:
        """Boxes that several ranks hold, and zones, cut and dealt."""
        held, shapes = self._held, self._shapes
        work: list[tuple[int, int, int, int, tuple[int, ...], Box, _Zone | None]] = []
        many = np.flatnonzero((held.count > 1) & self._open)
        for zone in zones:
            for i, a, b in zone.rest:
                self._keep_rows(work, i, a, b)
            rows = zone.stop - zone.start
            shape = shapes.tensors[zone.tensor].shape
            box = Box((zone.start, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            size = box.volume * int(shapes.item[zone.tensor])
            first = zone.start * int(shapes.strides[zone.tensor][0])
            work.append((len(zone.owners), -size, zone.tensor, first, zone.owners, box, zone))
        order = many[np.lexsort((-self._bytes[many], held.count[many]))]
        if not work:
            for i in order.tolist():
                self._deal_box(i)
            return
        for i in order.tolist():
            t = int(held.tensor[i])
            box = shapes.box(t, held.offset[i], held.size[i])
            row = (int(held.count[i]), -int(self._bytes[i]), t, int(held.first[i]), held.ranks(i), box, None)
            work.append(row)
        work.sort(key=lambda w: w[:4])
        for _, size, t, _, owners, box, zone in work:
            for part in self._shares(box, -size, t, owners):
                self._give(t, part, owners, zone)

    def _keep_rows(self, work: list, i: int, a: int, b: int) -> None:
        """Rows of a held box that no zone took."""
        held, shapes = self._held, self._shapes
        t, ranks = int(held.tensor[i]), held.ranks(i)
        box = shapes.box(t, held.offset[i], held.size[i])
        box = Box((a, *box.offset[1:]), (b - a, *box.size[1:]))
        size = box.volume * int(shapes.item[t])
        if len(ranks) == 1:
            self._cut.append((t, box, ranks[0], -1))
            self._load[ranks[0]] = self._load.get(ranks[0], 0) + size
            return
        first = int((np.array(box.offset) * shapes.strides[t][: len(box.offset)]).sum())
        work.append((len(ranks), -size, t, first, ranks, box, None))

    def _deal_box(self, i: int) -> None:
        size, t, owners = int(self._bytes[i]), int(self._held.tensor[i]), self._held.ranks(i)
        if size <= min(self._piece_bytes, SHARE_BYTES):
            self._writer[i] = self._least(owners, size)
            return
        box = self._shapes.box(t, self._held.offset[i], self._held.size[i])
        for part in self._shares(box, size, t, owners):
            self._give(t, part, owners, None)

    def _shares(self, box: Box, size: int, tensor: int, owners: tuple[int, ...]) -> list[Box]:
        share = min(self._piece_bytes, max(SHARE_BYTES, -(-size // len(owners))))
        return cut_box(box, max(1, share // int(self._shapes.item[tensor])))

    def _give(self, tensor: int, box: Box, owners: tuple[int, ...], zone: _Zone | None) -> None:
        rank = self._least(owners, box.volume * int(self._shapes.item[tensor]))
        block = -1
        if zone is not None:
            block = len(self._blocks)
            self._blocks.append(Block(box, self._parts(tensor, box, rank, zone)))
        self._cut.append((tensor, box, rank, block))

    def _parts(self, tensor: int, box: Box, writer: int, zone: _Zone) -> list[tuple[Box, int]]:
        """Who copies what into a block: its writer what it holds, for the rest a holder on its node."""
        parts = []
        for i in zone.members:
            common = intersection(box, self._shapes.box(tensor, self._held.offset[i], self._held.size[i]))
            if common is None:
                continue
            ranks = self._held.ranks(i)
            if writer in ranks:
                parts.append((common, writer))
                continue
            near = [r for r in ranks if self._node_of(r) == self._node_of(writer)]
            helper = min(near, key=lambda r: (self._copied.get(r, 0), r))
            self._copied[helper] = self._copied.get(helper, 0) + common.volume
            parts.append((common, helper))
        return parts

    def _least(self, ranks: tuple[int, ...], size: int) -> int:
        """The rank with least work, which now has `size` more."""
        if len(ranks) <= 8:
            rank = min(ranks, key=lambda r: (self._load.get(r, 0), r))
        else:
            heap = self._heaps.get(ranks)
            if heap is None:
                heap = self._heaps[ranks] = [(self._load.get(r, 0), r) for r in ranks]
                heapq.heapify(heap)
            # Loads only grow, so an entry that is out of date is too small and comes up to be corrected.
            while heap[0][0] != self._load.get(heap[0][1], 0):
                heapq.heapreplace(heap, (self._load.get(heap[0][1], 0), heap[0][1]))
            rank = heap[0][1]
        self._load[rank] = self._load.get(rank, 0) + size
        return rank

    def regions(self) -> Regions:
        held, shapes = self._held, self._shapes
        kept = self._writer >= 0
        cut_t = np.array([t for t, *_ in self._cut], np.int64)
        offset = shapes.padded(cut_t, [o for _, box, *_ in self._cut for o in box.offset], 0)
        size = shapes.padded(cut_t, [n for _, box, *_ in self._cut for n in box.size], 1)
        first = (offset * shapes.strides[cut_t]).sum(axis=1)
        tensor = np.concatenate([held.tensor[kept], cut_t])
        place = np.concatenate([held.first[kept], first])
        order = np.lexsort((place, tensor)) if len(cut_t) else np.arange(len(tensor))
        tensor, place = tensor[order], place[order]
        offset = np.concatenate([held.offset[kept], offset])[order]
        size = np.concatenate([held.size[kept], size])[order]
        rank = np.concatenate([self._writer[kept], np.array([r for *_, r, _ in self._cut], np.int64)])[order]
        block = np.concatenate([np.full(int(kept.sum()), -1), np.array([b for *_, b in self._cut], np.int64)])
        return Regions(
            tensor=tensor,
            offset=offset,
            size=size,
            rank=rank,
            bytes=size.prod(axis=1) * shapes.item[tensor],
            first=place,
            is_run=are_runs(size, shapes.shape[tensor]),
            block=block[order].astype(np.int64),
            blocks=self._blocks,
        )


def _summed(keys: np.ndarray, values: np.ndarray) -> tuple[list[int], list[int]]:
    """The sum of the values of each key."""
    unique, place = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    np.add.at(sums, place, values)
    return unique.tolist(), sums.tolist()
