"""Zones: rows of a weight whose columns lie with several ranks of one node, to be written as whole rows.

A weight lies in its file row after row, so a rank that holds columns of it (a row-parallel layer) holds many
short runs. Where one node holds all columns, such rows become one zone: blocks of whole rows, dealt to the
holders on that node, whose parts the others copy into the writer's image when the snapshot is taken.

        rank 0  rank 1                 zone
      ┌───────┬───────┐          ┌───────────────┐
      │ a0 b0 │ c0 d0 │          │ a0 b0   c0 d0 │  block of rank 0, one part by rank 1
      │ a1 b1 │ c1 d1 │          ├───────────────┤
      │ a2 b2 │ c2 d2 │          │ a2 b2   c2 d2 │  block of rank 1, one part by rank 0
      └───────┴───────┘          └───────────────┘
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sirara.pure.holders import Held, Shapes, are_runs


@dataclass(frozen=True, slots=True)
class Zone:
    """Rows [start, stop) of a tensor. members: held boxes that fill them; replaced: those and the boxes that `rest`
    now stands for; rest: (held box, rows) outside of zones.  owners: who may write blocks of it."""

    tensor: int
    start: int
    stop: int
    members: tuple[int, ...]
    owners: tuple[int, ...]
    replaced: tuple[int, ...]
    rest: tuple[tuple[int, int, int], ...]


def zones_of(held: Held, shapes: Shapes, node_of: Callable[[int], int]) -> list[Zone]:
    """The zones of all weights; a weight whose columns are spread over nodes has none.  node_of: of a rank."""
    zones: list[Zone] = []
    bounds = np.searchsorted(held.tensor, np.arange(len(shapes.tensors) + 1))
    known: dict[bytes, tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, int]]]] = {}
    for t in np.unique(held.tensor[~held.is_run]).tolist():
        if not shapes.tensors[t].is_weight:
            continue
        low, high = int(bounds[t]), int(bounds[t + 1])
        offset, size = held.offset[low:high], held.size[low:high]
        pattern = shapes.shape[t].tobytes() + offset.tobytes() + size.tobytes()
        if pattern not in known:
            known[pattern] = _strips(offset, size, shapes.shape[t])
        strips, rest = known[pattern]
        found = []
        for start, stop, members in strips:
            owners = _owners([held.ranks(low + m) for m in members], node_of)
            if not owners:
                break
            found.append((start, stop, tuple(low + m for m in members), owners))
        else:
            everything = tuple(range(low, high))
            for k, (start, stop, members, owners) in enumerate(found):
                left = tuple((low + m, a, b) for m, a, b in rest) if k == 0 else ()
                zones.append(Zone(t, start, stop, members, owners, everything, left))
    return zones


def _strips(
    offset: np.ndarray, size: np.ndarray, shape: np.ndarray
) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int, int]]]:
    """The tensor's rows as zones (start, stop, boxes that fill them) and as what is left: (box, start, stop)."""
    low, high = offset[:, 0], offset[:, 0] + size[:, 0]
    cuts = np.unique(np.concatenate([low, high])).tolist()
    zones: list[tuple[int, int, list[int]]] = []
    rest: list[tuple[int, int, int]] = []
    group: list[tuple[int, int, list[int]]] = []

    def close() -> None:
        if not group:
            return
        strided = False
        for a, b, members in group:
            rows = size[members].copy()
            rows[:, 0] = b - a
            strided |= not are_runs(rows, np.broadcast_to(shape, rows.shape)).all()
        if strided:
            zones.append((group[0][0], group[-1][1], sorted({m for _, _, members in group for m in members})))
        else:
            rest.extend((m, a, b) for a, b, members in group for m in members)
        group.clear()

    for a, b in pairwise(cuts):
        members = np.flatnonzero((low <= a) & (high >= b)).tolist()
        if len(members) > 1:
            group.append((a, b, members))
            continue
        close()
        rest.extend((m, a, b) for m in members)
    close()
    return zones, _joined(rest)


def _joined(rest: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring rows of one box as one."""
    out: list[tuple[int, int, int]] = []
    for m, a, b in sorted(rest):
        if out and out[-1][0] == m and out[-1][2] == a:
            out[-1] = (m, out[-1][1], b)
        else:
            out.append((m, a, b))
    return out


def _owners(holders: Sequence[tuple[int, ...]], node_of: Callable[[int], int]) -> tuple[int, ...]:
    """The holders on nodes that hold every member; none when the columns are spread over nodes."""
    nodes = set.intersection(*({node_of(r) for r in ranks} for ranks in holders))
    return tuple(sorted({r for ranks in holders for r in ranks if node_of(r) in nodes}))
