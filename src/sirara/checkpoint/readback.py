"""Reads a committed step back: what the committer does before older steps may go. No torch: its process has none."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.storage import read_at, storage_error
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest

BATCH_BYTES = 16 << 20


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


def committed_manifest(folder: Path, *, run: str, step: int) -> Manifest | None:
    """The manifest of a step folder, None unless it is one of this run and step with all files at their sizes."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes(), where=str(folder / MANIFEST))
        whole = all((folder / f.name).stat().st_size == f.size for f in manifest.files)
    except (CheckpointError, StorageError, OSError):
        return None
    return manifest if whole and (manifest.run, manifest.step) == (run, step) else None


def faulty_pieces(folder: Path, m: Manifest) -> Iterator[Fault]:
    """Reads every piece, header and small file once from the disk (not from the page cache) and compares
    hashes."""
    p = m.pieces
    order = np.lexsort((p.position, p.file))
    bounds = np.searchsorted(p.file[order], np.arange(len(m.files) + 1))
    for f, entry in enumerate(m.files):
        path = folder / entry.name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield Fault(file=entry.name, what="is missing")
            continue
        except OSError as fault:
            raise storage_error(fault, path) from fault
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _matches(fd, path, 0, entry.head, bytes.fromhex(entry.hash)):
                yield Fault(file=entry.name, what=f"its first {entry.head} bytes do not match their hash")
            for i in order[bounds[f] : bounds[f + 1]].tolist():
                if not _matches(fd, path, int(p.position[i]), int(p.length[i]), p.hash(i)):
                    name = m.tensors[int(p.tensor[i])].name
                    what = f"bytes {p.position[i]} to {p.position[i] + p.length[i]} do not match their hash"
                    yield Fault(file=entry.name, what=what, tensor=name, box=str(m.box(i)))
        finally:
            os.close(fd)


def _matches(fd: int, path: Path, position: int, length: int, digest: bytes) -> bool:
    hasher = xxhash.xxh3_128()
    buffer = np.empty(min(length, BATCH_BYTES), np.uint8)
    for at in range(0, length, BATCH_BYTES):
        part = buffer[: min(BATCH_BYTES, length - at)]
        try:
            read_at(fd, path, [part.data], position + at)
        except CheckpointError:
            return False
        hasher.update(part.data)
    return hasher.digest() == digest
