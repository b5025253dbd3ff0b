"""Where a tensor lies on the tensor-parallel axis, as data.

    Replicate()                      every rank holds all of it
    Shard(dim=0)                     one contiguous part of dim 0 per rank
    Shard(dim=0, parts=kv_heads)     `parts` indivisible parts: with more ranks than parts, degree / parts
                                     neighbours hold the same one
    Shard(dim=1, packs=3)            three tensors side by side along the dim (GPT-2's q, k, v); every rank
                                     holds its part of each

Gradient reduction, norms, checkpoint boxes and replica checks are derived from this.
"""

from dataclasses import dataclass

from sirara.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Replicate:
    """A full copy on every rank."""


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
