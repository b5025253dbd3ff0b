"""Assembly: pieces of whole rows whose columns lie with several ranks of a node (row-parallel weights).

    arena of rank 0   | pieces of rank 0 . . ▒ . |  a b          every rank packs what it holds behind its image;
    arena of rank 1   | pieces of rank 1 . . ▒ . |  c d          the keeper that writes a piece (▒) copies the parts
                                                                 into place, from all arenas of the node

Only memory that is there already is used. A keeper waits for the others' snapshots of the same save, and looks
again after it has copied whether they still are that save. No torch here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sirara.checkpoint.arena import Arena, ArenaState, arena_head, arena_name
from sirara.checkpoint.image import ImagePlan, image_plan
from sirara.errors import CheckpointError, CommTimeout, StorageError
from sirara.pure.saveplan import ITEM_BYTES, SavePlan

_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements at `source` in the arena of `rank`, packed in the shape `size`, go to `slices` of the piece at
    `target`, whose shape is `shape`."""

    rank: int
    source: int
    size: tuple[int, ...]
    target: int
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    item: int


class Assembly:
    """Fills the pieces of one rank's image that it does not hold whole.

    Args:  memory: the run's folder in the node's shared memory, where the arenas of its ranks lie.
    """

    def __init__(self, plan: SavePlan, image: ImagePlan, memory: Path) -> None:
        self._rank, self._memory = image.rank, memory
        self.helpers = plan.helpers_of(image.rank)
        self._parts = _parts(plan, image, self.helpers)
        self._arenas: dict[Path, Arena] = {}

    def fill(
        self,
        data: memoryview,
        uuid: str,
        *,
        deadline_s: float,
        orphaned: Callable[[], bool] = lambda: False,
        orphan_s: float = 0.0,
    ) -> None:
        """Copies all parts of save `uuid` into the image in `data`.

        orphaned: whether the training has ended; from then on it waits for orphan_s at most.
        Raises CommTimeout naming the ranks whose snapshots did not come, StorageError when one was overwritten.
        """
        if not self._parts:
            return
        found = self._wait(uuid, deadline_s, orphaned, orphan_s)
        sources = {self._rank: data, **{rank: arena.data for rank, arena in found.items()}}
        for part in self._parts:
            _copy(sources[part.rank], data, part)
        for rank, arena in found.items():
            head = arena.head
            if (head.state, head.uuid) != (ArenaState.READY, uuid):
                raise StorageError(
                    f"rank {rank} began another save before its rows of this one were copied",
                    code="SR607",
                    where=str(arena.path),
                    why=f"it is {head.state.name} with save {head.uuid}, wanted {uuid}",
                )

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _wait(
        self, uuid: str, deadline_s: float, orphaned: Callable[[], bool], orphan_s: float
    ) -> dict[int, Arena]:
        began, pause_s = time.monotonic(), 0.0005
        found: dict[int, Arena] = {}
        while True:
            for rank in self.helpers:
                arena = found.get(rank) or self._ready(rank, uuid)
                if arena is not None:
                    found[rank] = arena
            missing = [rank for rank in self.helpers if rank not in found]
            if not missing:
                return found
            waited_s = time.monotonic() - began
            if waited_s >= deadline_s or (waited_s >= orphan_s and orphaned()):
                raise CommTimeout(
                    f"rank {self._rank} lacks the rows of {len(missing)} ranks of its node: "
                    + ", ".join(map(str, missing)),
                    where=str(self._memory),
                    why=f"no snapshot of this save within {waited_s:.1f} s",
                    try_="look at the logs of these ranks; committed checkpoints are untouched",
                )
            time.sleep(pause_s)
            pause_s = min(0.02, 2 * pause_s)

    def _ready(self, rank: int, uuid: str) -> Arena | None:
        """The arena of another rank that holds the save."""
        for which in (0, 1):
            path = self._memory / arena_name(rank, which)
            try:
                head = arena_head(path)
                if (head.state, head.uuid) != (ArenaState.READY, uuid):
                    continue
                known = self._arenas.get(path)
                if known is not None and known.data.nbytes != head.size:
                    self._arenas.pop(path).close()
                    known = None
                if known is None:
                    self._arenas[path] = Arena.open(path)
                return self._arenas[path]
            except (CheckpointError, StorageError):
                continue  # not made yet, or being made
        return None


def _parts(plan: SavePlan, image: ImagePlan, helpers: tuple[int, ...]) -> list[_Part]:
    place_of = dict(zip(image.index.tolist(), image.position.tolist(), strict=True))
    parts = []
    for rank in (image.rank, *helpers):
        theirs = image if rank == image.rank else image_plan(plan, rank)
        for row, source in zip(plan.parts_of(rank), theirs.part_position.tolist(), strict=True):
            if row.piece not in place_of:
                continue
            piece = plan.columns.at.box(row.piece)
            item = ITEM_BYTES[plan.tensors[int(plan.columns.at.tensor[row.piece])].dtype]
            slices = row.box.relative_to(piece).slices
            parts.append(_Part(rank, source, row.box.size, place_of[row.piece], piece.size, slices, item))
    return parts


def _copy(source: memoryview, data: memoryview, part: _Part) -> None:
    kind = _RAW[part.item]
    count = int(np.prod(part.size))
    packed = np.frombuffer(source, kind, count, offset=part.source).reshape(part.size)
    piece = np.frombuffer(data, kind, int(np.prod(part.shape)), offset=part.target).reshape(part.shape)
    piece[part.slices] = packed
