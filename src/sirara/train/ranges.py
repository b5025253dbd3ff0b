"""What an optimizer gets and what it promises: flat ranges, the ranks that hold them, one call per step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sirara.comm.group import Comm
from sirara.pure.groups import Group

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """One flat range under update [U]: weights (masters), gradient (may be overwritten) and state by name."""

    weights_U: Tensor
    grad_U: Tensor
    state: dict[str, Tensor]
    decay: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """The ranks of one pipeline stage, which together hold the flat groups that one call of `update` gets.

    groups: per tensor-parallel rank its trainable groups, in the order in which `update` gets their ranges.
    comm: the dp * tp ranks of the stage, a group of its own; place = dp_rank * tp + tp_rank.
    sharded: each rank updates its data-parallel shard of a group (ZeRO 1-3), else all of it (ZeRO 0).
    """

    groups: Sequence[Sequence[Group]]
    comm: Comm
    dp: int
    sharded: bool


class Optimizer(Protocol):
    """What the step pipeline asks of an optimizer.

    Before the first update `prepare` is called once, and `states_of` says which tensors each group needs.  Then each
    step calls `update` once on every rank of the plane, with one range per trainable group: all gradients reduced,
    over data-parallel ranks and over copies.  An optimizer may talk to the other ranks of its plane there.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of all state tensors, each of the shape of a range's weights, zero at the start."""
        ...

    def states_of(self, group: Group) -> tuple[str, ...]:
        """Those of `state_names` that a group has."""
        ...

    def prepare(self, plane: Plane) -> None:
        """Says where the ranges of `update` lie.  No communication."""
        ...

    def update(self, ranges: Sequence[Range], *, lr: float, update: int, shrink: float = 1.0) -> None:
        """Applies update number `update` (1 is the first) in place, with gradients divided by `shrink`."""
        ...
