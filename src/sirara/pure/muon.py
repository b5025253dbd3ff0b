"""Which rank orthogonalises which matrix of a pipeline stage, and which flat ranges travel for it.

    places          the dp * tp ranks of one pipeline stage: place = dp_rank * tp + tp_rank
    matrices        2-D tensors of blocks; everything else is updated element by element where it lies
    owner           the place that orthogonalises a matrix: dealt by FLOPs, longest first

    place 0   [ W0 . . . | W1 . ]    W0's range   ->  owner of W0  ->  the same range comes back
    place 1   [ . . | W2 . . . . ]   W1's ranges of places 0 and 1  ->  owner of W1  ->  both come back

A flat range belongs to a group as the place holds it (a tensor-parallel rank holds a box of a tensor), so each part
says where its elements lie in the group and which boxes of the logical tensor they are.  All of it is a function of
the layout: every rank knows what it sends and receives without asking.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sirara.pure.groups import Group
from sirara.pure.layout import Box

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix of a block: `group` is the index of its flat group, `owner` the place that orthogonalises it."""

    name: str
    shape: tuple[int, int]
    group: int
    owner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, stop) of a place's flat group, which are `boxes` of a matrix, laid end to end."""

    start: int
    stop: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonPlan:
    """The matrices of one pipeline stage and their way to their owners and back.

    groups: per tensor-parallel rank its flat groups, the same list of names on each.
    sharded: ranks update their data-parallel shard of a group (ZeRO 1-3), else all of it (ZeRO 0).
    rounds: indices of matrices; a place owns at most one matrix of a round.
    """

    groups: tuple[tuple[Group, ...], ...]
    dp: int
    sharded: bool
    matrices: tuple[Matrix, ...]
    rounds: tuple[tuple[int, ...], ...]

    @property
    def tp(self) -> int:
        return len(self.groups)

    @property
    def places(self) -> int:
        return self.dp * self.tp

    def updated(self, group: int, place: int) -> tuple[int, int]:
        """The flat range of a group that a place updates."""
        numel = self.groups[0][group].shard_numel(self.dp)
        dp_rank = place // self.tp
        return (dp_rank * numel, (dp_rank + 1) * numel) if self.sharded else (0, self.dp * numel)

    def held(self, matrix: int, place: int) -> tuple[Part, ...]:
        """What a place updates of a matrix: these parts come back to it."""
        one = self.matrices[matrix]
        group = self.groups[place % self.tp][one.group]
        lo, hi = self.updated(one.group, place)
        return tuple(
            Part(start=piece.flat, stop=piece.flat + piece.stop - piece.start, boxes=piece.boxes)
            for piece in group.pieces(lo, hi)
            if piece.tensor.name == one.name
        )

    def sent(self, matrix: int, place: int) -> tuple[Part, ...]:
        """What a place contributes to a matrix: over all places each element once."""
        return self.held(matrix, place) if self._speaks(matrix, place) else ()

    def _speaks(self, matrix: int, place: int) -> bool:
        """Of the places that hold the same elements one sends them: the owner itself, or its nearest."""
        one = self.matrices[matrix]
        copies = self.groups[0][one.group].copies
        (dp_rank, tp_rank), (owner_dp, owner_tp) = divmod(place, self.tp), divmod(one.owner, self.tp)
        if not self.sharded and dp_rank != owner_dp:
            return False
        if tp_rank // copies == owner_tp // copies:
            return tp_rank == owner_tp
        return tp_rank % copies == 0


def muon_plan(
    groups: Sequence[Sequence[Group]], *, dp: int, sharded: bool, steps: int = NEWTON_SCHULZ_STEPS
) -> MuonPlan:
    """The plan for the trainable flat groups of one pipeline stage.

    Args:  groups: per tensor-parallel rank.  steps: of Newton-Schulz.
    """
    found = [
        (g, slot.tensor.name, slot.tensor.shape)
        for g, group in enumerate(groups[0])
        if is_matrices(group)
        for slot in group.slots
    ]
    # Packs of one tensor are slots of their own, the matrix is the tensor.
    unique = list(dict.fromkeys(found))
    owners, rounds = _deal([newton_schulz_flops(shape, steps) for _, _, shape in unique], dp * len(groups))
    return MuonPlan(
        groups=tuple(tuple(row) for row in groups),
        dp=dp,
        sharded=sharded,
        matrices=tuple(
            Matrix(name=name, shape=(shape[0], shape[1]), group=g, owner=owner)
            for (g, name, shape), owner in zip(unique, owners, strict=True)
        ),
        rounds=rounds,
    )


def is_matrices(group: Group) -> bool:
    """Whether a group holds matrices of a block and nothing else."""
    return group.name.startswith("block.") and all(len(slot.tensor.shape) == 2 for slot in group.slots)


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """FLOPs of orthogonalising a matrix: per step X X^T and A X of m * m * n and A A of m * m * m, with m <= n."""
    least = min(shape)
    return steps * (4 * least * prod(shape) + 2 * least**3)


def _deal(flops: Sequence[int], places: int) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Owner per matrix, the longest first to the place with the least work, ties by number; and the rounds."""
    loads = [(0, place) for place in range(places)]
    owners, queues = [0] * len(flops), [[] for _ in range(places)]
    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        load, place = heapq.heappop(loads)
        heapq.heappush(loads, (load + flops[index], place))
        owners[index] = place
        queues[place].append(index)
    count = max(map(len, queues))
    rounds = tuple(tuple(sorted(q[n] for q in queues if n < len(q))) for n in range(count))
    return owners, rounds
