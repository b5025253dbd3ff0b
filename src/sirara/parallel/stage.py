"""Runs the units of one stage, forward and backward, one small autograd graph per unit.

    embed -> block.0 -> ... -> block.n-1 -> head          x is cut between units: y.detach().requires_grad_()
    embed <- block.0 <- ... <- block.n-1 <- head          backward of a unit returns dx and its parameters' gradients

So each flat group's gradient is known, and its reduction starts, as soon as backward has left its unit, without hooks;
and what moves weights between units (ZeRO) or activations between ranks (pipeline) has one place to stand.
Shape letters: B sequences, L tokens, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sirara.parallel.zero import Zero
from sirara.pure.rng import DropoutKey

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one microbatch brings, on the stage's device: int64 [B, L]; target -100 counts for nothing."""

    tokens_BL: Tensor
    targets_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor | None = None


@dataclass(slots=True)
class Trail:
    """What forward leaves for backward: per unit its input (None for the embedding) and its output."""

    inputs: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class Stage:
    """The units of one rank's stage; for now all of them."""

    def __init__(self, units: Sequence[nn.Module], zero: Zero) -> None:
        self.units = list(units)
        self.zero = zero

    def forward(self, inputs: Inputs, key: DropoutKey | None, scale: float) -> tuple[Trail, Tensor]:
        """Runs all units; losses_BL are detached, backward of the trail gives gradients of scale * sum(losses_BL)."""
        trail = Trail()
        x: Tensor | None = None
        for index, unit in enumerate(self.units[:-1]):
            self.zero.wait(index)
            with torch.enable_grad():
                if x is None:
                    y = unit(inputs.tokens_BL, inputs.positions_BL, key)
                else:
                    y = unit(x, inputs.positions_BL, inputs.documents_BL, key)
            trail.inputs.append(x)
            trail.outputs.append(y)
            x = y.detach().requires_grad_()
        self.zero.wait(len(self.units) - 1)
        with torch.enable_grad():
            objective, losses_BL = self.units[-1](x, inputs.targets_BL, scale)
        trail.inputs.append(x)
        trail.outputs.append(objective)
        return trail, losses_BL

    def backward(self, trail: Trail, microbatch: int) -> None:
        """Gradients of one microbatch, unit by unit from the last; the trail is used up."""
        dy: Tensor | None = None
        for index in reversed(range(len(self.units))):
            x, y = trail.inputs.pop(), trail.outputs.pop()
            wanted = [*([] if x is None else [x]), *self.zero.leaves[index]]
            grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
            dy = grads[0] if x is not None else None
            self.zero.add(index, microbatch, grads[len(wanted) - len(self.zero.leaves[index]) :])

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> Tensor:
        """Token losses [B, L] without gradients, dropout or any other trace."""
        x = self.units[0](inputs.tokens_BL, inputs.positions_BL, None)
        for unit in self.units[1:-1]:
            x = unit(x, inputs.positions_BL, inputs.documents_BL, None)
        return self.units[-1](x, inputs.targets_BL, 1.0)[1]
