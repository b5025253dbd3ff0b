"""One rank's part of a save: its byte ranges into the planned files, hashed once, fsynced, reported.

    files at planned offsets ──► fsync each ──► report-<rank>.json (hash per piece) ──► fsync folder

Nothing is copied on the way: a piece is a slice of the range's own memory, hashed and handed to pwritev.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.ranges import NamedRange, dtype_name, host_bytes
from sirara.checkpoint.report import Report, report_name
from sirara.checkpoint.storage import Disk
from sirara.errors import InvariantError
from sirara.pure.layout import Box, box_runs
from sirara.pure.saveplan import ITEM_BYTES, PlannedPiece, SavePlan

BATCH_BYTES = 32 << 20  # neighbouring pieces are written together up to this many bytes
BATCH_PIECES = 1024


def write_part(
    disk: Disk,
    folder: Path,
    *,
    plan: SavePlan,
    rank: int,
    ranges: Sequence[NamedRange],
    uuid: str,
    attempt: int,
    step: int,
) -> None:
    """Writes this rank's pieces and headers, makes them durable, then reports them."""
    sources = _Sources(ranges)
    mine = plan.pieces_of.get(rank, [])
    hashes: dict[int, bytes] = {}
    by_file: dict[int, list[int]] = {}
    for i, piece in enumerate(mine):
        by_file.setdefault(piece.file, []).append(i)
    touched = sorted(by_file.keys() | {i for i, f in enumerate(plan.files) if f.writer == rank})
    # Writers of one file wait for each other in the kernel, so ranks start at different files.
    turn = rank % max(1, len(touched))
    for f in touched[turn:] + touched[:turn]:
        planned = plan.files[f]
        path = folder / planned.name
        fd = disk.open(path, size=planned.size)
        try:
            if planned.writer == rank:
                disk.write(fd, path, [memoryview(planned.header(uuid=uuid, step=step))], 0)
            _write_pieces(disk, fd, path, plan, mine, by_file.get(f, []), sources, hashes)
            disk.fsync(fd, path)
        finally:
            os.close(fd)
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


def _write_pieces(
    disk: Disk,
    fd: int,
    path: Path,
    plan: SavePlan,
    pieces: Sequence[PlannedPiece],
    chosen: Sequence[int],
    sources: "_Sources",
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


class _Sources:
    """Finds the memory of a piece among this rank's ranges."""

    def __init__(self, ranges: Sequence[NamedRange]) -> None:
        self._parts: dict[str, list[tuple[Box, np.ndarray]]] = {}
        self._item: dict[str, int] = {}
        for r in ranges:
            r.check()
            item = ITEM_BYTES[dtype_name(r.data.dtype)]
            raw, at = host_bytes(r.data), 0
            for box in r.boxes:
                size = box.volume * item
                self._parts.setdefault(r.tensor, []).append((box, raw[at : at + size]))
                at += size
            self._item[r.tensor] = item

    def bytes_of(self, tensor: str, box: Box) -> memoryview:
        for held, raw in self._parts.get(tensor, ()):
            if not box.within(held):
                continue
            item = self._item[tensor]
            runs = box_runs(held.size, box.relative_to(held))
            if len(runs) == 1:
                return raw[runs[0][0] * item : runs[0][1] * item].data
            return np.concatenate([raw[a * item : b * item] for a, b in runs]).data
        raise InvariantError(f"{tensor}{box} is planned for this rank, but it gave no range that holds it")


def check_ranges(plan: SavePlan, rank: int, ranges: Sequence[NamedRange]) -> None:
    """Raises InvariantError when a range differs from what the plan says about its tensor."""
    planned: Mapping[str, tuple[str, tuple[int, ...]]] = {t.name: (t.dtype, t.shape) for t in plan.tensors}
    for r in ranges:
        found = (dtype_name(r.data.dtype), tuple(r.shape))
        if planned.get(r.tensor) != found:
            raise InvariantError(
                f"rank {rank} gives {r.tensor} as {found}, "
                f"the plan has {planned.get(r.tensor, 'no such tensor')}"
            )
