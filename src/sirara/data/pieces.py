"""Raw files of a token store: written durably, mapped for reading, hashed piece by piece."""

import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from sirara.errors import CorruptDataError

PIECE_BYTES = 16 << 20
MAPPED_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One raw file of the store; `hashes` holds 32 hex digits per piece."""

    name: str
    bytes: int
    hashes: str


class PieceHasher:
    """xxh3-128 of every piece of a file that is written bit by bit."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            room = PIECE_BYTES - self.bytes % PIECE_BYTES
            self._open.update(view[:room])
            self.bytes += len(view[:room])
            view = view[room:]
            if self.bytes % PIECE_BYTES == 0:
                self._done.append(self._open.hexdigest())
                self._open = xxhash.xxh3_128()

    def stored(self, name: str) -> StoredFile:
        last = [self._open.hexdigest()] if self.bytes % PIECE_BYTES else []
        return StoredFile(name=name, bytes=self.bytes, hashes="".join([*self._done, *last]))


class MappedFiles:
    """Files mapped for reading, the most recently used ones; for any number of threads and stores.

    A mapped file holds a file descriptor, and a blend of large stores has thousands of files.
    """

    def __init__(self, limit: int = MAPPED_FILES) -> None:
        self._limit = limit
        self._maps: OrderedDict[Path, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, folder: Path, stored: StoredFile, dtype: np.dtype) -> np.ndarray:
        """The whole file as an array that is read when touched.  Raises CorruptDataError by its size."""
        path = folder / stored.name
        with self._lock:
            mapped = self._maps.get(path)
            if mapped is None:
                check_size(folder, stored)
                mapped = self._maps[path] = np.memmap(path, dtype=dtype, mode="r")
                if len(self._maps) > self._limit:
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(path)
            return mapped


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` by a file with these bytes, fsynced, in one step."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_bytes(name: str, data: bytes) -> StoredFile:
    hasher = PieceHasher()
    hasher.update(data)
    return hasher.stored(name)


def check_size(folder: Path, stored: StoredFile) -> None:
    path = folder / stored.name
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        found = -1
    if found == stored.bytes:
        return
    has = "is missing" if found < 0 else f"has {found} bytes instead of {stored.bytes}"
    piece = max(0, min(found, stored.bytes)) // PIECE_BYTES
    raise CorruptDataError(
        f"{path} {has}",
        code="SR353",
        where=f"{path}, piece {piece} of {len(stored.hashes) // 32}",
        try_=("restore the file from a copy or build the store again",),
    )


def check_pieces(folder: Path, stored: StoredFile) -> Iterator[CorruptDataError | int]:
    path = folder / stored.name
    pieces = len(stored.hashes) // 32
    with open(path, "rb") as file:
        for piece in range(pieces):
            data = file.read(PIECE_BYTES)
            found, wanted = xxhash.xxh3_128_hexdigest(data), stored.hashes[32 * piece : 32 * piece + 32]
            if found == wanted:
                yield len(data)
                continue
            yield CorruptDataError(
                f"piece {piece} of {path} is not what was written",
                code="SR350",
                where=f"{path}, bytes {piece * PIECE_BYTES} to {piece * PIECE_BYTES + len(data)}",
                why=f"xxh3-128 {found}, the index says {wanted}",
                try_=("restore the file from a copy or build the store again",),
            )
