"""Logical tensors as the flat ranges of one place of a pipeline stage, for tests of optimizers without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch

from sirara.comm.group import Comm
from sirara.pure.families import ModelShape, unit_specs
from sirara.pure.groups import Group, flat_groups
from sirara.train.ranges import Optimizer, Plane, Range

Tensor = torch.Tensor


def drawn(shape: ModelShape, salt: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A normal value for every logical tensor: a function of its name and the salt."""
    return {
        t.name: torch.from_numpy(
            np.random.default_rng([salt, crc32(t.name.encode())]).normal(size=t.shape) * 0.1
        ).to(dtype)
        for unit in unit_specs(shape)
        for t in unit.tensors
        if t.tied_to is None
    }


def flat_range(group: Group, tensors: Mapping[str, Tensor], lo: int, hi: int) -> Tensor:
    """Elements [lo, hi) of the group when its tensors have these values; padding is zero."""
    dtype = next(iter(tensors.values())).dtype
    flat = torch.zeros(max(hi, group.numel), dtype=dtype)
    for slot in group.slots:
        flat[slot.start : slot.start + slot.numel] = tensors[slot.tensor.name][slot.box.slices].reshape(-1)
    return flat[lo:hi].clone()


@dataclass(slots=True, kw_only=True)
class Place:
    """One rank's flat ranges: weights and state, by group."""

    groups: Sequence[Group]
    bounds: list[tuple[int, int]]
    weights: list[Tensor]
    state: list[dict[str, Tensor]]
    optimizer: Optimizer

    def update(self, grads: Mapping[str, Tensor], *, lr: float, update: int, shrink: float = 1.0) -> None:
        """One update with these gradients of logical tensors."""
        ranges = [
            Range(weights_U=w, grad_U=flat_range(group, grads, *bounds), state=state, decay=group.decay)
            for group, bounds, w, state in zip(
                self.groups, self.bounds, self.weights, self.state, strict=True
            )
        ]
        self.optimizer.update(ranges, lr=lr, update=update, shrink=shrink)


def place_of(
    optimizer: Optimizer, shape: ModelShape, *, comm: Comm, dp: int, sharded: bool, dtype: torch.dtype
) -> Place:
    """This rank of dp * tp, with drawn weights and an optimizer that is ready."""
    tp = comm.size // dp
    groups = [flat_groups(unit_specs(shape), tp=tp, tp_rank=rank) for rank in range(tp)]
    optimizer.prepare(Plane(groups=groups, comm=comm, dp=dp, sharded=sharded))
    mine = groups[comm.rank % tp]
    shards = [group.shard_numel(dp) for group in mine]
    first = comm.rank // tp
    bounds = [(first * s, (first + 1) * s) if sharded else (0, dp * s) for s in shards]
    weights = drawn(shape, 0, dtype)
    held = [flat_range(group, weights, *b) for group, b in zip(mine, bounds, strict=True)]
    state = [
        {name: torch.zeros_like(w) for name in optimizer.states_of(group)}
        for group, w in zip(mine, held, strict=True)
    ]
    return Place(groups=mine, bounds=bounds, weights=held, state=state, optimizer=optimizer)
