"""Who writes which elements: the boxes of all ranks as disjoint regions, each with one writer.

    boxes of all ranks ─► disjoint boxes with their holders (`holders`)
        ─► zones of whole rows (`zones`) and other boxes ─► one writer each

A region held by one rank is that rank's work; what several hold, zones too, is cut and dealt to the holder with least
work, fewest holders first, then largest first, ties to the lowest rank.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sirara.pure.holders import Held, Shapes, are_runs, held_by_ranks
from sirara.pure.layout import Box, cut_box, intersection
from sirara.pure.planned import PlannedTensor
from sirara.pure.zones import Zone, zones_of

SHARE_BYTES = 1 << 20  # replicated regions below this are not split among their holders


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
    held = held_by_ranks(tensors, shapes)
    zones = zones_of(held, shapes, node_of) if assemble else []
    deal = _Deal(held, shapes, piece_bytes, node_of)
    deal.alone({i for zone in zones for i in zone.replaced})
    deal.shared(zones)
    return deal.regions()


class _Deal:
    def __init__(self, held: Held, shapes: Shapes, piece_bytes: int, node_of: Callable[[int], int]) -> None:
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

    def shared(self, zones: Sequence[Zone]) -> None:
        """Boxes that several ranks hold, and zones, cut and dealt."""
        held, shapes = self._held, self._shapes
        work: list[tuple[int, int, int, int, tuple[int, ...], Box, Zone | None]] = []
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

    def _give(self, tensor: int, box: Box, owners: tuple[int, ...], zone: Zone | None) -> None:
        rank = self._least(owners, box.volume * int(self._shapes.item[tensor]))
        block = -1
        if zone is not None:
            block = len(self._blocks)
            self._blocks.append(Block(box, self._parts(tensor, box, rank, zone)))
        self._cut.append((tensor, box, rank, block))

    def _parts(self, tensor: int, box: Box, writer: int, zone: Zone) -> list[tuple[Box, int]]:
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
