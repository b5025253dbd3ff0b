"""How letters (comm/mail.py) travel: from memory to memory on one machine, or by the library.

    MemoryCarrier    header in a ring of the sender, tensor where the sender has it; the receiver reads both, once
    LibraryCarrier   header by gloo, then the tensor by gloo or NCCL into a buffer that the header made known

NCCL knows no tags: what two ranks send to each other on one communicator runs in the order of the calls, and a send
holds up what follows it until the other side receives.  Two ranks that both send first would wait for ever.  So
tensors that go to a higher rank and those that go to a lower one have communicators of their own: on each, one
side only sends and the other only receives, in the order of the headers, which is the order of the sends.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from sirara.comm.alarm import Patience
from sirara.comm.direct import DirectLink
from sirara.comm.group import Comm, Waitable
from sirara.comm.header import ADDRESS, NUMBER, WORDS, Header, read_header
from sirara.errors import InvariantError

Tensor = torch.Tensor

_HEADER_TAG, _TENSOR_TAG = 1 << 20, (1 << 20) + 1


class Carrier(Protocol):
    """What mail needs; peers are places in the group."""

    def post(self, peer: int, words: list[int], tensor: Tensor) -> None:
        """Sends words 1, 2, ... of a header and a tensor; never waits."""
        ...

    def expect(self, peer: int) -> None:
        """One more letter will come from `peer`."""
        ...

    def next(self, peer: int) -> list[int]:
        """Waits for the next header of `peer`."""
        ...

    def fetch(self, peer: int, header: Header) -> Tensor:
        """The tensor behind a header, in fresh memory."""
        ...

    def release(self) -> None:
        """Lets go of tensors that their receivers have."""
        ...

    def mark(self) -> list[int]:
        """Letters sent so far, per peer."""
        ...

    def settle(self, mark: Sequence[int]) -> None:
        """Waits until the letters up to `mark` have been taken."""
        ...


class MemoryCarrier:
    """Letters in the sender's memory.

    ring[peer, slot]   header of a letter to `peer`; its number is written last, so a header that has the expected
                       number is whole (on x86 stores become visible in the order in which they are made)
    taken[peer, slot]  number of the letter from `peer` that this rank has copied; `peer` reads it and lets go
    """

    def __init__(self, comm: Comm, link: DirectLink, slots: int) -> None:
        self.comm, self.link, self.slots = comm, link, slots
        self.ring = np.zeros((comm.size, slots, WORDS), dtype=np.int64)
        self.taken = np.zeros((comm.size, slots), dtype=np.int64)
        mine = torch.tensor([self.ring.ctypes.data, self.taken.ctypes.data])
        places = comm.gather_rows("find mailboxes", mine).tolist()
        # Where this rank's part of each peer's two boards begins.
        self._rings = [ring + 8 * WORDS * comm.rank * slots for ring, _ in places]
        self._answers = [taken + 8 * comm.rank * slots for _, taken in places]
        self._sent = [0] * comm.size
        self._opened = [0] * comm.size
        self._under_way: list[deque[tuple[int, Tensor]]] = [deque() for _ in places]
        self._queued: list[deque[tuple[list[int], Tensor]]] = [deque() for _ in places]
        self._header, self._numbers = np.zeros(WORDS, dtype=np.int64), np.zeros(slots, dtype=np.int64)
        self._header_at, self._numbers_at = self._header.ctypes.data, self._numbers.ctypes.data

    def post(self, peer: int, words: list[int], tensor: Tensor) -> None:
        if self._queued[peer] or not self._has_room(peer):
            self._queued[peer].append((words, tensor))
        else:
            self._put(peer, words, tensor)

    def expect(self, peer: int) -> None:
        return

    def next(self, peer: int) -> list[int]:
        number = self._opened[peer] + 1
        place = self._rings[peer] + 8 * WORDS * (number % self.slots)
        patience = Patience(self.comm.timeout_s, self.comm.alarm)
        self.link.copy(peer, place, self._header_at, 8 * WORDS)
        while self._header[NUMBER] != number:
            if patience.napping:
                self.release()
            if not patience.pause():
                raise self.link.silent(peer)
            self.link.copy(peer, place, self._header_at, 8 * WORDS)
        # The copy that showed the number may have begun before the other words were there; this one is whole.
        self.link.copy(peer, place, self._header_at, 8 * WORDS)
        self._opened[peer] = number
        return self._header.tolist()

    def fetch(self, peer: int, header: Header) -> Tensor:
        tensor = torch.empty(header.shape, dtype=header.dtype)
        size = prod(header.shape) * header.dtype.itemsize
        self.link.copy(peer, header.address, tensor.data_ptr(), size)
        self.taken[peer, header.number % self.slots] = header.number
        return tensor

    def release(self) -> None:
        for peer, under_way in enumerate(self._under_way):
            if under_way:
                self._release(peer, under_way)
            queued = self._queued[peer]
            while queued and self._has_room(peer):
                self._put(peer, *queued.popleft())

    def mark(self) -> list[int]:
        return [sent + len(queued) for sent, queued in zip(self._sent, self._queued, strict=True)]

    def settle(self, mark: Sequence[int]) -> None:
        for peer, number in enumerate(mark):
            patience = Patience(self.comm.timeout_s, self.comm.alarm)
            while not self._is_taken(peer, number):
                self.release()
                if not patience.pause():
                    raise self.link.silent(peer)

    def _is_taken(self, peer: int, number: int) -> bool:
        under_way = self._under_way[peer]
        return self._sent[peer] >= number and not (under_way and under_way[0][0] <= number)

    def _has_room(self, peer: int) -> bool:
        """Whether the slot of the next letter is free: the one that had it last has been taken."""
        under_way = self._under_way[peer]
        return not under_way or under_way[0][0] > self._sent[peer] + 1 - self.slots

    def _put(self, peer: int, words: list[int], tensor: Tensor) -> None:
        number = self._sent[peer] = self._sent[peer] + 1
        row = self.ring[peer, number % self.slots]
        row[1 : 1 + len(words)] = words
        row[ADDRESS] = tensor.data_ptr()
        row[NUMBER] = number
        self._under_way[peer].append((number, tensor))

    def _release(self, peer: int, under_way: deque[tuple[int, Tensor]]) -> None:
        first, last = under_way[0][0], under_way[-1][0]
        slot = first % self.slots
        # What lies beyond the end of the ring is read when this part of it has been taken.
        count = min(last - first + 1, self.slots - slot)
        self.link.copy(peer, self._answers[peer] + 8 * slot, self._numbers_at, 8 * count)
        taken = self._numbers[:count].tolist()
        self._under_way[peer] = deque(
            (number, tensor)
            for number, tensor in under_way
            if number - first >= count or taken[number - first] != number
        )


def _new_group(comm: Comm, backend: str) -> dist.ProcessGroup:
    timeout = timedelta(seconds=comm.timeout_s)
    group = dist.new_group(comm.ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise InvariantError(f"rank {comm.ranks[comm.rank]} is no member of its own group {comm.ranks}")
    return group


class LibraryCarrier:
    """Letters by torch.distributed: see the module's docstring for NCCL.

    A header is asked for as soon as one is expected, one per peer at a time; the tensor's receive starts when the
    header is there, so no size is ever assumed (gloo ends the process when sizes differ).

    Args:  ways: the backend of two communicators for tensors that go up and down; None to use the group of `comm`.
    """

    def __init__(self, comm: Comm, device: torch.device, *, ways: str | None) -> None:
        self.comm, self.device = comm, device
        self._headers = self._up = self._down = comm.group
        self._ways = ways is not None and comm.size > 1
        if ways is not None and comm.size > 1:
            self._headers, self._up, self._down = (_new_group(comm, kind) for kind in ("gloo", ways, ways))
            self._meet()
        self._due = [0] * comm.size
        self._asked: list[tuple[Tensor, Waitable] | None] = [None] * comm.size
        self._coming: dict[tuple[int, int], tuple[Tensor, Waitable]] = {}
        self._sent, self._opened = [0] * comm.size, [0] * comm.size
        self._under_way: list[deque[tuple[int, list[dist.Work], Tensor]]] = [deque() for _ in comm.ranks]

    def post(self, peer: int, words: list[int], tensor: Tensor) -> None:
        number = self._sent[peer] = self._sent[peer] + 1
        header = torch.zeros(WORDS, dtype=torch.int64)
        header[: 1 + len(words)] = torch.tensor([number, *words])
        to = self.comm.ranks[peer]
        with self.comm.translate("send a letter"):
            works = [
                dist.isend(header, to, group=self._headers, tag=_HEADER_TAG),
                dist.isend(tensor, to, group=self._way(self.comm.rank, peer, tensor), tag=_TENSOR_TAG),
            ]
        self._under_way[peer].append((number, [work for work in works if work is not None], tensor))

    def expect(self, peer: int) -> None:
        self._due[peer] += 1
        self._ask(peer)

    def next(self, peer: int) -> list[int]:
        asked, self._asked[peer] = self._asked[peer], None
        if asked is None:
            raise InvariantError(f"no letter is expected from rank {self.comm.ranks[peer]}")
        row, work = asked
        sender, receiver = self.comm.ranks[peer], self.comm.ranks[self.comm.rank]
        with self.comm.translate(f"receive a letter of rank {sender}"):
            work.wait()
            words = row.tolist()
            header = read_header(words, sender=sender, receiver=receiver)
            device = torch.device("cpu") if header.poison else self.device
            tensor = torch.empty(header.shape, dtype=header.dtype, device=device)
            group = self._way(peer, self.comm.rank, tensor)
            coming = dist.irecv(tensor, sender, group=group, tag=_TENSOR_TAG)
        if coming is not None:
            self._coming[peer, header.number] = (tensor, coming)
        self._ask(peer)
        return words

    def fetch(self, peer: int, header: Header) -> Tensor:
        tensor, work = self._coming.pop((peer, header.number))
        with self.comm.translate(f"receive a letter of rank {self.comm.ranks[peer]}"):
            work.wait()
        return tensor

    def release(self) -> None:
        # gloo cannot tell whether a send is over without waiting for it; NCCL can.
        if self.device.type == "cuda":
            for under_way in self._under_way:
                while under_way and all(work.is_completed() for work in under_way[0][1][1:]):
                    under_way.popleft()

    def mark(self) -> list[int]:
        return list(self._sent)

    def settle(self, mark: Sequence[int]) -> None:
        for peer, number in enumerate(mark):
            under_way = self._under_way[peer]
            while under_way and under_way[0][0] <= number:
                with self.comm.translate(f"send a letter to rank {self.comm.ranks[peer]}"):
                    for work in under_way.popleft()[1]:
                        work.wait()

    def _ask(self, peer: int) -> None:
        if self._due[peer] and self._asked[peer] is None:
            self._due[peer] -= 1
            row = torch.zeros(WORDS, dtype=torch.int64)
            with self.comm.translate("ask for a letter"):
                work = dist.irecv(row, self.comm.ranks[peer], group=self._headers, tag=_HEADER_TAG)
            if work is not None:
                self._asked[peer] = (row, work)

    def _way(self, sender: int, receiver: int, tensor: Tensor) -> "dist.ProcessGroup | None":
        if not self._ways or tensor.device.type != self.device.type:
            return self._headers
        return self._up if receiver > sender else self._down

    def _meet(self) -> None:
        """Makes NCCL's communicators of neighbours now: the first call waits for the other side.

        Every rank goes through the pairs of the ring in one order, so nobody waits in a circle.
        """
        size, me = self.comm.size, self.comm.rank
        for low, high in sorted({tuple(sorted((r, (r + 1) % size))) for r in range(size)}):
            if me in (low, high):
                word = torch.zeros(1, device=self.device)
                for group, sender, receiver in ((self._up, low, high), (self._down, high, low)):
                    if me == sender:
                        dist.send(word, self.comm.ranks[receiver], group=group)
                    else:
                        dist.recv(word, self.comm.ranks[sender], group=group)
