"""ZeRO over flat groups: who holds the weights, gradients and optimizer state of a group, and when they move.

    stage 0   every rank updates the whole group; reduced gradients are gathered
    stage 1   rank r updates shard r of dp; updated weights are gathered ("published")

    forward, backward    leaves of the units are views of `weights_P`
    add                  gradients of one unit and microbatch go to the reduction of their groups
    reduce               shard gradients [S], equal in bits for every stage and dp
    publish              after the update: weights travel while the next forward waits only for what it uses

Shape letters: P elements of the padded group, S = P / dp elements of a shard, U elements that this rank updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sirara.comm.group import Comm, Transfer
from sirara.errors import InvariantError
from sirara.parallel.reduce import FastSum, GradientSum, Pool
from sirara.pure.families import TensorSpec
from sirara.pure.groups import Group
from sirara.pure.tree import Deal

Tensor = torch.Tensor
InitSlice = Callable[[TensorSpec, int, int], Tensor]
"""(tensor, start, stop) -> its initial elements [start, stop), 1-D, of any float dtype."""


@dataclass(slots=True)
class FlatGroup:
    """One flat group as it lives on one rank.

    Attributes:  weights_P: what forward reads, in the model dtype.
                 master_U: what the optimizer updates; a view of weights_P when both have one dtype.
                 shard: flat elements [lo, hi) whose reduced gradient and saved state are this rank's.
                 updated: flat elements that this rank updates: the shard, or all of it at stage 0.
    """

    group: Group
    weights_P: Tensor
    master_U: Tensor
    shard: tuple[int, int]
    updated: tuple[int, int]
    sums: list[GradientSum]
    publishing: Transfer | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def has_master(self) -> bool:
        return self.master_U.dtype != self.weights_P.dtype


class Zero:
    """All flat groups of one stage's units on one rank.

    Args:  units: modules whose parameters may still lie on the meta device; they become views of flat buffers.
           stage: ZeRO stage 0 or 1.  dtype: of weights.  sum_dtype: of gradient sums and masters.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        groups: Sequence[Group],
        *,
        comm: Comm,
        deal: Deal,
        stage: int,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        device: torch.device,
        fast: bool,
    ) -> None:
        if stage not in (0, 1):
            raise InvariantError(f"ZeRO stage {stage} does not run yet: configuration must refuse it")
        self.comm, self.stage, self.pool, self.sum_dtype = comm, stage, Pool(device), sum_dtype
        self.leaves: list[list[nn.Parameter]] = [[] for _ in units]
        self._routes: list[list[tuple[int, int, int]]] = [[] for _ in units]
        self.groups: list[FlatGroup] = []
        tag = 1
        for group in groups:
            shard = group.shard_numel(comm.size)
            weights_P = torch.zeros(shard * comm.size, dtype=dtype, device=device)
            lo, hi = comm.rank * shard, (comm.rank + 1) * shard
            updated = (lo, hi) if stage else (0, shard * comm.size)
            master_U = weights_P[slice(*updated)]
            if dtype != sum_dtype:
                master_U = master_U.to(sum_dtype)
            make = FastSum if fast else GradientSum
            sums = [
                make(
                    f"{group.name}#{n}" if n else group.name,
                    group,
                    comm=comm,
                    deal=deal,
                    leaf_dtype=dtype,
                    dtype=sum_dtype,
                    pool=self.pool,
                    tag=tag + n,
                )
                for n in range(len(group.uses))
            ]
            tag += len(sums)
            self.groups.append(FlatGroup(group, weights_P, master_U, (lo, hi), updated, sums))
            self._bind(units, self.groups[-1])
        self.publish_tag = tag

    def _bind(self, units: Sequence[nn.Module], flat: FlatGroup) -> None:
        """Makes the units' parameters views of the group; a second use gets a leaf of its own on the same storage."""
        for n, use in enumerate(flat.group.uses):
            leaves = self.leaves[use.unit]
            self._routes[use.unit].append((len(self.groups) - 1, n, len(leaves)))
            for slot, local in zip(flat.group.slots, use.leaves, strict=True):
                view = flat.weights_P[slot.start : slot.start + slot.numel].view(slot.tensor.shape)
                owner, _, name = local.rpartition(".")
                parameter = nn.Parameter(view)
                setattr(units[use.unit].get_submodule(owner), name, parameter)
                leaves.append(parameter)

    def initialise(self, init_slice: InitSlice) -> None:
        """Draws this rank's shard of every weight and publishes it; no rank draws what another one owns."""
        for flat in self.groups:
            for piece in flat.group.pieces(*flat.shard):
                values = init_slice(piece.tensor, piece.start, piece.stop)
                stop = piece.flat + piece.stop - piece.start
                flat.weights_P[piece.flat : stop].copy_(values)
                if flat.has_master:
                    # The master starts from the unrounded value; weights are always its rounding.
                    at = piece.flat - flat.updated[0]
                    flat.master_U[at : at + piece.stop - piece.start].copy_(values)
        self.share_loaded()

    def round_masters(self) -> None:
        """Rounds this rank's masters to weights, where the two differ."""
        for flat in self.groups:
            if flat.has_master:
                flat.weights_P[slice(*flat.updated)].copy_(flat.master_U)

    def share_loaded(self) -> None:
        """After every rank filled its shards of weights and masters: completes what the stage holds in full."""
        for n, flat in enumerate(self.groups):
            self.comm.all_gather_shards(
                f"publish {flat.group.name}", flat.weights_P, tag=self.publish_tag + n
            ).wait()
            if flat.has_master and not self.stage:
                self.comm.all_gather_shards(
                    f"masters {flat.group.name}", flat.master_U, tag=self.publish_tag + n
                ).wait()
            if not self.stage:
                for name, tensor_U in flat.state.items():
                    self.comm.all_gather_shards(
                        f"{name} {flat.group.name}", tensor_U, tag=self.publish_tag + n
                    ).wait()

    def shard_of(self, flat: FlatGroup, tensor_U: Tensor) -> Tensor:
        """The part of an updated-range tensor (master, optimizer state) that this rank owns and saves."""
        lo = flat.shard[0] - flat.updated[0]
        return tensor_U[lo : lo + flat.shard[1] - flat.shard[0]]

    def wait(self, unit: int) -> None:
        """Returns when the weights of this unit may be read."""
        for index, _, _ in self._routes[unit]:
            flat = self.groups[index]
            if flat.publishing is not None:
                flat.publishing.wait()
                flat.publishing = None

    def wait_all(self) -> None:
        """Returns when all weights may be read."""
        for unit in range(len(self.leaves)):
            self.wait(unit)

    def add(self, unit: int, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        """Takes one unit's gradients of one microbatch, in the order of `leaves[unit]`."""
        for index, use, first in self._routes[unit]:
            flat = self.groups[index]
            flat.sums[use].add(microbatch, grads[first : first + len(flat.group.slots)])

    def reduce(self) -> list[Tensor]:
        """Per group the shard [S] of the step's gradient, summed over uses; give it back with `release`."""
        # A rank that had no microbatch has not waited for its weights yet, and others wait until it takes theirs.
        self.wait_all()
        # The order in which backward reaches them: exchanges are begun and waited for in one order on all ranks.
        uses = [(index, use) for routes in reversed(self._routes) for index, use, _ in routes]
        for index, use in uses:
            self.groups[index].sums[use].join_last_round()
        done = {(index, use): self.groups[index].sums[use].finish() for index, use in uses}
        shards: list[Tensor] = []
        for index, flat in enumerate(self.groups):
            first, *others = (done[index, use] for use in range(len(flat.sums)))
            for other in others:
                first.add_(other)
                self.pool.give(other)
            shards.append(first)
        return shards

    def widen(self, shards: list[Tensor]) -> list[Tensor]:
        """Per group the gradient of the updated range [U]: the shard itself, or at stage 0 all shards gathered."""
        if self.stage or self.comm.size == 1:
            return shards
        full: list[Tensor] = []
        transfers: list[Transfer] = []
        for n, (flat, shard_S) in enumerate(zip(self.groups, shards, strict=True)):
            full_P = self.pool.take(flat.weights_P.numel(), shard_S.dtype)
            full_P[slice(*flat.shard)].copy_(shard_S)
            transfers.append(
                self.comm.all_gather_shards(f"gradients {flat.group.name}", full_P, tag=self.publish_tag + n)
            )
            full.append(full_P)
        for transfer in transfers:
            transfer.wait()
        self.release(shards)
        return full

    def release(self, grads: Sequence[Tensor]) -> None:
        """Takes gradients back after the update."""
        for grad in grads:
            self.pool.give(grad)

    def publish(self) -> None:
        """After the update: rounds masters to weights and starts gathering them, first unit first."""
        self.round_masters()
        for n, flat in enumerate(self.groups):
            if self.stage:
                flat.publishing = self.comm.all_gather_shards(
                    f"publish {flat.group.name}", flat.weights_P, tag=self.publish_tag + n
                )
