"""Tensors sent from rank to rank inside a table of actions: a sender never waits, a receiver knows what must come.

    send(peer, tag, tensor)      posts header and tensor and returns; the tensor is kept until the peer has it
    expect(peer, tag, ...)       says, early, what must come; wait() gives it, checked against that
    finish()                     waits until the peers have taken everything
    poison(error)                instead of a tensor: whoever waits for this rank raises that error

A receiver reads a peer's headers in the order in which they were sent and puts aside those that it does not wait for
yet, so two ranks need not agree on an order.  Inside one channel, the outputs or the gradients of one stage, the order
counts: a letter that is not the expected one, in microbatch, shape or dtype, is an error that names both ranks.
How letters travel is comm/carriers.py's matter: straight from memory to memory on one machine, else by the library.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sirara.comm.alarm import describe, heard
from sirara.comm.carriers import Carrier, LibraryCarrier, MemoryCarrier
from sirara.comm.direct import DirectLink
from sirara.comm.group import Comm
from sirara.comm.header import Header, Tag, letter_words, poison_words, read_header
from sirara.errors import InvariantError

Tensor = torch.Tensor


class Mail:
    """The letters of one rank to and from the other ranks of `comm`.  Making it is collective.

    Peers read what they are sent, and whether what they sent was taken, in this object's memory: it is kept until all
    ranks have left their last `finish`.

    Args:  device: where received tensors are wanted; those sent lie there too.
           slots: letters to one peer that may be under way before further ones queue on this side.
    """

    def __init__(self, comm: Comm, *, device: torch.device | None = None, slots: int = 512) -> None:
        self.comm = comm
        self._place = comm.ranks[comm.rank]
        device = device or torch.device("cpu")
        self._carrier: Carrier
        if isinstance(comm.link, DirectLink) and device.type == "cpu":
            self._carrier = MemoryCarrier(comm, comm.link, slots)
        else:
            self._carrier = LibraryCarrier(comm, device, ways="nccl" if device.type == "cuda" else None)
        self._aside: dict[tuple[int, bool, int], deque[Header]] = {}

    def send(self, peer: int, tag: Tag, tensor: Tensor) -> None:
        """Posts a contiguous tensor, which nobody may write to any more."""
        words = letter_words(tag, tensor)
        self._carrier.release()
        self.comm.note(f"send {tag}", tensor.numel() * tensor.element_size())
        self._carrier.post(peer, words, tensor)

    def expect(self, peer: int, tag: Tag, *, shape: Sequence[int], dtype: torch.dtype) -> "Letter":
        """What comes next in the channel of `tag` from `peer`; each must be waited for, in this order."""
        self._carrier.expect(peer)
        return Letter(self, peer, tag, tuple(shape), dtype)

    def mark(self) -> list[int]:
        """A moment, for `finish`: everything that was sent so far."""
        return self._carrier.mark()

    def finish(self, mark: Sequence[int] | None = None) -> None:
        """Waits until the peers have taken everything that was sent (before `mark`)."""
        with self.comm.waiting():
            self._carrier.settle(self._carrier.mark() if mark is None else mark)

    def poison(self, error: BaseException) -> None:
        """Tells every peer that nothing more will come, and why.  Never waits."""
        text = "\0".join(describe(error, rank=self._place)).encode()
        letter = torch.tensor(list(text), dtype=torch.uint8)
        for peer in range(self.comm.size):
            if peer != self.comm.rank:
                self._carrier.post(peer, poison_words(letter), letter)

    def receive(self, letter: "Letter") -> Tensor:
        """The tensor of a letter; what was sent before it to other channels is put aside."""
        channel = (letter.peer, letter.tag.gradient, letter.tag.stage)
        waiting = self._aside.get(channel)
        header = waiting.popleft() if waiting else self._next(channel)
        if header.tag != letter.tag or header.shape != letter.shape or header.dtype != letter.dtype:
            raise InvariantError(
                f"rank {self.comm.ranks[letter.peer]} sent the {header.tag}: {header.dtype} {list(header.shape)}",
                where=f"rank {self._place}",
                why=f"rank {self._place} expected the {letter.tag}: {letter.dtype} {list(letter.shape)}",
                try_=["give all ranks of one pipeline the same microbatches, in one order and of one shape"],
            )
        return self._carrier.fetch(letter.peer, header)

    def _next(self, channel: tuple[int, bool, int]) -> Header:
        peer = channel[0]
        self._carrier.release()
        while True:
            words = self._carrier.next(peer)
            header = read_header(words, sender=self.comm.ranks[peer], receiver=self._place)
            if header.poison:
                text = bytes(self._carrier.fetch(peer, header).tolist()).decode(errors="replace")
                what, _, why = text.partition("\0")
                raise heard(what, why, rank=self._place)
            found = (peer, header.tag.gradient, header.tag.stage)
            if found == channel:
                return header
            self._aside.setdefault(found, deque()).append(header)


@dataclass(slots=True)
class Letter:
    """A tensor that must come."""

    mail: Mail
    peer: int
    tag: Tag
    shape: tuple[int, ...]
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """The tensor, in fresh memory of this rank.

        Raises:  InvariantError when something else came, CommError when a rank failed, CommTimeout.
        """
        with self.mail.comm.waiting():
            return self.mail.receive(self)
