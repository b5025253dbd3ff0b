"""A save as data: tensors, files, pieces; columns instead of objects, because there may be a million pieces.

The plan of a save is the same on all ranks (`saveplan.plan_save` makes it without talking). Boxes of a plan are
columns as in the manifest: the coordinates end to end, as many per box as its tensor has dimensions.

    pieces    tensor | offset .. | size .. | file | position | length | rank     by file, then position
    entries   tensor | offset .. | size .. | start                               of the headers, by file
    parts     piece  | offset .. | size .. | rank                                of pieces that several ranks fill
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import xxhash

from sirara.errors import InvariantError
from sirara.pure.layout import Box

INDEX = "model.safetensors.index.json"
HEADER_ALIGN = 4096
UUID_CHARS = 36

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

_FORMAT = "sirara-plan"


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
class PlannedPart:
    """A box of piece `piece` that `rank` holds, where no rank holds all of the piece. The piece's own rank
    collects the parts."""

    piece: int
    box: Box
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
class BoxColumns:
    """N boxes, each of the tensor whose index stands in `tensor`."""

    tensor: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    first: np.ndarray  # [N + 1]: where the coordinates of each box begin

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, i: int) -> Box:
        at = slice(int(self.first[i]), int(self.first[i + 1]))
        return Box(tuple(self.offset[at].tolist()), tuple(self.size[at].tolist()))

    def boxes(self, indices: Iterable[int]) -> Iterator[Box]:
        first, offset, size = self.first.tolist(), self.offset, self.size
        for i in indices:
            at = slice(first[i], first[i + 1])
            yield Box(tuple(offset[at].tolist()), tuple(size[at].tolist()))

    @staticmethod
    def of(
        tensors: Sequence[PlannedTensor], tensor: np.ndarray, offset: np.ndarray, size: np.ndarray
    ) -> "BoxColumns":
        dims = np.array([len(t.shape) for t in tensors], np.int64)
        counts = dims[tensor] if len(tensor) else np.zeros(0, np.int64)
        return BoxColumns(
            tensor=tensor,
            offset=offset,
            size=size,
            first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """entries: [begin, end) among the plan's entries.  writer: the rank that writes the header."""

    name: str
    header_bytes: int
    size: int
    writer: int
    span: tuple[int, int]
    _all: "EntryColumns" = field(repr=False, compare=False)

    @property
    def holds_weights(self) -> bool:
        return self.name.startswith("model")

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._all.entries(*self.span, named_by_box=not self.holds_weights))

    def header(self, *, uuid: str, step: int) -> bytes:
        entries = self._all.texts(*self.span, named_by_box=not self.holds_weights)
        header = _padded(_header_text(entries, uuid=uuid, step=step))
        if len(header) > self.header_bytes:
            raise InvariantError(
                f"the header of {self.name} does not fit",
                why=f"{len(header)} bytes, {self.header_bytes} planned",
            )
        return header


@dataclass(frozen=True, kw_only=True)
class EntryColumns:
    """The entries of all headers: boxes, and where each begins behind its header."""

    tensors: tuple[PlannedTensor, ...]
    at: BoxColumns
    start: np.ndarray

    def entries(self, begin: int, end: int, *, named_by_box: bool) -> Iterator[Entry]:
        owners, starts = self.at.tensor[begin:end].tolist(), self.start[begin:end].tolist()
        for t, start, box in zip(owners, starts, self.at.boxes(range(begin, end)), strict=True):
            tensor = self.tensors[t]
            name = f"{tensor.name}{box}" if named_by_box else tensor.name
            stop = start + box.volume * ITEM_BYTES[tensor.dtype]
            yield Entry(name, tensor.dtype, box.size, start, stop)

    def texts(self, begin: int, end: int, *, named_by_box: bool) -> Iterator[str]:
        """The same as JSON, without the objects: a header may have a hundred thousand of them."""
        owners, starts = self.at.tensor[begin:end].tolist(), self.start[begin:end].tolist()
        first = self.at.first[begin : end + 1].tolist()
        low = first[0] if first else 0
        offset, size = (c[low : first[-1] if first else 0].tolist() for c in (self.at.offset, self.at.size))
        names: dict[int, str] = {}
        for i, (t, start) in enumerate(zip(owners, starts, strict=True)):
            tensor = self.tensors[t]
            sizes = size[first[i] - low : first[i + 1] - low]
            if t not in names:
                names[t] = json.dumps(tensor.name)[:-1]
            box = ""
            if named_by_box:
                offsets = offset[first[i] - low : first[i + 1] - low]
                box = "[" + ",".join([f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True)]) + "]"
            stop = start + prod(sizes) * ITEM_BYTES[tensor.dtype]
            shape = ",".join(map(str, sizes))
            yield (
                f'{names[t]}{box}":{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{start},{stop}]}}'
            )


