"""Image: what one rank saves, laid out in one stretch of memory, and its description.

    image of rank r      | piece 7 | piece 8 | gap | piece 31 | ... |     in the order of the plan
    behind it            | part | part | ...                              what the rank holds of assembled pieces
    description          step, uuid, rank; index, position, length and hash of every piece

Pieces that follow each other in a file of the step folder follow each other here, and each such stretch
begins at the same place modulo BLOCK as in its file, so that it can be written by one call, past the page
cache. The snapshot is taken into an image in shared memory; the tiers that have no shared files (memory,
peer, parity, node-local disk) keep images as they are. No torch here: the writer process does without it.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from sirara.errors import CheckpointError
from sirara.pure.manifest import HASH_BYTES
from sirara.pure.saveplan import ITEM_BYTES, SavePlan
from sirara.pure.sealed import open_sealed, seal

BLOCK = 4096
FORMAT = "sirara-image"


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """Where the pieces of one rank lie in its image; equal for every save by the same plan.

    index: of each piece in the plan's (and the manifest's) pieces, int64 [n], ascending.  position, length: bytes,
    int64 [n].  size: bytes of the whole image, a multiple of BLOCK.
    part, part_position: the rank's rows of `plan.parts`, and where their elements lie behind the image, packed;
    total: bytes of image and parts, which is what the snapshot takes.  Parts are in no tier: assembled, they are
    pieces of some image.
    """

    rank: int
    index: np.ndarray
    position: np.ndarray
    length: np.ndarray
    size: int
    part: np.ndarray
    part_position: np.ndarray
    total: int


def image_plan(plan: SavePlan, rank: int) -> ImagePlan:
    """The image of one rank; an empty one when it has nothing to save."""
    c, index = plan.columns, plan.indices_of(rank)
    file, place, length = c.file[index], c.position[index], c.length[index]
    fresh = np.ones(len(index), bool)
    fresh[1:] = (file[1:] != file[:-1]) | (place[1:] != place[:-1] + length[:-1])
    heads = np.flatnonzero(fresh)
    ends = np.cumsum(length)
    sizes = np.diff(np.append(ends[heads] - length[heads], ends[-1:]))
    at, starts = 0, []
    for begin, size in zip(place[heads].tolist(), sizes.tolist(), strict=True):
        # A new stretch: the next place that is congruent to the piece's place in its file.
        at += (begin - at) % BLOCK
        starts.append(at)
        at += size
    shift = np.array(starts, np.int64) - place[heads]
    size = -(-at // BLOCK) * BLOCK
    part, part_position, total = _parts_behind(plan, rank, size)
    return ImagePlan(
        rank=rank,
        index=index,
        position=place + shift[np.cumsum(fresh) - 1],
        length=length,
        size=size,
        part=part,
        part_position=part_position,
        total=total,
    )


def _parts_behind(plan: SavePlan, rank: int, start: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(rows of the plan's parts, position of each, end of all), each at a multiple of its item."""
    mine = np.flatnonzero(plan.parts.rank == rank)
    positions = []
    for t, box in zip(plan.parts.at.tensor[mine].tolist(), plan.parts.at.boxes(mine.tolist()), strict=True):
        item = ITEM_BYTES[plan.tensors[t].dtype]
        start += -start % item
        positions.append(start)
        start += box.volume * item
    return mine, np.array(positions, np.int64), -(-start // BLOCK) * BLOCK


@dataclass(frozen=True, kw_only=True)
class Image:
    """The description of one rank's image in one save; together with the manifest of that save (same uuid) it tells
    which elements lie where.

    index, position, length: as in ImagePlan.  hashes: xxh3-128 of each piece, 16 bytes each, taken when the snapshot
    was staged.
    """

    uuid: str
    run: str
    attempt: int
    step: int
    rank: int
    world: int
    node: int
    size: int
    index: np.ndarray
    position: np.ndarray
    length: np.ndarray
    hashes: bytes

    def hash(self, n: int) -> bytes:
        """Of the n-th piece of this image."""
        return self.hashes[HASH_BYTES * n : HASH_BYTES * (n + 1)]

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Index in the manifest's pieces -> place in this image's columns."""
        return {int(i): n for n, i in enumerate(self.index)}

    def faults(self, data: memoryview) -> list[int]:
        """Places of the pieces whose bytes in `data` do not match their hash."""
        bad = []
        for n, (at, size) in enumerate(zip(self.position.tolist(), self.length.tolist(), strict=True)):
            if xxhash.xxh3_128_digest(data[at : at + size]) != self.hash(n):
                bad.append(n)
        return bad

    def to_bytes(self) -> bytes:
        fields: dict[str, Any] = {
            "format": FORMAT,
            "uuid": self.uuid,
            "run": self.run,
            "attempt": self.attempt,
            "step": self.step,
            "rank": self.rank,
            "world": self.world,
            "node": self.node,
            "size": self.size,
            "index": self.index.tolist(),
            "position": self.position.tolist(),
            "length": self.length.tolist(),
            "hash": self.hashes.hex(),
        }
        return seal(json.dumps(fields, separators=(",", ":"))[:-1].encode())

    @staticmethod
    def from_bytes(raw: bytes, *, where: str) -> "Image":
        """Raises CheckpointError naming `where` when the bytes are not what was written."""
        body = open_sealed(raw, where=where, code="SR550")
        try:
            f = json.loads(body + b"}")
            if f["format"] != FORMAT:
                raise CheckpointError(f"{where} is in format {f['format']!r}", code="SR511")
            return Image(
                uuid=f["uuid"],
                run=f["run"],
                attempt=f["attempt"],
                step=f["step"],
                rank=f["rank"],
                world=f["world"],
                node=f["node"],
                size=f["size"],
                index=np.array(f["index"], np.int64),
                position=np.array(f["position"], np.int64),
                length=np.array(f["length"], np.int64),
                hashes=bytes.fromhex(f["hash"]),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise CheckpointError(f"{where} lacks fields: {fault!r}", code="SR511") from fault
