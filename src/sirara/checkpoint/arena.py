"""Arena: a file in shared memory that holds one image, made once and filled by every save.

    page 0    magic | version | state | step | pid of the trainer | bytes of the image | uuid | run
    page 1..  the image

Both the trainer, which fills it, and its keeper, which writes it out, map the file; it outlives both of them, so
what is READY in it survives the death of processes. The state is stored last: an image that a kill has torn
stays in WRITING and counts as nothing.

    <memory>/<run>/          one folder per run on a node
      owner-<who>.json       the run's checkpoints and one process that uses the folder
      arena-<rank>-<0|1>     two per rank: the one that holds the newest committed image is never overwritten
"""

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from sirara.checkpoint.image import BLOCK
from sirara.checkpoint.storage import names_in, storage_error
from sirara.config.processes import ProcessId
from sirara.errors import CheckpointError, InvariantError, RunBusyError, StorageError
from sirara.pure.manifest import MANIFEST

MAGIC = b"sirarena"
VERSION = 1
OWNER = "owner-"
OLD_S = 24 * 3600.0
_FIXED = struct.Struct("<8sIIqqq36s128s")  # magic, version, state, step, pid, size, uuid, run
_STATE_AT = 12
_FILL_BYTES = 256 << 20


_log = logging.getLogger("sirara")


class ArenaState(IntEnum):
    EMPTY = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHead:
    """What the header of an arena says."""

    run: str
    state: ArenaState
    step: int
    uuid: str
    pid: int
    size: int


class Arena:
    """One mapped arena; `data` are the bytes of its image.

    Raises StorageError when shared memory is full (it is allocated as a whole, so a later write cannot fail),
    CheckpointError when a file is not an arena.
    """

    def __init__(self, path: Path, memory: mmap.mmap, *, fd: int = -1) -> None:
        self.path, self._fd = path, fd
        self._memory = memory
        self._view = memoryview(memory)

    @staticmethod
    def create(folder: Path, name: str, size: int, *, run: str, outlives: bool = True) -> "Arena":
        """A new, empty arena, or the old one of the same size and run made empty.

        outlives: it must be there after its process has died.  If not, and the file system of `folder` is full, the
        arena is memory of this process that its keeper finds by a link: a container may have 64 MiB of /dev/shm.
        """
        path = folder / name
        total = BLOCK + size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()
            kept = -1
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                memory = _mapped(fd, total)
            except OSError as fault:
                path.unlink()
                if outlives or fault.errno != errno.ENOSPC:
                    raise
                _log.warning(
                    "%s has no room for %d bytes: the snapshot is kept in memory of its own", folder, total
                )
                os.close(fd)
                fd, kept = -1, os.memfd_create(name)
                memory = _mapped(kept, total)
                # The link leads through this descriptor, so it stays open.
                path.symlink_to(f"/proc/{os.getpid()}/fd/{kept}")
            finally:
                if fd >= 0:
                    os.close(fd)
        except OSError as fault:
            raise _no_memory(fault, path, total) from fault
        head = _FIXED.pack(MAGIC, VERSION, ArenaState.EMPTY, -1, os.getpid(), size, b"", run.encode()[:128])
        memory[: len(head)] = head
        return Arena(path, memory, fd=kept)

    @staticmethod
    def open(path: Path) -> "Arena":
        """An existing arena, for its keeper or for a restart."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                total = os.fstat(fd).st_size
                if total < BLOCK:
                    raise CheckpointError(f"{path} is no arena: it has {total} bytes", code="SR551")
                memory = mmap.mmap(fd, total, mmap.MAP_SHARED)
            finally:
                os.close(fd)
        except OSError as fault:
            raise storage_error(fault, path) from fault
        arena = Arena(path, memory)
        head = arena.head
        if head.size + BLOCK != total:
            raise CheckpointError(
                f"{path} is no whole arena", code="SR551", why=f"{total} bytes, {head.size + BLOCK} expected"
            )
        return arena

    @property
    def head(self) -> ArenaHead:
        return _head(bytes(self._view[: _FIXED.size]), self.path)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._view)

    @property
    def data(self) -> memoryview:
        """The image's bytes, writable; they begin on a page of their own."""
        return self._view[BLOCK:]

    def mark_writing(self, step: int, uuid: str) -> None:
        """From now on the image is torn, until `mark_ready`."""
        head = self.head
        self._store(ArenaState.WRITING)
        packed = _FIXED.pack(
            MAGIC,
            VERSION,
            ArenaState.WRITING,
            step,
            os.getpid(),
            head.size,
            uuid.encode(),
            head.run.encode(),
        )
        self._view[: _FIXED.size] = packed

    def mark_ready(self) -> None:
        """The image is whole."""
        if self.head.state is not ArenaState.WRITING:
            raise InvariantError(f"{self.path} was not being written")
        self._store(ArenaState.READY)

    def close(self) -> None:
        """Unmaps the file; views of `data` must be gone."""
        self._view.release()
        self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)

    def _store(self, state: ArenaState) -> None:
        self._view[_STATE_AT : _STATE_AT + 4] = int(state).to_bytes(4, "little")


