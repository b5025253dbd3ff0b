"""Where the elements of pieces go: straight into the memory of who wants them, or by way of a room of the reader's own.

a piece ─► laid_out: own memory where a part lies in one stretch, else a room ─► read, hashed ─► hand_out
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from sirara.checkpoint.ranges import NamedRange, host_bytes
from sirara.pure.layout import Box, box_runs, whole

# Elements are moved as unsigned integers of their size: every bit pattern survives, and numpy need not know
# bf16 or fp8.
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_ALIGN = 64  # bytes


@dataclass(slots=True)
class PieceRead:
    """A piece that is wanted: the pairs (where in the piece, memory to fill), memory as unsigned integers.

    passed: (where in the piece, who takes it), called from any thread with these elements, in the shape of the box,
    when they are known to be right; their memory is used again after it returns.
    """

    parts: list[tuple[Box, np.ndarray]] = field(default_factory=list)
    passed: list[tuple[Box, Callable[[np.ndarray], None]]] = field(default_factory=list)


class Room:
    """Memory of one thread for what is not read straight into place; free again when the next batch begins."""

    def __init__(self) -> None:
        self._raw, self._at, self._least = np.empty(0, np.uint8), 0, 0

    def clear(self, batch_bytes: int, pieces: int) -> None:
        self._least, self._at = batch_bytes + _ALIGN * pieces, 0

    def take(self, box: Box, item: int) -> np.ndarray:
        """Memory for a box of elements, as unsigned integers."""
        size = box.volume * item
        if self._at + size > len(self._raw):
            self._raw, self._at = np.empty(max(size, self._least), np.uint8), 0
        raw = self._raw[self._at : self._at + size]
        self._at += -(-size // _ALIGN) * _ALIGN
        return raw.view(_RAW[item]).reshape(box.size)


class Rooms(threading.local):
    """One room per thread, kept from batch to batch: fresh pages cost as much as reading them."""

    def __init__(self) -> None:
        self._room = Room()

    def mine(self, batch_bytes: int, *, pieces: int) -> Room:
        self._room.clear(batch_bytes, pieces)
        return self._room


def laid_out(box: Box, item: int, read: PieceRead, room: Room) -> list[tuple[Box, np.ndarray]]:
    """Where the piece is read to, from end to end: (box of the piece, memory).

    Parts that each lie in one stretch go to where they belong, those of others to `room`; otherwise all goes there.

    box: of the piece.  item: bytes of an element.
    """
    theirs = dict.fromkeys(part for part, _ in read.passed)
    wanted: list[tuple[Box, np.ndarray | None]] = [*read.parts]
    wanted += [(part, None) for part in theirs if not any(part.within(own) for own, _ in read.parts)]
    held: list[tuple[Box, np.ndarray]] = []
    at = 0
    for part, target in sorted(wanted, key=lambda one: one[0].offset):
        runs = box_runs(box.size, part)
        if len(runs) != 1 or runs[0][0] != at or (target is not None and not target.flags.c_contiguous):
            break
        at = runs[0][1]
        held.append((part, room.take(part, item) if target is None else target))
    return held if at == box.volume else [(whole(box.size), room.take(whole(box.size), item))]


def hand_out(held: Sequence[tuple[Box, np.ndarray]], read: PieceRead) -> None:
    """Gives the elements of a piece that is right to all that want them.  held: where they lie now."""
    places = {id(memory) for _, memory in held}
    for part, target in read.parts:
        if id(target) not in places:
            target[...] = _within(held, part)
    for part, take in read.passed:
        take(_within(held, part))


def _within(held: Sequence[tuple[Box, np.ndarray]], part: Box) -> np.ndarray:
    box, memory = next(one for one in held if part.within(one[0]))
    return memory[(*part.relative_to(box).slices, ...)]


@contextmanager
def on_host(ranges: Sequence[NamedRange]) -> Iterator[list[np.ndarray]]:
    """The bytes of ranges in host memory, to be filled; what lives on a device is copied there at the end."""
    hosts: list[torch.Tensor] = []
    for r in ranges:
        r.check()
        hosts.append(r.data if r.data.device.type == "cpu" else torch.empty_like(r.data, device="cpu"))
    yield [host_bytes(host) for host in hosts]
    for r, host in zip(ranges, hosts, strict=True):
        if host is not r.data:
            r.data.copy_(host)


def box_memory(raw: np.ndarray, boxes: Sequence[Box], item: int) -> list[np.ndarray]:
    """The bytes of boxes that lie end to end, as one array of unsigned integers per box."""
    memory, at = [], 0
    for box in boxes:
        size = box.volume * item
        memory.append(raw[at : at + size].view(_RAW[item]).reshape(box.size))
        at += size
    return memory
