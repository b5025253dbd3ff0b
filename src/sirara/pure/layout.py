"""Boxes: where the elements of a piece lie in a tensor.

Everything that is saved, loaded or moved is a box: an offset and a size in each dimension of a logical
tensor. A rank that owns elements [start, stop) of a flattened tensor (a ZeRO shard) owns at most 2d-1
boxes: a partial first row, whole rows, a partial last row, and the same again inside the partial rows.

    range_boxes((4, 5), 3, 17)      . . . 3 4     first row from column 3
                                    5 6 7 8 9     whole rows
                                    0 1 2 3 4
                                    5 6 . . .     last row up to column 2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from sirara.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: element i of dimension d lies in it when offset[d] <= i < offset[d] + size[d]."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.size)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size, strict=True)) + "]"

    def within(self, outer: "Box") -> bool:
        return len(self.offset) == len(outer.offset) and all(
            o <= i and i + n <= o + s
            for i, n, o, s in zip(self.offset, self.size, outer.offset, outer.size, strict=True)
        )

    def relative_to(self, outer: "Box") -> "Box":
        """The same elements, counted from the corner of `outer`."""
        return Box(tuple(i - o for i, o in zip(self.offset, outer.offset, strict=True)), self.size)

    def moved(self, by: Sequence[int]) -> "Box":
        return Box(tuple(i + o for i, o in zip(self.offset, by, strict=True)), self.size)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """The common block of two boxes, None when they share no element."""
    offset = tuple(map(max, a.offset, b.offset))
    size = tuple(min(e, f) - o for e, f, o in zip(a.stop, b.stop, offset, strict=True))
    return Box(offset, size) if all(n > 0 for n in size) else None


def difference(a: Box, b: Box) -> tuple[Box, ...]:
    """The elements of `a` that are not in `b`, as at most 2d boxes."""
    common = intersection(a, b)
    if common is None:
        return (a,) if a.volume else ()
    rest = []
    offset, size = list(a.offset), list(a.size)
    for d, (low, n) in enumerate(zip(common.offset, common.size, strict=True)):
        end = offset[d] + size[d]
        if offset[d] < low:
            rest.append(Box(tuple(offset), (*size[:d], low - offset[d], *size[d + 1 :])))
        if low + n < end:
            above = (*offset[:d], low + n, *offset[d + 1 :])
            rest.append(Box(above, (*size[:d], end - low - n, *size[d + 1 :])))
        offset[d], size[d] = low, n
    return tuple(rest)


def range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Elements [start, stop) of the flattened (C-order) tensor as at most 2d-1 boxes, in order."""
    if not 0 <= start <= stop <= prod(shape):
        raise InvariantError(f"elements [{start}, {stop}) lie outside a tensor of shape {tuple(shape)}")
    boxes: list[Box] = []
    if start < stop:
        _append_range(boxes, (), tuple(shape), start, stop)
    return tuple(boxes)


def _append_range(
    boxes: list[Box], index: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int
) -> None:
    """Elements [start, stop) of the sub-tensor at `index`, whose shape is `shape`."""
    if not shape:
        boxes.append(Box(index, (1,) * len(index)))
        return
    inner = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        _append_range(boxes, (*index, first), shape[1:], head, tail)
        return
    if head:
        _append_range(boxes, (*index, first), shape[1:], head, inner)
        first += 1
    if first < last:
        offset = (*index, first, *(0 for _ in shape[1:]))
        boxes.append(Box(offset, (*(1 for _ in index), last - first, *shape[1:])))
    if tail:
        _append_range(boxes, (*index, last), shape[1:], 0, tail)


def box_runs(shape: Sequence[int], box: Box) -> list[tuple[int, int]]:
    """The elements of a box as runs [start, stop) of the flattened tensor, in order and as long as can be."""
    if not box.within(whole(shape)):
        raise InvariantError(f"box {box} lies outside a tensor of shape {tuple(shape)}")
    if not box.volume:
        return []
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    # Trailing dimensions that are whole merge into one run with the first one that is not.
    cut = len(shape) - 1
    while cut > 0 and box.size[cut] == shape[cut]:
        cut -= 1
    if not shape:
        return [(0, 1)]
    length = box.size[cut] * strides[cut]
    base = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    leading = (range(0, n * s, s) for n, s in zip(box.size[:cut], strides[:cut], strict=True))
    return [(base + sum(steps), base + sum(steps) + length) for steps in product(*leading)]


def cut_box(box: Box, most: int) -> list[Box]:
    """A box as boxes of at most `most` elements; laid end to end they are the box in C order."""
    if box.volume <= most:
        return [box] if box.volume else []
    for d, n in enumerate(box.size):
        inner = prod(box.size[d + 1 :])
        if n == 1:
            continue
        rows = max(1, most // inner)
        parts = [
            Box(
                (*box.offset[:d], box.offset[d] + i, *box.offset[d + 1 :]),
                (*box.size[:d], min(rows, n - i), *box.size[d + 1 :]),
            )
            for i in range(0, n, rows)
        ]
        return parts if inner <= most else [piece for part in parts for piece in cut_box(part, most)]
    return [box]
