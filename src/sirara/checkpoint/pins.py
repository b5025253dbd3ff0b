"""Pins: a file `pinned` in a step folder says that somebody wants the step; retention and prune leave it alone."""

from collections.abc import Iterable
from pathlib import Path

from sirara.checkpoint.steps import step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError
from sirara.pure.manifest import MANIFEST

PINNED = "pinned"


def pin(folder: Path, *, note: str = "", disk: Disk | None = None) -> None:
    """Pins a committed step; `note` says for whom or what."""
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is not a committed checkpoint: it has no {MANIFEST}", code="SR513")
    disk = disk or Disk()
    disk.write_file(folder / PINNED, note.encode() + b"\n")
    disk.sync_folder(folder)


def unpin(folder: Path, *, disk: Disk | None = None) -> None:
    """The step goes when retention says so; nothing happens when it is not pinned."""
    disk = disk or Disk()
    disk.remove(folder / PINNED)
    disk.sync_folder(folder)


def is_pinned(folder: Path) -> bool:
    return (folder / PINNED).exists()


def pinned(folder: Path, steps: Iterable[int]) -> set[int]:
    """Those of `steps` that are pinned in the checkpoints folder."""
    return {step for step in steps if is_pinned(folder / step_name(step))}
