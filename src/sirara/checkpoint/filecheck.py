"""A file of a step, compared with the manifest while its bytes pass by: what an upload reads is checked on the way."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.readback import Fault
from sirara.checkpoint.storage import read_at, storage_error
from sirara.errors import CheckpointError
from sirara.pure.manifest import Manifest


class FileCheck:
    """The hashes of one file, in the order of its bytes."""

    def __init__(self, manifest: Manifest, f: int) -> None:
        self._manifest, self._entry = manifest, manifest.files[f]
        p = manifest.pieces
        mine = np.flatnonzero(p.file == f)
        mine = mine[np.argsort(p.position[mine], kind="stable")]
        self._pieces: list[int] = [-1, *mine.tolist()]  # -1: the header, or all of a small file
        self._starts: list[int] = [0, *p.position[mine].tolist()]
        self._stops: list[int] = [self._entry.head, *(p.position[mine] + p.length[mine]).tolist()]
        self._next = 0
        self._hasher = xxhash.xxh3_128()

    def feed(self, chunk: memoryview, at: int) -> list[Fault]:
        """Takes the bytes from `at` on, each once and in order; returns what ends in them and is not right."""
        end, faults = at + len(chunk), []
        while self._next < len(self._pieces):
            start, stop = self._starts[self._next], self._stops[self._next]
            a, b = max(start, at), min(stop, end)
            if a < b:
                self._hasher.update(chunk[a - at : b - at])
            if stop > end:
                break
            digest, piece = self._hasher.digest(), self._pieces[self._next]
            self._hasher.reset()
            self._next += 1
            if digest != self._wanted(piece):
                faults.append(self._fault(piece, start, stop))
        return faults

    def _wanted(self, piece: int) -> bytes:
        return bytes.fromhex(self._entry.hash) if piece < 0 else self._manifest.pieces.hash(piece)

    def _fault(self, piece: int, start: int, stop: int) -> Fault:
        if piece < 0:
            return Fault(file=self._entry.name, what=f"its first {stop} bytes do not match their hash")
        tensor = self._manifest.tensors[int(self._manifest.pieces.tensor[piece])].name
        what = f"bytes {start} to {stop} do not match their hash"
        return Fault(file=self._entry.name, what=what, tensor=tensor, box=str(self._manifest.box(piece)))


def checked_chunks(folder: Path, manifest: Manifest, f: int, chunk_bytes: int) -> Iterator[memoryview]:
    """A file of a step folder in chunks, each given out only when all hashes that end in it are right.

    Raises:  CheckpointError naming tensor and file for bytes that are not as they were saved, or are not there;
             StorageError when the file cannot be read.
    """
    entry = manifest.files[f]
    path = folder / entry.name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as fault:
        raise CheckpointError(f"{path} is missing", code="SR521") from fault
    except OSError as fault:
        raise storage_error(fault, path) from fault
    try:
        check = FileCheck(manifest, f)
        for at in range(0, entry.size, chunk_bytes):
            chunk = memoryview(bytearray(min(chunk_bytes, entry.size - at)))
            read_at(fd, path, [chunk], at)
            for fault in check.feed(chunk, at):
                raise CheckpointError(
                    str(fault),
                    code="SR523",
                    where=str(path),
                    try_="run `sirara ckpt verify` on the step; nothing damaged is uploaded",
                )
            yield chunk
    finally:
        os.close(fd)
