"""Loading by all ranks together: each piece is read by one of them and passed on to the others that want it.

    every rank     pieces that it alone wants ─► into place
                   pieces that several want, on one machine ─► its own parts into place, those of others into theirs
                   agree that all could read
    round by round what is left of those ─► their reader ─► agree that all could read ─► each its part

A rank that cannot read its pieces says so before anything is sent, and all ranks stop there: nobody waits for it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from sirara.checkpoint.neighbours import Memory, Neighbours, open_neighbours
from sirara.checkpoint.placing import PieceRead, box_memory, on_host
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.comm.group import Comm
from sirara.errors import CheckpointError, CommError, SiraraError, StorageError
from sirara.pure.layout import Box, intersection, whole
from sirara.pure.readplan import ReadPlan, plan_reads
from sirara.pure.saveplan import ITEM_BYTES, PlannedTensor

_TAG = 4096
_LARGE = 256 << 10
"""Bytes of a part that travels alone, from where it was read to where it belongs; smaller ones are packed."""

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
) -> None:
    """Fills this rank's ranges while every other rank fills its own.  Collective over `comm`, the ranks of `plan`.

    Args:    plan: what every rank wants, the same on all ranks; `ranges` are this rank's share of it.
             device: on which `comm` moves data.
    Raises:  CheckpointError, StorageError or CommError for what this rank could not read, OtherRankFailed when it
             was another one, on all ranks; the ranges' contents are then undefined.
    """
    wanted = [(snapshot.find_like(t.name, t.dtype, t.shape), t.boxes) for t in plan]
    # All ranks read at the same time; more of them than cores, or some on other nodes, only make this less.
    snapshot.cores = len(os.sched_getaffinity(0)) // len(comm.ranks)
    with on_host(ranges) as hosts:
        memory = _memory(snapshot, ranges, hosts)
        dims = max((len(t.shape) for t in plan), default=0)
        with open_neighbours(comm, memory, dims=dims) as neighbours:
            shares, holes = plan_reads(snapshot.manifest, wanted, put=neighbours is not None)
            if holes:
                tensor, box, missing = holes[0]
                raise snapshot.holes(snapshot.manifest.tensors[tensor].name, [(box, missing)])
            reading = _Reading(snapshot, shares, memory, comm, agree, device)
            reading.straight(neighbours)
        reading.by_rounds()


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

    def straight(self, neighbours: Neighbours | None) -> None:
        """Reads what goes straight into place, here and with neighbours."""
        reads: dict[int, PieceRead] = {}
        for i in (*self.plan.alone.get(self.rank, ()), *self.plan.put.get(self.rank, ())):
            box = self.snapshot.manifest.box(i)
            reads[i] = PieceRead(
                parts=[(common.relative_to(box), target) for common, target in self._targets(i, box)]
            )
        if neighbours is not None:
            sent = 0
            tensor = self.snapshot.manifest.pieces.tensor
            for i in self.plan.put.get(self.rank, ()):
                box = self.snapshot.manifest.box(i)
                theirs = [(rank, part) for rank, part in self.plan.wants[i] if rank != self.rank]
                reads[i].passed = [
                    (part.relative_to(box), partial(neighbours.put, rank, int(tensor[i]), part))
                    for rank, part in theirs
                ]
                sent += sum(self._bytes(i, part) for _, part in theirs)
            self.comm.note("put parts of a checkpoint", sent)
        self._read(reads)

    def by_rounds(self) -> None:
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
        blocks = self._read_round(one.get(self.rank, []))
        sends = {
            rank: self._letters([blocks[part] for part in self._parts(one.get(self.rank, []), rank)])
            for rank in sorted({rank for i in one.get(self.rank, ()) for rank, _ in self.plan.wants[i]})
            if rank != self.rank
        }
        receives = {
            reader: self._parts(one[reader], self.rank) for reader in sorted(one) if reader != self.rank
        }
        self._pass_on(sends, {reader: parts for reader, parts in receives.items() if parts})

    def _read_round(self, mine: Sequence[int]) -> dict[tuple[int, Box], np.ndarray]:
        """Fills this rank's own memory; returns what others want of its pieces, each box in one stretch."""
        blocks: dict[tuple[int, Box], np.ndarray] = {}
        reads: dict[int, PieceRead] = {}
        whole_pieces: dict[int, np.ndarray] = {}
        for i in mine:
            box = self.snapshot.manifest.box(i)
            others = dict.fromkeys(part for rank, part in self.plan.wants[i] if rank != self.rank)
            own = list(self._targets(i, box))
            if sum(part.volume for part, _ in own) + sum(part.volume for part in others) == box.volume:
                # Nobody wants what another wants: each part is read straight to where it goes from here.
                for part in others:
                    blocks[i, part] = self._elements(i, part, np.empty(self._bytes(i, part), np.uint8))
                targets = [*own, *((part, blocks[i, part]) for part in others)]
                reads[i] = PieceRead(parts=[(part.relative_to(box), target) for part, target in targets])
            else:
                whole_pieces[i] = self._elements(i, box, np.empty(self._bytes(i, box), np.uint8))
                reads[i] = PieceRead(parts=[(whole(box.size), whole_pieces[i])])
        self._read(reads)
        for i, block in whole_pieces.items():
            box = self.snapshot.manifest.box(i)
            self._fill(i, box, block)
            for part in dict.fromkeys(part for rank, part in self.plan.wants[i] if rank != self.rank):
                blocks[i, part] = np.ascontiguousarray(block[(*part.relative_to(box).slices, ...)])
        return blocks

    def _letters(self, blocks: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """What one rank gets: all small parts in one, each large one as it is."""
        raw = [block.reshape(-1).view(np.uint8) for block in blocks]
        small = [part for part in raw if len(part) < _LARGE]
        letters = [np.concatenate(small)] if small else []
        letters += [part for part in raw if len(part) >= _LARGE]
        return [torch.from_numpy(letter).to(self._device) for letter in letters]

    def _pass_on(
        self, sends: dict[int, list[torch.Tensor]], receives: dict[int, list[tuple[int, Box]]]
    ) -> None:
        coming = {reader: self._expected(parts) for reader, parts in receives.items()}
        place = self.comm.ranks.index
        under_way = []
        for n in range(max((len(letters) for letters in (*sends.values(), *coming.values())), default=0)):
            under_way.append(
                self.comm.exchange(
                    "pass on a checkpoint",
                    [(place(rank), letters[n]) for rank, letters in sends.items() if n < len(letters)],
                    [
                        (place(reader), letters[n][0])
                        for reader, letters in coming.items()
                        if n < len(letters)
                    ],
                    tag=_TAG + n,
                )
            )
        for transfer in under_way:
            transfer.wait()
        for letters in coming.values():
            for letter, parts in letters:
                raw, at = letter.cpu().numpy() if parts else np.empty(0, np.uint8), 0
                for i, box in parts:
                    size = self._bytes(i, box)
                    self._fill(i, box, self._elements(i, box, raw[at : at + size]))
                    at += size

    def _expected(self, parts: Sequence[tuple[int, Box]]) -> list[tuple[torch.Tensor, list[tuple[int, Box]]]]:
        """Memory for the letters of one reader, and what is to be copied out of each when it has come."""
        small = [(i, box) for i, box in parts if self._bytes(i, box) < _LARGE]
        letters: list[tuple[torch.Tensor, list[tuple[int, Box]]]] = []
        if small:
            size = sum(self._bytes(i, box) for i, box in small)
            letters.append((torch.empty(size, dtype=torch.uint8, device=self._device), small))
        for i, box in parts:
            if self._bytes(i, box) < _LARGE:
                continue
            targets = list(self._targets(i, box))
            place = targets[0][1] if len(targets) == 1 and targets[0][0] == box else None
            if place is not None and place.flags.c_contiguous and torch.device(self._device).type == "cpu":
                letters.append((torch.from_numpy(place.reshape(-1).view(np.uint8)), []))
            else:
                size = self._bytes(i, box)
                letter = torch.empty(size, dtype=torch.uint8, device=self._device)
                letters.append((letter, [(i, box)]))
        return letters

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
