"""A part of a block that backward runs again, between two matrix products of which the second one reads its output.

    forward     x -> [ run, without a graph ] -> y -> product          kept: x
    backward    the product asks for y: run(x) with a graph; y for dW, then dy through that graph: dx and gradients of
                the parameters that run uses

So it runs once more and not twice, and neither product does.  What is computed, and in which order, is the same as
without: bits are equal.  Source of the idea: Chen et al., arXiv:1604.06174.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sirara.model.split import Remake


class Again:
    """run(x) -> y of one forward.  parameters: what run uses of the model beside x."""

    def __init__(self, run: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> None:
        self.run, self.parameters = run, parameters
        self._made: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Remake]:
        """y, and how its reader gets it in backward."""
        y = _Run.apply(self, x, *self.parameters)
        # The detached x shares its memory, and holds no graph that would hold this again.
        return y, Remake(self._value, (x.detach(),), at_once=True)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y with its graph, the x that it begins at); the same for whoever asks first and second."""
        if self._made is None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                self._made = self.run(x), x
        return self._made

    def let_go(self) -> None:
        """The graph has been used."""
        self._made = None

    def _value(self, x: Tensor) -> Tensor:
        return self.made(x)[0].detach()


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Again, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        return part.run(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        part: Again = ctx.part
        y, x = part.made(ctx.saved_tensors[0])
        needed = ctx.needs_input_grad[2:]
        wanted = [x, *(p for p, n in zip(part.parameters, needed, strict=True) if n)]
        found = iter(torch.autograd.grad(y, wanted, grad_outputs[0], allow_unused=True))
        part.let_go()
        dx = next(found)
        return (None, dx, *(next(found) if n else None for n in needed))
