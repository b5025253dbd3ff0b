"""Which steps stay: the choice as data, then the deletion.

A step counts only when it is committed and verified (every piece re-read once, its mark in the folder). The
step that was just verified always stays, so the last good one cannot go; steps above it belong to another
branch of the run and are left alone.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from sirara.checkpoint.storage import Disk
from sirara.errors import InvariantError
from sirara.pure.manifest import MANIFEST

VERIFIED = "verified.json"


def expendable(
    committed: Sequence[int],
    verified: Collection[int],
    *,
    newest: int,
    keep_last: int,
    keep_every: int | None,
) -> list[int]:
    """Committed steps that may go, oldest first, now that step `newest` is committed and verified."""
    if newest not in verified or newest not in committed:
        raise InvariantError(f"step {newest} is not committed and verified: nothing may be deleted")
    past = sorted((s for s in committed if s <= newest), reverse=True)
    last = [s for s in past if s in verified][: max(1, keep_last)]
    # An unverified step takes no place from a good one, and goes only when enough good ones are newer.
    if len(last) < keep_last:
        return []
    return sorted(s for s in past if s < last[-1] and not (keep_every and s % keep_every == 0))


def mark_verified(disk: Disk, folder: Path, *, uuid: str, bytes_read: int) -> None:
    """Notes in the step folder that every piece was read back and matched."""
    disk.write_file(folder / VERIFIED, json.dumps({"uuid": uuid, "bytes": bytes_read}).encode() + b"\n")
    disk.sync_folder(folder)


def is_verified(folder: Path, *, uuid: str) -> bool:
    try:
        return json.loads((folder / VERIFIED).read_bytes())["uuid"] == uuid
    except (OSError, ValueError, KeyError, TypeError):
        return False


def delete_step(disk: Disk, folder: Path, *, trash: Path) -> None:
    """Takes the commit away first, so that a crash leaves no step that looks whole; then the files."""
    disk.remove(folder / MANIFEST)
    disk.sync_folder(folder)
    disk.rename(folder, trash)
    disk.remove_tree(trash)
