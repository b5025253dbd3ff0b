"""A committed step, opened: its manifest is trusted, every other byte is checked when it is read.

    manifest (own hash) ─► overlaps of the wanted boxes ─► pieces by copy, key and position
        ─► one read for neighbours ─► hash while hot ─► scatter;  a bad piece ─► the next copy

What the caller's memory takes in one stretch is read straight into it; what others want of a piece is handed to
them once its hash is right.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash

from sirara.checkpoint.copies import Copy, FolderCopy
from sirara.checkpoint.placing import PieceRead, Room, Rooms, box_memory, hand_out, laid_out, on_host
from sirara.checkpoint.ranges import DTYPES, NamedRange, dtype_name
from sirara.checkpoint.step_folder import open_manifest
from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError, CommError, SiraraError, StorageError
from sirara.pure.layout import Box, whole
from sirara.pure.manifest import Manifest
from sirara.pure.reshard import overlaps
from sirara.pure.saveplan import ITEM_BYTES

BATCH_PIECES = 1024
_MOST_THREADS = 3  # each may hold a piece of 16 MiB that is not read straight into place
_PATIENCE = 3
"""A copy that could not be read this often, for other reasons than wrong bytes, is asked no more in this load."""

_READ_FAULTS = (CheckpointError, StorageError, CommError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A piece that was bad in `copy` and good in another."""

    copy: str
    tensor: str
    box: str
    file: str
    what: str
    taken_from: str

    def __str__(self) -> str:
        return f"{self.tensor}{self.box} in {self.file}: {self.what}; taken from {self.taken_from}"


