"""How files come into a generation: under its name a file is complete, or it is not there. No torch here."""

import contextlib
import mmap
import os
from pathlib import Path

from sirara.checkpoint.storage import Disk, storage_error
from sirara.errors import StorageError

_FILL_BYTES = 256 << 20


class Slot:
    """A file of a generation that is being filled; `data` is its memory. It is there for readers after `keep()`."""

    def __init__(self, path: Path, size: int, *, disk: Disk, durable: bool) -> None:
        self.path, self.size = path, size
        self._disk, self._durable = disk, durable
        self._part = path.with_name(path.name + ".part")
        disk.remove(self._part)
        os.close(disk.open(self._part, size=size))
        self._file = os.open(self._part, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._open = True
        self.data = memoryview(bytearray())
        try:
            _allocate(self._file, self._part, 0, size)
            self._map = mmap.mmap(self._file, size) if size else None
        except (OSError, StorageError):
            self.discard()
            raise
        if self._map is not None:
            self.data = memoryview(self._map)

    def grow(self, size: int) -> None:
        """At least `size` bytes, new ones zero; nobody may hold a view of `data` meanwhile."""
        if size <= self.size:
            return
        _allocate(self._file, self._part, self.size, size - self.size)
        self._unmap()
        self._map = mmap.mmap(self._file, size)
        self.data, self.size = memoryview(self._map), size

    def keep(self, description: Path, raw: bytes) -> None:
        """Gives the file its name, then writes its description."""
        if self._durable:
            self._disk.fsync(self._file, self._part)
        self._close()
        self._disk.rename(self._part, self.path)
        put_file(description, raw, disk=self._disk, durable=self._durable)

    def discard(self) -> None:
        """Removes the file; a second call, or one after keep(), does nothing."""
        if self._open:
            self._close()
            self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._unmap()
            os.close(self._file)

    def _unmap(self) -> None:
        # A view in the traceback of a fault keeps the mapping until it is gone itself.
        with contextlib.suppress(BufferError):
            self.data.release()
            if self._map is not None:
                self._map.close()
        self._map = None


def put_file(path: Path, raw: bytes, *, disk: Disk, durable: bool) -> None:
    """A whole small file, a description or a manifest; its name, too, is on the disk when it is durable."""
    disk.write_file(path, raw)
    if durable:
        disk.sync_folder(path.parent)


def _allocate(fd: int, path: Path, position: int, size: int) -> None:
    # Without this a full shared memory would end the process at the first touch of a page.
    try:
        # In parts: one call over all of it could not be interrupted by a signal.
        for at in range(position, position + size, _FILL_BYTES):
            os.posix_fallocate(fd, at, min(_FILL_BYTES, position + size - at))
    except OSError as fault:
        raise storage_error(fault, path, asked=size) from fault
