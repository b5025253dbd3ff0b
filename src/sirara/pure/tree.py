"""The one fixed binary tree of every sum: who computes which leaves, and how partial sums meet.

    microbatch   0   1   2   3   4   5   6        Leaves are aligned pairs, pairs of pairs, and so on; what is left
                  \\ /     \\ /     \\ /    |        at the end is folded from the smallest entry to the largest:
                  +       +       +     |        ((0 1)(2 3)) + ((4 5) + 6)
                   \\_____/        \\____/
                       \\____________/

Block b holds the microbatches [b * 2^k, (b + 1) * 2^k) and belongs to data-parallel rank b mod dp.  A round is dp
consecutive blocks.  A block is a subtree, so each rank may add its block alone and the partial sums of a round may be
added in block order: the association, and so every bit, is the same for every k, dp and number of leaves M.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How M microbatches are dealt to dp ranks in blocks of 2^k."""

    microbatches: int
    dp: int
    k: int

    @property
    def blocks(self) -> int:
        return -(-self.microbatches // (1 << self.k))

    @property
    def rounds(self) -> int:
        return -(-self.blocks // self.dp)

    def block(self, b: int) -> range:
        """The microbatches of block b; the last one may be short."""
        return range(b << self.k, min((b + 1) << self.k, self.microbatches))

    def senders(self, r: int) -> int:
        """How many ranks, counted from 0, own a block in round r."""
        return min(self.dp, self.blocks - r * self.dp)

    @property
    def places(self) -> int:
        """Microbatches of rank 0, which has most; the others pass their last places without one."""
        return int(most_places(self.microbatches, self.dp, self.k))

    def closes(self, place: int) -> bool:
        """Whether a round ends at this place, the same on all ranks: every rank's block, if it has one, is whole."""
        return (place + 1) % (1 << self.k) == 0 or place + 1 == self.places

    def mine(self, rank: int) -> list[int]:
        """The microbatches of one rank in ascending order."""
        return [i for b in range(rank, self.blocks, self.dp) for i in self.block(b)]

    def owner(self, i: int) -> tuple[int, int]:
        """(rank, position in `mine(rank)`) of microbatch i; blocks before the last one are full."""
        b = i >> self.k
        return b % self.dp, ((b // self.dp) << self.k) + (i - (b << self.k))


def most_places(microbatches: Any, dp: Any, k: int) -> Any:
    """`Deal.places` for numbers, or arrays of them."""
    blocks = -(-microbatches // (1 << k))
    rounds = -(-blocks // dp)
    missing = blocks * (1 << k) - microbatches  # from the last block
    return rounds * (1 << k) - missing * ((blocks - 1) % dp == 0)


def deal(microbatches: int, dp: int, block: int | str = "auto", *, max_k: int = 3) -> Deal:
    """The deal for `mesh.block`: a power of two, or "auto" = the largest block that costs no balance.

    Args:  max_k: the deepest local tree that auto may take; a rank holds max(1, k) full-size gradient buffers.
    """
    if block != "auto":
        size = int(block)
        if size < 1 or size & (size - 1):
            raise ConfigError(
                f"mesh.block={block} is no power of two",
                why="blocks are subtrees of the reduction tree",
                try_=[
                    "mesh.block=auto",
                    f"mesh.block={1 << max(0, size.bit_length() - 1) if size > 0 else 1}",
                ],
            )
        return Deal(microbatches=microbatches, dp=dp, k=size.bit_length() - 1)
    if dp == 1:
        # Nothing is exchanged: one block holds all, and its tree needs no more buffers than the shard's would.
        return Deal(microbatches=microbatches, dp=1, k=max(0, (microbatches - 1).bit_length()))
    deals = [Deal(microbatches=microbatches, dp=dp, k=k) for k in range(max_k + 1)]
    return next(d for d in reversed(deals) if d.places <= deals[0].places)


def aligned_nodes(start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) as its largest aligned tree nodes, left to right: (level, index) = [index * 2^level, ...)."""
    nodes: list[tuple[int, int]] = []
    while start < stop:
        level = (start & -start).bit_length() - 1 if start else (stop - start).bit_length() - 1
        while start + (1 << level) > stop:
            level -= 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def node_sums(values: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """Sums of the leaves [start, start + len(values)) per aligned node, each added as a balanced binary tree."""
    return np.array(
        [
            _tree(values[(i << level) - start : ((i + 1) << level) - start])
            for level, i in aligned_nodes(start, start + len(values))
        ],
        dtype=np.float64,
    )


def _tree(values: NDArray[np.float64]) -> float:
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return float(values[0])


def combine(nodes: Mapping[tuple[int, int], float], leaves: int) -> float:
    """The sum of all leaves from the sums of any cover by aligned nodes; leaves beyond the last one count as 0.

    Sums of squares are never negative, so adding the 0.0 of an absent leaf changes no bit.
    """

    def value(level: int, index: int) -> float:
        if (level, index) in nodes:
            return nodes[level, index]
        if index << level >= leaves or level == 0:
            return 0.0
        return value(level - 1, 2 * index) + value(level - 1, 2 * index + 1)

    return value(max(0, (leaves - 1).bit_length()), 0)