def arena_head(path: Path) -> ArenaHead:
    """The header alone, without mapping the image. Raises CheckpointError when it is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_FIXED.size)
    except OSError as fault:
        raise storage_error(fault, path) from fault
    return _head(raw, path)


def _head(raw: bytes, path: Path) -> ArenaHead:
    if len(raw) < _FIXED.size or not raw.startswith(MAGIC):
        raise CheckpointError(f"{path} is no arena", code="SR551")
    _, version, state, step, pid, size, uuid, run = _FIXED.unpack(raw)
    if version != VERSION or state not in tuple(ArenaState):
        raise CheckpointError(f"{path} is an arena of version {version}, state {state}", code="SR551")
    return ArenaHead(
        run=run.rstrip(b"\0").decode(),
        state=ArenaState(state),
        step=step,
        uuid=uuid.rstrip(b"\0").decode(),
        pid=pid,
        size=size,
    )


def _mapped(fd: int, total: int) -> mmap.mmap:
    """A file of `total` bytes that are all allocated, so that no later write can fail; its pages are there."""
    if os.fstat(fd).st_size > total:
        os.ftruncate(fd, total)
    # In parts: one call over all of it could not be interrupted by a signal.
    for at in range(0, total, _FILL_BYTES):
        os.posix_fallocate(fd, at, min(_FILL_BYTES, total - at))
    return mmap.mmap(fd, total, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _no_memory(fault: OSError, path: Path, size: int) -> StorageError:
    error = storage_error(fault, path, asked=size)
    return StorageError(
        f"the snapshot has no room in shared memory: {error.what}",
        code=error.code,
        where=str(path),
        why=error.why,
        try_=["checkpoint.async=false   (no snapshot)", "a larger /dev/shm, or `path` of the memory tier"],
    )


# ---- the folder of a run on a node


def memory_root(path: Path | str | None, node: int) -> Path:
    """Where runs keep images on this node; `path` as configured, {node} in it is the number of the node."""
    if path is None:
        return Path("/dev/shm") / f"sirara-{os.getuid()}"
    return Path(str(path).replace("{node}", str(node)))


def arena_name(rank: int, which: int) -> str:
    return f"arena-{rank}-{which}"


def claim(folder: Path, who: str, *, checkpoints: Path) -> None:
    """Makes the run's folder on this node and notes this process in it, so that nobody reaps it.

    Raises:  RunBusyError when another copy of the run uses it at this moment.
    """
    for path in folder.glob(f"{OWNER}*.json"):
        owner = _owner(path)
        if owner is not None and owner[0] != checkpoints and owner[1] is not None and owner[1].alive:
            raise RunBusyError(
                f"another copy of this run trains on this node: {owner[1]}",
                code="SR804",
                where=str(folder),
                why=f"it saves to {owner[0]}, this one to {checkpoints}",
                try_=["stop it", "give the memory tier of one of them another path"],
            )
    fields = {"checkpoints": str(checkpoints), "process": ProcessId.current().as_record()}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = folder / f".{OWNER}{who}.part"
        part.write_text(json.dumps(fields))
        part.replace(folder / f"{OWNER}{who}.json")
    except OSError as fault:
        raise storage_error(fault, folder) from fault


def release(folder: Path) -> None:
    """Removes the run's folder on this node, after a clean end; the last rank to leave takes it away."""
    shutil.rmtree(folder, ignore_errors=True)


def withdraw(folder: Path, names: Sequence[str], *, who: Sequence[str]) -> None:
    """Removes files of one rank, and the folder when it was the last; nobody needs them any more."""
    for name in (*names, *(f"{OWNER}{one}.json" for one in who)):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def reap(root: Path, *, spare: Path | None = None) -> list[str]:
    """Removes what ended runs left in a node's memory; returns the names of their folders.

    A folder goes when no process of its run lives here and its run folder is gone, or a committed step in it is
    not older than what is in memory, or it is older than a day. `spare`: the caller's own.
    """
    removed = []
    for name in sorted(names_in(root)) if root.is_dir() else ():
        folder = root / name
        if folder != spare and folder.is_dir() and _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(name)
    return removed


def _is_dead(folder: Path) -> bool:
    owners = [owner for path in folder.glob(f"{OWNER}*.json") if (owner := _owner(path)) is not None]
    if not owners:
        # Somebody makes it this moment, or nobody knows whose it is.
        return _age_s(folder) > OLD_S
    if any(process is not None and process.alive for _, process, _ in owners):
        return False
    checkpoints = owners[0][0]
    if not checkpoints.is_dir() or min(age_s for _, _, age_s in owners) > OLD_S:
        return True
    return _newest_on_disk(checkpoints) >= _newest_in_memory(folder)


def _owner(path: Path) -> tuple[Path, ProcessId | None, float] | None:
    """(checkpoints of the run, the process, seconds since it came)."""
    try:
        fields = json.loads(path.read_text())
        return Path(fields["checkpoints"]), ProcessId.from_record(fields["process"]), _age_s(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _newest_on_disk(checkpoints: Path) -> int:
    names = [n for n in names_in(checkpoints) if n.startswith("step-") and n[5:].isdigit()]
    return max((int(n[5:]) for n in names if (checkpoints / n / MANIFEST).exists()), default=-1)


def _newest_in_memory(folder: Path) -> int:
    steps = [-1]
    for path in folder.glob("**/arena-*"):
        try:
            head = arena_head(path)
        except (CheckpointError, StorageError):
            continue
        if head.state is ArenaState.READY:
            steps.append(head.step)
    steps += [int(p.name.split("-")[1]) for p in folder.glob("**/gen-*-*") if p.name.split("-")[1].isdigit()]
    return max(steps)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
