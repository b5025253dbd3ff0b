"""Reads a committed step back: what the committer does before older steps may go. No torch: its process has none.

While training goes on it reads for at most half of the time (`Rests`), whatever the disk's speed: data, logs and
other jobs find it free. A limit in bytes per second would be too high for one disk and too low for another, and the
idle class of I/O would make each read wait for as long as anybody uses the disk.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from sirara.checkpoint.image import BLOCK
from sirara.checkpoint.storage import storage_error
from sirara.errors import CheckpointError
from sirara.pure.manifest import Manifest

BATCH_BYTES = 16 << 20
LEAST_REST_S = 0.05
"""Shorter rests are put together: a small step is read back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong. tensor and box are empty when a whole file is meant."""

    file: str
    what: str
    tensor: str = ""
    box: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}{self.box}{' ' if self.tensor else ''}{self.what}"

    def error(self) -> CheckpointError:
        return CheckpointError(str(self), code="SR523")


class Rests:
    """After reads, a rest as long as they took.

    Args:  hurry: True when nobody trains, or waits for what is read: then there are no rests.
    Attributes:  rested_s: of all rests so far.
    """

    def __init__(
        self,
        *,
        hurry: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._hurry, self._clock, self._sleep = hurry, clock, sleep
        self.rested_s = self._owed_s = 0.0

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """Rests when the block, one read, is over."""
        began = self._clock()
        yield
        ended = self._clock()
        self._owed_s += ended - began
        if self._owed_s >= LEAST_REST_S and not self._hurry():
            self._sleep(self._owed_s)
            self.rested_s += self._clock() - ended
            self._owed_s = 0.0


NO_RESTS = Rests(hurry=lambda: True)


def faulty_pieces(folder: Path, m: Manifest, *, rests: Rests = NO_RESTS) -> Iterator[Fault]:
    """Reads every piece, header and small file once from the disk (not from the page cache) and compares
    hashes."""
    p = m.pieces
    order = np.lexsort((p.position, p.file))
    bounds = np.searchsorted(p.file[order], np.arange(len(m.files) + 1))
    buffer = memoryview(mmap.mmap(-1, BATCH_BYTES))
    for f, entry in enumerate(m.files):
        try:
            file = _Reader(folder / entry.name, buffer, rests)
        except FileNotFoundError:
            yield Fault(file=entry.name, what="is missing")
            continue
        with file:
            if not _matches(file, 0, entry.head, bytes.fromhex(entry.hash)):
                yield Fault(file=entry.name, what=f"its first {entry.head} bytes do not match their hash")
            for i in order[bounds[f] : bounds[f + 1]].tolist():
                if not _matches(file, int(p.position[i]), int(p.length[i]), p.hash(i)):
                    name = m.tensors[int(p.tensor[i])].name
                    what = f"bytes {p.position[i]} to {p.position[i] + p.length[i]} do not match their hash"
                    yield Fault(file=entry.name, what=what, tensor=name, box=str(m.box(i)))


class _Reader:
    """Reads a file in large blocks past the page cache, which holds what the training wants; where the file system
    has no such way, through it, after what it held was dropped.

    Raises FileNotFoundError, StorageError.
    """

    def __init__(self, path: Path, buffer: memoryview, rests: Rests) -> None:
        self._path, self._buffer, self._rests = path, buffer, rests
        self._start = self._stop = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(OSError):
                direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
                os.close(self._fd)
                self._fd = direct
        except FileNotFoundError:
            raise
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def bytes_of(self, position: int, length: int) -> Iterator[memoryview]:
        """The bytes in parts, each good until the next is asked for; fewer where the file ends before."""
        while length:
            if not self._start <= position < self._stop:
                self._fill(position)
            at = position - self._start
            part = self._buffer[at : min(at + length, self._stop - self._start)]
            if not len(part):
                return
            yield part
            position, length = position + len(part), length - len(part)

    def _fill(self, position: int) -> None:
        self._start = self._stop = position // BLOCK * BLOCK
        try:
            with self._rests.after():
                self._stop += os.preadv(self._fd, [self._buffer], self._start)
        except OSError as fault:
            raise storage_error(fault, self._path) from fault


def _matches(file: _Reader, position: int, length: int, digest: bytes) -> bool:
    hasher = xxhash.xxh3_128()
    for part in file.bytes_of(position, length):
        hasher.update(part)
        length -= len(part)
    return not length and hasher.digest() == digest
