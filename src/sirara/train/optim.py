"""Optimizers on flat ranges: element by element, a function of (weight, gradient, state, lr, update number).

State is named tensors beside the weights, never a step counter: the number of updates belongs to TrainState, so an
optimizer cannot disagree with the run about it.  Arithmetic has equal bits on any cut at multiples of 16 elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sirara.errors import ConfigError
from sirara.pure.groups import Group
from sirara.train.muon import Muon
from sirara.train.ranges import Optimizer, Plane, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW by torch's fused kernel.  Source: arXiv:1711.05101."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def states_of(self, group: Group) -> tuple[str, ...]:
        return self.state_names

    def prepare(self, plane: Plane) -> None:
        """Nothing: each element is updated where it lies."""

    def update(self, ranges: Sequence[Range], *, lr: float, update: int, shrink: float = 1.0) -> None:
        for decay in (True, False):
            chosen = [r for r in ranges if r.decay is decay]
            if not chosen:
                continue
            scale = None
            if shrink != 1.0 and chosen[0].weights_U.dtype == torch.float64:
                # The kernel's own division would round the divisor to float32.
                torch._foreach_div_([r.grad_U for r in chosen], shrink)
            elif shrink != 1.0:
                # The kernel divides while it reads: clipping costs no pass over memory of its own.
                scale = torch.full((), shrink, device=chosen[0].weights_U.device)
            # The kernel reads the step as a float32 tensor on the weights' device.
            steps = [torch.full((), float(update), device=r.weights_U.device) for r in chosen]
            torch._fused_adamw_(
                [r.weights_U for r in chosen],
                [r.grad_U for r in chosen],
                [r.state["exp_avg"] for r in chosen],
                [r.state["exp_avg_sq"] for r in chosen],
                [],
                steps,
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if decay else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """Lion: sign of an interpolated momentum; one state tensor.  Source: arXiv:2302.06675, algorithm 2."""

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    state_names: tuple[str, ...] = ("momentum",)

    def states_of(self, group: Group) -> tuple[str, ...]:
        return self.state_names

    def prepare(self, plane: Plane) -> None:
        """Nothing: each element is updated where it lies."""

    def update(self, ranges: Sequence[Range], *, lr: float, update: int, shrink: float = 1.0) -> None:
        b1, b2 = self.betas
        for r in ranges:
            momentum = r.state["momentum"]
            if shrink != 1.0:
                r.grad_U.div_(shrink)
            # Products and sums are separate operations: a fused multiply-add would round differently at cuts.
            direction = momentum.mul(b1).add_(r.grad_U.mul(1 - b1)).sign_()
            if r.decay and self.weight_decay:
                r.weights_U.mul_(1 - lr * self.weight_decay)
            r.weights_U.sub_(direction.mul_(lr))
            momentum.mul_(b2).add_(r.grad_U.mul_(1 - b2))


def make_optimizer(
    *,
    name: str,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
) -> Optimizer:
    """The optimizer that `train.optimizer` names; the last three are Muon's alone."""
    if name == "adamw":
        return AdamW(betas=betas, eps=eps, weight_decay=weight_decay)
    if name == "lion":
        return Lion(betas=betas, weight_decay=weight_decay)
    if name == "muon":
        rest = AdamW(betas=betas, eps=eps, weight_decay=weight_decay)
        return Muon(
            rest=rest, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, steps=ns_steps
        )
    raise ConfigError(f"train.optimizer.name={name}: use adamw, lion or muon")
