"""Stager: copies a rank's live tensors into an arena, which is all that a save keeps the training loop from.

    plan, image, ranges ─► pairs (memory of a range, place in the image), neighbours joined      once per run
    every save          ─► copies only

On the CPU the copies are done when `copy` returns. On an accelerator they run on a stream of their own beside the
next forward and backward; `fence` makes the next update wait for them, `done` says when the arena is whole.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sirara.checkpoint.image import ImagePlan
from sirara.checkpoint.ranges import NamedRange
from sirara.errors import InvariantError, StorageError
from sirara.pure.layout import Box, box_runs
from sirara.pure.saveplan import ITEM_BYTES, SavePlan

Tensor = torch.Tensor

# From here on the C library's memmove, which writes past the cache, beats torch's copy; below it, one call of
# torch for all of them beats Python.
_LARGE_BYTES = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Copy(NamedTuple):
    """Elements to copy: `source` as bytes in one stretch, or a strided view of a range in `box` order."""

    source: Tensor
    at: int
    size: int


class Stager:
    """The copies of one rank's saves.

    Raises InvariantError when the ranges do not hold what the plan wants of this rank.
    """

    def __init__(self, plan: SavePlan, image: ImagePlan, ranges: Sequence[NamedRange]) -> None:
        self._sources = {(r.data.data_ptr(), r.data.numel()) for r in ranges}
        self._joined = _join(_copies(plan, image, ranges))
        self._device = next((r.data.device for r in ranges if r.data.is_cuda), torch.device("cpu"))
        self._targets: dict[int, list[Tensor]] = {}
        self._pinned: set[int] = set()
        self._event: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fits(self, ranges: Sequence[NamedRange]) -> bool:
        """Whether these are the ranges that it was made for: the same memory."""
        return {(r.data.data_ptr(), r.data.numel()) for r in ranges} == self._sources

    def copy(self, data: memoryview) -> None:
        """Fills the image; on an accelerator the copies may be under way when it returns."""
        if not self._joined:
            return
        whole = torch.frombuffer(data, dtype=torch.uint8)
        targets = self._targets_in(whole)
        if self._stream is None:
            self._copy_on_host(targets)
            return
        self._pin(whole)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, (source, _, _) in zip(targets, self._joined, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def fence(self) -> None:
        """What the device does from now on comes after the copies."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self, *, wait: bool = False) -> bool:
        """Whether all copies of the last `copy` have arrived."""
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        elif not self._event.query():
            return False
        self._event = None
        return True

    def close(self) -> None:
        """Lets go of the arenas: they may be unmapped."""
        self.done(wait=True)
        for address in self._pinned:
            _runtime().cudaHostUnregister(address)
        self._pinned.clear()
        self._targets.clear()

    def _targets_in(self, whole: Tensor) -> list[Tensor]:
        address = whole.data_ptr()
        if address not in self._targets:
            self._targets[address] = [_place(whole, copy) for copy in self._joined]
        return self._targets[address]

    def _copy_on_host(self, targets: Sequence[Tensor]) -> None:
        small_targets, small_sources = [], []
        for target, (source, _, size) in zip(targets, self._joined, strict=True):
            if size >= _LARGE_BYTES and source.dim() == 1:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
            else:
                small_targets.append(target)
                small_sources.append(source)
        if small_targets:
            torch._foreach_copy_(small_targets, small_sources)

    def _pin(self, whole: Tensor) -> None:
        # Copies from the device run beside other work only into memory that cannot move.
        if whole.data_ptr() in self._pinned:
            return
        code = _runtime().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        if int(code) != 0:
            raise StorageError(
                "the arena cannot be pinned for copies from the device",
                why=f"cudaHostRegister of {whole.numel()} bytes: {code}",
                try_="ulimit -l unlimited",
            )
        self._pinned.add(whole.data_ptr())


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    if runtime is None:
        raise InvariantError("tensors lie on a device, but torch has no CUDA runtime")
    return runtime


def _place(whole: Tensor, copy: _Copy) -> Tensor:
    """Where a copy goes, in the shape of its source."""
    target = whole[copy.at : copy.at + copy.size]
    if copy.source.dtype == torch.uint8 and copy.source.dim() == 1:
        return target
    # An image begins every stretch at its place in a file, which is a multiple of the item.
    return target.view(copy.source.dtype).view(copy.source.shape)


def _copies(plan: SavePlan, image: ImagePlan, ranges: Sequence[NamedRange]) -> list[_Copy]:
    held: dict[str, list[tuple[Box, Tensor]]] = {}
    for r in ranges:
        r.check()
        at = 0
        for box in r.boxes:
            held.setdefault(r.tensor, []).append((box, r.data.detach()[at : at + box.volume]))
            at += box.volume
    copies = []
    assembled = np.isin(image.index, plan.assembled).tolist()
    places = zip(plan.pieces_of.get(image.rank, ()), image.position.tolist(), assembled, strict=True)
    for piece, at, from_parts in places:
        if not from_parts:
            source = _find(held, plan.tensors[piece.tensor].name, piece.box)
            copies.append(_Copy(source, at, piece.length))
    for part, at in zip(plan.parts_of(image.rank), image.part_position.tolist(), strict=True):
        tensor = plan.tensors[int(plan.columns.at.tensor[part.piece])]
        source = _find(held, tensor.name, part.box)
        copies.append(_Copy(source, at, part.box.volume * ITEM_BYTES[tensor.dtype]))
    return copies


def _find(held: dict[str, list[tuple[Box, Tensor]]], tensor: str, box: Box) -> Tensor:
    for mine, data in held.get(tensor, ()):
        if not box.within(mine):
            continue
        inner = box.relative_to(mine)
        runs = box_runs(mine.size, inner)
        if len(runs) <= 1:
            start, stop = runs[0] if runs else (0, 0)
            return data[start:stop].view(torch.uint8)
        return data.view(_BITS[data.element_size()]).view(mine.size)[inner.slices]
    raise InvariantError(f"{tensor}{box} is planned for this rank, but it gave no range that holds it")


def _join(copies: Sequence[_Copy]) -> list[_Copy]:
    """Neighbours in both memories become one copy."""
    joined: list[_Copy] = []
    for source, at, size in copies:
        if not size:
            continue
        if joined and source.dim() == 1 and joined[-1].source.dim() == 1:
            before = joined[-1]
            follows = before.at + before.size == at
            follows &= before.source.data_ptr() + before.size == source.data_ptr()
            # Both must be bytes of one storage: the longer stretch is a view of it.
            if follows and before.source.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                longer = before.source.as_strided((before.size + size,), (1,))
                joined[-1] = _Copy(longer, before.at, before.size + size)
                continue
        joined.append(_Copy(source, at, size))
    return joined
