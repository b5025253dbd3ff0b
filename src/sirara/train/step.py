"""One optimizer step, one pipeline:  accumulate -> reduce -> finite? -> norm -> clip -> update -> publish.

Everything that ranks must agree on before the update travels in one small gather: losses, finiteness, norm sums and
requests (save, stop).  So no rank can take a branch that another one does not take.
"""

from dataclasses import dataclass
from math import fsum, inf, sqrt

import numpy as np
import torch

from sirara.comm.group import Comm
from sirara.parallel.stage import Inputs, Stage
from sirara.parallel.zero import FlatGroup
from sirara.pure.groups import GRAIN
from sirara.pure.rng import DropoutKey
from sirara.pure.tree import Deal, aligned_nodes, combine, node_sums
from sirara.train.optim import Optimizer, Range

Tensor = torch.Tensor

HALF = GRAIN // 2
"""Norm sums are rows of half a grain, so that no shard is a single row, which torch would split by threads."""

_FLAT_BITS = 44
"""A bad element is reported as group * 2^44 + flat index, exact in a float64 up to 512 groups of 2^44 elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; `lr` is the rate of its update.  `bad_parameter` names the first non-finite gradient: then
    nothing was updated and no rate was consumed."""

    loss: float
    grad_norm: float
    lr: float
    target_tokens: int
    request: int
    bad_parameter: str | None = None

    @property
    def skipped(self) -> bool:
        return self.bad_parameter is not None


