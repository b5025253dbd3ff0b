"""One optimizer step, one pipeline:  accumulate -> reduce -> finite? -> norm -> clip -> update -> publish.

Everything that ranks must agree on before the update travels in one small gather: losses, finiteness, norm sums and
requests (save, stop).  So no rank can take a branch that another one does not take.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum

import numpy as np
import torch

from sirara.mesh import Mesh
from sirara.parallel.parallelize import Stage
from sirara.parallel.pipeline import Work
from sirara.parallel.stage import Inputs
from sirara.pure.groups import Group
from sirara.pure.rng import DropoutKey
from sirara.pure.tree import Deal
from sirara.train.agree import Agreement
from sirara.train.ranges import Optimizer, Plane, Range

Tensor = torch.Tensor


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

    Args:  clip: largest gradient norm, or None.  deal: which data-parallel rank computes which microbatch.
           mesh: where this rank and all others stand.
    """

    stage: Stage
    mesh: Mesh
    deal: Deal
    optimizer: Optimizer
    clip: float | None
    agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.stage, self.mesh, self.deal)
        self.optimizer.prepare(
            Plane(
                groups=[self._trained(groups) for groups in self.stage.groups],
                comm=self.stage.comms.plane,
                dp=self.mesh.dp,
                sharded=self.stage.zero.stage > 0,
            )
        )

    def _trained(self, groups: Sequence[Group]) -> list[Group]:
        """Of a tp rank's groups those that this pipeline stage updates, in the order of its ranges."""
        indices = {flat.index for flat in self.stage.zero.trained}
        return [group for index, group in enumerate(groups) if index in indices]

    def accumulate(
        self, inputs: dict[int, Inputs], *, valid_targets: int, keys: dict[int, DropoutKey] | None
    ) -> list[float]:
        """Forward and backward of this rank's microbatches in ascending order; returns their loss sums.

        Stages before the last one return none.
        """
        self.stage.zero.begin(self.stage.order)
        work = [
            Work(microbatch=i, inputs=inputs[i], key=keys[i] if keys else None)
            for i in self.deal.mine(self.mesh.coordinate("dp"))
        ]
        losses = self.stage.pipeline.run(work, scale=1.0 / max(1, valid_targets))
        # Read only now: on an accelerator each read waits for the device.
        return [loss_sum(losses_BL) for losses_BL in losses]

    def finish(
        self,
        losses: list[float],
        *,
        valid_targets: int,
        lr: float,
        update: int,
        request: int,
        facts: Sequence[float] = (),
        hear: Callable[[np.ndarray], None] | None = None,
    ) -> StepResult:
        """Reduces, agrees, clips, updates and publishes.

        Args:  update: number of this update, 1 is the first.  request: this rank's wish; the largest one is returned.
               facts: what this rank measured of the step before; hear: called with those of all ranks, once they agree.
        """
        zero = self.stage.zero
        with torch.no_grad():
            shards = zero.reduce()
            agreed = self.agreement.reach(shards, losses, request, facts)
            if hear is not None:
                hear(agreed.facts)
            loss = agreed.loss_sum / max(1, valid_targets)
            if agreed.bad is not None:
                zero.release(shards)
                return StepResult(
                    loss=loss,
                    grad_norm=agreed.norm,
                    lr=0.0,
                    target_tokens=valid_targets,
                    request=agreed.request,
                    bad_parameter=self.agreement.name_of(agreed.bad),
                )
            grads = zero.widen(shards)
            clipped = self.clip is not None and agreed.norm > self.clip
            shrink = (agreed.norm + 1e-6) / self.clip if clipped and self.clip else 1.0
            ranges = [
                Range(weights_U=flat.master_U, grad_U=grad, state=flat.state, decay=flat.group.decay)
                for flat, grad in zip(zero.trained, grads, strict=True)
                if flat.master_U is not None
            ]
            self.optimizer.update(ranges, lr=lr, update=update, shrink=shrink)
            zero.release(grads)
            zero.publish()
        return StepResult(
            loss=loss, grad_norm=agreed.norm, lr=lr, target_tokens=valid_targets, request=agreed.request
        )


def loss_sum(losses_BL: Tensor) -> float:
    """The exactly rounded sum of token losses: the same for any order, device or number of threads."""
    return fsum(losses_BL.detach().double().flatten().tolist())
