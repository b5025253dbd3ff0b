"""parallelize: THE order in which a model is split and wrapped.

    split stages -> tensor -> recompute -> compile -> zero

What it asks of a model is small, so that a user's own module can fill it: an ordered list of units (an embedding,
blocks with one hidden state in and out, a head with the loss), and per unit the table of its logical tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sirara.comm.group import Comm
from sirara.parallel.stage import Stage
from sirara.parallel.zero import Zero
from sirara.pure.families import UnitSpec
from sirara.pure.groups import flat_groups
from sirara.pure.tree import Deal


class Trainable(Protocol):
    """A model that can be parallelized; its parameters may lie on the meta device.

    units()  [embed, block, ..., head], called as
        embed(tokens_BL, positions_BL, key) -> x_BLD          key: DropoutKey, or None for no dropout
        block(x_BLD, positions_BL, documents_BL, key) -> x_BLD
        head(x_BLD, targets_BL, scale) -> (objective, losses_BL)       the objective's gradient is that of
                                                                       scale * sum(losses_BL)
    """

    def units(self) -> list[nn.Module]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that parallelize may decide by; none of it changes what is computed, but for `fast`."""

    zero: int
    deal: Deal
    weights: torch.dtype
    sums: torch.dtype
    compile: bool = False
    fast: bool = False


def parallelize(
    model: Trainable, specs: Sequence[UnitSpec], layout: Layout, *, comm: Comm, device: torch.device
) -> Stage:
    """The model as one stage of flat groups, ready to be initialised or loaded."""
    units = model.units()
    zero = Zero(
        units,
        flat_groups(specs),
        comm=comm,
        deal=layout.deal,
        stage=layout.zero,
        dtype=layout.weights,
        sum_dtype=layout.sums,
        device=device,
        fast=layout.fast,
    )
    if layout.compile:
        # In place: names of submodules and parameters stay what they are, so checkpoints do too.
        for block in units[1:-1]:
            block.compile(dynamic=False)
    return Stage(units, zero)
