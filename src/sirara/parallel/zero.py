"""ZeRO over flat groups: who holds the weights, gradients and optimizer state of a group, and when they move.

    stage   weights            gradient sums         optimizer state    moves over dp, per step
    0       all                reduced shard, then   all                reduce, gather gradients
                               all
    1       all                reduced shard         shard              reduce, gather ("publish") weights
    2       all                shard, from the       shard              reduce per microbatch, publish
                               first microbatch on
    3       shard              as in 2               shard              reduce and two gathers per microbatch

    enter(unit)          before the unit computes: its weights may be read
    add, skip            gradients of one unit and microbatch go to the reduction of their groups
    reduce               shard gradients [S], equal in bits for every stage and dp
    publish              after the update: weights travel while the next forward waits only for what it uses

Shape letters: P elements of the padded group, S = P / dp elements of a shard, U elements that this rank updates.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from sirara.comm.group import Transfer
from sirara.comm.world import Comms
from sirara.errors import InvariantError
from sirara.parallel.flat import FlatGroup, InitSlice, Places, read_piece
from sirara.parallel.reduce import FastSum, GradientSum, Pool
from sirara.parallel.window import Window
from sirara.pure.groups import Group
from sirara.pure.tree import Deal

Tensor = torch.Tensor
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Zero:
    """All flat groups of one rank's units.

    Args:  units: modules by number in the model; their parameters may still lie on the meta device and become views of
           flat buffers.  groups: all groups of the model as this tensor-parallel rank holds them.
           home: unit -> pipeline rank that runs it.  stage: ZeRO stage.  dtype: of weights.  sum_dtype: of gradient
           sums and masters.  keep: at stage 3, gather once per step and keep the weights for all of it.
    """

    def __init__(
        self,
        units: Mapping[int, nn.Module],
        groups: Sequence[Group],
        *,
        comms: Comms,
        home: Callable[[int], int],
        deal: Deal,
        stage: int,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        device: torch.device,
        fast: bool = False,
        keep: bool = False,
    ) -> None:
        self.comms, self.stage, self.pool, self.sum_dtype = comms, stage, Pool(device), sum_dtype
        self.deal, self.fast, self.device, self.dtype = deal, fast, device, dtype
        self.leaves: dict[int, list[nn.Parameter]] = {unit: [] for unit in units}
        self._routes: dict[int, list[tuple[int, int, int]]] = {unit: [] for unit in units}
        self.sink = Places()
        self._pending: deque[GradientSum] = deque()
        self._mine = deal.mine(comms.dp.rank)
        self.groups: list[FlatGroup] = []
        self._tag = 1
        for index, group in enumerate(groups):
            homes = [home(use.unit) for use in group.uses]
            if comms.pp.rank in homes:
                self.groups.append(self._make(index, group, units, homes))
        self.window = self._open_window(units, keep) if stage == 3 else None
        for place, flat in enumerate(self.groups):
            self._bind(units, place, flat)

    # ---- making

    def _make(
        self,
        index: int,
        group: Group,
        units: Mapping[int, nn.Module],
        homes: Sequence[int],
    ) -> FlatGroup:
        comm, weights = self.comms.dp, self.dtype_of(group)
        numel = group.shard_numel(comm.size)
        shard = (comm.rank * numel, (comm.rank + 1) * numel)
        weights_P = None
        if self.stage < 3:
            weights_P = torch.zeros(numel * comm.size, dtype=weights, device=self.device)
            weights_S = weights_P[slice(*shard)]
        else:
            weights_S = torch.zeros(numel, dtype=weights, device=self.device)
        guest = homes[0] != self.comms.pp.rank
        others = sorted(set(homes[1:]) - {homes[0]})
        flat = FlatGroup(
            index=index,
            group=group,
            weights_P=weights_P,
            weights_S=weights_S,
            master_U=None,
            shard=shard,
            updated=shard if self.stage else (0, numel * comm.size),
            sums={},
            guest=guest,
            partners=(homes[0],) if guest else tuple(others),
        )
        if flat.trained:
            same = weights == self.sum_dtype
            flat.master_U = flat.weights_U if same else flat.weights_U.to(self.sum_dtype)
        make = FastSum if self.fast else GradientSum
        for n, use in enumerate(group.uses):
            if use.unit in units and group.trainable:
                flat.sums[n] = make(
                    f"{group.name}#{n}" if n else group.name,
                    group,
                    comm=comm,
                    deal=self.deal,
                    leaf_dtype=weights,
                    dtype=self.sum_dtype,
                    pool=self.pool,
                    tag=self._take_tag(),
                    lean=self.stage >= 2,
                )
        return flat

    def dtype_of(self, group: Group) -> torch.dtype:
        """The dtype of a group's weights."""
        return _DTYPES[group.dtype] if group.dtype else self.dtype

    def _take_tag(self) -> int:
        self._tag += 1
        return self._tag - 1

    def _open_window(self, units: Mapping[int, nn.Module], keep: bool) -> Window:
        shards: dict[int, list[tuple[str, Tensor, int]]] = {unit: [] for unit in units}
        for flat in self.groups:
            for use in flat.group.uses:
                if use.unit in units:
                    shards[use.unit].append((flat.group.name, flat.weights_S, self._take_tag()))
        last = max((use.unit for flat in self.groups for use in flat.group.uses), default=0)
        return Window(shards, comm=self.comms.dp, keep=keep, ends_share=0 in units and last in units)

    def _bind(self, units: Mapping[int, nn.Module], place: int, flat: FlatGroup) -> None:
        """Makes the units' parameters views of the group; a second use gets a leaf of its own on the same storage."""
        for n, use in enumerate(flat.group.uses):
            if use.unit not in units:
                continue
            source = flat.weights_P
            if self.window is not None:
                source = self.window.loads[use.unit][len(self._routes[use.unit])].full_P
            if source is None:
                raise InvariantError(f"group {flat.group.name} has no weights to bind to")
            leaves = self.leaves[use.unit]
            self._routes[use.unit].append((place, n, len(leaves)))
            for leaf, local in zip(flat.group.leaves, use.leaves, strict=True):
                view = source.as_strided(leaf.size, leaf.stride, source.storage_offset() + leaf.start)
                owner, _, name = local.rpartition(".")
                # `.data` has a version of its own: autograd must not take a gather anew for a change of the weights.
                parameter = nn.Parameter(view.data, requires_grad=flat.group.trainable)
                setattr(units[use.unit].get_submodule(owner), name, parameter)
                leaves.append(parameter)

    def initialise(self, init_slice: InitSlice) -> None:
        """Draws this rank's shard of every weight and publishes it; no rank draws what another one owns."""
        with torch.no_grad():
            for flat in self.owned:
                for piece in flat.group.pieces(*flat.shard):
                    values = read_piece(piece, init_slice)
                    low = piece.flat - flat.shard[0]
                    flat.weights_S[low : low + len(values)].copy_(values)
                    if flat.has_master and flat.master_U is not None:
                        # The master starts from the unrounded value; weights are always its rounding.
                        low = piece.flat - flat.updated[0]
                        flat.master_U[low : low + len(values)].copy_(values)
        self.share_loaded()

    def round_masters(self) -> None:
        """Rounds this rank's masters to weights, where the two differ."""
        for flat in self.groups:
            if flat.has_master and flat.master_U is not None:
                flat.weights_U.copy_(flat.master_U)

    def share_loaded(self) -> None:
        """After every rank filled its shards of weights and masters: completes what the stage holds in full."""
        for flat in self.groups:
            if flat.trained and not self.stage and flat.master_U is not None:
                held = [("masters", flat.master_U)] if flat.has_master else []
                for name, tensor_U in (*held, *flat.state.items()):
                    self.comms.dp.all_gather_shards(
                        f"{name} {flat.group.name}", tensor_U, tag=self._tag + flat.index
                    ).wait()
        self._share_weights()
        self.wait_all()

    def shard_of(self, flat: FlatGroup, tensor_U: Tensor) -> Tensor:
        """The part of an updated-range tensor (master, optimizer state) that this rank owns and saves."""
        lo = flat.shard[0] - flat.updated[0]
        return tensor_U[lo : lo + flat.shard[1] - flat.shard[0]]

    # ---- forward and backward

    def begin(self, order: Sequence[int]) -> None:
        """Tells the units in the order in which this pass uses their weights."""
        if self.window is not None:
            self.window.begin(order)

    def enter(self, unit: int) -> None:
        """Returns when the weights of this unit may be read; at stage 3 until the next unit but one is entered."""
        for place, _, _ in self._routes[unit]:
            flat = self.groups[place]
            if flat.publishing is not None:
                flat.publishing.wait()
                flat.publishing = None
        if self.window is not None:
            self.window.enter(unit)

    def wait_all(self) -> None:
        """Returns when nothing that was published is on its way any more."""
        for flat in self.groups:
            if flat.publishing is not None:
                flat.publishing.wait()
                flat.publishing = None

    def open(self, unit: int) -> None:
        """Says where the gradients of this unit's next `add` may be written or added (`sink`)."""
        self.sink.clear()
        for place, use, first in self._routes[unit]:
            here = self.groups[place].sums.get(use)
            if here is not None:
                views, onto = here.open()
                known = self.sink.sums if onto else self.sink.fresh
                known.update(zip(map(id, self.leaves[unit][first:]), views, strict=False))

    def add(self, unit: int, grads: Sequence[Tensor | None], microbatch: int) -> None:
        """Takes one unit's gradients of this rank's next microbatch, in the order of `leaves[unit]`.

        Raises:  InvariantError when another microbatch was due: sums are exact in ascending order alone.
        """
        for place, use, first in self._routes[unit]:
            flat = self.groups[place]
            if use not in flat.sums:
                continue
            here = flat.sums[use]
            if here.places >= len(self._mine) or self._mine[here.places] != microbatch:
                raise InvariantError(
                    f"{flat.group.name} got the gradient of microbatch {microbatch} at place {here.places}",
                    why=f"rank {self.comms.world.rank} adds microbatches {self._mine} in this order",
                )
            here.add(grads[first : first + len(flat.group.leaves)])
        self._pace(unit)

    def skip(self, unit: int) -> None:
        """Takes part in the moves of `add` where this rank has no microbatch and its peers have one."""
        for place, use, _ in self._routes[unit]:
            if use in self.groups[place].sums:
                self.groups[place].sums[use].skip()
        self._pace(unit)

    def _pace(self, unit: int) -> None:
        """At stages 2 and 3 ends the exchanges of the units before this one: full gradients of two units at most."""
        if self.stage < 2:
            return
        while self._pending:
            self._pending.popleft().complete()
        self._pending.extend(
            self.groups[place].sums[use]
            for place, use, _ in self._routes[unit]
            if use in self.groups[place].sums
        )

    # ---- the step

    @property
    def trained(self) -> list[FlatGroup]:
        """The groups that this rank updates."""
        return [flat for flat in self.groups if flat.trained]

    @property
    def owned(self) -> list[FlatGroup]:
        """The groups whose state this rank holds and saves, frozen ones included."""
        return [flat for flat in self.groups if not flat.guest]

    def reduce(self) -> list[Tensor]:
        """Per trained group the shard [S] of the step's gradient, summed over uses; give it back with `release`."""
        # A rank that had no microbatch has not waited for its weights yet, and others wait until it takes theirs.
        self.wait_all()
        self._pending.clear()
        # The order in which backward reaches them: exchanges are waited for in one order on all ranks.
        uses = [(place, use) for unit in reversed(self._routes) for place, use, _ in self._routes[unit]]
        done = {(p, use): self.groups[p].sums[use].finish() for p, use in uses if use in self.groups[p].sums}
        shards: list[Tensor] = []
        for place, flat in enumerate(self.groups):
            if not flat.group.trainable:
                continue
            first, *others = (done[place, use] for use in sorted(flat.sums))
            for other in others:
                first.add_(other)
                self.pool.give(other)
            if flat.partners:
                first = self._add_guests(flat, first)
            if flat.guest:
                self.pool.give(first)
                continue
            shards.append(self._add_copies(flat, first) if flat.group.partial else first)
        return shards

    def _add_guests(self, flat: FlatGroup, shard_S: Tensor) -> Tensor:
        """Adds what the uses on other pipeline stages made, in the order of uses; a guest sends its sum."""
        what, tag = f"tied {flat.group.name}", flat.index
        if flat.guest:
            self.comms.ties.exchange(what, [(flat.partners[0], shard_S)], [], tag=tag).wait()
            return shard_S
        for partner in flat.partners:
            received = self.pool.take(shard_S.numel(), shard_S.dtype)
            self.comms.ties.exchange(what, [], [(partner, received)], tag=tag).wait()
            shard_S.add_(received)
            self.pool.give(received)
        return shard_S

    def _add_copies(self, flat: FlatGroup, shard_S: Tensor) -> Tensor:
        """Sums partial gradients over the tensor-parallel ranks that hold the same elements, in rank order."""
        comm, copies = self.comms.copies, flat.group.copies
        first = comm.rank // copies * copies
        parts = {r: self.pool.take(shard_S.numel(), shard_S.dtype) for r in range(first, first + copies)}
        parts[comm.rank].copy_(shard_S)
        others = [r for r in parts if r != comm.rank]
        sends = [(r, parts[comm.rank]) for r in others]
        comm.exchange(
            f"copies {flat.group.name}", sends, [(r, parts[r]) for r in others], tag=flat.index
        ).wait()
        shard_S.copy_(parts[first])
        for r in range(first + 1, first + copies):
            shard_S.add_(parts[r])
        for part in parts.values():
            self.pool.give(part)
        return shard_S

    def widen(self, shards: list[Tensor]) -> list[Tensor]:
        """Per trained group the gradient of the updated range [U]: the shard, or at stage 0 all shards gathered."""
        comm = self.comms.dp
        if self.stage or comm.size == 1:
            return shards
        full: list[Tensor] = []
        transfers: list[Transfer] = []
        for flat, shard_S in zip(self.trained, shards, strict=True):
            full_P = self.pool.take(flat.updated[1] - flat.updated[0], shard_S.dtype)
            full_P[slice(*flat.shard)].copy_(shard_S)
            transfers.append(
                comm.all_gather_shards(f"gradients {flat.group.name}", full_P, tag=self._tag + flat.index)
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
        """After the update: rounds masters to weights and starts sending them to whoever computes with them."""
        self.round_masters()
        self._share_weights(everything=False)

    def _share_weights(self, *, everything: bool = True) -> None:
        """Starts gathering what stages below 3 hold in full, first unit first; refreshes copies of tied weights."""
        if self.window is not None:
            self.window.forget()
        for flat in self.groups:
            if not (everything or flat.group.trainable):
                continue
            what = f"publish {flat.group.name}"
            ties: Sequence[Transfer] = ()
            if flat.guest:
                receives = [(flat.partners[0], flat.weights_S)]
                self.comms.ties.exchange(what, [], receives, tag=flat.index).wait()
            elif flat.partners:
                sends = [(partner, flat.weights_S) for partner in flat.partners]
                ties = [self.comms.ties.exchange(what, sends, [], tag=flat.index)]
            gathers = self.stage in (1, 2) or (self.stage == 0 and (everything or flat.guest))
            if gathers and flat.weights_P is not None:
                flat.publishing = self.comms.dp.all_gather_shards(
                    what, flat.weights_P, tag=self._tag + flat.index
                )
            if ties:
                later = [flat.publishing] if flat.publishing is not None else []
                flat.publishing = Transfer(self.comms.dp, what, [*later, *ties])

    def bytes_held(self) -> Iterator[tuple[str, int]]:
        """(what, bytes) of everything that lives on between steps or is kept for the next one."""
        for flat in self.groups:
            weights = flat.weights_S if flat.weights_P is None else flat.weights_P
            yield "weights", weights.numel() * weights.element_size()
            if flat.has_master and flat.master_U is not None:
                yield "masters", flat.master_U.numel() * flat.master_U.element_size()
            yield "optimizer", sum(t.numel() * t.element_size() for t in flat.state.values())
        yield "window", self.window.bytes if self.window is not None else 0
        yield "gradients and exchange", self.pool.bytes_made
