"""The only caller of torch.distributed's communication: deadlines, byte counts, a trace, translated errors.

No object collectives, and no float is ever added by the library in exact mode: data moves, we add.  On gloo a shard
travels by send and receive, 2 to 4 times faster than its collectives; on NCCL the same calls are one batch.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from sirara.errors import CommError, CommTimeout, ConfigError

Tensor = torch.Tensor

SECONDARY = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")
"""What the libraries say on the ranks that did *not* fail first."""


@dataclass(slots=True)
class Transfer:
    """Communication in flight; the tensors must not be touched before `wait()`."""

    comm: "Comm"
    what: str
    works: list[dist.Work] = field(default_factory=list)
    keep: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Blocks the host (CPU) or the current stream (CUDA) until all of it has arrived."""
        with self.comm.translate(self.what):
            for work in self.works:
                work.wait()
        self.works, self.keep = [], ()


class Comm:
    """All communication of one rank inside one group of ranks.

    Attributes:  bytes_sent: payload bytes that this rank has sent so far.
                 trace: the last calls, newest last, for the report of a hang.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, group: "dist.ProcessGroup | None", timeout_s: float) -> None:
        self.ranks = list(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.group = group
        self.timeout_s = timeout_s
        self.bytes_sent = 0
        self.trace: deque[tuple[float, str]] = deque(maxlen=64)

    def exchange(self, what: str, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]],
                 *, tag: int) -> Transfer:
        """Starts sends (to, tensor) and receives (into, from); peers are places in this group.

        Every receive must be met by a send of the same tag and size; gloo ends the process otherwise.
        """
        operations = [
            *(dist.P2POp(dist.irecv, tensor, self.ranks[peer], self.group, tag) for peer, tensor in receives),
            *(dist.P2POp(dist.isend, tensor, self.ranks[peer], self.group, tag) for peer, tensor in sends),
        ]
        transfer = Transfer(self, what, keep=tuple(t for _, t in (*sends, *receives)))
        self._note(what, sum(t.numel() * t.element_size() for _, t in sends))
        if operations:
            with self.translate(what):
                transfer.works = dist.batch_isend_irecv(operations)
        return transfer

    def all_gather_shards(self, what: str, full_P: Tensor, *, tag: int) -> Transfer:
        """Starts filling `full_P` in place: rank r's equal part comes from rank r."""
        shard = full_P.numel() // self.size
        parts = full_P.split(shard) if shard else ()
        if self.size == 1 or not parts:
            return Transfer(self, what)
        if full_P.is_cuda:
            self._note(what, parts[self.rank].numel() * full_P.element_size() * (self.size - 1))
            with self.translate(what):
                work = dist.all_gather_into_tensor(full_P, parts[self.rank], group=self.group, async_op=True)
            return Transfer(self, what, [work] if work else [], (full_P,))
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        return self.exchange(
            what, [(p, parts[self.rank]) for p in peers], [(p, parts[p]) for p in reversed(peers)], tag=tag
        )

    def gather_rows(self, what: str, row_N: Tensor) -> Tensor:
        """[size, N]: every rank's row of the same length, on every rank.  For scalars and small vectors."""
        if self.size == 1:
            return row_N.unsqueeze(0)
        out = row_N.new_empty(self.size * row_N.numel())
        self._note(what, row_N.numel() * row_N.element_size() * (self.size - 1))
        with self.translate(what):
            dist.all_gather_into_tensor(out, row_N.contiguous(), group=self.group)
        return out.view(self.size, -1)

    def reduce_scatter_sum(self, what: str, full_P: Tensor) -> Tensor:
        """This rank's equal part of the sum over ranks, added by the library: bits depend on the layout.

        Only `numerics: fast` calls it.
        """
        if self.size == 1:
            return full_P
        self._note(what, full_P.numel() * full_P.element_size())
        out_S = full_P.new_empty(full_P.numel() // self.size)
        with self.translate(what):
            dist.reduce_scatter_tensor(out_S, full_P, group=self.group)
        return out_S

    def _note(self, what: str, sent_bytes: int) -> None:
        self.bytes_sent += sent_bytes
        self.trace.append((time.monotonic(), what))

    @contextmanager
    def translate(self, what: str) -> Iterator[None]:
        """Turns the library's errors into ours, which name the call, the rank and the peers."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            where = f"{what}, rank {self.ranks[self.rank]} of group {self.ranks}"
            if any(word in text for word in SECONDARY):
                raise CommError(f"a peer left during {what}", code="SR701", where=where, why=text) from error
            if "imed out" in text or "imeout" in text:
                raise CommTimeout(
                    f"no answer from a peer within {self.timeout_s:g} s during {what}",
                    where=where, why=text, try_=["look at the log of the rank that is silent", "launch.hang_timeout=30m"],
                ) from error
            raise CommError(f"{what} failed", where=where, why=text) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all processes of the attempt, as the launcher's environment tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int

    @staticmethod
    def from_environment() -> "World":
        """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (torchrun) or SLURM_*; alone without them."""
        env = os.environ

        def number(default: int, *names: str) -> int:
            for name in names:
                if name in env:
                    try:
                        return int(env[name])
                    except ValueError as error:
                        raise ConfigError(f"environment variable {name}={env[name]!r} is no number") from error
            return default

        size = number(1, "WORLD_SIZE", "SLURM_NTASKS") if "RANK" in env or "SLURM_PROCID" in env else 1
        return World(
            rank=number(0, "RANK", "SLURM_PROCID"),
            size=size,
            local_rank=number(0, "LOCAL_RANK", "SLURM_LOCALID"),
            local_size=number(size, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
            node=number(0, "GROUP_RANK", "SLURM_NODEID"),
        )


def connect(world: World, *, backend: str, timeout_s: float) -> None:
    """Joins the default group of all ranks; one process alone needs none."""
    if world.size > 1 and not dist.is_initialized():
        try:
            dist.init_process_group(
                backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {world.rank} could not join the group of {world.size} processes", why=str(error),
                try_=["check MASTER_ADDR and MASTER_PORT", "look for a rank that did not start"],
            ) from error


def disconnect() -> None:
    """Leaves the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_comm(world: World, *, timeout_s: float) -> Comm:
    """The group of all ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return Comm(range(world.size), world.rank, group=group, timeout_s=timeout_s)
