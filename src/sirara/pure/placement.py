"""Where a tensor lies on the tensor-parallel axis, as data.

    Replicate()                      every rank holds all of it and applies it to the tokens that it sees
    Replicate(over="heads")          every rank holds all of it and applies it to its own heads
    Shard(dim=0)                     one contiguous part of dim 0 per rank
    Shard(dim=0, parts=kv_heads)     `parts` indivisible parts: with more ranks than parts, degree / parts
                                     neighbours hold the same one
    Shard(dim=1, packs=3)            three tensors side by side along the dim (GPT-2's q, k, v); every rank
                                     holds its part of each

Gradient reduction, norms, checkpoint boxes and replica checks are derived from this.
"""

from dataclasses import dataclass
from typing import Literal

from sirara.errors import LayoutError
from sirara.pure.layout import Box, whole


@dataclass(frozen=True, slots=True)
class Replicate:
    """A full copy on every rank, applied to all tokens (or its share of them) or to the rank's own heads."""

    over: Literal["tokens", "heads"] = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Split along `dim` into `parts` (None: as many as the degree) inside each of `packs` equal sections."""

    dim: int
    parts: int | None = None
    packs: int = 1


Placement = Replicate | Shard
REPLICATE = Replicate()


def held_ranges(
    placement: Placement, shape: tuple[int, ...], *, degree: int, rank: int
) -> tuple[tuple[int, int], ...]:
    """Index ranges [start, stop) along `placement.dim` that `rank` of `degree` holds: one per pack, or ().

    A dim that the degree does not divide (a vocabulary) is cut into parts of ceil(size / degree); the last
    may be short or empty.

    Raises: LayoutError when indivisible parts cannot be dealt out evenly.
    """
    if isinstance(placement, Replicate):
        return ()
    section = shape[placement.dim] // placement.packs
    start, stop = _held_parts(placement.parts, section, degree, rank)
    return tuple((pack * section + start, pack * section + stop) for pack in range(placement.packs))


def held_boxes(placement: Placement, shape: tuple[int, ...], *, degree: int, rank: int) -> tuple[Box, ...]:
    """What `rank` of `degree` holds, one box per pack; an empty box where nothing is left for it."""
    if isinstance(placement, Replicate) or degree == 1:
        return (whole(shape),)
    boxes = []
    for start, stop in held_ranges(placement, shape, degree=degree, rank=rank):
        offset, size = [0] * len(shape), list(shape)
        offset[placement.dim], size[placement.dim] = start, stop - start
        boxes.append(Box(tuple(offset), tuple(size)))
    return tuple(boxes)


def is_partial(placement: Placement, *, degree: int, sequence: bool) -> bool:
    """Whether a rank's gradient is one term of a sum over the ranks that hold the same elements.

    Copies of key-value heads see the queries of their own rank, a norm inside heads its own heads, and with
    sequence parallelism everything else that is replicated sees its own tokens.
    """
    if holders(placement, degree=degree) == 1:
        return False
    return isinstance(placement, Shard) or placement.over == "heads" or sequence


def holders(placement: Placement, *, degree: int) -> int:
    """How many ranks hold each element."""
    if isinstance(placement, Replicate):
        return degree
    return max(1, degree // placement.parts) if placement.parts else 1


def _held_parts(parts: int | None, section: int, degree: int, rank: int) -> tuple[int, int]:
    if parts is None:
        size = -(-section // degree)
        return min(section, rank * size), min(section, (rank + 1) * size)
    if section % parts or (parts % degree and degree % parts):
        raise LayoutError(
            f"{parts} parts of a dimension of {section} cannot be dealt out to {degree} ranks",
            why="the number of parts must divide the degree or be divisible by it",
            try_=[f"mesh.tp={d}" for d in _common_degrees(parts, degree)],
        )
    size = section // parts
    if parts >= degree:
        per_rank = parts // degree
        return rank * per_rank * size, (rank + 1) * per_rank * size
    part = rank // (degree // parts)
    return part * size, (part + 1) * size


def _common_degrees(parts: int, degree: int) -> list[int]:
    return [d for d in range(degree, 0, -1) if parts % d == 0][:2]
