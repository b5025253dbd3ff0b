"""Which saved pieces hold the elements that a reader wants: any set of boxes read from any other.

Per tensor the saved boxes are sorted once by their start in the dimension where they differ most; a wanted
box then meets only the window of saved boxes that can reach it. The volumes of the overlaps must add up to
the volume of the wanted box: a hole is an error that names the tensor, never stale memory.

      saved     |--0--|---1---|--2--|----3----|          sorted by start, ends never fall
      wanted            [===========)
      window          |---1---|--2--|----3----|          first end > start ... last start < end
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sirara.pure.layout import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Elements `box` of the tensor: in saved piece `saved` and in wanted box `wanted` (indices)."""

    saved: int
    wanted: int
    box: Box


class SavedBoxes:
    """The saved boxes of one tensor, ready to be asked.

    Args:  offset_NK, size_NK: int64, N boxes of a tensor with K dimensions, disjoint.
    """

    def __init__(self, offset_NK: np.ndarray, size_NK: np.ndarray) -> None:
        end_NK = offset_NK + size_NK
        starts = [len(np.unique(column)) for column in offset_NK.T] if len(offset_NK) > 1 else []
        self._dim = int(np.argmax(starts)) if starts else 0
        key = offset_NK[:, self._dim] if offset_NK.shape[1] else np.zeros(len(offset_NK), np.int64)
        self._order = np.argsort(key, kind="stable")
        self._start = offset_NK[self._order]
        self._end = end_NK[self._order]
        if offset_NK.shape[1]:
            self._low = self._start[:, self._dim]
            self._reach = np.maximum.accumulate(self._end[:, self._dim]) if len(key) else self._low

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """(index of a saved box, what it shares with `box`), by index."""
        if not box.volume:
            return []
        if not box.offset:
            return [(int(i), box) for i in self._order]
        lo, hi = np.asarray(box.offset), np.asarray(box.stop)
        first = int(np.searchsorted(self._reach, lo[self._dim], side="right"))
        last = int(np.searchsorted(self._low, hi[self._dim], side="left"))
        start = np.maximum(self._start[first:last], lo)
        size = np.minimum(self._end[first:last], hi) - start
        hit = np.flatnonzero((size > 0).all(axis=1))
        found = zip(
            self._order[first:last][hit].tolist(), start[hit].tolist(), size[hit].tolist(), strict=True
        )
        return sorted(((i, Box(tuple(o), tuple(n))) for i, o, n in found), key=lambda pair: pair[0])


def overlaps(saved: SavedBoxes, wanted: Sequence[Box]) -> tuple[list[Overlap], list[tuple[Box, int]]]:
    """All reads that fill `wanted`, and the wanted boxes that they do not fill with the number of
    elements missing."""
    reads: list[Overlap] = []
    holes: list[tuple[Box, int]] = []
    for w, box in enumerate(wanted):
        met = saved.meeting(box)
        reads.extend(Overlap(saved=i, wanted=w, box=common) for i, common in met)
        missing = box.volume - sum(common.volume for _, common in met)
        if missing:
            holes.append((box, missing))
    return reads, holes


def collisions(saved: SavedBoxes, boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Pairs (i, j), i < j, of saved boxes that share an element; `boxes` are the ones that `saved` was
    made of."""
    for i, box in enumerate(boxes):
        yield from ((i, j) for j, _ in saved.meeting(box) if j > i)