@dataclass(slots=True, kw_only=True)
class Step:
    """The step pipeline of one rank.

    Args:  clip: largest gradient norm, or None.  deal: which rank computes which microbatch.
    """

    stage: Stage
    comm: Comm
    deal: Deal
    optimizer: Optimizer
    clip: float | None

    def accumulate(
        self, inputs: dict[int, Inputs], *, valid_targets: int, keys: dict[int, DropoutKey] | None
    ) -> list[float]:
        """Forward and backward of this rank's microbatches in ascending order; returns their loss sums."""
        scale = 1.0 / max(1, valid_targets)
        losses: list[Tensor] = []
        for i in self.deal.mine(self.comm.rank):
            trail, losses_BL = self.stage.forward(inputs[i], keys[i] if keys else None, scale)
            self.stage.backward(trail, i)
            losses.append(losses_BL)
        # Read only now: on an accelerator each read waits for the device.
        return [loss_sum(losses_BL) for losses_BL in losses]

    def finish(
        self, losses: list[float], *, valid_targets: int, lr: float, update: int, request: int
    ) -> StepResult:
        """Reduces, agrees, clips, updates and publishes.

        Args:  update: number of this update, 1 is the first.  request: this rank's wish; the largest one is returned.
        """
        zero = self.stage.zero
        with torch.no_grad():
            shards = zero.reduce()
            agreed = self._agree(shards, losses, request)
            loss = agreed.loss_sum / max(1, valid_targets)
            if agreed.bad is not None:
                zero.release(shards)
                return StepResult(
                    loss=loss,
                    grad_norm=agreed.norm,
                    lr=0.0,
                    target_tokens=valid_targets,
                    request=agreed.request,
                    bad_parameter=self._name(agreed.bad),
                )
            grads = zero.widen(shards)
            clipped = self.clip is not None and agreed.norm > self.clip
            shrink = (agreed.norm + 1e-6) / self.clip if clipped and self.clip else 1.0
            ranges = [
                Range(weights_U=flat.master_U, grad_U=grad, state=flat.state, decay=flat.group.decay)
                for flat, grad in zip(zero.groups, grads, strict=True)
            ]
            self.optimizer.update(ranges, lr=lr, update=update, shrink=shrink)
            zero.release(grads)
            zero.publish()
        return StepResult(
            loss=loss, grad_norm=agreed.norm, lr=lr, target_tokens=valid_targets, request=agreed.request
        )

    def _agree(self, shards: list[Tensor], losses: list[float], request: int) -> "Agreed":
        """One gather: [request, first bad element, losses of this rank, norm sums per group and aligned node]."""
        zero, deal, comm = self.stage.zero, self.deal, self.comm
        slots = max(len(deal.mine(r)) for r in range(comm.size))
        sums, bad = grain_sums(shards, zero.groups)
        nodes = [node_sums(s, flat.shard[0] // HALF) for s, flat in zip(sums, zero.groups, strict=True)]
        widths = [_node_count(flat, comm.size) for flat in zero.groups]
        row = np.zeros(2 + slots + sum(widths))
        row[0], row[1] = request, bad
        row[2 : 2 + len(losses)] = losses
        at = 2 + slots
        for values, width in zip(nodes, widths, strict=True):
            row[at : at + len(values)] = values
            at += width
        rows = comm.gather_rows("agree on the step", torch.from_numpy(row).to(self._device())).cpu().numpy()
        loss = 0.0
        for i in range(deal.microbatches):
            rank, place = deal.owner(i)
            loss += float(rows[rank, 2 + place])
        first_bad = float(rows[:, 1].min())
        total, at = 0.0, 2 + slots
        for flat, width in zip(zero.groups, widths, strict=True):
            total += combine(_nodes_of(flat, rows[:, at : at + width], comm.size), flat.group.numel // HALF)
            at += width
        return Agreed(
            loss_sum=loss,
            norm=sqrt(total) if total >= 0 else total,
            bad=None if first_bad == inf else int(first_bad),
            request=int(rows[:, 0].max()),
        )

    def _device(self) -> torch.device:
        return self.stage.zero.pool.device

    def _name(self, bad: int) -> str:
        group, flat = bad >> _FLAT_BITS, bad & ((1 << _FLAT_BITS) - 1)
        for piece in self.stage.zero.groups[group].group.pieces(flat, flat + 1):
            return piece.tensor.name
        return self.stage.zero.groups[group].group.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after the gather; `bad` is the first non-finite gradient element, in canonical order."""

    loss_sum: float
    norm: float
    bad: int | None
    request: int


def loss_sum(losses_BL: Tensor) -> float:
    """The exactly rounded sum of token losses: the same for any order, device or number of threads."""
    return fsum(losses_BL.detach().double().flatten().tolist())


def grain_sums(shards: list[Tensor], groups: list[FlatGroup]) -> tuple[list[np.ndarray], float]:
    """Per group the sums of squares of each half grain, float64, and the first non-finite element (inf when none)."""
    norms = [torch.linalg.vector_norm(shard_S.view(-1, HALF), dim=1) for shard_S in shards]
    flat = torch.cat(norms).cpu().double().numpy()
    parts = np.split(flat, np.cumsum([len(n) for n in norms])[:-1])
    bad = inf if np.isfinite(flat).all() else _first_bad(shards, groups, parts)
    return [np.square(part) for part in parts], bad


def _first_bad(shards: list[Tensor], groups: list[FlatGroup], norms: list[np.ndarray]) -> float:
    """The first non-finite element, inf when there is none: then norms that only overflowed are made right.

    A true fault spoils every norm, so nothing is looked at behind the first one.
    """
    for index, (shard_S, norm) in enumerate(zip(shards, norms, strict=True)):
        for row in np.flatnonzero(~np.isfinite(norm)).tolist():
            values = shard_S.view(-1, HALF)[row].double()
            wrong = (~torch.isfinite(values)).nonzero().flatten()
            if len(wrong):
                element = groups[index].shard[0] + row * HALF + int(wrong[0])
                return float((index << _FLAT_BITS) + element)
            norm[row] = float(values.square().sum().sqrt())
    return inf


def _node_count(flat: FlatGroup, ranks: int) -> int:
    width = (flat.shard[1] - flat.shard[0]) // HALF
    return max(len(aligned_nodes(r * width, (r + 1) * width)) for r in range(ranks))


def _nodes_of(flat: FlatGroup, rows: np.ndarray, ranks: int) -> dict[tuple[int, int], float]:
    width = (flat.shard[1] - flat.shard[0]) // HALF
    return {
        node: float(rows[rank, n])
        for rank in range(ranks)
        for n, node in enumerate(aligned_nodes(rank * width, (rank + 1) * width))
    }
