"""One rank's part of a save: its pieces into the planned files, then fsync. No torch here.

    room reserved ──► files at planned offsets ──► fsync each ──► report-<rank>.json (hash per piece) ──► fsync folder

From an image, long stretches go past the page cache in a few calls: what the cache would hold is written back under
the training that goes on, and it takes the memory of others. Straight from the ranges (a save in line), a piece is
a slice of the range's own memory, hashed and handed to pwritev.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from sirara.checkpoint.image import BLOCK, ImagePlan
from sirara.checkpoint.report import Report, report_name
from sirara.checkpoint.storage import Disk
from sirara.pure.layout import Box
from sirara.pure.saveplan import PlannedPiece, SavePlan

BATCH_BYTES = 32 << 20  # neighbouring pieces are written together up to this many bytes
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
    by_file: dict[int, list[Stretch]] = {f: [] for f in _touched(plan, rank, {s.file for s in stretches})}
    for s in stretches:
        by_file[s.file].append(s)
    aligned = _is_aligned(data)
    with ExitStack() as files:
        opened = {f: files.enter_context(_opened(disk, folder, plan, f)) for f in by_file}
        for f, mine in by_file.items():
            fd, path = opened[f]
            if plan.files[f].writer == rank:
                disk.allocate(fd, path, 0, plan.files[f].header_bytes)
            for s in mine:
                disk.allocate(fd, path, s.position, s.length)
        for f, mine in by_file.items():
            fd, path = opened[f]
            direct = (
                disk.open_direct(path) if aligned and any(s.length >= DIRECT_BYTES for s in mine) else None
            )
            try:
                for s in mine:
                    _write_stretch(disk, fd, direct, path, data[s.at : s.at + s.length], s.position)
            finally:
                if direct is not None:
                    os.close(direct)
            if plan.files[f].writer == rank:
                header = plan.files[f].header(uuid=uuid, step=step)
                disk.write(fd, path, [memoryview(header)], 0)
        for fd, path in opened.values():
            disk.fsync(fd, path)


def stretches_of(plan: SavePlan, image: ImagePlan) -> list[Stretch]:
    """The image as stretches, each written by one call."""
    c, index = plan.columns, image.index
    if not len(index):
        return []
    file, position = c.file[index], c.position[index]
    fresh = np.ones(len(index), bool)
    fresh[1:] = (file[1:] != file[:-1]) | (position[1:] != position[:-1] + image.length[:-1])
    heads = np.flatnonzero(fresh)
    length = np.add.reduceat(image.length, heads)
    rows = zip(
        *(col.tolist() for col in (file[heads], position[heads], image.position[heads], length)), strict=True
    )
    return [Stretch(*row) for row in rows]


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
    hashes: dict[int, bytes] = {}
    by_file: dict[int, list[int]] = {}
    for i, piece in enumerate(mine):
        by_file.setdefault(piece.file, []).append(i)
    for f in _touched(plan, rank, by_file.keys()):
        with _opened(disk, folder, plan, f) as (fd, path):
            if plan.files[f].writer == rank:
                disk.write(fd, path, [memoryview(plan.files[f].header(uuid=uuid, step=step))], 0)
            _write_pieces(disk, fd, path, plan, mine, by_file.get(f, []), sources, hashes)
            disk.fsync(fd, path)
    report = Report(
        uuid=uuid,
        attempt=attempt,
        step=step,
        rank=rank,
        plan=plan.digest,
        lengths=tuple(p.length for p in mine),
        hashes=b"".join(hashes[i] for i in range(len(mine))),
    )
    disk.write_file(folder / report_name(rank), report.to_bytes())
    disk.sync_folder(folder)


def _touched(plan: SavePlan, rank: int, files: Iterable[int]) -> list[int]:
    """The files that the rank writes to. Writers of one file wait for each other in the kernel, so ranks start at
    different files."""
    touched = sorted({*files, *(i for i, f in enumerate(plan.files) if f.writer == rank)})
    turn = rank % max(1, len(touched))
    return touched[turn:] + touched[:turn]


@contextmanager
def _opened(disk: Disk, folder: Path, plan: SavePlan, file: int) -> Iterator[tuple[int, Path]]:
    path = folder / plan.files[file].name
    fd = disk.open(path, size=plan.files[file].size)
    try:
        yield fd, path
    finally:
        os.close(fd)


def _write_stretch(
    disk: Disk, fd: int, direct: int | None, path: Path, data: memoryview, position: int
) -> None:
    """The whole blocks in the middle past the page cache, the rest through it."""
    head = -position % BLOCK
    body = (len(data) - head) // BLOCK * BLOCK
    if direct is None or body < DIRECT_BYTES:
        disk.write(fd, path, [data], position)
        return
    disk.write_direct(fd, direct, path, data[head : head + body], position + head)
    disk.write(fd, path, [data[:head]], position)
    disk.write(fd, path, [data[head + body :]], position + head + body)


def _is_aligned(data: memoryview) -> bool:
    return len(data) > 0 and np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0


def _write_pieces(
    disk: Disk,
    fd: int,
    path: Path,
    plan: SavePlan,
    pieces: Sequence[PlannedPiece],
    chosen: Sequence[int],
    sources: PieceSource,
    hashes: dict[int, bytes],
) -> None:
    batch: list[memoryview] = []
    start = stop = 0
    for i in chosen:
        piece = pieces[i]
        if batch and (piece.position != stop or stop - start >= BATCH_BYTES or len(batch) >= BATCH_PIECES):
            disk.write(fd, path, batch, start)
            disk.start_writeback(fd, start, stop - start)
            batch = []
        if not batch:
            start = stop = piece.position
        data = sources.bytes_of(plan.tensors[piece.tensor].name, piece.box)
        hashes[i] = xxhash.xxh3_128_digest(data)
        batch.append(data)
        stop += piece.length
    disk.write(fd, path, batch, start)
