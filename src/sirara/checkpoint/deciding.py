"""How all ranks begin a save, or not, together: one row of bytes per rank, gathered where a save is due.

    rank 0's row    what to do, for which tiers, whether the save before was kept in memory
    every row       whether this rank's keeper still works, where it is, what is wrong here
    joint           the same answer on every rank

Only rank 0 hears how a save ended, so it decides; the others say what keeps them from taking part.
"""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

TIERS = ("memory", "peer", "parity", "disk", "object")
_ROW = struct.Struct("<BBBB32s64s400s")


class Move(IntEnum):
    """What is done where a save is due."""

    START = 0
    WAIT = 1  # for the save before it
    QUEUE = 2  # at the first step boundary after that one
    SKIP = 3
    BACK_OFF = 4  # the one before failed: at the time of the next try


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank says. kept: the save before is committed in the node's memory.  digest: of the last save."""

    move: Move = Move.START
    tiers: frozenset[str] = frozenset()
    busy: bool = False
    kept: bool = False
    digest: str = ""
    address: str = ""
    fault: str = ""

    def to_bytes(self) -> bytes:
        mask = sum(1 << i for i, tier in enumerate(TIERS) if tier in self.tiers)
        flags = self.busy | self.kept << 1
        # A text that is cut inside a character is mended by the reader.
        texts = (self.digest.encode(), self.address.encode(), self.fault.encode())
        return _ROW.pack(self.move, mask, flags, 0, *texts)

    @staticmethod
    def from_bytes(raw: bytes) -> "Row":
        move, mask, flags, _, digest, address, fault = _ROW.unpack(raw)
        return Row(
            move=Move(move),
            tiers=frozenset(tier for i, tier in enumerate(TIERS) if mask >> i & 1),
            busy=bool(flags & 1),
            kept=bool(flags & 2),
            digest=_text(digest),
            address=_text(address),
            fault=_text(fault),
        )


ROW_BYTES = _ROW.size


def own_move(*, busy: bool, patient: bool, when_busy: str, backing_off: bool, due_again: bool) -> Move:
    """Rank 0's wish.

    Args:  busy: a save is being written.  patient: this one must be made.  backing_off: the last one failed;
           due_again: and the time of the next try has come.
    """
    if busy:
        if patient or when_busy == "wait":
            return Move.WAIT
        return Move.QUEUE if when_busy == "queue" else Move.SKIP
    if backing_off and not due_again and not patient:
        return Move.BACK_OFF
    return Move.START


def joint(rows: Sequence[Row], *, patient: bool, when_busy: str) -> Move:
    """What all ranks do: rank 0's wish, unless a keeper elsewhere still works on a save that is over."""
    wish = rows[0].move
    if wish is Move.START and any(row.busy for row in rows):
        return own_move(busy=True, patient=patient, when_busy=when_busy, backing_off=False, due_again=False)
    return wish


def first_fault(rows: Sequence[Row]) -> tuple[int, str] | None:
    """(rank, what is wrong there) of the first rank that cannot take part."""
    return next(((rank, row.fault) for rank, row in enumerate(rows) if row.fault), None)


def ordered(tiers: Collection[str]) -> tuple[str, ...]:
    """Fastest first."""
    return tuple(tier for tier in TIERS if tier in tiers)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
