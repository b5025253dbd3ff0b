"""The only caller of torch.distributed's communication: deadlines, byte counts, a trace, translated errors.

No object collectives, and no float is ever added by the library in exact mode: data moves, we add.  On gloo a
shard travels by send and receive, 2 to 4 times faster than its collectives, or directly from the memory of a rank
on the same machine (comm/direct.py); on NCCL the same calls are one batch.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from sirara.comm.alarm import Alarm
from sirara.errors import CommError, CommTimeout

Tensor = torch.Tensor

# torch 2.13 has new names for these two and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
)
"""What the libraries say on the ranks that did *not* fail first."""


class Waitable(Protocol):
    """Anything in flight."""

    def wait(self) -> object: ...


class Link(Protocol):
    """A faster way for sends and receives between the ranks of a group than the library's."""

    def carries(self, tag: int, tensors: Sequence[Tensor]) -> bool: ...

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, tag: int
    ) -> Waitable: ...

    def absent(self) -> list[int]: ...


@dataclass(slots=True)
class Transfer:
    """Communication in flight; the tensors must not be touched before `wait()`."""

    comm: "Comm"
    what: str
    works: Sequence[Waitable] = ()
    keep: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Blocks the host (CPU) or the current stream (CUDA) until all of it has arrived."""
        with self.comm.translate(self.what):
            for work in self.works:
                if isinstance(work, Transfer):  # which counts for its own group
                    work.wait()
                    continue
                with self.comm.waiting():
                    work.wait()
        self.works, self.keep = (), ()


class Comm:
    """All communication of one rank inside one group of ranks.

    Attributes:  bytes_sent: payload bytes that this rank has sent so far.
                 waited_s: seconds that the host has waited so far; on CUDA streams wait, and the host hardly does.
                 trace: the last calls, newest last, for the report of a hang.
                 alarm: tells of failures on other ranks, where there is one.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, *, group: "dist.ProcessGroup | None", timeout_s: float
    ) -> None:
        self.ranks = list(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.group = group
        self.timeout_s = timeout_s
        self.link: Link | None = None
        self.alarm: Alarm | None = None
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.trace: deque[tuple[float, str]] = deque(maxlen=64)

    def exchange(
        self,
        what: str,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        tag: int,
    ) -> Transfer:
        """Starts sends (peer, tensor) and receives (peer, tensor); peers are places in this group.

        Every receive must be met by a send of the same tag and size; gloo ends the process otherwise.  All ranks
        wait for their exchanges in the same order.
        """
        tensors = tuple(t for _, t in (*sends, *receives))
        transfer = Transfer(self, what, keep=tensors)
        self.note(what, sum(t.numel() * t.element_size() for _, t in sends))
        with self.translate(what):
            if not tensors:
                return transfer
            if self.link is not None and self.link.carries(tag, tensors):
                transfer.works = [self.link.exchange(sends, receives, tag=tag)]
                return transfer
            transfer.works = dist.batch_isend_irecv(
                [
                    *(dist.P2POp(dist.irecv, t, self.ranks[p], self.group, tag) for p, t in receives),
                    *(dist.P2POp(dist.isend, t, self.ranks[p], self.group, tag) for p, t in sends),
                ]
            )
        return transfer

    def all_gather_shards(self, what: str, full_P: Tensor, *, tag: int) -> Transfer:
        """Starts filling `full_P` in place: rank r's equal part comes from rank r."""
        shard = full_P.numel() // self.size
        parts = full_P.split(shard) if shard else ()
        if self.size == 1 or not parts:
            return Transfer(self, what)
        if full_P.is_cuda:
            self.note(what, parts[self.rank].numel() * full_P.element_size() * (self.size - 1))
            with self.translate(what):
                work = _all_gather(full_P, parts[self.rank], group=self.group, async_op=True)
            return Transfer(self, what, [work] if work else (), (full_P,))
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        return self.exchange(
            what, [(p, parts[self.rank]) for p in peers], [(p, parts[p]) for p in reversed(peers)], tag=tag
        )

    def gather_rows(self, what: str, row_N: Tensor) -> Tensor:
        """[size, N]: every rank's row of the same length, on every rank.  For scalars and small vectors."""
        if self.size == 1:
            return row_N.unsqueeze(0)
        out = row_N.new_empty(self.size * row_N.numel())
        self.note(what, row_N.numel() * row_N.element_size() * (self.size - 1))
        with self.translate(what), self.waiting():
            _all_gather(out, row_N.contiguous(), group=self.group)
        return out.view(self.size, -1)

    def reduce_scatter_sum(self, what: str, full_P: Tensor, out_S: Tensor) -> None:
        """Fills `out_S` with this rank's equal part of the sum over ranks, added by the library.

        Bits depend on the layout: only `numerics: fast` calls it.
        """
        self.note(what, full_P.numel() * full_P.element_size())
        with self.translate(what), self.waiting():
            _reduce_scatter(out_S, full_P, group=self.group)

    def note(self, what: str, sent_bytes: int) -> None:
        """Counts bytes that this rank sends and keeps the call for the report of a hang."""
        self.bytes_sent += sent_bytes
        self.trace.append((time.monotonic(), what))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds inside the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    @contextmanager
    def translate(self, what: str) -> Iterator[None]:
        """Turns the library's errors into ours, which name the call, the rank and the peers."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            where = f"{what}, rank {self.ranks[self.rank]} of group {self.ranks}"
            if any(word in text for word in SECONDARY):
                told = self.alarm.look() if self.alarm is not None else None
                if told is not None:
                    raise told from error
                # The library names a peer's address at most; a link knows whose memory is gone.
                absent = self.link.absent() if self.link is not None else []
                who = f": rank {', '.join(map(str, absent))}" if absent else ""
                raise CommError(
                    f"a peer left during {what}{who}", code="SR701", where=where, why=text
                ) from error
            if "imed out" in text or "imeout" in text:
                raise CommTimeout(
                    f"no answer from a peer within {self.timeout_s:g} s during {what}",
                    where=where,
                    why=text,
                    try_=["look at the log of the rank that is silent", "launch.hang_timeout=30m"],
                ) from error
            raise CommError(f"{what} failed", where=where, why=text) from error
