"""Letters from memory to memory, with both ends in one process: addresses are then this process's own."""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sirara.comm.carriers import MemoryCarrier
from sirara.comm.header import ADDRESS, NUMBER, WORDS, Tag, letter_words, read_header
from sirara.errors import CommTimeout


class SameProcess:
    """A link whose peers live here."""

    def copy(self, peer: int, source: int, target: int, length: int) -> None:
        ctypes.memmove(target, source, length)

    def silent(self, peer: int) -> CommTimeout:
        return CommTimeout(f"rank {peer} is silent")


def two_ends(slots: int, link: Any = None) -> list[MemoryCarrier]:
    ends = []
    for rank in range(2):
        comm: Any = SimpleNamespace(
            rank=rank,
            size=2,
            ranks=[0, 1],
            timeout_s=0.05,
            alarm=None,
            gather_rows=lambda what, row: torch.zeros(2, 2, dtype=torch.int64),
        )
        ends.append(MemoryCarrier(comm, link or SameProcess(), slots))
    for rank, end in enumerate(ends):
        peer = 1 - rank
        end._rings[peer] = ends[peer].ring[rank].ctypes.data
        end._answers[peer] = ends[peer].taken[rank].ctypes.data
    return ends


def post(end: MemoryCarrier, n: int) -> None:
    tensor = torch.full((3,), float(n))
    end.post(1, letter_words(Tag(False, 0, n), tensor), tensor)


def open_next(end: MemoryCarrier) -> Any:
    return read_header(end.next(0), sender=0, receiver=1)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_letters_come_once_and_in_order_whatever_is_full_and_however_late_they_are_fetched(
    slots: int, seed: int
) -> None:
    rng = random.Random(seed)
    sender, receiver = two_ends(slots)
    total, sent, opened, fetched = 40, 0, [], []
    unread: list[Any] = []
    while len(fetched) < total:
        move = rng.randrange(4)
        if move == 0 and sent < total:
            post(sender, sent)
            sent += 1
        elif move == 1:
            sender.release()
        elif move == 2 and len(opened) < sender._sent[1]:
            unread.append(open_next(receiver))
            opened.append(unread[-1].tag.microbatch)
        elif move == 3 and unread:
            # Those of another channel are fetched later than ones that came after them.
            header = unread.pop(rng.randrange(len(unread)))
            fetched.append(header.tag.microbatch)
            assert receiver.fetch(0, header).tolist() == [float(header.tag.microbatch)] * 3
    assert opened == list(range(total)) and sorted(fetched) == list(range(total))
    sender.settle(sender.mark())
    assert not sender._under_way[1] and not sender._queued[1]


def test_settling_up_to_a_mark_does_not_wait_for_what_was_sent_later() -> None:
    sender, receiver = two_ends(4)
    post(sender, 0)
    mark = sender.mark()
    post(sender, 1)
    receiver.fetch(0, open_next(receiver))
    sender.settle(mark)
    with pytest.raises(CommTimeout, match="rank 1 is silent"):
        sender.settle(sender.mark())


def test_a_letter_that_never_comes_ends_at_the_deadline() -> None:
    _, receiver = two_ends(4)
    with pytest.raises(CommTimeout, match="rank 0 is silent"):
        receiver.next(0)


class Torn(SameProcess):
    """The first copy of a header shows its number beside words that were there before."""

    def __init__(self) -> None:
        self.torn = True

    def copy(self, peer: int, source: int, target: int, length: int) -> None:
        super().copy(peer, source, target, length)
        if length == 8 * WORDS and self.torn:
            self.torn = False
            row = np.ctypeslib.as_array((ctypes.c_int64 * WORDS).from_address(target))
            row[NUMBER + 1 : ADDRESS + 1] = -1


def test_a_header_is_read_again_once_its_number_is_seen() -> None:
    sender, receiver = two_ends(4, Torn())
    post(sender, 7)
    header = open_next(receiver)
    assert header.tag == Tag(False, 0, 7)
    assert receiver.fetch(0, header).tolist() == [7.0] * 3
