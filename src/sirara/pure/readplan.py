"""Who reads which piece of a checkpoint and passes it on to whom: a pure function, the same on all ranks.

    saved pieces x wanted boxes of all ranks ─► wants of each piece
        wanted by one rank     that rank reads it, straight into place
        wanted by several      one of them reads it, the one with least to read, and gives the others their parts

So each byte is read once per job.  Where ranks can write into each other's memory, a reader puts parts straight to
where they belong, unless they lie there in many short runs; nobody waits.  What is left is passed on in rounds of
bounded size: a round gives every reader at most ROUND_BYTES to read and every rank at most about as much to receive.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sirara.pure.layout import Box
from sirara.pure.manifest import Manifest
from sirara.pure.planned import ITEM_BYTES
from sirara.pure.reshard import SavedBoxes

ROUND_BYTES = 16 << 20
"""A reader holds what it read and what it packed of it, a receiver what comes: with this, below 64 MiB together."""

RUN_BYTES = 512
FEW_RUNS = 64
"""A part in shorter runs than this, and in more of them, is cheaper to pack and to send than to put in place."""

Want = tuple[int, Box]
"""(rank, elements of the tensor) that a piece holds for a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """wants: piece -> who wants which of its elements, by rank.  alone: rank -> pieces that only it wants.
    put: reader -> pieces whose parts it puts into the memory of those that want them.
    rounds: of passing on, each reader -> its pieces in order."""

    wants: dict[int, list[Want]]
    alone: dict[int, list[int]]
    put: dict[int, list[int]]
    rounds: list[dict[int, list[int]]]

    def bytes_read(self, manifest: Manifest, rank: int) -> int:
        sent = [piece for one in self.rounds for piece in one.get(rank, ())]
        mine = (*self.alone.get(rank, ()), *self.put.get(rank, ()), *sent)
        return sum(int(manifest.pieces.length[i]) for i in mine)


def plan_reads(
    manifest: Manifest,
    wanted: Iterable[tuple[int, Mapping[int, Sequence[Box]]]],
    *,
    put: bool = False,
    round_bytes: int = ROUND_BYTES,
) -> tuple[ReadPlan, list[tuple[int, Box, int]]]:
    """The plan, and the wanted boxes with elements in no piece: (tensor, box, number of elements).

    Args:  wanted: (tensor, rank -> boxes), each tensor at most once.  put: ranks can write into each other's memory.
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
    placed: dict[int, list[int]] = {}
    queues: dict[int, list[int]] = {}
    for piece, ranks in sorted(shared, key=lambda one: (-int(length[one[0]]), one[0])):
        reader = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
        straight = put and _in_long_runs(manifest, piece, wants[piece])
        (placed if straight else queues).setdefault(reader, []).append(piece)
        load[reader] = load.get(reader, 0) + int(length[piece])
    in_order = {reader: deque(sorted(queues[reader])) for reader in sorted(queues)}
    rounds = _rounds(manifest, wants, in_order, round_bytes)
    return ReadPlan(wants=wants, alone=alone, put=placed, rounds=rounds), holes


def _in_long_runs(manifest: Manifest, piece: int, wants: Iterable[Want]) -> bool:
    """Whether all parts lie in few or in long runs, wherever they belong."""
    entry = manifest.tensors[int(manifest.pieces.tensor[piece])]
    item = ITEM_BYTES[entry.dtype]
    for _, box in wants:
        run = 1
        # Dimensions that are whole are so in the piece, and with whoever holds the part.
        for n, whole in zip(reversed(box.size), reversed(entry.shape), strict=True):
            run *= n
            if n != whole:
                break
        if run * item < RUN_BYTES and box.volume > FEW_RUNS * run:
            return False
    return True


def _wants(
    manifest: Manifest, wanted: Iterable[tuple[int, Mapping[int, Sequence[Box]]]]
) -> tuple[dict[int, list[Want]], list[tuple[int, Box, int]]]:
    wants: dict[int, list[Want]] = {}
    holes: list[tuple[int, Box, int]] = []
    # The layers of a model are all cut alike, when they are saved and when they are wanted.
    known: dict[object, tuple[list[tuple[int, Want]], list[tuple[Box, int]]]] = {}
    for tensor, boxes in wanted:
        index, offset_NK, size_NK = manifest.columns_of(tensor)
        by_rank = tuple((rank, tuple(boxes[rank])) for rank in sorted(boxes))
        pattern = (offset_NK.shape, offset_NK.tobytes(), size_NK.tobytes(), by_rank)
        if pattern not in known:
            known[pattern] = _met(SavedBoxes(offset_NK, size_NK), by_rank)
        met, missing = known[pattern]
        holes.extend((tensor, box, count) for box, count in missing)
        pieces = index.tolist()
        for i, want in met:
            wants.setdefault(pieces[i], []).append(want)
    return wants, holes


def _met(
    saved: SavedBoxes, by_rank: Iterable[tuple[int, Iterable[Box]]]
) -> tuple[list[tuple[int, Want]], list[tuple[Box, int]]]:
    """(saved box, who wants what of it), and the wanted boxes with the number of elements that are not saved."""
    met: list[tuple[int, Want]] = []
    missing: list[tuple[Box, int]] = []
    known: dict[Box, list[tuple[int, Box]]] = {}
    for rank, boxes in by_rank:
        for box in dict.fromkeys(boxes):
            if box not in known:
                known[box] = saved.meeting(box)
                count = box.volume - sum(common.volume for _, common in known[box])
                if count:
                    missing.append((box, count))
            met.extend((i, (rank, common)) for i, common in known[box])
    return met, missing


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