@dataclass(frozen=True, kw_only=True)
class PieceColumns:
    """N pieces, by file, then position. rank: who writes the piece."""

    at: BoxColumns
    file: np.ndarray
    position: np.ndarray
    length: np.ndarray
    rank: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, kw_only=True)
class PartColumns:
    """The parts of assembled pieces, by piece."""

    piece: np.ndarray
    at: BoxColumns
    rank: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class SavePlan:
    tensors: tuple[PlannedTensor, ...]
    files: tuple[PlannedFile, ...]
    columns: PieceColumns
    entries: EntryColumns
    parts: PartColumns

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks that hold the same plan."""
        return xxhash.xxh3_128_hexdigest(self._body)

    @cached_property
    def pieces(self) -> tuple[PlannedPiece, ...]:
        """The columns as objects, by file, then position; for small plans."""
        return tuple(self._objects(np.arange(len(self.columns))))

    @property
    def pieces_of(self) -> "Mapping[int, list[PlannedPiece]]":
        """Rank -> its pieces, made when asked for."""
        return _PiecesOf(self)

    def indices_of(self, rank: int) -> np.ndarray:
        """Indices of the rank's pieces, by file, then position."""
        order, ranks, bounds = self._by_rank
        at = int(np.searchsorted(ranks, rank))
        if at == len(ranks) or ranks[at] != rank:
            return np.zeros(0, np.int64)
        return order[bounds[at] : bounds[at + 1]]

    def parts_of(self, rank: int) -> list[PlannedPart]:
        """What the rank holds of pieces that it does not hold whole, its own and those of other ranks."""
        mine = np.flatnonzero(self.parts.rank == rank)
        pieces = self.parts.piece[mine].tolist()
        return [
            PlannedPart(p, b, rank) for p, b in zip(pieces, self.parts.at.boxes(mine.tolist()), strict=True)
        ]

    @cached_property
    def assembled(self) -> np.ndarray:
        """Indices of the pieces that several ranks fill, ascending."""
        return np.unique(self.parts.piece)

    def helpers_of(self, rank: int) -> tuple[int, ...]:
        """The other ranks that fill a part of this rank's pieces."""
        filled = self.parts.rank[self.columns.rank[self.parts.piece] == rank]
        return tuple(int(r) for r in np.unique(filled) if r != rank)

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """The ranks that have something to write."""
        _, ranks, _ = self._by_rank
        return tuple(sorted({*ranks.tolist(), *(f.writer for f in self.files)}))

    @property
    def total_bytes(self) -> int:
        return sum(f.size for f in self.files)

    def bytes_of(self, rank: int) -> int:
        """Bytes of the rank's pieces."""
        return int(self.columns.length[self.indices_of(rank)].sum())

    @cached_property
    def _by_rank(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        order = np.argsort(self.columns.rank, kind="stable")
        ranks, first = np.unique(self.columns.rank[order], return_index=True)
        return order, ranks, np.append(first, len(order))

    def _objects(self, indices: np.ndarray) -> Iterator[PlannedPiece]:
        c = self.columns
        rows = (column[indices].tolist() for column in (c.at.tensor, c.file, c.position, c.length, c.rank))
        for t, f, p, n, r, box in zip(*rows, c.at.boxes(indices.tolist()), strict=True):
            yield PlannedPiece(t, box, f, p, n, r)

    # ---- as bytes

    def to_bytes(self) -> bytes:
        """One line of JSON, then the columns as little-endian int64. What the ranks hold (`boxes`) stays out:
        whoever writes by a plan does not need it."""
        return self._body + xxhash.xxh3_128_digest(self._body)

    @cached_property
    def _body(self) -> bytes:
        columns = self._columns()
        head = {
            "format": _FORMAT,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "files": [[f.name, f.header_bytes, f.size, f.writer, *f.span] for f in self.files],
            "columns": [len(column) for column in columns],
        }
        line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        return line + b"".join(column.astype("<i8", copy=False).tobytes() for column in columns)

    def _columns(self) -> tuple[np.ndarray, ...]:
        c, e, p = self.columns, self.entries, self.parts
        return (
            *(c.at.tensor, c.at.offset, c.at.size, c.file, c.position, c.length, c.rank),
            *(e.at.tensor, e.at.offset, e.at.size, e.start),
            *(p.piece, p.at.tensor, p.at.offset, p.at.size, p.rank),
        )

    @staticmethod
    def from_bytes(raw: bytes) -> "SavePlan":
        """The plan again, but for the tensors' `boxes`, which are empty."""
        body = raw[:-16]
        if xxhash.xxh3_128_digest(body) != raw[-16:]:
            raise InvariantError("a save plan did not arrive as it was sent", why=f"{len(raw)} bytes came")
        line, _, _ = body.partition(b"\n")
        head = json.loads(line)
        if head["format"] != _FORMAT:
            raise InvariantError(f"a save plan is in format {head['format']!r}, not {_FORMAT!r}")
        values = np.frombuffer(body, "<i8", offset=len(line) + 1)
        ends = np.cumsum(head["columns"])
        columns = iter(np.split(values, ends[:-1]))
        tensors = tuple(
            PlannedTensor(name=n, dtype=d, shape=tuple(s), boxes={}) for n, d, s in head["tensors"]
        )

        def boxes() -> BoxColumns:
            return BoxColumns.of(tensors, next(columns), next(columns), next(columns))

        pieces = PieceColumns(
            at=boxes(), file=next(columns), position=next(columns), length=next(columns), rank=next(columns)
        )
        entries = EntryColumns(tensors=tensors, at=boxes(), start=next(columns))
        parts = PartColumns(piece=next(columns), at=boxes(), rank=next(columns))
        files = tuple(
            PlannedFile(name=n, header_bytes=h, size=s, writer=w, span=(a, b), _all=entries)
            for n, h, s, w, a, b in head["files"]
        )
        return SavePlan(tensors=tensors, files=files, columns=pieces, entries=entries, parts=parts)


class _PiecesOf(Mapping[int, list[PlannedPiece]]):
    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan

    def __getitem__(self, rank: int) -> list[PlannedPiece]:
        mine = self._plan.indices_of(rank)
        if not len(mine):
            raise KeyError(rank)
        return list(self._plan._objects(mine))

    def __iter__(self) -> Iterator[int]:
        return iter(self._plan._by_rank[1].tolist())

    def __len__(self) -> int:
        return len(self._plan._by_rank[1])


def safetensors_header(entries: Iterable[Entry], *, uuid: str, step: int) -> bytes:
    """Length, JSON and padding: the first bytes of a safetensors file. Their number depends on the
    entries alone."""
    texts = (
        f"{json.dumps(e.name)}:"
        + json.dumps(
            {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.stop]},
            separators=(",", ":"),
        )
        for e in entries
    )
    return _padded(_header_text(texts, uuid=uuid, step=step))


def empty_header_chars() -> int:
    """Characters of a header without entries, its length included."""
    return 8 + len(_header_text((), uuid="0" * UUID_CHARS, step=0))


def _header_text(entries: Iterable[str], *, uuid: str, step: int) -> bytes:
    about = {"format": "pt", "sirara.step": f"{step:012d}", "sirara.uuid": uuid}
    head = f'"__metadata__":{json.dumps(about, separators=(",", ":"))}'
    return ("{" + ",".join([head, *entries]) + "}").encode()


def _padded(text: bytes) -> bytes:
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
