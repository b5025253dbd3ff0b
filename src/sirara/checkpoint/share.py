"""Loading by all ranks together: each piece is read by one of them and passed on to the others that want it.

    every rank     pieces that it alone wants ─► into place
    round by round pieces that several want ─► their reader ─► agree that all could read ─► each its part

A rank that cannot read its pieces says so before anything is sent, and all ranks stop there: nobody waits for it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch

from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.reader import PieceRead, Snapshot, box_memory, on_host
from sirara.comm.group import Comm
from sirara.errors import CheckpointError, CommError, SiraraError, StorageError
from sirara.pure.layout import Box, intersection, whole
from sirara.pure.readplan import ReadPlan, plan_reads
from sirara.pure.saveplan import ITEM_BYTES, PlannedTensor

_TAG = 7900

Memory = dict[int, list[tuple[Box, np.ndarray]]]
"""Tensor -> the boxes that this rank holds of it, with their memory."""

Agree = Callable[[str], str]
"""Given this rank's fault, "" when there is none, the first fault of any rank."""


class OtherRankFailed(CheckpointError):
    """A step could not be read, and the reason lies on another rank; all know it."""

    default_code = "SR531"


def read_together(
    snapshot: Snapshot,
    plan: Sequence[PlannedTensor],
    ranges: Sequence[NamedRange],
    *,
    comm: Comm,
    agree: Agree,
    device: torch.device | str = "cpu",
    near: Callable[[int], Collection[int]] = lambda piece: (),
) -> None:
    """Fills this rank's ranges while every other rank fills its own.  Collective over `comm`, the ranks of `plan`.

    Args:    plan: what every rank wants, the same on all ranks; `ranges` are this rank's share of it.
             device: on which `comm` moves data.  near: as in `plan_reads`, the same on all ranks.
    Raises:  CheckpointError, StorageError or CommError for what this rank could not read, OtherRankFailed when it
             was another one, on all ranks; the ranges' contents are then undefined.
    """
    wanted = [(snapshot.find_like(t.name, t.dtype, t.shape), t.boxes) for t in plan]
    shares, holes = plan_reads(snapshot.manifest, wanted, near=near)
    if holes:
        tensor, box, missing = holes[0]
        raise snapshot.holes(snapshot.manifest.tensors[tensor].name, [(box, missing)])
    with on_host(ranges) as hosts:
        _Reading(snapshot, shares, _memory(snapshot, ranges, hosts), comm, agree, device).run()


def _memory(snapshot: Snapshot, ranges: Sequence[NamedRange], hosts: Sequence[np.ndarray]) -> Memory:
    memory: Memory = {}
    for r, raw in zip(ranges, hosts, strict=True):
        t = snapshot.find(r.tensor)
        item = ITEM_BYTES[snapshot.manifest.tensors[t].dtype]
        memory.setdefault(t, []).extend(zip(r.boxes, box_memory(raw, r.boxes, item), strict=True))
    return memory


