"""Makes the bad bytes of a step folder good again from other copies, and names what no copy has.

    every head and piece read ─► bad ones from the first copy whose bytes have the right hash
        ─► a new file beside the old one ─► fsync ─► rename over it ─► everything read again ─► verified.json

Nothing is written in place: a reader sees the old file or the new one, and a crash leaves the old one. What the
manifest says is never changed; the manifest itself, when it is torn, is taken from a copy that is of this very save.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.copies import Copy, FolderCopy
from sirara.checkpoint.heads import find_head
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.retention import mark_verified, read_back
from sirara.checkpoint.scrub import Fault, scrub
from sirara.checkpoint.step_folder import file_owner
from sirara.checkpoint.steps import fresh_uuid, step_name
from sirara.checkpoint.storage import Disk, names_in
from sirara.errors import CheckpointError, CommError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest

MENDING = ".mend"
"""What a repair that was killed leaves behind ends so; the next one removes it."""

_READ_FAULTS = (CheckpointError, StorageError, CommError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A stretch that was bad and is good again. tensor and box are empty for a header or a whole small file."""

    file: str
    what: str
    taken_from: str
    tensor: str = ""
    box: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}{self.box}{' ' if self.tensor else ''}{self.what}, from {self.taken_from}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What became of one step (or, dry, would). lost: what is still not as it was written.

    rebuilt: the step had no folder, everything was taken from elsewhere.
    """

    step: int
    path: Path
    mended: tuple[Mended, ...]
    lost: tuple[Fault, ...]
    rebuilt: bool = False

    @property
    def good(self) -> bool:
        return not self.lost


def repair_step(
    path: Path,
    manifest: Manifest,
    copies: Sequence[Copy],
    *,
    others: Sequence[Path] = (),
    dry_run: bool = False,
    disk: Disk | None = None,
) -> Repaired:
    """Repairs one step folder as far as `copies` allow.

    Args:    copies: of this very save, first choice first; the folder itself is none of them.
             others: folders of other steps of the run, or of replicas, which may have a lost header or small file.
    Raises:  StorageError when the folder cannot be read or written; the files are then as they were, or mended.
    """
    disk = disk or Disk()
    if not dry_run:
        _clear(disk, path)
    work = _Work(path, manifest, copies, [*_folders(copies), *others], disk)
    for f in range(len(manifest.files)):
        work.mend(f, dry_run=dry_run)
    lost = work.lost
    if not (dry_run and work.mended):
        # Read again from the disk; this also finds what no copy cures: foreign files, pieces that overlap.
        disk.sync_folder(path)
        said = {(fault.file, fault.tensor, fault.box): fault for fault in work.lost}
        found = scrub(Snapshot(path, check_sizes=False))
        lost = [said.get((fault.file, fault.tensor, fault.box), fault) for fault in found]
    if not lost and not dry_run and ((mark := read_back(path, manifest)) is None or mark.changed):
        mark_verified(disk, path, uuid=manifest.uuid, bytes_read=sum(f.size for f in manifest.files))
    return Repaired(step=manifest.step, path=path, mended=tuple(work.mended), lost=tuple(lost))


def rebuild_step(
    folder: Path,
    manifest: Manifest,
    copies: Sequence[Copy],
    *,
    others: Sequence[Path] = (),
    dry_run: bool = False,
    disk: Disk | None = None,
) -> Repaired:
    """Makes a step folder that is not there from other copies; nothing is left of it unless it is whole.

    Args:  folder: the checkpoints folder, in which the step has no folder of its own.  Others as in `repair_step`.
    """
    disk = disk or Disk()
    final = folder / step_name(manifest.step)
    temp = folder / f".{step_name(manifest.step)}.tmp-{fresh_uuid(manifest.attempt)}"
    work = _Work(temp, manifest, copies, [*_folders(copies), *others], disk)
    with ExitStack() as undo:
        if not dry_run:
            disk.make_folder(temp)
            undo.callback(shutil.rmtree, temp, ignore_errors=True)
        for f in range(len(manifest.files)):
            work.mend(f, dry_run=dry_run)
        if not work.lost and not dry_run:
            disk.write_file(temp / MANIFEST, manifest.to_bytes())
            disk.sync_folder(temp)
            disk.rename(temp, final)
            undo.pop_all()
            disk.sync_folder(folder)
    lost = list(work.lost)
    if not lost and not dry_run:
        lost = scrub(Snapshot(final, check_sizes=False))
        if not lost:
            size = sum(f.size for f in manifest.files)
            mark_verified(disk, final, uuid=manifest.uuid, bytes_read=size)
    return Repaired(step=manifest.step, path=final, mended=tuple(work.mended), lost=tuple(lost))


def repair_manifest(
    path: Path, candidates: Sequence[tuple[Manifest, str]], *, dry_run: bool = False, disk: Disk | None = None
) -> tuple[Manifest, str]:
    """Puts the manifest of a step folder back; returns it and where it comes from.

    candidates: manifests of this step with the places where they were found.  The right one has the uuid that the
    files of the folder carry.
    Raises:  CheckpointError when there is none.
    """
    owners = {
        owner[0] for file in sorted(path.glob("*.safetensors")) if (owner := file_owner(file)) is not None
    }
    for manifest, place in candidates:
        if manifest.uuid in owners:
            if not dry_run:
                disk = disk or Disk()
                disk.write_file(path / MANIFEST, manifest.to_bytes())
                disk.sync_folder(path)
            return manifest, place
    found = (
        "; ".join(f"{place}: of save {m.uuid}" for m, place in candidates) or "no copy has one of this step"
    )
    raise CheckpointError(
        f"the {MANIFEST} of {path} cannot be repaired",
        code="SR545",
        why=f"the files are of save {', '.join(sorted(owners)) or '(none says)'}; {found}",
        try_="ckpt repair --from FOLDER, with a copy of this step made before the damage",
    )


@dataclass
class _Work:
    """The files of one step, mended one after the other."""

    path: Path
    m: Manifest
    copies: Sequence[Copy]
    others: list[Path]
    disk: Disk
    mended: list[Mended] = field(default_factory=list)
    lost: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.m.pieces
        order = np.lexsort((p.position, p.file))
        bounds = np.searchsorted(p.file[order], np.arange(len(self.m.files) + 1))
        self._pieces = [order[a:b].tolist() for a, b in pairwise(bounds.tolist())]
        self._own = FolderCopy(self.path, self.m)

    def mend(self, f: int, *, dry_run: bool) -> None:
        """Looks at one file; writes it anew when something is bad and a copy has it."""
        entry = self.m.files[f]
        head = self._read(self._own, entry.name, 0, entry.head, bytes.fromhex(entry.hash))
        bad = [i for i in self._pieces[f] if self._own_piece(i) is None]
        size = self._size(entry.name)
        if head is not None and not bad and size == entry.size:
            return
        mended: list[Mended] = []
        lost: list[Fault] = []
        if head is None:
            found = self._head(f)
            what = "its header" if entry.name.endswith(".safetensors") else "all of it"
            if found is None:
                lost.append(Fault(file=entry.name, what=f"{what} is bad, and no copy has it"))
            else:
                head = found[0]
                mended.append(Mended(file=entry.name, what=f"{what} is good again", taken_from=found[1]))
        elif not bad:
            mended.append(
                Mended(
                    file=entry.name,
                    what=f"its size is right again, it was {size} bytes",
                    taken_from="the manifest",
                )
            )
        sources: dict[int, Copy] = {}
        for i in bad:
            tensor, box = self.m.tensors[int(self.m.pieces.tensor[i])].name, str(self.m.box(i))
            copy, tried = self._find(i)
            if copy is None:
                why = f" ({tried})" if tried else ""
                lost.append(
                    Fault(file=entry.name, tensor=tensor, box=box, what=f"is bad, and no copy has it{why}")
                )
            else:
                sources[i] = copy
                mended.append(
                    Mended(
                        file=entry.name, tensor=tensor, box=box, what="is good again", taken_from=copy.name
                    )
                )
        self.lost += lost
        # A file that was missing and cannot be completed stays missing: it must not look whole.
        if not mended or (size is None and lost):
            return
        if not dry_run:
            self._write(f, head, sources)
        self.mended += mended

    def _write(self, f: int, head: bytes | None, sources: dict[int, Copy]) -> None:
        entry, p = self.m.files[f], self.m.pieces
        target, temp = self.path / entry.name, self.path / f".{entry.name}{MENDING}"
        self.disk.require(self.path, entry.size)
        fd = self.disk.open(temp, size=entry.size)
        try:
            raw = head if head is not None else self._raw(entry.name, 0, entry.head)
            self.disk.write(fd, temp, [memoryview(raw)], 0)
            for i in self._pieces[f]:
                at, size = int(p.position[i]), int(p.length[i])
                found = self._piece(sources[i], i) if i in sources else self._own_piece(i)
                # What is lost keeps the bytes that it has: they may be of use to somebody.
                data = found if found is not None else self._raw(entry.name, at, size)
                self.disk.write(fd, temp, [memoryview(data)], at)
            self.disk.fsync(fd, temp)
        finally:
            os.close(fd)
        self.disk.rename(temp, target)

    def _head(self, f: int) -> tuple[bytes, str] | None:
        entry = self.m.files[f]
        for copy in self.copies:
            if self._holds_files(copy):
                raw = self._read(copy, entry.name, 0, entry.head, bytes.fromhex(entry.hash))
                if raw is not None:
                    return bytes(raw), copy.name
        return find_head(self.m, f, self.others)

    def _holds_files(self, copy: Copy) -> bool:
        """Whether the keys of a copy are the names of the step's files (a folder, an object store)."""
        if not len(self.m.pieces):
            return isinstance(copy, FolderCopy)
        at = copy.locate(0)
        return at is not None and at[0] == self.m.files[int(self.m.pieces.file[0])].name

    def _find(self, i: int) -> tuple[Copy | None, str]:
        """The first copy with a good piece i, and what the ones before it said."""
        said = []
        for copy in self.copies:
            at = copy.locate(i)
            if at is None:
                continue
            try:
                if self._piece(copy, i) is not None:
                    return copy, ""
                said.append(f"{copy.name}: other bytes, {copy.suspicion(at[0]) or 'by their hash'}")
            except _READ_FAULTS as fault:
                said.append(f"{copy.name}: {fault.what}")
        return None, "; ".join(said)

    def _piece(self, copy: Copy, i: int) -> bytes | None:
        at = copy.locate(i)
        if at is None:
            return None
        return self._read(copy, *at, int(self.m.pieces.length[i]), self.m.pieces.hash(i), strict=True)

    def _own_piece(self, i: int) -> bytes | None:
        key, at = self._own.locate(i) or ("", 0)
        return self._read(self._own, key, at, int(self.m.pieces.length[i]), self.m.pieces.hash(i))

    def _read(
        self, copy: Copy, key: str, at: int, size: int, digest: bytes, *, strict: bool = False
    ) -> bytes | None:
        """The bytes when their hash is right, otherwise None. strict: what makes them unreadable is raised."""
        data = bytearray(size)
        try:
            copy.read(key, [memoryview(data)], at)
        except _READ_FAULTS:
            if strict:
                raise
            return None
        return bytes(data) if xxhash.xxh3_128_digest(data) == digest else None

    def _raw(self, name: str, at: int, size: int) -> bytes:
        """Bytes as they are, zeros where the file has none."""
        try:
            with (self.path / name).open("rb") as file:
                file.seek(at)
                return file.read(size).ljust(size, b"\0")
        except OSError:
            return bytes(size)

    def _size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except OSError:
            return None


def _folders(copies: Sequence[Copy]) -> list[Path]:
    return [copy.path for copy in copies if isinstance(copy, FolderCopy)]


def _clear(disk: Disk, path: Path) -> None:
    """Removes what a repair that was killed left behind."""
    for name in names_in(path):
        if name.startswith(".") and name.endswith(MENDING):
            disk.remove(path / name)
