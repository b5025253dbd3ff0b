"""One rank's part of a save: its pieces into the planned files, then fsync. No torch here.

    room reserved ──► files at planned offsets ──► fsync each ──► report-<rank>.json (hash per piece)

The report is a message, which need not survive a loss of power; the committer makes the names in the folder durable.

Long stretches go past the page cache: what the cache holds is written back under the training that goes on, and
takes the memory of others. From an image they go in a few calls. Straight from the ranges (a save in line), a piece
is a slice of the range's own memory, hashed and copied into one of two aligned buffers, or, where the file system
takes only the page cache, handed to pwritev.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from sirara.checkpoint.image import BLOCK, ImagePlan
from sirara.checkpoint.report import Report, report_name
from sirara.checkpoint.storage import Disk
from sirara.pure.layout import Box
from sirara.pure.saveplan import SavePlan

BATCH_BYTES = 16 << 20  # neighbouring pieces are written together up to this many bytes
BATCH_PIECES = 1024
DIRECT_BYTES = 256 << 10  # shorter stretches go through the page cache


class PieceSource(Protocol):
    def bytes_of(self, tensor: str, box: Box) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes that follow each other at `at` in an image and at `position` in a file."""

    file: int
    position: int
    at: int
    length: int


def hash_image(image: ImagePlan, data: memoryview) -> bytes:
    """xxh3-128 of every piece of an image, 16 bytes each, in its order."""
    ends = (image.position + image.length).tolist()
    return b"".join(
        xxhash.xxh3_128_digest(data[at:end]) for at, end in zip(image.position.tolist(), ends, strict=True)
    )


def write_image(
    disk: Disk,
    folder: Path,
    *,
    plan: SavePlan,
    rank: int,
    data: memoryview,
    image: ImagePlan,
    uuid: str,
    step: int,
) -> None:
    """Makes an image and this rank's headers durable in the files of a step folder. The report is the caller's.

    data: the image; from page-aligned memory it goes past the page cache.
    Raises StorageError: disk full, before anything is written; I/O.
    """
    stretches = stretches_of(plan, image)
    aligned = _is_aligned(data)
    with ExitStack() as undo:
        for f in _files(disk, folder, plan, rank, stretches, undo, direct=aligned):
            for s in f.stretches:
                _write_stretch(disk, f, data[s.at : s.at + s.length], s.position)
            f.write_header(disk, uuid=uuid, step=step)


def stretches_of(plan: SavePlan, image: ImagePlan) -> list[Stretch]:
    """The image as stretches, each written by one call."""
    heads, length = _heads(plan, image.index)
    c, index = plan.columns, image.index[heads]
    return [
        Stretch(*row)
        for row in zip(
            *(col.tolist() for col in (c.file[index], c.position[index], image.position[heads], length)),
            strict=True,
        )
    ]