class _Reading:
    """One rank's part of `read_together`."""

    def __init__(
        self,
        snapshot: Snapshot,
        plan: ReadPlan,
        memory: Memory,
        comm: Comm,
        agree: Agree,
        device: torch.device | str,
    ) -> None:
        self.snapshot, self.plan, self.memory, self.comm, self.agree = snapshot, plan, memory, comm, agree
        self.rank = comm.ranks[comm.rank]
        self._device = device

    def run(self) -> None:
        alone: dict[int, PieceRead] = {}
        for i in self.plan.alone.get(self.rank, ()):
            box = self.snapshot.manifest.box(i)
            alone[i] = PieceRead(
                parts=[(common.relative_to(box), target) for common, target in self._targets(i, box)]
            )
        self._read(alone)
        for one in self.plan.rounds:
            self._round(one)

    def _read(self, reads: dict[int, PieceRead]) -> None:
        """Reads, and learns whether the others could; raises on all ranks when one could not."""
        fault: CheckpointError | StorageError | CommError | None = None
        try:
            self.snapshot.run(reads)
        except (CheckpointError, StorageError, CommError) as error:
            fault = error
        told = self.agree(reason(fault) if fault else "")
        if fault:
            raise fault
        if told:
            raise OtherRankFailed(told)

    def _round(self, one: dict[int, list[int]]) -> None:
        """Reads this rank's pieces of one round, then sends and receives."""
        mine, m = one.get(self.rank, []), self.snapshot.manifest
        ends = np.cumsum([int(m.pieces.length[i]) for i in mine], dtype=np.int64).tolist()
        held = np.empty(ends[-1] if ends else 0, np.uint8)
        blocks = {
            i: self._elements(i, m.box(i), held[end - int(m.pieces.length[i]) : end])
            for i, end in zip(mine, ends, strict=True)
        }
        self._read({i: PieceRead(parts=[(whole(block.shape), block)]) for i, block in blocks.items()})
        sends = self._messages(blocks, held)
        receives: list[tuple[int, torch.Tensor]] = []
        for reader in sorted(one):
            size = sum(self._bytes(i, box) for i, box in self._parts(one[reader], self.rank))
            if reader != self.rank and size:
                receives.append((reader, torch.empty(size, dtype=torch.uint8, device=self._device)))
        place = self.comm.ranks.index
        self.comm.exchange(
            "pass on a checkpoint",
            [(place(rank), message) for rank, message in sends],
            [(place(reader), message) for reader, message in receives],
            tag=_TAG,
        ).wait()
        for i, block in blocks.items():
            self._fill(i, m.box(i), block)
        for reader, message in receives:
            raw, at = message.cpu().numpy(), 0
            for i, box in self._parts(one[reader], self.rank):
                size = self._bytes(i, box)
                self._fill(i, box, self._elements(i, box, raw[at : at + size]))
                at += size

    def _messages(self, blocks: dict[int, np.ndarray], held: np.ndarray) -> list[tuple[int, torch.Tensor]]:
        """What this rank sends to whom; ranks that want the same elements get one and the same tensor."""
        boxes = {i: self.snapshot.manifest.box(i) for i in blocks}
        others = sorted({rank for i in blocks for rank, _ in self.plan.wants[i]} - {self.rank})
        packed: dict[tuple[tuple[int, Box], ...], torch.Tensor] = {}
        sends = []
        for rank in others:
            parts = tuple(self._parts(list(blocks), rank))
            if parts not in packed:
                raw = held  # all of it, as it was read
                if parts != tuple(boxes.items()):
                    raw, at = np.empty(sum(self._bytes(i, box) for i, box in parts), np.uint8), 0
                    for i, box in parts:
                        size = self._bytes(i, box)
                        target = self._elements(i, box, raw[at : at + size])
                        target[...] = blocks[i][(*box.relative_to(boxes[i]).slices, ...)]
                        at += size
                packed[parts] = torch.from_numpy(raw).to(self._device)
            sends.append((rank, packed[parts]))
        return sends

    def _parts(self, pieces: Sequence[int], rank: int) -> list[tuple[int, Box]]:
        return [(i, box) for i in pieces for wanting, box in self.plan.wants[i] if wanting == rank]

    def _fill(self, piece: int, box: Box, block: np.ndarray) -> None:
        """Copies elements `box` of the piece's tensor to wherever this rank holds them."""
        for common, target in self._targets(piece, box):
            target[...] = block[(*common.relative_to(box).slices, ...)]

    def _targets(self, piece: int, box: Box) -> Iterator[tuple[Box, np.ndarray]]:
        """(what this rank holds of `box`, its memory)."""
        for held, memory in self.memory.get(int(self.snapshot.manifest.pieces.tensor[piece]), ()):
            common = intersection(box, held)
            if common is not None:
                yield common, memory[(*common.relative_to(held).slices, ...)]

    def _item(self, piece: int) -> int:
        m = self.snapshot.manifest
        return ITEM_BYTES[m.tensors[int(m.pieces.tensor[piece])].dtype]

    def _bytes(self, piece: int, box: Box) -> int:
        return box.volume * self._item(piece)

    def _elements(self, piece: int, box: Box, raw: np.ndarray) -> np.ndarray:
        return box_memory(raw, (box,), self._item(piece))[0]


def reason(fault: SiraraError) -> str:
    """An error in one line, for the other ranks."""
    return fault.what + (f" ({fault.why})" if fault.why else "")
