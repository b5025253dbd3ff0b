"""The disk, one method per effect: every write, fsync and rename of a checkpoint goes through `Disk`.

`touch` is called before each effect with its name and path. Here it does nothing; the fault tests override
it to count the effects of a save, and to fail or kill the process at any one of them.
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from sirara.errors import CheckpointError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_BUFFERS = 1024  # IOV_MAX on Linux
_SYNC_FILE_RANGE_WRITE = 2
_DIRECT_BYTES = 64 << 20  # in one call: a signal is heard between two


class Disk:
    """Durable effects on a file system. Every OSError leaves as a StorageError with path, bytes asked
    and bytes free."""

    def __init__(self) -> None:
        # Starting write-back early lets the device work while the next pieces are hashed and copied. Linux
        # only, a hint.
        self._sync_file_range: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
        self._fallocate: Callable[..., int] | None = getattr(
            ctypes.CDLL(None, use_errno=True), "fallocate", None
        )

    def touch(self, effect: str, path: Path) -> None:
        """Called before each effect; for tests."""

    def make_folder(self, path: Path) -> None:
        try:
            self.touch("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def open(self, path: Path, *, size: int | None = None) -> int:
        """A descriptor to write at any place. Other ranks write to the file as well, so it is set to
        `size`, never emptied."""
        try:
            self.touch("open", path)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if size is not None and os.fstat(fd).st_size != size:
                # Even to the same size it would wait for what another rank is writing.
                os.ftruncate(fd, size)
            return fd
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def open_direct(self, path: Path) -> int | None:
        """A second descriptor, past the page cache; None where the file system has none."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as fault:
            if fault.errno == errno.EINVAL:
                return None
            raise storage_error(fault, path) from fault

    def allocate(self, fd: int, path: Path, position: int, length: int) -> None:
        """Reserves the blocks of a range, so that a full disk or a quota shows before anything is written.

        The system call, not posix_fallocate: where the file system cannot, that one writes into blocks which other
        ranks may be writing; here nothing is done then.
        """
        try:
            self.touch("allocate", path)
            if length and self._fallocate is not None:
                self.fallocate(fd, position, length)
        except OSError as fault:
            if fault.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            raise storage_error(fault, path, asked=length) from fault

    def fallocate(self, fd: int, position: int, length: int) -> None:
        """The bare call. Raises OSError."""
        if self._fallocate is not None and self._fallocate(
            ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(position), ctypes.c_int64(length)
        ):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def write_direct(self, fd: int, direct: int, path: Path, data: memoryview, position: int) -> None:
        """Whole blocks from aligned memory past the page cache; through `fd` what the file system does not take
        that way."""
        at = 0
        while at < len(data):
            try:
                self.touch("write", path)
                at += self.pwrite(direct, [data[at : at + _DIRECT_BYTES]], position + at)
            except OSError as fault:
                if fault.errno != errno.EINVAL:
                    raise storage_error(fault, path, asked=len(data) - at) from fault
                self.write(fd, path, [data[at:]], position + at)
                return

    def write(self, fd: int, path: Path, buffers: Sequence[memoryview], position: int) -> int:
        """Writes the buffers one after the other from `position` on; returns the position behind them."""
        left = [b for b in buffers if len(b)]
        while left:
            try:
                self.touch("write", path)
                done = self.pwrite(fd, left[:_MOST_BUFFERS], position)
            except OSError as fault:
                raise storage_error(fault, path, asked=sum(map(len, left))) from fault
            position += done
            while done:
                step = min(done, len(left[0]))
                done -= step
                left[0] = left[0][step:]
                if not len(left[0]):
                    left.pop(0)
        return position

    def pwrite(self, fd: int, buffers: Sequence[memoryview], position: int) -> int:
        return os.pwritev(fd, buffers, position)

    def start_writeback(self, fd: int, position: int, length: int) -> None:
        if self._sync_file_range is not None:
            self._sync_file_range(
                ctypes.c_int(fd),
                ctypes.c_int64(position),
                ctypes.c_int64(length),
                ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
            )

    def fsync(self, fd: int, path: Path) -> None:
        try:
            self.touch("fsync", path)
            os.fsync(fd)
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        try:
            self.touch("fsync", path)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def write_file(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """A whole file, durable but for its name (`sync_folder`); readers see all of it or nothing.

        durable: False for a message, of which nothing is needed after a loss of power.
        """
        part = path.with_name(path.name + ".part")
        fd = self.open(part, size=len(data))
        try:
            self.write(fd, part, [memoryview(data)], 0)
            if durable:
                self.fsync(fd, part)
        finally:
            os.close(fd)
        self.rename(part, path)

    def rename(self, source: Path, target: Path) -> None:
        try:
            self.touch("rename", source)
            source.rename(target)
        except OSError as fault:
            raise storage_error(fault, target) from fault

    def remove(self, path: Path) -> None:
        try:
            self.touch("unlink", path)
            path.unlink(missing_ok=True)
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def remove_tree(self, path: Path) -> None:
        try:
            self.touch("rmtree", path)
            if path.exists():
                shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as fault:
            raise storage_error(fault, path) from fault

    def require(self, folder: Path, size: int) -> None:
        """Raises StorageError unless the file system of `folder` has `size` bytes free."""
        free = free_bytes(folder)
        if free is not None and free < size:
            raise _full(folder, asked=size, free=free)


def free_bytes(path: Path) -> int | None:
    """Bytes that a user may still write at the nearest existing parent; None when the system does not say."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def names_in(folder: Path) -> set[str]:
    """The names in a folder. Raises StorageError when it cannot be listed."""
    try:
        return set(os.listdir(folder))
    except OSError as fault:
        raise storage_error(fault, folder) from fault


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise storage_error(fault, path) from fault


def storage_error(fault: OSError, path: Path, *, asked: int | None = None) -> StorageError:
    """The StorageError for an OSError at `path`."""
    if fault.errno in _FULL:
        return _full(path, asked=asked, free=free_bytes(path), quota=fault.errno == errno.EDQUOT)
    name = errno.errorcode.get(fault.errno or 0, "?")
    size = f"{asked} bytes asked, {free_bytes(path)} bytes free; " if asked is not None else ""
    return StorageError(
        f"cannot use {path}: {fault.strerror or fault}",
        code="SR602",
        where=str(path),
        why=f"{size}{name}",
        try_="check the disk or mount (dmesg, quota, permissions), then resume the run",
    )


def _full(path: Path, *, asked: int | None, free: int | None, quota: bool = False) -> StorageError:
    numbers = f"{asked if asked is not None else 'some'} bytes asked, {free} bytes free"
    return StorageError(
        f"the quota for {path} is used up" if quota else f"no space left for {path}",
        code="SR601",
        where=str(path),
        why=f"EDQUOT; {numbers} on the device, which others may use" if quota else numbers,
        try_=("raise the quota, " if quota else "")
        + "free some space or lower checkpoint.keep_last; committed checkpoints are untouched",
    )


def read_at(fd: int, path: Path, buffers: Sequence[memoryview], position: int) -> None:
    """Fills the buffers from `position` on. Raises CheckpointError when the file ends before,
    StorageError when it cannot be read."""
    left = list(buffers)
    while left:
        try:
            done = os.preadv(fd, left[:_MOST_BUFFERS], position)
        except OSError as fault:
            raise storage_error(fault, path) from fault
        if not done:
            raise CheckpointError(
                f"{path} is truncated",
                code="SR521",
                why=f"it ends at byte {position}, {sum(map(len, left))} more are planned",
            )
        position += done
        while done:
            step = min(done, len(left[0]))
            done -= step
            left[0] = left[0][step:]
            if not len(left[0]):
                left.pop(0)