def _heads(plan: SavePlan, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in `index` a piece does not follow the one before it in its file, and the bytes from there to the next
    such place."""
    c = plan.columns
    if not len(index):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    file, position, length = c.file[index], c.position[index], c.length[index]
    fresh = np.ones(len(index), bool)
    fresh[1:] = (file[1:] != file[:-1]) | (position[1:] != position[:-1] + length[:-1])
    heads = np.flatnonzero(fresh)
    return heads, np.add.reduceat(length, heads)


def write_part(
    disk: Disk,
    folder: Path,
    *,
    plan: SavePlan,
    rank: int,
    sources: PieceSource,
    uuid: str,
    attempt: int,
    step: int,
) -> None:
    """Writes this rank's pieces and headers straight from where they lie, makes them durable, then reports them."""
    mine = plan.pieces_of.get(rank, [])
    index = plan.indices_of(rank)
    heads, lengths = _heads(plan, index)
    # Here `at` counts pieces.
    stretches = [
        Stretch(mine[i].file, mine[i].position, i, n)
        for i, n in zip(heads.tolist(), lengths.tolist(), strict=True)
    ]
    ends = dict(pairwise([*heads.tolist(), len(mine)]))
    hashes: list[bytes] = [b""] * len(mine)

    def bytes_of(start: int, stop: int) -> Iterator[memoryview]:
        for i in range(start, stop):
            data = sources.bytes_of(plan.tensors[mine[i].tensor].name, mine[i].box)
            hashes[i] = xxhash.xxh3_128_digest(data)
            yield data

    # The buffers' thread ends before the files are closed.
    with ExitStack() as undo, _Bounce(disk) as bounce:
        for f in _files(disk, folder, plan, rank, stretches, undo, direct=True):
            for s in f.stretches:
                parts = bytes_of(s.at, ends[s.at])
                if f.direct is not None and s.length >= DIRECT_BYTES:
                    bounce.write(f, parts, s.position)
                else:
                    _write_batches(disk, f, parts, s.position)
            f.write_header(disk, uuid=uuid, step=step)
    report = Report(
        uuid=uuid,
        attempt=attempt,
        step=step,
        rank=rank,
        plan=plan.digest,
        lengths=tuple(p.length for p in mine),
        hashes=b"".join(hashes),
    )
    disk.write_file(folder / report_name(rank), report.to_bytes(), durable=False)


@dataclass(frozen=True, slots=True)
class _File:
    """One open file of the step folder. direct: a second descriptor past the page cache."""

    plan: SavePlan
    number: int
    path: Path
    fd: int
    direct: int | None
    stretches: list[Stretch]
    has_header: bool

    def write_header(self, disk: Disk, *, uuid: str, step: int) -> None:
        if self.has_header:
            header = self.plan.files[self.number].header(uuid=uuid, step=step)
            disk.write(self.fd, self.path, [memoryview(header)], 0)


def _files(
    disk: Disk,
    folder: Path,
    plan: SavePlan,
    rank: int,
    stretches: Sequence[Stretch],
    undo: ExitStack,
    *,
    direct: bool,
) -> Iterator[_File]:
    """The files that the rank writes to, one after the other, all opened and their room reserved before the first;
    once the caller is done with the last, all are fsynced."""
    by_file: dict[int, list[Stretch]] = {
        f: [] for f, planned in enumerate(plan.files) if planned.writer == rank
    }
    for s in stretches:
        by_file.setdefault(s.file, []).append(s)
    # Writers of one file wait for each other in the kernel, so ranks start at different files.
    order = sorted(by_file)
    turn = rank % max(1, len(order))
    files = []
    for f in order[turn:] + order[:turn]:
        planned, mine = plan.files[f], by_file[f]
        path = folder / planned.name
        fd = disk.open(path, size=planned.size)
        undo.callback(os.close, fd)
        past = disk.open_direct(path) if direct and any(s.length >= DIRECT_BYTES for s in mine) else None
        if past is not None:
            undo.callback(os.close, past)
        files.append(_File(plan, f, path, fd, past, mine, planned.writer == rank))
    for f in files:
        if f.has_header:
            disk.allocate(f.fd, f.path, 0, plan.files[f.number].header_bytes)
        for s in f.stretches:
            disk.allocate(f.fd, f.path, s.position, s.length)
    yield from files
    for f in files:
        disk.fsync(f.fd, f.path)


def _write_stretch(disk: Disk, file: _File, data: memoryview, position: int) -> None:
    """The whole blocks in the middle past the page cache, the rest through it."""
    head = -position % BLOCK
    body = (len(data) - head) // BLOCK * BLOCK
    if file.direct is None or body < DIRECT_BYTES:
        disk.write(file.fd, file.path, [data], position)
        return
    disk.write_direct(file.fd, file.direct, file.path, data[head : head + body], position + head)
    disk.write(file.fd, file.path, [data[:head]], position)
    disk.write(file.fd, file.path, [data[head + body :]], position + head + body)


def _write_batches(disk: Disk, file: _File, parts: Iterable[memoryview], position: int) -> None:
    """Through the page cache, neighbours together."""
    batch: list[memoryview] = []
    start = stop = position
    for data in parts:
        if stop - start >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            disk.write(file.fd, file.path, batch, start)
            disk.start_writeback(file.fd, start, stop - start)
            batch, start = [], stop
        batch.append(data)
        stop += len(data)
    disk.write(file.fd, file.path, batch, start)


class _Bounce:
    """Two page-aligned buffers: one is filled while the other is written past the page cache."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffers: list[np.ndarray] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._under_way: list[Future[None] | None] = [None, None]

    def __enter__(self) -> "_Bounce":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def write(self, file: _File, parts: Iterable[memoryview], position: int) -> None:
        """Writes the parts one after the other; all are written when it returns."""
        if not self._buffers:
            self._buffers = [np.frombuffer(mmap.mmap(-1, BATCH_BYTES), np.uint8) for _ in range(2)]
        which, first = 0, position % BLOCK
        used = first
        for part in parts:
            data = np.frombuffer(part, np.uint8)
            while len(data):
                n = min(len(data), BATCH_BYTES - used)
                self._buffers[which][used : used + n] = data[:n]
                data, used = data[n:], used + n
                if used == BATCH_BYTES:
                    self._flush(file, which, first, used, position)
                    position += used - first
                    which, first, used = 1 - which, 0, 0
                    self._wait(which)
        self._flush(file, which, first, used, position)
        self._wait(1 - which)
        self._wait(which)

    def _flush(self, file: _File, which: int, first: int, used: int, position: int) -> None:
        data = self._buffers[which].data[first:used]
        self._under_way[which] = self._thread.submit(_write_stretch, self._disk, file, data, position)

    def _wait(self, which: int) -> None:
        job, self._under_way[which] = self._under_way[which], None
        if job is not None:
            job.result()


def _is_aligned(data: memoryview) -> bool:
    return len(data) > 0 and np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0
