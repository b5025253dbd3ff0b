"""Who writes which bytes of a checkpoint: a pure function of what every rank holds, known without talking.

    boxes of all ranks ─► disjoint regions, each with its holders ─► one writer per region
        ─► pieces of at most 16 MiB, each with one hash, at a place in a file

Weights (names without "/") become whole tensors of model*.safetensors, in plan order; a piece is then a
run of the tensor, so every rank writes its runs at planned offsets. All other state becomes entries
"name[a:b,c:d]" of optim-<node>-<k>.safetensors, in the order of their writers, so a rank writes long
stretches. Files are as many as bytes / FILE_BYTES, rounded up, per side. A region held by one rank is that
rank's work; what several hold is cut and dealt to the holder with least work, fewest holders first, then
largest first, ties to the lowest rank.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
import xxhash

from sirara.errors import InvariantError
from sirara.pure.layout import Box, box_runs, cut_box, difference, intersection, whole
from sirara.pure.reshard import SavedBoxes, collisions

PIECE_BYTES = 16 << 20
SHARE_BYTES = 1 << 20  # replicated regions below this are not split among their holders
FILE_BYTES = 2 << 30
HEADER_ALIGN = 4096
INDEX = "model.safetensors.index.json"

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One logical tensor of the training state, and which boxes of it each rank holds.

    dtype: safetensors name ("F32", "BF16", ...).  boxes: rank -> its boxes; ranks without elements may be
    missing; boxes of several ranks may coincide or overlap (replicas), together they cover the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[int, tuple[Box, ...]]

    @property
    def is_weight(self) -> bool:
        return "/" not in self.name


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    tensor: int
    box: Box
    file: int
    position: int
    length: int
    rank: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    name: str
    entries: tuple[Entry, ...]
    header_bytes: int
    size: int
    writer: int  # the rank that writes the header

    @property
    def holds_weights(self) -> bool:
        return self.name.startswith("model")

    def header(self, *, uuid: str, step: int) -> bytes:
        return safetensors_header(self.entries, uuid=uuid, step=step)


@dataclass(frozen=True)
class SavePlan:
    tensors: tuple[PlannedTensor, ...]
    files: tuple[PlannedFile, ...]
    pieces: tuple[PlannedPiece, ...]  # by file, then position

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks that hold the same plan."""
        text = repr([(f.name, f.size, f.writer) for f in self.files])
        text += repr([(t.name, t.dtype, t.shape) for t in self.tensors])
        hasher = xxhash.xxh3_128(text.encode())
        rows = [
            (p.tensor, p.file, p.position, p.length, p.rank, *p.box.offset, *p.box.size) for p in self.pieces
        ]
        hasher.update(np.fromiter((n for row in rows for n in row), dtype="<i8").tobytes())
        return hasher.hexdigest()

    @cached_property
    def pieces_of(self) -> dict[int, list[PlannedPiece]]:
        mine: dict[int, list[PlannedPiece]] = {}
        for piece in self.pieces:
            mine.setdefault(piece.rank, []).append(piece)
        return mine

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """The ranks that have something to write."""
        return tuple(sorted(set(self.pieces_of) | {f.writer for f in self.files}))

    @property
    def total_bytes(self) -> int:
        return sum(f.size for f in self.files)


@dataclass(frozen=True, slots=True)
class _Region:
    tensor: int
    box: Box
    rank: int
    bytes: int


