"""Gradients of a step, added on the one fixed tree (pure/tree.py), whatever the number of ranks.

    local      a rank adds the microbatches of its block in full-size buffers (a binary counter of them)
    exchange   when a block is complete, the owner of each shard receives the partial sums of the round's other blocks
    shard      the owner adds them in block order on a binary counter of shard-size buffers

All of it is started by `add`, as backward reaches the group, and finished by `finish`; in between data travels.  A rank
that has no microbatch where its peers have one says `skip`, so that rounds begin and end at the same places everywhere.
Shape letters: P elements of the padded group, S = P / dp elements of a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sirara.comm.group import Comm, Transfer
from sirara.pure.groups import Group
from sirara.pure.tree import Deal

Tensor = torch.Tensor


_CACHED = 1 << 16
"""Elements that a CPU's cache holds in two dtypes."""


class Pool:
    """Flat buffers kept between steps, by size and dtype: fresh pages cost more than the sums they hold."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.bytes_made = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of unspecified content."""
        kept = self.free.get((numel, dtype))
        if kept:
            return kept.pop()
        self.bytes_made += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back; the caller must not touch it again."""
        self.free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def add(self, total: Tensor, part: Tensor) -> None:
        """total += part, also of a lower dtype: converted piece by piece in the cache, not in a copy of its own."""
        plain = total.dtype == part.dtype or total.device.type != "cpu"
        if plain or not (total.is_contiguous() and part.is_contiguous()):
            total.add_(part)
            return
        total_N, part_N = total.view(-1), part.view(-1)
        scratch = self.take(_CACHED, total.dtype)
        for low in range(0, len(total_N), _CACHED):
            piece = part_N[low : low + _CACHED]
            total_N[low : low + _CACHED].add_(scratch[: len(piece)].copy_(piece))
        self.give(scratch)


@dataclass(slots=True)
class Entry:
    """A subtree's sum.  A borrowed tensor belongs to somebody else: it may be read, not written or kept."""

    level: int
    tensor: Tensor
    owned: bool


@dataclass(slots=True)
class TreeSum:
    """A binary counter: equal levels merge as they are pushed, what is left folds from smallest to largest."""

    dtype: torch.dtype
    pool: Pool
    entries: list[Entry] = field(default_factory=list)

    def push(self, level: int, tensor: Tensor, *, owned: bool) -> None:
        entry = Entry(level, tensor, owned)
        while self.entries and self.entries[-1].level == entry.level:
            entry = self._merge(self.entries.pop(), entry)
        self.entries.append(entry)

    def settle(self) -> None:
        """Copies what is borrowed, so that its owner may reuse it."""
        for entry in self.entries:
            if not entry.owned:
                copy = self.pool.take(entry.tensor.numel(), entry.tensor.dtype)
                entry.tensor, entry.owned = copy.copy_(entry.tensor), True

    def fold(self) -> Entry | None:
        """The sum of everything pushed (as it came, when it was one leaf); empties the counter."""
        if not self.entries:
            return None
        total = self.entries.pop()
        while self.entries:
            total = self._merge(self.entries.pop(), total)
        return total

    def total(self, numel: int) -> Tensor:
        """`fold` as an owned tensor of the accumulation dtype; zeros when nothing was pushed."""
        entry = self.fold()
        if entry is not None and entry.owned and entry.tensor.dtype == self.dtype:
            return entry.tensor
        out = self.pool.take(numel, self.dtype)
        if entry is None:
            return out.zero_()
        out.copy_(entry.tensor)
        self._release(entry)
        return out

    def _merge(self, older: Entry, newer: Entry) -> Entry:
        # Addition of two floats commutes, so either operand may receive the sum.
        for target, other in ((older, newer), (newer, older)):
            if target.owned and target.tensor.dtype == self.dtype:
                self.pool.add(target.tensor, other.tensor)
                self._release(other)
                return Entry(older.level + 1, target.tensor, True)
        total = self.pool.take(older.tensor.numel(), self.dtype)
        self.pool.add(total.copy_(older.tensor), newer.tensor)
        self._release(older)
        self._release(newer)
        return Entry(older.level + 1, total, True)

    def _release(self, entry: Entry) -> None:
        if entry.owned:
            self.pool.give(entry.tensor)


@dataclass(slots=True)
class Round:
    """One exchange in flight: this rank's partial sum, if it has a block, and what arrives from the others."""

    transfer: Transfer
    partial: Entry | None
    received: dict[int, Tensor]
    senders: int


