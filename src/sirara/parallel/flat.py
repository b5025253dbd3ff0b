"""One flat group as it lives on one rank, and how the pieces of it are read from whole tensors.

Shape letters: P elements of the padded group, S = P / dp elements of a shard, U elements that this rank updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from sirara.comm.group import Transfer
from sirara.parallel.reduce import GradientSum
from sirara.pure.families import TensorSpec
from sirara.pure.groups import Group, Piece

Tensor = torch.Tensor
InitSlice = Callable[[TensorSpec, int, int], Tensor]
"""(tensor, start, stop) -> its initial elements [start, stop) in C order, 1-D, of any float dtype."""


_SLAB = 1 << 20
"""Elements of a tensor that are drawn or read at once where a rank holds some columns of its rows."""


@dataclass(slots=True, kw_only=True)
class FlatGroup:
    """One flat group as it lives on one rank.

    Attributes:  index: its number among all groups of the model.
                 weights_P: what forward reads, in the model dtype; None at stage 3.  weights_S: this rank's shard.
                 master_U: what the optimizer updates; a view of the weights when both have one dtype; None where
                 nothing is updated here.
                 shard: flat elements [lo, hi) whose reduced gradient and saved state are this rank's.
                 updated: flat elements that this rank updates: the shard, or all of it at stage 0.
                 sums: the gradient of each use that is on this rank.
                 guest: the first use is on another pipeline stage, which updates the weights; here is a copy.
                 partners: the pipeline ranks that hold such copies (for the owner), or the owner (for a guest).
    """

    index: int
    group: Group
    weights_P: Tensor | None
    weights_S: Tensor
    master_U: Tensor | None
    shard: tuple[int, int]
    updated: tuple[int, int]
    sums: dict[int, GradientSum]
    guest: bool
    partners: tuple[int, ...]
    state: dict[str, Tensor] = field(default_factory=dict)
    publishing: Transfer | None = None

    @property
    def has_master(self) -> bool:
        return self.master_U is not None and self.master_U.dtype != self.weights_S.dtype

    @property
    def trained(self) -> bool:
        """Whether this rank updates (its shard of) the group."""
        return self.group.trainable and not self.guest

    @property
    def weights_U(self) -> Tensor:
        """The updated range of the weights."""
        whole = self.weights_P is not None and self.updated != self.shard
        return self.weights_P if whole and self.weights_P is not None else self.weights_S


class Places:
    """Where gradients may be written as they are made, or added, by the `id` of their leaf; each is given out once."""

    def __init__(self) -> None:
        self.fresh: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    def places(self, leaves: Sequence[Tensor], *, onto: bool) -> list[Tensor] | None:
        """The places of all of `leaves`, or None."""
        views = self.sums if onto else self.fresh
        if any(id(leaf) not in views for leaf in leaves):
            return None
        return [views.pop(id(leaf)) for leaf in leaves]

    def clear(self) -> None:
        """Nothing may be written any more."""
        self.fresh.clear()
        self.sums.clear()


def read_piece(piece: Piece, read: InitSlice) -> Tensor:
    """A piece's elements in order, from a source that gives runs of whole tensors.

    Where the piece holds columns of many rows, whole rows are read in slabs and cut.
    """
    parts: list[Tensor] = []
    shape, row = piece.tensor.shape, prod(piece.tensor.shape[1:])
    for box in piece.boxes:
        if not shape or box.size[1:] == shape[1:]:
            start = box.offset[0] * row if shape else 0
            parts.append(read(piece.tensor, start, start + box.volume))
            continue
        step = max(1, _SLAB // row)
        columns = tuple(slice(o, o + n) for o, n in zip(box.offset[1:], box.size[1:], strict=True))
        for low in range(box.offset[0], box.offset[0] + box.size[0], step):
            high = min(low + step, box.offset[0] + box.size[0])
            rows = read(piece.tensor, low * row, high * row).view(high - low, *shape[1:])
            parts.append(rows[(slice(None), *columns)].reshape(-1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
