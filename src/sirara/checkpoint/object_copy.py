"""Pieces of a committed save out of an object store: ranges of its objects, near ones in one request."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from sirara.checkpoint.bucket import Bucket
from sirara.checkpoint.copies import Copy
from sirara.errors import SiraraError
from sirara.pure.manifest import Manifest

_BLOCK_BYTES = 4 << 20  # small pieces are read by blocks of this size
_BLOCKS = 4
_HEADER_BYTES = 1 << 20


class ObjectCopy(Copy):
    """The objects of one committed save.  foreign: names of objects there that its manifest does not know."""

    name = "object"
    batch_bytes = 16 << 20  # several of them are in memory at once

    def __init__(
        self, bucket: Bucket, manifest: Manifest, *, prefix: str, foreign: tuple[str, ...] = ()
    ) -> None:
        self.foreign = foreign
        self._bucket, self._manifest, self._prefix = bucket, manifest, prefix
        self._size = {f.name: f.size for f in manifest.files}
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = Lock()

    def locate(self, piece: int) -> tuple[str, int] | None:
        p = self._manifest.pieces
        return self._manifest.files[int(p.file[piece])].name, int(p.position[piece])

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        """As in Copy.  Small reads that lie near each other become one request: whole blocks are fetched and kept."""
        size = sum(map(len, buffers))
        stop = position + size
        if size >= _BLOCK_BYTES // 4 or stop > self._size.get(key, 0):
            self._bucket.read(self._prefix + key, buffers, position)
            return
        parts = []
        for at in range(position // _BLOCK_BYTES * _BLOCK_BYTES, stop, _BLOCK_BYTES):
            block = self._block(key, at)
            parts.append(block[max(0, position - at) : min(len(block), stop - at)])
        raw = memoryview(b"".join(parts)) if len(parts) > 1 else parts[0] if parts else memoryview(b"")
        for buffer in buffers:
            buffer[:] = raw[: len(buffer)]
            raw = raw[len(buffer) :]

    def place(self, key: str) -> str:
        return f"{self._bucket.url}/{self._prefix}{key}"

    def suspicion(self, key: str) -> str:
        """The save that wrote this object, when its header names another one."""
        try:
            size = memoryview(bytearray(min(self._size.get(key, 0), _HEADER_BYTES)))
            self._bucket.read(self._prefix + key, [size], 0)
            length = int.from_bytes(size[:8], "little")
            head = json.loads(bytes(size[8 : 8 + length]))["__metadata__"]
            uuid, step = head["sirara.uuid"], int(head["sirara.step"])
        except (SiraraError, ValueError, KeyError, TypeError):
            return ""
        return (
            ""
            if uuid == self._manifest.uuid
            else f"the object belongs to another save (step {step}, uuid {uuid})"
        )

    def _block(self, key: str, at: int) -> memoryview:
        with self._lock:
            if (key, at) in self._blocks:
                self._blocks.move_to_end((key, at))
                return self._blocks[key, at]
        block = memoryview(bytearray(min(_BLOCK_BYTES, self._size[key] - at)))
        self._bucket.read(self._prefix + key, [block], at)
        with self._lock:
            self._blocks[key, at] = block
            while len(self._blocks) > _BLOCKS:
                self._blocks.popitem(last=False)
        return block