class GradientSum:
    """The gradient of one use of one flat group, over the microbatches and ranks of a step.

    Args:  leaf_dtype: dtype of gradients as autograd gives them.  dtype: dtype of sums.
           tag: tells the exchanges of different uses apart; the same on all ranks.
           lean: between microbatches hold the shard alone (ZeRO 2 and 3); whoever calls completes rounds early.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        *,
        comm: Comm,
        deal: Deal,
        leaf_dtype: torch.dtype,
        dtype: torch.dtype,
        pool: Pool,
        tag: int,
        lean: bool = False,
    ) -> None:
        self.name, self.group, self.comm, self.deal, self.tag = name, group, comm, deal, tag
        self.lean = lean
        self.shard_numel = group.shard_numel(comm.size)
        self.numel = self.shard_numel * comm.size
        self.pool = pool
        # A block of one microbatch is sent as autograd made it: the sum starts at its receiver, in full precision.
        self.leaf_dtype, self.buffer_dtype = leaf_dtype, self._leaf_buffer(leaf_dtype, dtype)
        self.local = TreeSum(dtype, pool)
        self.shard = TreeSum(dtype, pool)
        self.opened: Tensor | None = None
        self.places = 0
        self.rounds_begun = 0
        self.pending: Round | None = None
        ends = [0, *(slot.start + slot.numel for slot in group.slots)]
        starts = [*(slot.start for slot in group.slots), self.numel]
        self.gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def _leaf_buffer(self, leaf_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return leaf_dtype if self.deal.k == 0 and self.comm.size > 1 else dtype

    def open(self) -> tuple[list[Tensor], bool]:
        """(places, onto): where the leaves' gradients of the next `add` may be written as they are made, or, `onto`,
        what they may be added to; none where they have another dtype."""
        if self.leaf_dtype != self.buffer_dtype:
            return [], False
        entries = self.local.entries
        if entries and entries[-1].level == 0:
            return self._views(entries[-1].tensor), True
        self.opened = self._fresh()
        return self._views(self.opened), False

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Adds this rank's next microbatch, in ascending order; a complete block starts its exchange.

        Args:  grads: one per leaf of the group; None where the unit did not use the parameter.
        """
        entries = self.local.entries
        if entries and entries[-1].level == 0:
            # Adding into the leaf that waits for its sibling saves a buffer and a pass over memory.
            top = entries.pop()
            self._add_onto(top.tensor, grads)
            self.local.push(1, top.tensor, owned=True)
        else:
            self.local.push(0, self._laid_out(grads), owned=True)
        self.skip()

    def skip(self) -> None:
        """Passes a place, with a microbatch just added or without one."""
        self.places += 1
        if self.deal.closes(self.places - 1):
            self._begin_round(self.local.fold())

    def complete(self) -> None:
        """Ends the exchange in flight, if there is one."""
        if self.pending is None:
            return
        done, self.pending = self.pending, None
        done.transfer.wait()
        rank, part = self.comm.rank, self.shard_numel
        for peer in range(done.senders):
            if peer != rank:
                self.shard.push(self.deal.k, done.received[peer], owned=True)
            elif done.partial is not None:
                self.shard.push(
                    self.deal.k, done.partial.tensor[rank * part : (rank + 1) * part], owned=False
                )
        self.shard.settle()
        if done.partial is not None:
            self.pool.give(done.partial.tensor)

    def finish(self) -> Tensor:
        """This rank's shard [S] of the sum over all microbatches; the caller gives it back to the pool."""
        self.complete()
        self.places = self.rounds_begun = 0
        return self.shard.total(self.shard_numel)

    def _fresh(self) -> Tensor:
        """A full-size buffer whose padding is zero."""
        buffer = self.pool.take(self.numel, self.buffer_dtype)
        for start, stop in self.gaps:
            buffer[start:stop].zero_()
        return buffer

    def _laid_out(self, grads: Sequence[Tensor | None]) -> Tensor:
        buffer = self._fresh() if self.opened is None else self.opened
        self.opened = None
        for target, grad in zip(self._views(buffer), grads, strict=True):
            if grad is None:
                target.zero_()
            elif grad.is_sparse:
                target.zero_().add_(grad.to(target.dtype))
            elif grad.data_ptr() != target.data_ptr():
                target.copy_(grad)
        return buffer

    def _add_onto(self, buffer: Tensor, grads: Sequence[Tensor | None]) -> None:
        for target, grad in zip(self._views(buffer), grads, strict=True):
            if grad is not None and grad.is_sparse:
                target.add_(grad.to(target.dtype))
            elif grad is not None and grad.data_ptr() != target.data_ptr():
                self.pool.add(target, grad)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [buffer.as_strided(leaf.size, leaf.stride, leaf.start) for leaf in self.group.leaves]

    def _begin_round(self, partial: Entry | None) -> None:
        self.complete()
        senders = self.deal.senders(self.rounds_begun)
        self.rounds_begun += 1
        rank, size, part = self.comm.rank, self.comm.size, self.shard_numel
        if size == 1:
            if partial is not None:
                self.shard.push(self.deal.k, partial.tensor, owned=True)
            return
        sends = []
        if partial is not None:
            peers = [(rank + i) % size for i in range(1, size)]
            sends = [(p, partial.tensor[p * part : (p + 1) * part]) for p in peers]
        received = {p: self.pool.take(part, self.buffer_dtype) for p in range(senders) if p != rank}
        transfer = self.comm.exchange(f"reduce {self.name}", sends, list(received.items()), tag=self.tag)
        self.pending = Round(transfer, partial, received, senders)


class FastSum(GradientSum):
    """`numerics: fast`: one buffer, microbatches added as they come, ranks added by the library.

    Lean, every microbatch is reduced at once into the shard.
    """

    def _leaf_buffer(self, leaf_dtype: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def add(self, grads: Sequence[Tensor | None]) -> None:
        if self.local.entries:
            self._add_onto(self.local.entries[0].tensor, grads)
        else:
            self.local.push(0, self._laid_out(grads), owned=True)
        self.skip()

    def skip(self) -> None:
        self.places += 1
        if self.lean and self.comm.size > 1:
            shard_S = self._reduced()
            if self.shard.entries:
                self.shard.entries[0].tensor.add_(shard_S)
                self.pool.give(shard_S)
            else:
                self.shard.push(0, shard_S, owned=True)

    def finish(self) -> Tensor:
        self.places = 0
        if self.comm.size == 1:
            return self.local.total(self.numel)
        return self.shard.total(self.shard_numel) if self.lean else self._reduced()

    def _reduced(self) -> Tensor:
        full_P = self.local.total(self.numel)
        # The caller gives the shard back to the pool, so it must come from there.
        shard_S = self.pool.take(self.shard_numel, full_P.dtype)
        self.comm.reduce_scatter_sum(f"reduce {self.name}", full_P, shard_S)
        self.pool.give(full_P)
        return shard_S
