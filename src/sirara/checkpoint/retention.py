"""The mark that a step was read back, and the deletion of a step; which steps may go is in pure/retain."""

import json
from pathlib import Path

from sirara.checkpoint.storage import Disk
from sirara.pure.manifest import MANIFEST

VERIFIED = "verified.json"


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
