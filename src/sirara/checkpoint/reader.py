"""A committed step, opened: its manifest is trusted, every other byte is checked when it is read.

    manifest (own hash) ─► sizes of all files ─► overlaps of the wanted boxes ─► pieces by file and position
        ─► preadv of neighbours together ─► hash ─► scatter

A piece that the caller's memory takes in one stretch is read straight into it.
"""

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash

from sirara.checkpoint.ranges import DTYPES, NamedRange, dtype_name, host_bytes
from sirara.checkpoint.storage import read_at, storage_error
from sirara.errors import CheckpointError
from sirara.pure.layout import Box, whole
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest
from sirara.pure.reshard import overlaps
from sirara.pure.saveplan import ITEM_BYTES

BATCH_BYTES = 32 << 20
BATCH_PIECES = 1024

# Elements are moved as unsigned integers of their size: every bit pattern survives, and numpy need not know
# bf16 or fp8.
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True)
class _Read:
    """A piece that is wanted: the pairs (where in the piece, memory to fill)."""

    parts: list[tuple[Box, np.ndarray]] = field(default_factory=list)


class Snapshot:
    """One committed step.

    Raises CheckpointError when it is torn, damaged, of another run or step, or when a file is missing or
    has another size.
    """

    def __init__(
        self, path: Path, *, run: str | None = None, step: int | None = None, check_sizes: bool = True
    ) -> None:
        self.path = path
        self.manifest: Manifest = parse_manifest(_read_manifest(path), where=str(path / MANIFEST))
        m = self.manifest
        if run is not None and m.run != run:
            raise CheckpointError(f"{path} belongs to run {m.run!r}, this is run {run!r}", code="SR512")
        if step is not None and m.step != step:
            raise CheckpointError(f"{path} holds step {m.step}: it was renamed or copied over", code="SR512")
        faults = size_faults(path, m) if check_sizes else []
        if faults:
            more = f"; {len(faults) - 1} more files are not right" if faults[1:] else ""
            raise CheckpointError(f"{path / faults[0][0]} {faults[0][1]}{more}", code="SR521")

    @property
    def record(self) -> dict:
        return self.manifest.record

    @property
    def step(self) -> int:
        return self.manifest.step

    def read_into(self, ranges: Sequence[NamedRange]) -> None:
        """Fills the data of every range, checking the hash of each piece that it touches.

        Raises CheckpointError naming tensor, piece and file; the ranges' contents are then undefined.
        """
        reads: dict[int, _Read] = {}
        late: list[tuple[NamedRange, torch.Tensor]] = []
        for r in ranges:
            r.check()
            host = r.data if r.data.device.type == "cpu" else torch.empty_like(r.data, device="cpu")
            if host is not r.data:
                late.append((r, host))
            self._plan_reads(r, host_bytes(host), reads)
        self._run(reads)
        for r, host in late:
            r.data.copy_(host)

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        entry = self.manifest.tensors[self._find(name)]
        data = torch.empty(entry_volume(entry.shape), dtype=DTYPES[entry.dtype])
        self.read_into([NamedRange(tensor=name, shape=entry.shape, boxes=(whole(entry.shape),), data=data)])
        return data.reshape(entry.shape)

    def _find(self, name: str) -> int:
        index = self.manifest.tensor_index
        name = self.manifest.aliases.get(name, name)
        if name not in index:
            near = difflib.get_close_matches(name, index, n=1)
            raise CheckpointError(
                f"step {self.step} has no tensor {name!r}",
                code="SR524",
                where=str(self.path),
                why=f"it holds {len(index)} tensors" + (f"; the nearest name is {near[0]!r}" if near else ""),
            )
        return index[name]

    def _plan_reads(self, r: NamedRange, raw: np.ndarray, reads: dict[int, _Read]) -> None:
        t = self._find(r.tensor)
        entry = self.manifest.tensors[t]
        wanted = (dtype_name(r.data.dtype), tuple(r.shape))
        if (entry.dtype, entry.shape) != wanted:
            raise CheckpointError(
                f"{r.tensor} is {entry.dtype} {list(entry.shape)} in step {self.step}, "
                f"the run wants {wanted[0]} {list(wanted[1])}",
                code="SR524",
                where=str(self.path),
                try_="resume with the model and precision that were saved",
            )
        item = ITEM_BYTES[entry.dtype]
        memory, at = [], 0
        for box in r.boxes:
            size = box.volume * item
            memory.append(raw[at : at + size].view(_RAW[item]).reshape(box.size))
            at += size
        index, saved = self.manifest.boxes_of(t)
        found, holes = overlaps(saved, r.boxes)
        if holes:
            box, missing = holes[0]
            raise CheckpointError(
                f"{r.tensor}{box}: {missing} of {box.volume} elements are in no piece of step {self.step}",
                code="SR522",
                where=str(self.path),
            )
        for o in found:
            piece = int(index[o.saved])
            part = o.box.relative_to(self.manifest.box(piece))
            target = memory[o.wanted][(*o.box.relative_to(r.boxes[o.wanted]).slices, ...)]
            reads.setdefault(piece, _Read()).parts.append((part, target))

    def _run(self, reads: dict[int, _Read]) -> None:
        p = self.manifest.pieces
        order = sorted(reads, key=lambda i: (p.file[i], p.position[i]))
        for f, batch in _batches(order, p.file, p.position, p.length):
            path = self.path / self.manifest.files[f].name
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as fault:
                raise self.fault(batch[0], "the file is missing") from fault
            except OSError as fault:
                raise storage_error(fault, path) from fault
            try:
                self._read_batch(fd, path, batch, reads)
            finally:
                os.close(fd)

    def _read_batch(self, fd: int, path: Path, batch: Sequence[int], reads: dict[int, _Read]) -> None:
        p = self.manifest.pieces
        buffers: list[np.ndarray] = []
        for i in batch:
            direct = self._direct(i, reads[i])
            buffers.append(np.empty(int(p.length[i]), np.uint8) if direct is None else direct)
        try:
            read_at(fd, path, [b.data for b in buffers], int(p.position[batch[0]]))
        except CheckpointError as fault:
            raise self.fault(batch[0], "the file is truncated") from fault
        for i, buffer in zip(batch, buffers, strict=True):
            if xxhash.xxh3_128_digest(buffer.data) != p.hash(i):
                raise self.fault(i, self._mismatch(path, buffer))
            box = self.manifest.box(i)
            item = ITEM_BYTES[self.manifest.tensors[int(p.tensor[i])].dtype]
            block = buffer.view(_RAW[item]).reshape(box.size)
            for part, target in reads[i].parts:
                if not np.may_share_memory(target, buffer):
                    target[...] = block[(*part.slices, ...)]

    def _direct(self, piece: int, read: _Read) -> np.ndarray | None:
        """The caller's own memory as bytes, when it takes the whole piece in one stretch."""
        part, target = read.parts[0]
        if len(read.parts) > 1 or part.size != self.manifest.box(piece).size or not target.flags.c_contiguous:
            return None
        return target.reshape(-1).view(np.uint8)

    def fault(self, piece: int, what: str) -> CheckpointError:
        """The error for a bad piece: names tensor, box, file and place."""
        p = self.manifest.pieces
        name = self.manifest.tensors[int(p.tensor[piece])].name
        file = self.manifest.files[int(p.file[piece])].name
        return CheckpointError(
            f"{name}{self.manifest.box(piece)} in {file}: {what}",
            code="SR523",
            where=f"{self.path / file}, bytes {p.position[piece]} to {p.position[piece] + p.length[piece]}",
            why=f"the manifest says xxh3-128 {p.hash(piece).hex()}",
            try_="resume falls back to the next older step by itself",
        )

    def _mismatch(self, path: Path, buffer: np.ndarray) -> str:
        found = f"its bytes hash to {xxhash.xxh3_128_hexdigest(buffer.data)}"
        owner = file_owner(path)
        if owner is not None and owner[0] != self.manifest.uuid:
            return f"the file belongs to another save (step {owner[1]}, uuid {owner[0]}); {found}"
        return found


