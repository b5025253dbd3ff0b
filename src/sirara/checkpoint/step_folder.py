"""What a step folder says of itself: its manifest, sizes of files, which save wrote a file. No torch here."""

import json
import os
from pathlib import Path

from sirara.checkpoint.storage import storage_error
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest


def open_manifest(
    path: Path, *, run: str | None = None, step: int | None = None, check_sizes: bool = True
) -> Manifest:
    """The manifest of a committed step.

    Raises:  CheckpointError when it is torn, damaged, of another run or step, or when a file is missing or has another
             size.
    """
    manifest = parse_manifest(read_manifest(path), where=str(path / MANIFEST))
    check_identity(manifest, str(path), run=run, step=step)
    faults = size_faults(path, manifest) if check_sizes else []
    if faults:
        more = f"; {len(faults) - 1} more files are not right" if faults[1:] else ""
        raise CheckpointError(f"{path / faults[0][0]} {faults[0][1]}{more}", code="SR521")
    return manifest


def committed_manifest(path: Path, *, run: str, step: int) -> Manifest | None:
    """`open_manifest`, and None where that raises."""
    try:
        return open_manifest(path, run=run, step=step)
    except (CheckpointError, StorageError):
        return None


def check_identity(manifest: Manifest, where: str, *, run: str | None, step: int | None) -> None:
    """Raises CheckpointError when a manifest is not that of this run and step."""
    if run is not None and manifest.run != run:
        raise CheckpointError(f"{where} belongs to run {manifest.run!r}, this is run {run!r}", code="SR512")
    if step is not None and manifest.step != step:
        raise CheckpointError(
            f"{where} holds step {manifest.step}: it was renamed or copied over", code="SR512"
        )


def read_manifest(path: Path) -> bytes:
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
