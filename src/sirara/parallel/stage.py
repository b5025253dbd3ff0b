"""Runs the units of one (virtual) stage, forward and backward, one small autograd graph per unit.

    embed -> block.0 -> ... -> block.n-1 -> head          x is cut between units: y.detach().requires_grad_()
    embed <- block.0 <- ... <- block.n-1 <- head          backward of a unit returns dx and its parameters' gradients

So each flat group's gradient is known, and its reduction starts, as soon as backward has left its unit, without hooks;
and what moves weights between units (ZeRO) or activations between ranks (pipeline) has one place to stand.  A unit
that is recomputed leaves its input alone: backward runs its forward again.
Shape letters: B sequences, L tokens, D model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sirara.errors import InvariantError
from sirara.parallel.zero import Zero
from sirara.pure.rng import DropoutKey
from sirara.pure.schedule import Kind

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one microbatch brings, on the stage's device: int64 [B, L]; target -100 counts for nothing."""

    tokens_BL: Tensor
    targets_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor | None = None


class WeightJobs(Protocol):
    """Weight gradients that a split backward has put off."""

    def run(self) -> Mapping[int, Tensor]:
        """Gradients by the `id` of their parameter."""
        ...


class Deferral(Protocol):
    """Lets a model's backward put weight gradients off while `active`."""

    active: bool

    def take(self) -> WeightJobs: ...


@dataclass(slots=True)
class Later:
    """A unit's weight gradients between the two halves of a split backward."""

    unit: int
    grads: Sequence[Tensor | None]
    jobs: WeightJobs


@dataclass(slots=True)
class Trail:
    """What forward leaves for backward: per unit its input (None for the embedding) and where its backward begins (None
    when it is recomputed), and what a split backward leaves for its second half.

    The output's place in the graph is enough: its memory, where another rank needs it, is let go when that rank has it.
    """

    inputs: Inputs
    key: DropoutKey | None
    scale: float
    hidden: list[Tensor | None] = field(default_factory=list)
    outputs: list[Tensor | GradientEdge | None] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)


