"""Step folders and their names: which are committed, which are leftovers.

step-000001200/                    committed when it holds manifest.json, otherwise incomplete
.step-000001200.tmp-<uuid>/        a save in progress, or what a crash left of it
.step-000001200.old-<uuid>/        another state of the step, moved aside by a commit
.step-000001200.gone-<uuid>/       a step that is being deleted
"""

import hashlib
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from sirara.checkpoint.storage import Disk, names_in
from sirara.pure.manifest import MANIFEST

_STEP = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.step-(\d+)\.(tmp|old|gone)-([0-9a-f]{8}-[0-9a-f-]{27})")


def step_name(step: int) -> str:
    return f"step-{step:09d}"


def named_step(name: str) -> int | None:
    """The step that the name of a folder says; None for another kind of name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def temp_name(step: int, uuid: str) -> str:
    """The folder of a save in progress."""
    return f".{step_name(step)}.tmp-{uuid}"


def save_uuid(run: str, attempt: int, step: int, count: int) -> str:
    """A version 8 UUID that begins with the attempt: the same on every rank without talking, never reused."""
    text = f"{run}\0{attempt}\0{step}\0{count}".encode()
    h = hashlib.blake2b(text, digest_size=12).hexdigest()
    return f"{attempt:08x}-{h[:4]}-8{h[4:7]}-8{h[7:10]}-{h[10:22]}"


def fresh_uuid(attempt: int) -> str:
    """A UUID like those of saves, for what is written or moved outside of a save: random behind the attempt."""
    h = secrets.token_hex(11)
    return f"{attempt:08x}-{h[:4]}-8{h[4:7]}-8{h[7:10]}-{h[10:22]}"


def committed_steps(folder: Path) -> list[int]:
    """Numbers of the steps that have a manifest, newest first. A folder that cannot be read is an error."""
    return sorted((step for step, whole in _step_folders(folder) if whole), reverse=True)


def incomplete_steps(folder: Path) -> list[str]:
    """Names of the folders in which a save or a deletion did not end."""
    hidden = [name for name in _names(folder) if _HIDDEN.fullmatch(name)]
    return sorted(hidden + [step_name(step) for step, whole in _step_folders(folder) if not whole])


def clear_leftovers(disk: Disk, folder: Path, *, attempt: int, ended: Collection[str]) -> list[str]:
    """Removes temporary folders of attempts before `attempt` and of the saves in `ended`, and moved or
    deleted steps.

    A save of this attempt that is still being written by other ranks stays, and so does one of a newer
    attempt.
    """
    removed = []
    for name in sorted(_names(folder)):
        found = _HIDDEN.fullmatch(name)
        if found is None:
            continue
        kind, uuid, final = found[2], found[3], folder / step_name(int(found[1]))
        if kind == "old" and not final.exists():
            # The crash came between the two renames of a replacement: the older state of the step comes back.
            disk.rename(folder / name, final)
        elif kind != "tmp" or int(uuid[:8], 16) < attempt or uuid in ended:
            disk.remove_tree(folder / name)
            removed.append(name)
    steps = _step_folders(folder)
    newest = max((step for step, whole in steps if whole), default=-1)
    for name in (step_name(step) for step, whole in steps if not whole and step < newest):
        # Its manifest was deleted first; the crash came before the rest.
        disk.remove_tree(folder / name)
        removed.append(name)
    return removed


def _step_folders(folder: Path) -> list[tuple[int, bool]]:
    """(step, committed) of every step folder."""
    steps = [int(found[1]) for name in _names(folder) if (found := _STEP.fullmatch(name))]
    return [(s, (folder / step_name(s) / MANIFEST).exists()) for s in set(steps)]


def _names(folder: Path) -> set[str]:
    return names_in(folder) if folder.exists() else set()
