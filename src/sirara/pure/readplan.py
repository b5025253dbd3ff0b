"""Who reads which piece of a checkpoint and passes it on to whom: a pure function, the same on all ranks.

    saved pieces x wanted boxes of all ranks ─► wants of each piece
        wanted by one rank     that rank reads it, straight into place
        wanted by several      one of them reads it, the one with least to read; it sends the others their parts

So each byte is read once per job.  What is passed on goes in rounds of bounded size; a round gives every reader at
most ROUND_BYTES to read and every rank at most about as much to receive.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sirara.pure.layout import Box
from sirara.pure.manifest import Manifest

ROUND_BYTES = 16 << 20
"""A reader holds what it read and what it packed of it, a receiver what comes: with this, below 64 MiB together."""

Want = tuple[int, Box]
"""(rank, elements of the tensor) that a piece holds for a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """wants: piece -> who wants which of its elements, by rank.  alone: rank -> pieces that only it wants.
    rounds: of passing on, each reader -> its pieces in order."""

    wants: dict[int, list[Want]]
    alone: dict[int, list[int]]
    rounds: list[dict[int, list[int]]]

    def bytes_read(self, manifest: Manifest, rank: int) -> int:
        passed = [piece for one in self.rounds for piece in one.get(rank, ())]
        return sum(int(manifest.pieces.length[i]) for i in (*self.alone.get(rank, ()), *passed))


def plan_reads(
    manifest: Manifest,
    wanted: Iterable[tuple[int, Mapping[int, Sequence[Box]]]],
    *,
    round_bytes: int = ROUND_BYTES,
) -> tuple[ReadPlan, list[tuple[int, Box, int]]]:
    """The plan, and the wanted boxes with elements in no piece: (tensor, box, number of elements).

    Args:  wanted: (tensor, rank -> boxes), each tensor at most once.
    """
    wants, holes = _wants(manifest, wanted)
    length = manifest.pieces.length
    alone: dict[int, list[int]] = {}
    load: dict[int, int] = {}
    shared: list[tuple[int, list[int]]] = []
    for piece in sorted(wants):
        ranks = sorted({rank for rank, _ in wants[piece]})
        if len(ranks) > 1:
            shared.append((piece, ranks))
            continue
        alone.setdefault(ranks[0], []).append(piece)
        load[ranks[0]] = load.get(ranks[0], 0) + int(length[piece])
    queues: dict[int, list[int]] = {}
    for piece, ranks in sorted(shared, key=lambda one: (-int(length[one[0]]), one[0])):
        reader = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
        queues.setdefault(reader, []).append(piece)
        load[reader] = load.get(reader, 0) + int(length[piece])
    in_order = {reader: deque(sorted(queues[reader])) for reader in sorted(queues)}
    return ReadPlan(wants=wants, alone=alone, rounds=_rounds(manifest, wants, in_order, round_bytes)), holes


def _wants(
    manifest: Manifest, wanted: Iterable[tuple[int, Mapping[int, Sequence[Box]]]]
) -> tuple[dict[int, list[Want]], list[tuple[int, Box, int]]]:
    wants: dict[int, list[Want]] = {}
    holes: list[tuple[int, Box, int]] = []
    for tensor, boxes in wanted:
        index, saved = manifest.boxes_of(tensor)
        known: dict[Box, list[tuple[int, Box]]] = {}
        for rank in sorted(boxes):
            for box in dict.fromkeys(boxes[rank]):
                if box not in known:
                    known[box] = saved.meeting(box)
                    missing = box.volume - sum(common.volume for _, common in known[box])
                    if missing:
                        holes.append((tensor, box, missing))
                for i, common in known[box]:
                    wants.setdefault(int(index[i]), []).append((rank, common))
    return wants, holes


def _rounds(
    manifest: Manifest, wants: dict[int, list[Want]], queues: dict[int, deque[int]], round_bytes: int
) -> list[dict[int, list[int]]]:
    rounds: list[dict[int, list[int]]] = []
    length, volumes = manifest.pieces.length, manifest.volumes()
    while any(queues.values()):
        one: dict[int, list[int]] = {}
        read: dict[int, int] = {}
        received: dict[int, int] = {}
        for reader, queue in queues.items():
            while queue:
                piece = queue[0]
                size = int(length[piece])
                item = size // int(volumes[piece])
                parts: dict[int, int] = {}
                for rank, box in wants[piece]:
                    if rank != reader:
                        parts[rank] = parts.get(rank, 0) + box.volume * item
                if read.get(reader, 0) and read[reader] + size > round_bytes:
                    break
                if any(received.get(r, 0) and received[r] + n > round_bytes for r, n in parts.items()):
                    break
                one.setdefault(reader, []).append(queue.popleft())
                read[reader] = read.get(reader, 0) + size
                for rank, n in parts.items():
                    received[rank] = received.get(rank, 0) + n
        rounds.append(one)
    return rounds
