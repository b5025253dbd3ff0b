"""manifest.json, the commit record: which tensors, in which pieces, in which files, with which hashes.

Columns instead of objects: a million pieces are six arrays of integers and one hex string, which open in
well under a second. The last line of the file is a hash of all bytes before
it, because the training record (lr, cursors, seeds) lives here and nowhere else.

    {"format":"sirara-checkpoint","version":1,"uuid":...,"run":...,"step":...,"tokens":...,"attempt":...,
     "layout":{...},"versions":{...},"aliases":{...},"record":{...},
     "files":{"name":[...],"bytes":[...],"head":[...],"hash":"..."},
     "tensors":{"name":[...],"dtype":[...],"shape":[[...],...]},
     "pieces":{
    "tensor":[...],
    "offset":[...],
    "shape":[...],
    "file":[...],
    "position":[...],
    "length":[...],
    "hash":"..."}
    ,"check":"xxh3-128 of everything before this line"}

Each column of `pieces` stands on a line of its own, so that it can also be read without the JSON parser.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from sirara.errors import CheckpointError, InvariantError
from sirara.pure.layout import Box
from sirara.pure.reshard import SavedBoxes
from sirara.pure.saveplan import ITEM_BYTES
from sirara.pure.sealed import open_sealed, seal

MANIFEST = "manifest.json"
FORMAT = "sirara-checkpoint"
VERSION = 1
HASH_BYTES = 16
_PIECES = b'"pieces":{\n'
_COLUMNS = ("tensor", "offset", "shape", "file", "position", "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the step folder. `hash` covers its first `head` bytes: a safetensors header, or all of a
    small file."""

    name: str
    size: int
    head: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """N pieces as columns. offset and size hold the boxes' coordinates end to end, as many per piece as
    its tensor has dims."""

    tensor: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    file: np.ndarray
    position: np.ndarray
    length: np.ndarray
    hashes: bytes  # 16 bytes each

    def __len__(self) -> int:
        return len(self.tensor)

    def hash(self, i: int) -> bytes:
        return self.hashes[HASH_BYTES * i : HASH_BYTES * (i + 1)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    uuid: str
    run: str
    step: int
    tokens: int
    attempt: int
    layout: dict[str, Any]
    versions: dict[str, str]
    aliases: dict[str, str]
    record: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    pieces: Pieces

    @cached_property
    def tensor_index(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def _first_coordinate(self) -> np.ndarray:
        """Where the coordinates of each piece begin in the offset and size columns."""
        dims = np.array([len(t.shape) for t in self.tensors], np.int64)
        counts = dims[self.pieces.tensor] if len(self.pieces) else np.zeros(0, np.int64)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def _by_tensor(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.pieces.tensor, kind="stable")
        return order, np.searchsorted(self.pieces.tensor[order], np.arange(len(self.tensors) + 1))

    def box(self, piece: int) -> Box:
        at = slice(int(self._first_coordinate[piece]), int(self._first_coordinate[piece + 1]))
        return Box(tuple(self.pieces.offset[at].tolist()), tuple(self.pieces.size[at].tolist()))

    def pieces_of(self, tensor: int) -> np.ndarray:
        """Indices of the tensor's pieces, by file and position."""
        order, bounds = self._by_tensor
        return order[bounds[tensor] : bounds[tensor + 1]]

    def boxes_of(self, tensor: int) -> tuple[np.ndarray, SavedBoxes]:
        """The tensor's pieces, and their boxes in that order, ready to be asked."""
        index, offset_NK, size_NK = self.columns_of(tensor)
        return index, SavedBoxes(offset_NK, size_NK)

    def columns_of(self, tensor: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tensor's pieces, and offset and size of their boxes: [N], [N, K], [N, K]."""
        index = self.pieces_of(tensor)
        dims = len(self.tensors[tensor].shape)
        at = self._first_coordinate[index][:, None] + np.arange(dims)
        return index, self.pieces.offset[at], self.pieces.size[at]

    def volumes(self) -> np.ndarray:
        """Elements of each piece, from its box."""
        if not len(self.pieces):
            return np.zeros(0, np.int64)
        first = self._first_coordinate
        # reduceat cannot express a piece without coordinates (a scalar); such a piece has one element.
        padded = np.append(self.pieces.size, 1)
        product = np.multiply.reduceat(padded, first[:-1])
        return np.where(np.diff(first) > 0, product, 1)

    def to_bytes(self) -> bytes:
        try:
            text = json.dumps(self._head(), separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as fault:
            raise InvariantError(f"the record of step {self.step} is not plain JSON: {fault}") from fault
        p = self.pieces
        columns = (p.tensor, p.offset, p.size, p.file, p.position, p.length)
        lines = [
            f'"{name}":[{",".join(map(str, column.tolist()))}],\n'
            for name, column in zip(_COLUMNS, columns, strict=True)
        ]
        lines.append(f'"hash":"{p.hashes.hex()}"}}')
        body = text[:-1].encode() + b",\n" + _PIECES + "".join(lines).encode()
        return seal(body)

    def _head(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "uuid": self.uuid,
            "run": self.run,
            "step": self.step,
            "tokens": self.tokens,
            "attempt": self.attempt,
            "layout": self.layout,
            "versions": self.versions,
            "aliases": self.aliases,
            "record": self.record,
            "files": {
                "name": [f.name for f in self.files],
                "bytes": [f.size for f in self.files],
                "head": [f.head for f in self.files],
                "hash": "".join(f.hash for f in self.files),
            },
            "tensors": {
                "name": [t.name for t in self.tensors],
                "dtype": [t.dtype for t in self.tensors],
                "shape": [list(t.shape) for t in self.tensors],
            },
        }


def parse_manifest(raw: bytes, *, where: str) -> Manifest:
    """The manifest in `raw`. Raises CheckpointError naming `where` when its bytes are not what was
    written."""
    body = open_sealed(raw, where=where, code="SR510")
    try:
        head = _loads(body)
        if head["format"] != FORMAT or head["version"] != VERSION:
            raise CheckpointError(
                f"{where} is in format {head['format']!r} version {head['version']!r}",
                code="SR511",
                why=f"this program reads {FORMAT!r} version {VERSION}",
                try_="read it with the version of sirara that wrote it: "
                + json.dumps(head.get("versions", {})),
            )
        manifest = _from_json(head)
    except (KeyError, TypeError, ValueError) as fault:
        raise CheckpointError(
            f"{where} does not have the fields of format {VERSION}: {fault!r}", code="SR511"
        ) from fault
    _check(manifest, where)
    return manifest


def _loads(body: bytes) -> dict[str, Any]:
    """The fields, the pieces' columns as arrays: numpy reads those much faster than json."""
    head, mark, lines = body.partition(b",\n" + _PIECES)
    columns: dict[str, Any] = {}
    for line in lines.split(b"\n") if mark else ():
        name, _, text = line.partition(b":")
        key = name.strip(b'"').decode()
        if key == "hash":
            columns[key] = text.rstrip(b"}").strip(b'"').decode()
        elif key in _COLUMNS and text.startswith(b"[") and text.endswith(b"],"):
            columns[key] = np.fromstring(text[1:-2], np.int64, sep=",")
    if columns.keys() != {*_COLUMNS, "hash"}:
        return json.loads(body + b"}")  # another writer's spacing
    return {**json.loads(head + b"}"), "pieces": columns}


def _from_json(head: Mapping[str, Any]) -> Manifest:
    files, tensors, pieces = head["files"], head["tensors"], head["pieces"]
    per_file = zip(files["name"], files["bytes"], files["head"], strict=True)
    per_tensor = zip(tensors["name"], tensors["dtype"], tensors["shape"], strict=True)
    return Manifest(
        uuid=head["uuid"],
        run=head["run"],
        step=head["step"],
        tokens=head["tokens"],
        attempt=head["attempt"],
        layout=head["layout"],
        versions=head["versions"],
        aliases=head["aliases"],
        record=head["record"],
        files=tuple(
            FileEntry(name=n, size=b, head=h, hash=files["hash"][32 * i : 32 * i + 32])
            for i, (n, b, h) in enumerate(per_file)
        ),
        tensors=tuple(TensorEntry(name=n, dtype=d, shape=tuple(s)) for n, d, s in per_tensor),
        pieces=Pieces(
            tensor=np.asarray(pieces["tensor"], np.int64),
            offset=np.asarray(pieces["offset"], np.int64),
            size=np.asarray(pieces["shape"], np.int64),
            file=np.asarray(pieces["file"], np.int64),
            position=np.asarray(pieces["position"], np.int64),
            length=np.asarray(pieces["length"], np.int64),
            hashes=bytes.fromhex(pieces["hash"]),
        ),
    )


def _check(m: Manifest, where: str) -> None:
    """The columns agree with each other and every tensor is covered; all of it vectorised."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: {what}", code="SR511")

    p, n = m.pieces, len(m.pieces)
    if not len(p.file) == len(p.position) == len(p.length) == n or len(p.hashes) != HASH_BYTES * n:
        raise refuse("the columns of `pieces` differ in length")
    unsafe = [f.name for f in m.files if f.name in ("", ".", "..") or "/" in f.name or "\\" in f.name]
    if unsafe:
        raise refuse(f"file {unsafe[0]!r} is not a plain name")
    unknown = [t.dtype for t in m.tensors if t.dtype not in ITEM_BYTES]
    if unknown:
        raise refuse(f"dtype {unknown[0]!r} is unknown")
    if n and not (0 <= p.tensor.min() <= p.tensor.max() < len(m.tensors)):
        raise refuse("a piece names a tensor that is not listed")
    if n and not (0 <= p.file.min() <= p.file.max() < len(m.files)):
        raise refuse("a piece names a file that is not listed")
    if len(p.offset) != m._first_coordinate[-1] or len(p.size) != len(p.offset):
        raise refuse("the boxes of `pieces` do not have the dimensions of their tensors")
    item = np.array([ITEM_BYTES[t.dtype] for t in m.tensors], np.int64)
    volumes = m.volumes()
    if n and (volumes * item[p.tensor] != p.length).any():
        raise refuse("a piece's length is not that of its box")
    if n and (p.position + p.length > np.array([f.size for f in m.files], np.int64)[p.file]).any():
        raise refuse("a piece lies beyond the end of its file")
    held = np.zeros(len(m.tensors), np.int64)
    np.add.at(held, p.tensor, volumes)
    want = np.array([prod(t.shape) for t in m.tensors], np.int64)
    if (held != want).any():
        bad = int(np.flatnonzero(held != want)[0])
        t = m.tensors[bad]
        raise refuse(
            f"the pieces of {t.name} hold {held[bad]} of its {want[bad]} elements (shape {list(t.shape)})"
        )