def _read_manifest(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as fault:
        raise CheckpointError(
            f"{path} is not a committed checkpoint: it has no {MANIFEST}",
            code="SR513",
            why="the save did not end, or the path is wrong",
        ) from fault
    except OSError as fault:
        raise storage_error(fault, path / MANIFEST) from fault


def entry_volume(shape: Sequence[int]) -> int:
    return whole(shape).volume


def size_faults(path: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """(file, what is wrong) where a file is missing or has another size: the cheap half of verifying."""
    faults = []
    for f in manifest.files:
        try:
            size = os.stat(path / f.name).st_size
        except FileNotFoundError:
            faults.append((f.name, "is missing"))
            continue
        except OSError as fault:
            raise storage_error(fault, path / f.name) from fault
        if size != f.size:
            word = "truncated" if size < f.size else "too long"
            faults.append((f.name, f"is {word}: {size} bytes, the manifest says {f.size}"))
    return faults


def file_owner(path: Path) -> tuple[str, int] | None:
    """(uuid, step) of the save that wrote a safetensors file, from its header; None when it does not say."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(length, 100_000_000)))
        return head["__metadata__"]["sirara.uuid"], int(head["__metadata__"]["sirara.step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _batches(
    order: Sequence[int], file: np.ndarray, position: np.ndarray, length: np.ndarray
) -> Iterator[tuple[int, list[int]]]:
    """Neighbours in one file, together at most BATCH_BYTES."""
    batch: list[int] = []
    stop = total = 0
    for i in order:
        apart = batch and (file[i] != file[batch[0]] or position[i] != stop)
        if batch and (apart or total + length[i] > BATCH_BYTES or len(batch) >= BATCH_PIECES):
            yield int(file[batch[0]]), batch
            batch, total = [], 0
        batch.append(i)
        stop = position[i] + length[i]
        total += length[i]
    if batch:
        yield int(file[batch[0]]), batch
