"""Who writes which bytes of a checkpoint: a pure function of what every rank holds, known without talking.

    boxes of all ranks ─► disjoint regions, one writer each (`regions`)
        ─► pieces of at most 16 MiB, each with one hash, at a place in a file

Weights (names without "/") become whole tensors of model*.safetensors, in plan order; a piece is then a
run of the tensor, so every rank writes its runs at planned offsets. All other state becomes entries
"name[a:b,c:d]" of optim-<node>-<k>.safetensors, in the order of their writers, so a rank writes long
stretches. Files are as many as bytes / FILE_BYTES, rounded up, per side.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from sirara.errors import InvariantError
from sirara.pure.holders import Shapes
from sirara.pure.layout import Box, box_runs, cut_box
from sirara.pure.planned import (
    HEADER_ALIGN,
    INDEX,
    ITEM_BYTES,
    BoxColumns,
    Entry,
    EntryColumns,
    PartColumns,
    PieceColumns,
    PlannedFile,
    PlannedPart,
    PlannedPiece,
    PlannedTensor,
    SavePlan,
    empty_header_chars,
    safetensors_header,
    weight_file,
    weight_index,
)
from sirara.pure.regions import Regions, assign

__all__ = [
    "FILE_BYTES",
    "INDEX",
    "ITEM_BYTES",
    "PIECE_BYTES",
    "Entry",
    "PlannedFile",
    "PlannedPart",
    "PlannedPiece",
    "PlannedTensor",
    "SavePlan",
    "plan_save",
    "safetensors_header",
    "weight_file",
    "weight_index",
]

PIECE_BYTES = 16 << 20
FILE_BYTES = 2 << 30


def plan_save(
    tensors: Sequence[PlannedTensor],
    *,
    node_of: Callable[[int], int],
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
    assemble: bool = False,
) -> SavePlan:
    """The files of a checkpoint, their headers, and the writer and place of every piece.

    assemble: rows of a weight whose columns lie with several ranks of a node become pieces of whole rows, filled by
    all of them (`SavePlan.parts`); only where ranks can copy into each other's images. Otherwise every such row is
    as many pieces as ranks hold columns of it.
    Raises InvariantError when the boxes of a tensor leave a hole or stick out of it.
    """
    _check_names(tensors)
    shapes = Shapes(tensors)
    regions = assign(tensors, shapes, piece_bytes=piece_bytes, node_of=node_of, assemble=assemble)
    files = _Files(tuple(tensors), shapes, regions, piece_bytes)
    files.add_weights(file_bytes)
    files.add_state(file_bytes, node_of)
    return files.plan()


def _check_names(tensors: Sequence[PlannedTensor]) -> None:
    seen: set[str] = set()
    for t in tensors:
        if t.name in seen or not t.name or t.name == "__metadata__":
            raise InvariantError(f"tensor name {t.name!r} is planned twice or cannot be a name")
        if t.dtype not in ITEM_BYTES:
            raise InvariantError(f"{t.name}: dtype {t.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        seen.add(t.name)


class _Files:
    """Lays regions into files. Everything that may be a million is a column."""

    def __init__(
        self, tensors: tuple[PlannedTensor, ...], shapes: Shapes, regions: Regions, piece_bytes: int
    ) -> None:
        self._tensors, self._shapes, self._regions, self._piece_bytes = tensors, shapes, regions, piece_bytes
        self._name_chars = np.array([len(json.dumps(t.name)) + len(t.dtype) for t in tensors], np.int64)
        self._files: list[tuple[str, int, int, int, tuple[int, int]]] = []  # name, head, size, writer, span
        self._entries: list[
            tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
        ] = []  # tensor, offset, size, start
        self._entry_count = 0
        n = len(regions.tensor)
        self._file = np.full(n, -1, np.int64)
        self._position = np.zeros(n, np.int64)  # of the region's first byte; of its tensor's for weights

    def add_weights(self, file_bytes: int) -> None:
        """Whole tensors; larger items first keeps every tensor aligned to its item size, as the safetensors
        library does."""
        shapes, regions = self._shapes, self._regions
        weights = np.array([t for t, tensor in enumerate(self._tensors) if tensor.is_weight], np.int64)
        sizes = shapes.numel[weights] * shapes.item[weights]
        group = _spread(sizes, file_bytes)
        count = int(group.max(initial=-1)) + 1
        file_of = np.full(len(self._tensors), -1, np.int64)
        base = np.zeros(len(self._tensors), np.int64)
        file_of[weights] = group
        in_file = file_of[regions.tensor]
        for k in range(count):
            mine = weights[group == k]
            mine = mine[np.argsort(-shapes.item[mine], kind="stable")]
            bytes_of = shapes.numel[mine] * shapes.item[mine]
            start = np.cumsum(bytes_of) - bytes_of
            ranks = regions.rank[in_file == k]
            head = self._add(
                weight_file(k, count),
                int(ranks.min(initial=2**62)) if len(ranks) else 0,
                mine,
                np.zeros((len(mine), shapes.D), np.int64),
                shapes.shape[mine],
                start,
                by_box=False,
            )
            base[mine] = head + start
        weight = in_file >= 0
        self._file[weight] = in_file[weight]
        self._position[weight] = base[regions.tensor[weight]]

    def add_state(self, file_bytes: int, node_of: Callable[[int], int]) -> None:
        """Boxes as they are, node by node, each rank's together."""
        regions = self._regions
        state = np.flatnonzero(self._file < 0)
        if not len(state):
            return
        ranks, place = np.unique(regions.rank[state], return_inverse=True)
        node = np.array([node_of(r) for r in ranks.tolist()], np.int64)[place]
        item = self._shapes.item[regions.tensor[state]]
        order = np.lexsort((regions.rank[state], -item, node))
        state, node = state[order], node[order]
        nodes, first = np.unique(node, return_index=True)
        for number, low, high in zip(nodes.tolist(), first, [*first[1:], len(state)], strict=True):
            group = _spread(regions.bytes[state[low:high]], file_bytes)
            cuts = np.searchsorted(group, np.arange(int(group[-1]) + 2)) + low
            for k, (a, b) in enumerate(pairwise(cuts)):
                mine = state[a:b]
                start = np.cumsum(regions.bytes[mine]) - regions.bytes[mine]
                head = self._add(
                    f"optim-{number}-{k}.safetensors",
                    int(regions.rank[mine].min()),
                    regions.tensor[mine],
                    regions.offset[mine],
                    regions.size[mine],
                    start,
                    by_box=True,
                )
                self._file[mine] = len(self._files) - 1
                self._position[mine] = head + start

    def _add(
        self,
        name: str,
        writer: int,
        tensor: np.ndarray,
        offset: np.ndarray,
        size: np.ndarray,
        start: np.ndarray,
        *,
        by_box: bool,
    ) -> int:
        """Adds a file and returns where its data begins."""
        stop = start + size.prod(axis=1) * self._shapes.item[tensor]
        chars = self._chars(tensor, offset, size, start, stop, by_box=by_box)
        head = -(-(empty_header_chars() + chars) // HEADER_ALIGN) * HEADER_ALIGN
        span = (self._entry_count, self._entry_count + len(tensor))
        self._files.append((name, head, head + int(stop[-1]) if len(stop) else head, writer, span))
        self._entries.append((tensor, offset, size, start))
        self._entry_count = span[1]
        return head

    def _chars(
        self,
        tensor: np.ndarray,
        offset: np.ndarray,
        size: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        *,
        by_box: bool,
    ) -> int:
        """Characters of the entries in their header, each with its comma."""
        dims = self._shapes.dims[tensor]
        real = np.arange(self._shapes.D) < dims[:, None]
        commas = np.maximum(dims - 1, 0)
        total = self._name_chars[tensor] + _ENTRY + commas + (_digits(size) * real).sum(axis=1)
        total += _digits(start) + _digits(stop)
        if by_box:
            ends = ((_digits(offset) + 1 + _digits(offset + size)) * real).sum(axis=1)
            total += 2 + commas + ends
        return int(total.sum())

    def plan(self) -> SavePlan:
        regions, shapes = self._regions, self._shapes
        weight = np.array([t.is_weight for t in self._tensors], bool)[regions.tensor]
        most = np.maximum(1, self._piece_bytes // shapes.item[regions.tensor])
        volume = regions.size.prod(axis=1)
        whole = (volume <= most) & (regions.is_run | ~weight)
        at = self._position + np.where(weight, regions.first * shapes.item[regions.tensor], 0)
        cut = [
            piece
            for i in np.flatnonzero(~whole).tolist()
            for piece in self._cut(i, bool(weight[i]), int(most[i]))
        ]
        from_i = np.array([i for i, _, _ in cut], np.int64)
        of = regions.tensor[from_i]
        source = np.concatenate([np.flatnonzero(whole), from_i])
        tensor = regions.tensor[source]
        offset = np.concatenate(
            [regions.offset[whole], shapes.padded(of, [o for _, box, _ in cut for o in box.offset], 0)]
        )
        size = np.concatenate(
            [regions.size[whole], shapes.padded(of, [n for _, box, _ in cut for n in box.size], 1)]
        )
        position = np.concatenate([at[whole], np.array([p for *_, p in cut], np.int64)])
        file = self._file[source]
        order = np.lexsort((position, file))
        tensor, offset, size, source = tensor[order], offset[order], size[order], source[order]
        tensors = self._tensors
        entries = self._entry_columns()
        return SavePlan(
            tensors=tensors,
            files=tuple(
                PlannedFile(name=n, header_bytes=h, size=s, writer=w, span=span, _all=entries)
                for n, h, s, w, span in self._files
            ),
            columns=PieceColumns(
                at=self._columns(tensor, offset, size),
                file=file[order],
                position=position[order],
                length=size.prod(axis=1) * shapes.item[tensor],
                rank=regions.rank[source],
            ),
            entries=entries,
            parts=self._parts(source),
        )

    def _cut(self, i: int, weight: bool, most: int) -> Iterable[tuple[int, Box, int]]:
        """(region, box, position) of a region's pieces where it is not one."""
        shapes, regions = self._shapes, self._regions
        t = int(regions.tensor[i])
        box, item = shapes.box(t, regions.offset[i], regions.size[i]), int(shapes.item[t])
        start = int(self._position[i])
        if weight:
            shape = self._tensors[t].shape
            return [(i, part, start + first * item) for part, first in _runs_as_boxes(shape, box, most)]
        pieces = []
        for part in cut_box(box, most):
            pieces.append((i, part, start))
            start += part.volume * item
        return pieces

    def _columns(self, tensor: np.ndarray, offset: np.ndarray, size: np.ndarray) -> BoxColumns:
        ragged = self._shapes.ragged
        return BoxColumns.of(self._tensors, tensor, ragged(tensor, offset), ragged(tensor, size))

    def _entry_columns(self) -> EntryColumns:
        D = self._shapes.D
        none = (
            np.zeros(0, np.int64),
            np.zeros((0, D), np.int64),
            np.zeros((0, D), np.int64),
            np.zeros(0, np.int64),
        )
        tensor, offset, size, start = (np.concatenate(c) for c in zip(none, *self._entries, strict=True))
        return EntryColumns(tensors=self._tensors, at=self._columns(tensor, offset, size), start=start)

    def _parts(self, source: np.ndarray) -> PartColumns:
        """source: the region that each piece comes from."""
        regions = self._regions
        rows = [
            (p, int(regions.tensor[i]), box, rank)
            for p, i in zip(
                np.flatnonzero(regions.block[source] >= 0).tolist(), _blocks(regions, source), strict=True
            )
            for box, rank in regions.blocks[int(regions.block[i])].parts
        ]
        tensor = np.array([t for _, t, _, _ in rows], np.int64)
        return PartColumns(
            piece=np.array([p for p, *_ in rows], np.int64),
            at=BoxColumns.of(
                self._tensors,
                tensor,
                np.array([o for _, _, box, _ in rows for o in box.offset], np.int64),
                np.array([n for _, _, box, _ in rows for n in box.size], np.int64),
            ),
            rank=np.array([r for *_, r in rows], np.int64),
        )


def _blocks(regions: Regions, source: np.ndarray) -> list[int]:
    """The assembled regions, in the order of their pieces. Each is one piece."""
    return source[regions.block[source] >= 0].tolist()


_ENTRY = len(',:{"dtype":"","shape":[],"data_offsets":[,]}')
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


def _digits(values: np.ndarray) -> np.ndarray:
    """Decimal digits of each value."""
    return np.searchsorted(_POWERS, values, side="right") + 1


def _spread(sizes: np.ndarray, file_bytes: int) -> np.ndarray:
    """The group of each item: neighbours in ceil(total / file_bytes) groups of about equal bytes, none empty."""
    total = int(sizes.sum())
    n = max(1, -(-total // file_bytes))
    if not total:
        return np.zeros(len(sizes), np.int64)
    # An item belongs to the group in which its middle lies.
    middle = 2 * (np.cumsum(sizes) - sizes) + sizes
    group = np.minimum(n - 1, middle * n // (2 * total))
    return np.unique(group, return_inverse=True)[1]


def _runs_as_boxes(shape: tuple[int, ...], box: Box, most: int) -> Iterable[tuple[Box, int]]:
    """Boxes of at most `most` elements that are runs of the flattened tensor, with their first element."""
    runs = box_runs(shape, box)
    if len(runs) == 1:
        at = runs[0][0]
        for part in cut_box(box, max(1, most)):
            yield part, at
            at += part.volume
        return
    depth = next(d for d in range(len(shape)) if prod(box.size[: d + 1]) == len(runs)) + 1
    for (start, _), index in zip(runs, np.ndindex(*box.size[:depth]), strict=True):
        corner = tuple(int(i) + o for i, o in zip(index, box.offset, strict=False))
        row = Box((*corner, *box.offset[depth:]), ((1,) * depth) + box.size[depth:])
        at = start
        for part in cut_box(row, max(1, most)):
            yield part, at
            at += part.volume
