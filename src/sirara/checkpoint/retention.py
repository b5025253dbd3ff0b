"""The mark that a step was read back, and the deletion of a step; which steps may go is in pure/retain."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sirara.checkpoint.storage import Disk
from sirara.pure.manifest import MANIFEST, Manifest

VERIFIED = "verified.json"

_SAME_TIME_NS = (
    2_000_000_000  # between the last write of a file and the last change of its inode, by its writer
)
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """When every byte of a step was read and matched.

    at: epoch seconds.  changed: files that were written, or put in their place, after that; what they hold now nobody
    has read.
    """

    at: float
    changed: tuple[str, ...]

    @property
    def time(self) -> str:
        return datetime.fromtimestamp(self.at, UTC).isoformat(sep=" ", timespec="seconds")


def mark_verified(disk: Disk, folder: Path, *, uuid: str, bytes_read: int) -> None:
    """Notes in the step folder that every piece was read back and matched."""
    disk.write_file(folder / VERIFIED, json.dumps({"uuid": uuid, "bytes": bytes_read}).encode() + b"\n")
    disk.sync_folder(folder)


def is_verified(folder: Path, *, uuid: str) -> bool:
    try:
        return json.loads((folder / VERIFIED).read_bytes())["uuid"] == uuid
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_back(folder: Path, manifest: Manifest) -> ReadBack | None:
    """When a committed step was read back; None when it never was, or the mark is of another save.

    Looks at times alone. A copied folder has new inodes, whose changes say nothing: then only times of writing count.
    """
    mark = folder / VERIFIED
    if not is_verified(folder, uuid=manifest.uuid):
        return None
    try:
        told = mark.stat()
        in_place = told.st_ctime_ns - told.st_mtime_ns < _SAME_TIME_NS
        changed = []
        for name in (*(f.name for f in manifest.files), MANIFEST):
            found = (folder / name).stat()
            moved = in_place and found.st_ctime_ns > told.st_ctime_ns
            if found.st_mtime_ns > told.st_mtime_ns or moved:
                changed.append(name)
    except OSError:
        return None  # a file is missing: its size says more
    return ReadBack(at=told.st_mtime, changed=tuple(changed))


def state_text(found: ReadBack | None) -> str:
    """What is known of a step whose sizes agree: when its bytes were read, and what was written since."""
    if found is None:
        return "never read back; sizes agree"
    return f"read back {found.time[:16]}; sizes agree" + changed_text(found.changed)


def changed_text(changed: Sequence[str]) -> str:
    """ "; written since: ..." and what to do, "" when nothing was."""
    if not changed:
        return ""
    more = f" and {len(changed) - _SHOWN} more" if changed[_SHOWN:] else ""
    return f"; WRITTEN SINCE: {', '.join(changed[:_SHOWN])}{more}, `sirara ckpt verify` reads the bytes"


def delete_step(disk: Disk, folder: Path, *, trash: Path) -> None:
    """Takes the commit away first, so that a crash leaves no step that looks whole; then the files."""
    disk.remove(folder / MANIFEST)
    disk.sync_folder(folder)
    disk.rename(folder, trash)
    disk.remove_tree(trash)
