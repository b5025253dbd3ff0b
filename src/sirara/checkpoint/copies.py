"""Copies: the places where the pieces of one save can be read.

    Snapshot(manifest, copies)      for every piece the first copy that holds it; after a fault the next one

A copy only moves bytes: which bytes are right, the manifest's hashes say, whatever the copy.  No torch here.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from sirara.checkpoint.image import Image
from sirara.checkpoint.step_folder import file_owner
from sirara.checkpoint.storage import read_at, storage_error
from sirara.errors import CheckpointError
from sirara.pure.manifest import Manifest

NEAR_BYTES = 8 << 20
"""Read and hashed at a time on this machine: few calls, and what was read is still in a cache when it is hashed."""

FAR_BYTES = 16 << 20
"""Asked at a time of another machine: one answer costs a round trip."""

_IMAGE = "the image of rank "


class Copy(ABC):
    """One place where pieces of a save can be read, from any thread.

    name: as people call it: "memory", "peer on node 3", "disk", "object".  batch_bytes: how much is asked at a time.
    """

    name: str
    batch_bytes: int = FAR_BYTES

    @abstractmethod
    def locate(self, piece: int) -> tuple[str, int] | None:
        """(key, first byte there) of a piece, by its index in the manifest; None when this copy lacks it.

        Pieces with one key that follow each other are read together.
        """

    @abstractmethod
    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        """Fills the buffers, one after the other, with the bytes from `position` on.

        Raises:  CheckpointError when there are fewer bytes or none, StorageError or CommError when the place
                 cannot be read.
        """

    def place(self, key: str) -> str:
        """Where `key` is, for an error."""
        return f"{self.name}: {key}"

    def suspicion(self, key: str) -> str:
        """Why the bytes under `key` may be wrong, when the place itself tells; otherwise empty."""
        return ""


class FolderCopy(Copy):
    """A step folder: the files that the manifest names."""

    batch_bytes = NEAR_BYTES

    def __init__(self, path: Path, manifest: Manifest, *, name: str = "disk") -> None:
        self.path, self.name = path, name
        self._manifest = manifest

    def locate(self, piece: int) -> tuple[str, int] | None:
        p = self._manifest.pieces
        return self._manifest.files[int(p.file[piece])].name, int(p.position[piece])

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        path = self.path / key
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as fault:
            raise CheckpointError("the file is missing", code="SR521", where=str(path)) from fault
        except OSError as fault:
            raise storage_error(fault, path) from fault
        try:
            read_at(fd, path, buffers, position)
        finally:
            os.close(fd)

    def place(self, key: str) -> str:
        return str(self.path / key)

    def suspicion(self, key: str) -> str:
        owner = file_owner(self.path / key)
        if owner is None or owner[0] == self._manifest.uuid:
            return ""
        return f"the file belongs to another save (step {owner[1]}, uuid {owner[0]})"


class ImageReader(Protocol):
    """Where images of one save can be read: a node's own stores, or another node (checkpoint/serve.py)."""

    def read(self, step: int, uuid: str, rank: int, buffers: Sequence[memoryview], position: int) -> None: ...


class ImagesCopy(Copy):
    """Images of some or all ranks of a save that lie in one place.

    Args:  images: their descriptions; those of another save, or that do not fit the manifest, count as absent.
           far: the place is on another machine.
    """

    def __init__(
        self, name: str, manifest: Manifest, images: Iterable[Image], reader: ImageReader, *, far: bool
    ) -> None:
        self.name = name
        self.batch_bytes = FAR_BYTES if far else NEAR_BYTES
        self._manifest, self._reader = manifest, reader
        count = len(manifest.pieces)
        self._rank = np.full(count, -1, np.int64)
        self._position = np.zeros(count, np.int64)
        self.ranks: list[int] = []
        for image in images:
            if image.uuid == manifest.uuid and _fits(image, manifest):
                self._rank[image.index] = image.rank
                self._position[image.index] = image.position
                self.ranks.append(image.rank)

    @property
    def pieces(self) -> int:
        """How many of the manifest's pieces are here."""
        return int((self._rank >= 0).sum())

    def locate(self, piece: int) -> tuple[str, int] | None:
        rank = int(self._rank[piece])
        return None if rank < 0 else (f"{_IMAGE}{rank}", int(self._position[piece]))

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        m = self._manifest
        self._reader.read(m.step, m.uuid, int(key.removeprefix(_IMAGE)), buffers, position)


class ParityCopy(ImagesCopy):
    """Images that are decoded from parity when the first piece of them is asked for.

    Args:  decode: makes the image of a rank readable at `reader`, or raises CheckpointError.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        images: Iterable[Image],
        reader: ImageReader,
        *,
        far: bool,
        decode: Callable[[int], object],
    ) -> None:
        super().__init__(name, manifest, images, reader, far=far)
        self._decode = decode
        self._done: dict[int, CheckpointError | None] = {}
        self._lock = Lock()

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        rank = int(key.removeprefix(_IMAGE))
        with self._lock:
            if rank not in self._done:
                self._done[rank] = None
                try:
                    self._decode(rank)
                except CheckpointError as fault:
                    self._done[rank] = fault
            fault = self._done[rank]
        if fault is not None:
            raise fault
        super().read(key, buffers, position)


def _fits(image: Image, manifest: Manifest) -> bool:
    index, length = image.index, manifest.pieces.length
    return bool((index >= 0).all() and (index < len(length)).all() and (length[index] == image.length).all())