class Chunk:
    """Contiguous units of the model on this rank: one (virtual) stage.

    Args:  units: modules by number in the model, in order.  recompute: units whose forward runs again in backward.
           deferral: splits the backward of a model that knows how; without it the input half does all the work.
           compiled: units that torch.compile has made.
    """

    def __init__(
        self,
        stage: int,
        units: Mapping[int, nn.Module],
        zero: Zero,
        *,
        model_units: int,
        recompute: Sequence[int] = (),
        deferral: Deferral | None = None,
        compiled: Sequence[int] = (),
    ) -> None:
        self.stage, self.units, self.zero = stage, dict(units), zero
        self.first, self.last = 0 in self.units, model_units - 1 in self.units
        self.head = model_units - 1
        self.recompute, self.deferral = frozenset(recompute), deferral
        self.compiled = frozenset(compiled)

    @torch.enable_grad()
    def forward(
        self, x: Tensor | None, inputs: Inputs, key: DropoutKey | None, scale: float
    ) -> tuple[Trail, Tensor]:
        """Runs all units; returns the hidden state, or on the last stage the detached losses_BL.

        Backward of the trail gives gradients of scale * sum(losses_BL).
        """
        trail = Trail(inputs, key, scale)
        losses_BL: Tensor | None = None
        x = None if x is None else x.requires_grad_()
        for unit in self.units:
            self.zero.enter(unit)
            again = unit in self.recompute
            run = self._run_alone if again else self._run
            y, losses_BL = run(unit, x, inputs, key, scale)
            trail.hidden.append(x)
            trail.outputs.append(None if again else y if y.grad_fn is None else get_gradient_edge(y))
            x = y.detach().requires_grad_()
        if losses_BL is not None:
            return trail, losses_BL
        if x is None:
            raise InvariantError(f"stage {self.stage} has no units")
        return trail, x.detach()

    def backward(self, trail: Trail, dy: Tensor | None, microbatch: int) -> Tensor | None:
        """Gradients of one microbatch of the step, unit by unit from the last; returns dx.  The trail is used up."""
        for unit in reversed(self.units):
            dy = self._backward_at_once(unit, trail, dy, microbatch)
        return dy

    def backward_input(self, trail: Trail, dy: Tensor | None, microbatch: int) -> Tensor | None:
        """The half of backward that other stages wait for: dx; weight gradients are kept for `backward_weight`.

        The embedding puts nothing off: it gives no dx.
        """
        for unit in reversed(self.units):
            if self.deferral is None or not self._defers(unit):
                dy = self._backward_at_once(unit, trail, dy, microbatch)
                continue
            self.deferral.active = True
            try:
                dy, grads = self._backward_unit(unit, trail, dy)
            finally:
                self.deferral.active = False
            trail.later.append(Later(unit, grads, self.deferral.take()))
        return dy

    def backward_weight(self, trail: Trail, microbatch: int) -> None:
        """The rest of a split backward."""
        for later in trail.later:
            self.zero.open(later.unit)
            made = later.jobs.run()
            leaves = self.zero.leaves[later.unit]
            grads = [made.get(id(leaf), grad) for leaf, grad in zip(leaves, later.grads, strict=True)]
            self.zero.add(later.unit, grads, microbatch)
        trail.later.clear()

    def ghost(self, kind: Kind) -> None:
        """Takes part in ZeRO's moves where this data-parallel rank has no microbatch and its peers have one."""
        if kind == Kind.FORWARD:
            for unit in self.units:
                self.zero.enter(unit)
            return
        for unit in reversed(self.units):
            if kind != Kind.WEIGHT:
                self.zero.enter(unit)
            if kind == Kind.BACKWARD or self._defers(unit) == (kind == Kind.WEIGHT):
                self.zero.skip(unit)

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, inputs: Inputs) -> Tensor:
        """The hidden state, or on the last stage token losses [B, L], without gradients, dropout or any other trace."""
        losses_BL: Tensor | None = None
        for unit in self.units:
            self.zero.enter(unit)
            x, losses_BL = self._run_alone(unit, x, inputs, None, 1.0)
        result = losses_BL if losses_BL is not None else x
        if result is None:
            raise InvariantError(f"stage {self.stage} has no units")
        return result

    def _defers(self, unit: int) -> bool:
        """Whether a split backward leaves this unit's weight gradients for its second half."""
        return self.deferral is not None and unit > 0

    def _run(
        self, unit: int, x: Tensor | None, inputs: Inputs, key: DropoutKey | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """(output or objective, losses_BL of the head)."""
        module = self.units[unit]
        if unit == 0:
            return module(inputs.tokens_BL, inputs.positions_BL, key), None
        if unit == self.head:
            return module(x, inputs.targets_BL, scale)
        return module(x, inputs.positions_BL, inputs.documents_BL, key), None

    def _run_alone(
        self, unit: int, x: Tensor | None, inputs: Inputs, key: DropoutKey | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """As `_run`, without anything for a backward.

        A compiled unit runs as it does in training and what it kept is dropped: without gradients it would be compiled
        once more, and other code may have other bits.
        """
        with torch.set_grad_enabled(unit in self.compiled):
            if x is not None and unit in self.compiled:
                x = x.detach().requires_grad_()
            y, losses_BL = self._run(unit, x, inputs, key, scale)
        return y.detach(), losses_BL

    def _backward_at_once(self, unit: int, trail: Trail, dy: Tensor | None, microbatch: int) -> Tensor | None:
        self.zero.open(unit)
        dx, grads = self._backward_unit(unit, trail, dy)
        self.zero.add(unit, grads, microbatch)
        return dx

    def _backward_unit(
        self, unit: int, trail: Trail, dy: Tensor | None
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """(dx, gradients in the order of the unit's leaves)."""
        self.zero.enter(unit)
        x, y = trail.hidden.pop(), trail.outputs.pop()
        if y is None:
            with torch.enable_grad():
                y, _ = self._run(unit, x, trail.inputs, trail.key, trail.scale)
        leaves = self.zero.leaves[unit]
        wanted = [*([] if x is None else [x]), *(leaf for leaf in leaves if leaf.requires_grad)]
        if not wanted:
            return None, [None] * len(leaves)
        found = list(torch.autograd.grad(y, wanted, dy, allow_unused=True))
        dx = found.pop(0) if x is not None else None
        return dx, [found.pop(0) if leaf.requires_grad else None for leaf in leaves]
