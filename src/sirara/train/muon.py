"""Muon on flat ranges: matrices of blocks move along their orthogonalised momentum, all else is left to AdamW.

    every rank    momentum = m * momentum + (1 - m) * gradient       on its flat ranges, element by element
                  direction = m * momentum + (1 - m) * gradient      Nesterov's; else the momentum
    to the owner  the parts of a matrix travel once, to one rank of its pipeline stage (pure/muon.py)
    owner         orthogonal = Newton-Schulz(direction), in fp32, fp64 for an fp64 model
    back          each part returns to the ranks that update it
    every rank    weight = (1 - lr * weight_decay) * weight - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal

A matrix is whole when it is orthogonalised, and the mean gradient of the whole batch is in it, so the update has the
same bits on every layout of data-parallel ranks and every stage of ZeRO.  The factor 0.2 * sqrt(max(rows, columns))
gives an update the size that AdamW's has, so that its learning rate and weight decay carry over ("match_rms_adamw" of
torch.optim.Muon; arXiv:2502.16982, section 2.2).

Matrices travel in rounds, at most one per owner: while one is orthogonalised the next one arrives and the last one
leaves.  A rank holds two matrices besides the work space of the product.

Source: Keller Jordan et al., Muon, https://kellerjordan.github.io/posts/muon.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch

from sirara.errors import InvariantError
from sirara.model.ops import product
from sirara.pure.groups import Group
from sirara.pure.muon import is_matrices, muon_plan
from sirara.train.ranges import Optimizer, Plane, Range
from sirara.train.travel import Travel

Tensor = torch.Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: chosen for its slope at 0, so singular values end between 0.7 and 1.2, not at 1."""
_LEAST_NORM = 1e-7
_NORMS_AT_ONCE = 16_384


@dataclass(slots=True, kw_only=True)
class Muon:
    """The optimizer; its state is "momentum" for groups of matrices and that of `rest` for all others."""

    rest: Optimizer
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    _travel: Travel | None = field(default=None, init=False)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum", *self.rest.state_names)

    def states_of(self, group: Group) -> tuple[str, ...]:
        return ("momentum",) if is_matrices(group) else self.rest.states_of(group)

    def prepare(self, plane: Plane) -> None:
        plan = muon_plan(plane.groups, dp=plane.dp, sharded=plane.sharded, steps=self.steps)
        if plane.comm.size != plan.places:
            raise InvariantError(
                f"Muon needs the {plan.places} ranks of a pipeline stage, not {plane.comm.size}",
                why=f"dp {plan.dp} * tp {plan.tp}",
            )
        self._travel = Travel(plane.comm, plan)

    def update(self, ranges: Sequence[Range], *, lr: float, update: int, shrink: float = 1.0) -> None:
        travel = self._travel
        if travel is None:
            raise InvariantError("Muon.update was called before prepare")
        travel.check([len(r.weights_U) for r in ranges])
        matrices = {g: r for g, r in enumerate(ranges) if g in travel.groups}
        for r in matrices.values():
            self._direct(r, shrink)
        directions = {g: r.grad_U for g, r in matrices.items()}
        for matrix, cuts in travel.through(directions, lambda x_MN: orthogonalise(x_MN, self.steps)):
            r, step = matrices[matrix.group], lr * 0.2 * sqrt(max(matrix.shape))
            for cut in cuts:
                self._move(r.weights_U[cut], r.grad_U[cut], step, lr * self.weight_decay if r.decay else 0.0)
        others = [r for g, r in enumerate(ranges) if g not in travel.groups]
        self.rest.update(others, lr=lr, update=update, shrink=shrink)

    def _direct(self, r: Range, shrink: float) -> None:
        """Moves the momentum, and makes of the gradient the direction that is to be orthogonalised."""
        if shrink != 1.0:
            r.grad_U.div_(shrink)
        momentum, grad = r.state["momentum"], r.grad_U
        # Products and sums are separate operations: a fused multiply-add would round differently at cuts.
        momentum.mul_(self.momentum).add_(grad.mul_(1 - self.momentum))
        if self.nesterov:
            grad.add_(momentum.mul(self.momentum))
        else:
            grad.copy_(momentum)

    @staticmethod
    def _move(weights_U: Tensor, orthogonal_U: Tensor, step: float, decay: float) -> None:
        if decay:
            weights_U.mul_(1 - decay)
        weights_U.sub_(orthogonal_U.mul_(step))


def orthogonalise(x_MN: Tensor, steps: int = 5) -> Tensor:
    """A matrix near the orthogonal factor of x, by Newton-Schulz: singular values s become f(f(...f(s / |x|))).

    f(s) = a s + b s^3 + c s^5.  Equal bits for any number of threads; a matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    wide_MN = x_MN.T if x_MN.shape[0] > x_MN.shape[1] else x_MN
    wide_MN = wide_MN / _norm(x_MN).clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram_MM = product(wide_MN, wide_MN.T)
        polynomial_MM = product(gram_MM, gram_MM).mul_(c).add_(gram_MM.mul_(b))
        wide_MN = product(polynomial_MM, wide_MN, onto=wide_MN.mul(a))
    return wide_MN.T if x_MN.shape[0] > x_MN.shape[1] else wide_MN


def _norm(x_MN: Tensor) -> Tensor:
    """The Frobenius norm; every sum is short or one of many, so threads do not cut it."""
    rows_M = torch.linalg.vector_norm(x_MN, dim=1).double()
    parts = [torch.linalg.vector_norm(part) for part in rows_M.split(_NORMS_AT_ONCE)]
    return torch.linalg.vector_norm(torch.stack(parts)).to(x_MN.dtype)