class Snapshot:
    """One committed step: its manifest, and the copies from which its pieces can be read, first choice first.

    Args:    path: of a step folder, the only copy then (`over` takes others).
    Raises:  CheckpointError when it is torn, damaged, of another run or step, or when a file is missing or
             has another size.

    Attributes:  notes: what was bad in one copy and taken from another, so far.
                 taken: bytes that were read and good, by the name of the copy.
                 cores: that nobody else uses while this reads.
    """

    cores: int = 1

    def __init__(
        self, path: Path, *, run: str | None = None, step: int | None = None, check_sizes: bool = True
    ) -> None:
        manifest = open_manifest(path, run=run, step=step, check_sizes=check_sizes)
        self._set(manifest, (FolderCopy(path, manifest),), path)

    @classmethod
    def over(cls, manifest: Manifest, copies: Sequence[Copy], *, path: Path | None = None) -> Self:
        """A step that is read from `copies`, each piece from the first one that has it.

        path: of the step's folder, for people; nothing is read from it.
        """
        snapshot = cls.__new__(cls)
        snapshot._set(manifest, tuple(copies), path or Path(step_name(manifest.step)))
        return snapshot

    def _set(self, manifest: Manifest, copies: tuple[Copy, ...], path: Path) -> None:
        self.manifest, self.copies, self.path = manifest, copies, path
        self.notes: list[Note] = []
        self.taken: dict[str, int] = {}

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
        with on_host(ranges) as hosts:
            reads: dict[int, PieceRead] = {}
            for r, raw in zip(ranges, hosts, strict=True):
                self.plan_reads(r, raw, reads)
            self.run(reads)

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        entry = self.manifest.tensors[self.find(name)]
        data = torch.empty(prod(entry.shape), dtype=DTYPES[entry.dtype])
        self.read_into([NamedRange(tensor=name, shape=entry.shape, boxes=(whole(entry.shape),), data=data)])
        return data.reshape(entry.shape)

    def find(self, name: str) -> int:
        """Index of a tensor, or of the one that holds the values of a tied name.  Raises CheckpointError."""
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

    def find_like(self, name: str, dtype: str, shape: Sequence[int]) -> int:
        """`find`, and the tensor must have this dtype (safetensors name) and shape."""
        t = self.find(name)
        entry = self.manifest.tensors[t]
        if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
            raise CheckpointError(
                f"{name} is {entry.dtype} {list(entry.shape)} in step {self.step}, "
                f"the run wants {dtype} {list(shape)}",
                code="SR524",
                where=str(self.path),
                try_="resume with the model and precision that were saved",
            )
        return t

    def holes(self, name: str, missing: Sequence[tuple[Box, int]]) -> CheckpointError:
        """The error for wanted elements that are in no piece."""
        box, count = missing[0]
        return CheckpointError(
            f"{name}{box}: {count} of {box.volume} elements are in no piece of step {self.step}",
            code="SR522",
            where=str(self.path),
        )

    def plan_reads(self, r: NamedRange, raw: np.ndarray, reads: dict[int, PieceRead]) -> None:
        """Adds to `reads` what fills a range.

        raw: the bytes of its data.  Raises CheckpointError when the step does not hold it.
        """
        t = self.find_like(r.tensor, dtype_name(r.data.dtype), r.shape)
        index, saved = self.manifest.boxes_of(t)
        found, missing = overlaps(saved, r.boxes)
        if missing:
            raise self.holes(r.tensor, missing)
        memory = box_memory(raw, r.boxes, ITEM_BYTES[self.manifest.tensors[t].dtype])
        for o in found:
            piece = int(index[o.saved])
            part = o.box.relative_to(self.manifest.box(piece))
            target = memory[o.wanted][(*o.box.relative_to(r.boxes[o.wanted]).slices, ...)]
            reads.setdefault(piece, PieceRead()).parts.append((part, target))

    # ---- pieces

    def run(self, reads: dict[int, PieceRead]) -> None:
        """Fills the memory of all reads, each piece from the first copy where it is good.

        Raises:  CheckpointError or StorageError for the first piece that no copy has.
        """
        left = sorted(reads)
        faults: dict[int, list[tuple[Copy, str, SiraraError]]] = {}
        for n, copy in enumerate(self.copies):
            if not left:
                return
            later = self.copies[n + 1 :]
            placed = [(i, at) for i in left if (at := copy.locate(i)) is not None]
            missed = set(left).difference(i for i, _ in placed)
            for piece, key, fault in self._from_copy(copy, placed, reads):
                faults.setdefault(piece, []).append((copy, key, fault))
                if all(other.locate(piece) is None for other in later):
                    raise self._lost(piece, faults[piece])
                missed.add(piece)
            good = [i for i, _ in placed if i not in missed]
            if good:
                size = int(self.manifest.pieces.length[good].sum())
                self.taken[copy.name] = self.taken.get(copy.name, 0) + size
            for i in good:
                if i in faults:
                    self._note(i, faults[i], copy)
            left = sorted(missed)
        if left:
            raise self._lost(left[0], faults.get(left[0], []))

    def _from_copy(
        self, copy: Copy, placed: Iterable[tuple[int, tuple[str, int]]], reads: dict[int, PieceRead]
    ) -> Iterator[tuple[int, str, SiraraError]]:
        """Reads pieces from one copy; yields those that are bad there, with key and reason."""
        work = list(self._batches(copy, placed))
        patience = _PATIENCE
        read = partial(self._read_batch, copy, reads, Rooms())
        threads = min(_MOST_THREADS, max(torch.get_num_threads(), self.cores), len(work))
        pool = ThreadPoolExecutor(threads) if threads > 1 else None
        try:
            results = pool.map(read, work) if pool else map(read, work)
            for done, (key, _, _) in enumerate(work):
                bad = next(results)
                yield from ((piece, key, fault) for piece, fault in bad)
                patience -= any(not isinstance(fault, CheckpointError) for _, fault in bad)
                if patience <= 0:
                    gone = bad[0][1]
                    yield from ((i, later, gone) for later, _, pieces in work[done + 1 :] for i in pieces)
                    return
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _batches(
        self, copy: Copy, placed: Iterable[tuple[int, tuple[str, int]]]
    ) -> Iterator[tuple[str, int, list[int]]]:
        """Neighbours under one key, together at most the copy's batch: (key, position of the first, pieces)."""
        length = self.manifest.pieces.length
        in_order = sorted(placed, key=lambda pair: pair[1])
        for key, run in groupby(in_order, key=lambda pair: pair[1][0]):
            batch: list[int] = []
            first = stop = 0
            for i, (_, position) in run:
                size = int(length[i])
                full = stop - first + size > copy.batch_bytes or len(batch) >= BATCH_PIECES
                if batch and (position != stop or full):
                    yield key, first, batch
                    batch = []
                if not batch:
                    first = position
                batch.append(i)
                stop = position + size
            yield key, first, batch

    def _read_batch(
        self, copy: Copy, reads: dict[int, PieceRead], rooms: Rooms, work: tuple[str, int, list[int]]
    ) -> list[tuple[int, SiraraError]]:
        """Reads neighbouring pieces, checks and hands out their elements; returns the bad ones."""
        key, position, batch = work
        p = self.manifest.pieces
        room = rooms.mine(copy.batch_bytes, pieces=BATCH_PIECES)
        memory = [self._laid_out(i, reads[i], room) for i in batch]
        try:
            buffers = [[part.reshape(-1).view(np.uint8) for _, part in held] for held in memory]
            digests = self._filled(copy, key, position, buffers)
        except _READ_FAULTS as fault:
            if len(batch) > 1 and isinstance(fault, CheckpointError):
                # One of them is beyond the end: piece by piece, to name it and to keep the others.
                singles = []
                for i in batch:
                    singles.append((key, position, [i]))
                    position += int(p.length[i])
                return [bad for one in singles for bad in self._read_batch(copy, reads, rooms, one)]
            return [(i, self._unreadable(i, copy, key, fault)) for i in batch]
        bad: list[tuple[int, SiraraError]] = []
        for i, digest, held in zip(batch, digests, memory, strict=True):
            if digest == p.hash(i):
                hand_out(held, reads[i])
                continue
            what = f"its bytes hash to {digest.hex()}"
            suspicion = copy.suspicion(key)
            bad.append((i, self.fault(i, f"{suspicion}; {what}" if suspicion else what, copy, key)))
        return bad

    def _filled(
        self, copy: Copy, key: str, position: int, pieces: Sequence[Sequence[np.ndarray]]
    ) -> list[bytes]:
        """Fills the memory of neighbouring pieces and returns their hashes."""
        if sum(len(b) for memory in pieces for b in memory) <= copy.batch_bytes:
            copy.read(key, [b.data for memory in pieces for b in memory], position)
            return [_digest(memory) for memory in pieces]
        # One that is larger than a batch: hashed as it comes.
        (memory,) = pieces
        hasher = xxhash.xxh3_128()
        for buffer in memory:
            for at in range(0, len(buffer), copy.batch_bytes):
                part = buffer.data[at : at + copy.batch_bytes]
                copy.read(key, [part], position)
                hasher.update(part)
                position += len(part)
        return [hasher.digest()]

    def _laid_out(self, piece: int, read: PieceRead, room: Room) -> list[tuple[Box, np.ndarray]]:
        item = ITEM_BYTES[self.manifest.tensors[int(self.manifest.pieces.tensor[piece])].dtype]
        return laid_out(self.manifest.box(piece), item, read, room)

    # ---- what went wrong

    def fault(self, piece: int, what: str, copy: Copy | None = None, key: str = "") -> CheckpointError:
        """The error for a bad piece: names tensor, box, file and place.  Without `copy`: in the step folder."""
        m, p = self.manifest, self.manifest.pieces
        name = m.tensors[int(p.tensor[piece])].name
        position = int(p.position[piece])
        if copy is None:
            key = m.files[int(p.file[piece])].name
        elif (at := copy.locate(piece)) is not None:
            position = at[1]
        place = copy.place(key) if copy is not None else str(self.path / key)
        return CheckpointError(
            f"{name}{m.box(piece)} in {key}: {what}",
            code="SR523",
            where=f"{place}, bytes {position} to {position + p.length[piece]}",
            why=f"the manifest says xxh3-128 {p.hash(piece).hex()}",
            try_="resume falls back to the next older step by itself",
        )

    def _unreadable(self, piece: int, copy: Copy, key: str, fault: SiraraError) -> SiraraError:
        if not isinstance(fault, CheckpointError):
            return fault
        what = "the file is missing" if fault.what == "the file is missing" else "the file is truncated"
        error = self.fault(piece, what if isinstance(copy, FolderCopy) else fault.what, copy, key)
        error.__cause__ = fault
        return error

    def _lost(self, piece: int, faults: Sequence[tuple[Copy, str, SiraraError]]) -> SiraraError:
        """The error for a piece that no copy has."""
        if len(faults) == 1 and len(self.copies) == 1:
            return faults[0][2]
        tried = [f"{copy.name}: {fault.what}" for copy, _, fault in faults]
        lacking = [copy.name for copy in self.copies if all(copy is not other for other, _, _ in faults)]
        error = self.fault(piece, f"it is good in none of {len(self.copies)} copies")
        error.why = "; ".join([*tried, *(f"{name}: does not hold it" for name in lacking), error.why])
        return error

    def _note(self, piece: int, faults: Sequence[tuple[Copy, str, SiraraError]], copy: Copy) -> None:
        name = self.manifest.tensors[int(self.manifest.pieces.tensor[piece])].name
        box = str(self.manifest.box(piece))
        for bad, key, fault in faults:
            what = fault.what.removeprefix(f"{name}{box} in {key}: ")
            file = bad.place(key)
            self.notes.append(
                Note(copy=bad.name, tensor=name, box=box, file=file, what=what, taken_from=copy.name)
            )


def _digest(memory: Sequence[np.ndarray]) -> bytes:
    if len(memory) == 1:
        return xxhash.xxh3_128_digest(memory[0].data)
    hasher = xxhash.xxh3_128()
    for buffer in memory:
        hasher.update(buffer.data)
    return hasher.digest()