def plan_save(
    tensors: Sequence[PlannedTensor],
    *,
    node_of: Callable[[int], int],
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> SavePlan:
    """The files of a checkpoint, their headers, and the writer and place of every piece.

    Raises InvariantError when the boxes of a tensor leave a hole or stick out of it.
    """
    _check_names(tensors)
    regions = _assign(tensors, piece_bytes)
    files: list[PlannedFile] = []
    pieces: list[PlannedPiece] = []
    _plan_weights(tensors, regions, files, pieces, file_bytes, piece_bytes)
    _plan_state(tensors, regions, files, pieces, file_bytes, piece_bytes, node_of)
    pieces.sort(key=lambda p: (p.file, p.position))
    return SavePlan(tuple(tensors), tuple(files), tuple(pieces))


def safetensors_header(entries: Iterable[Entry], *, uuid: str, step: int) -> bytes:
    """Length, JSON and padding: the first bytes of a safetensors file. Their number depends on the
    entries alone."""
    head: dict[str, object] = {
        "__metadata__": {"format": "pt", "sirara.step": f"{step:012d}", "sirara.uuid": uuid}
    }
    for e in entries:
        head[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.stop]}
    text = json.dumps(head, separators=(",", ":")).encode()
    total = -(-(8 + len(text)) // HEADER_ALIGN) * HEADER_ALIGN
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def weight_file(i: int, n: int) -> str:
    """Name of the i-th of n files of weights, as transformers looks for them."""
    return "model.safetensors" if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"


def weight_index(plan: SavePlan) -> bytes:
    """model.safetensors.index.json of the planned weights."""
    where = {e.name: f.name for f in plan.files if f.holds_weights for e in f.entries}
    total = sum(e.stop - e.start for f in plan.files if f.holds_weights for e in f.entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n"


# ---- regions and their writers


def _check_names(tensors: Sequence[PlannedTensor]) -> None:
    seen: set[str] = set()
    for t in tensors:
        if t.name in seen or not t.name or t.name == "__metadata__":
            raise InvariantError(f"tensor name {t.name!r} is planned twice or cannot be a name")
        if t.dtype not in ITEM_BYTES:
            raise InvariantError(f"{t.name}: dtype {t.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        seen.add(t.name)


def _assign(tensors: Sequence[PlannedTensor], piece_bytes: int) -> list[_Region]:
    """Every element once, with its writer: by tensor, then by offset."""
    load: dict[int, int] = {}
    regions: list[_Region] = []
    shared: list[tuple[int, int, Box, tuple[int, ...]]] = []  # (tensor, bytes, box, holders)
    for t, tensor in enumerate(tensors):
        item = ITEM_BYTES[tensor.dtype]
        for box, holders in _held(tensor).items():
            size = box.volume * item
            if len(holders) == 1:
                regions.append(_Region(t, box, holders[0], size))
                load[holders[0]] = load.get(holders[0], 0) + size
            else:
                shared.append((t, size, box, holders))
    shared.sort(key=lambda s: (len(s[3]), -s[1], s[0], s[2].offset))
    for t, size, box, holders in shared:
        item = ITEM_BYTES[tensors[t].dtype]
        share = min(piece_bytes, max(SHARE_BYTES, -(-size // len(holders))))
        for part in cut_box(box, max(1, share // item)):
            rank = min(holders, key=lambda r: (load.get(r, 0), r))
            regions.append(_Region(t, part, rank, part.volume * item))
            load[rank] = load.get(rank, 0) + part.volume * item
    regions.sort(key=lambda r: (r.tensor, r.box.offset))
    return regions


def _held(tensor: PlannedTensor) -> dict[Box, tuple[int, ...]]:
    """Disjoint boxes that cover the tensor, with the ranks that hold each."""
    holders: dict[Box, tuple[int, ...]] = {}
    full = whole(tensor.shape)
    for rank in sorted(tensor.boxes):
        for box in tensor.boxes[rank]:
            if not box.within(full):
                raise InvariantError(
                    f"{tensor.name}: box {box} of rank {rank} lies outside shape {tensor.shape}"
                )
            if box.volume:
                known = holders.get(box, ())
                holders[box] = known if known and known[-1] == rank else (*known, rank)
    if len(holders) > 1 and _any_overlap(list(holders)):
        holders = _split(holders)
    missing = prod(tensor.shape) - sum(box.volume for box in holders)
    if missing:
        raise InvariantError(
            f"{tensor.name}: the ranks' boxes leave {missing} of {prod(tensor.shape)} elements out"
        )
    return holders


def _any_overlap(boxes: list[Box]) -> bool:
    saved = SavedBoxes(
        np.array([b.offset for b in boxes], np.int64), np.array([b.size for b in boxes], np.int64)
    )
    return next(collisions(saved, boxes), None) is not None


def _split(holders: dict[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """Boxes that overlap in part are cut where they meet: a region has one set of holders."""
    parts: list[tuple[Box, tuple[int, ...]]] = []
    for box, ranks in holders.items():
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
    return dict(parts)


# ---- files and pieces


def _plan_weights(
    tensors: Sequence[PlannedTensor],
    regions: Sequence[_Region],
    files: list[PlannedFile],
    pieces: list[PlannedPiece],
    file_bytes: int,
    piece_bytes: int,
) -> None:
    # Larger items first keeps every tensor aligned to its item size, as the safetensors library does.
    weights = [t for t in range(len(tensors)) if tensors[t].is_weight]
    sizes = {t: prod(tensors[t].shape) * ITEM_BYTES[tensors[t].dtype] for t in weights}
    by_tensor: dict[int, list[_Region]] = {}
    for region in regions:
        by_tensor.setdefault(region.tensor, []).append(region)
    groups = _spread(weights, [sizes[t] for t in weights], file_bytes)
    for i, group in enumerate(groups):
        entries, at = [], 0
        for t in sorted(group, key=lambda t: -ITEM_BYTES[tensors[t].dtype]):
            entries.append(Entry(tensors[t].name, tensors[t].dtype, tensors[t].shape, at, at + sizes[t]))
            at += sizes[t]
        start_of = {e.name: e.start for e in entries}
        mine = [r for t in group for r in by_tensor.get(t, ())]
        head = _add_file(files, weight_file(i, len(groups)), entries, min((r.rank for r in mine), default=0))
        for r in mine:
            tensor = tensors[r.tensor]
            item, base = ITEM_BYTES[tensor.dtype], head + start_of[tensor.name]
            for box, first in _runs_as_boxes(tensor.shape, r.box, piece_bytes // item):
                place = base + first * item
                pieces.append(PlannedPiece(r.tensor, box, len(files) - 1, place, box.volume * item, r.rank))


def _plan_state(
    tensors: Sequence[PlannedTensor],
    regions: Sequence[_Region],
    files: list[PlannedFile],
    pieces: list[PlannedPiece],
    file_bytes: int,
    piece_bytes: int,
    node_of: Callable[[int], int],
) -> None:
    by_node: dict[int, list[_Region]] = {}
    for r in regions:
        if not tensors[r.tensor].is_weight:
            by_node.setdefault(node_of(r.rank), []).append(r)
    for node in sorted(by_node):
        mine = sorted(by_node[node], key=lambda r: (-ITEM_BYTES[tensors[r.tensor].dtype], r.rank))
        for k, group in enumerate(_spread(mine, [r.bytes for r in mine], file_bytes)):
            entries, at = [], 0
            for r in group:
                tensor = tensors[r.tensor]
                entries.append(Entry(f"{tensor.name}{r.box}", tensor.dtype, r.box.size, at, at + r.bytes))
                at += r.bytes
            writer = min((r.rank for r in group), default=0)
            head = _add_file(files, f"optim-{node}-{k}.safetensors", entries, writer)
            for r, entry in zip(group, entries, strict=True):
                item, place = ITEM_BYTES[entry.dtype], head + entry.start
                for box in cut_box(r.box, piece_bytes // item):
                    length = box.volume * item
                    pieces.append(PlannedPiece(r.tensor, box, len(files) - 1, place, length, r.rank))
                    place += length


def _add_file(files: list[PlannedFile], name: str, entries: list[Entry], writer: int) -> int:
    """Adds a file and returns where its data begins."""
    head = len(safetensors_header(entries, uuid="0" * 32, step=0))
    total = head + (entries[-1].stop if entries else 0)
    files.append(PlannedFile(name=name, entries=tuple(entries), header_bytes=head, size=total, writer=writer))
    return head


def _spread(items: Sequence[T], sizes: Sequence[int], file_bytes: int) -> list[list[T]]:
    """Neighbouring items in ceil(total / file_bytes) groups of about equal bytes, none empty."""
    total = sum(sizes)
    n = max(1, -(-total // file_bytes))
    groups: dict[int, list[T]] = {}
    at = 0
    for item, size in zip(items, sizes, strict=True):
        # An item belongs to the group in which its middle lies.
        groups.setdefault(min(n - 1, (2 * at + size) * n // (2 * total) if total else 0), []).append(item)
        at += size
    return list(groups.values())


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
