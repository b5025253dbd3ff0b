"""Two steps, tensor by tensor: what one has and the other lacks, and how far their values are apart.

    names of both ─► missing, dtype, shape from the manifests ─► values read chunk by chunk, hashes checked

Equal means equal bits, so NaN equals itself and 0.0 is not -0.0. Layouts, files and pieces do not count: a state
saved by one rank equals the same state saved by eight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch

from sirara.checkpoint.ranges import DTYPES, NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.errors import ConfigError
from sirara.pure.layout import Box, cut_box, whole
from sirara.pure.manifest import Manifest, TensorEntry
from sirara.pure.saveplan import ITEM_BYTES

CHUNK_BYTES = 16 << 20
BLOCK = 1 << 16
"""Elements that are compared at a time, in the core's cache."""
NOT_STATE = ("layout",)
"""Fields of the record that say who saved the state, not what it is."""

What = Literal["equal", "values", "dtype", "shape", "only in A", "only in B"]
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor in A and in B.

    a, b: dtype and shape on either side.  differing: elements whose bits differ (of two dtypes: whose values do).
    max_abs: greatest |a - b| over elements that are numbers on both sides; None when nothing could be subtracted.
    nans: elements that are NaN on one side only.  first: index of the first element that differs.
    """

    name: str
    what: What
    a: TensorEntry | None = None
    b: TensorEntry | None = None
    differing: int = 0
    max_abs: float | None = None
    nans: int = 0
    first: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All tensors in the order of A, then those that only B has; and the fields of the records that differ."""

    tensors: tuple[TensorDiff, ...]
    record: dict[str, tuple[Any, Any]]

    @property
    def differing(self) -> tuple[TensorDiff, ...]:
        return tuple(t for t in self.tensors if t.what != "equal")

    @property
    def equal(self) -> bool:
        return not self.differing and not self.record


def compare(a: Snapshot, b: Snapshot, *, only: Sequence[str] = (), quick: bool = False) -> Comparison:
    """The differences of two steps; memory stays at a few chunks of CHUNK_BYTES and the pieces that meet them.

    Args:  only: globs of tensor names; the records are compared when there is none.
           quick: tensors whose pieces have the same boxes and hashes are taken as equal without reading them.
    Raises:  CheckpointError naming a bad piece; ConfigError when `only` fits no tensor.
    """
    names = _names(a.manifest, b.manifest)
    if only:
        names = [n for n in names if any(fnmatchcase(n, glob) for glob in only)]
        if not names:
            raise ConfigError(f"no tensor of either step fits {', '.join(only)}")
    return Comparison(
        tensors=tuple(_compare_tensor(name, a, b, quick=quick) for name in names),
        record={} if only else _record_diff(a.record, b.record),
    )


def _names(a: Manifest, b: Manifest) -> list[str]:
    """Every tensor of either side; a tied name counts when the other side stores it by itself."""
    return list(dict.fromkeys(t.name for m in (a, b) for t in m.tensors))


def _record_diff(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys((*a, *b))
    return {k: (a.get(k), b.get(k)) for k in keys if k not in NOT_STATE and a.get(k) != b.get(k)}


def _entry(m: Manifest, name: str) -> TensorEntry | None:
    place = m.tensor_index.get(m.aliases.get(name, name))
    return None if place is None else m.tensors[place]


def _compare_tensor(name: str, a: Snapshot, b: Snapshot, *, quick: bool) -> TensorDiff:
    left, right = _entry(a.manifest, name), _entry(b.manifest, name)
    if left is None or right is None:
        return TensorDiff(name=name, what="only in B" if left is None else "only in A", a=left, b=right)
    if left.shape != right.shape:
        return TensorDiff(name=name, what="shape", a=left, b=right)
    same_dtype = left.dtype == right.dtype
    if quick and same_dtype and _fingerprint(a.manifest, left) == _fingerprint(b.manifest, right):
        return TensorDiff(name=name, what="equal", a=left, b=right)
    differing, nans, first = 0, 0, None
    largest: float | None = None
    for box, x, y in _chunks(a, left, b, right):
        for at in range(0, len(x), BLOCK):
            found = _block(x[at : at + BLOCK], y[at : at + BLOCK])
            if found is None:
                continue
            count, lone, peak, place = found
            differing += count
            nans += lone
            first = _index(box, at + place) if first is None else first
            if count > lone:
                largest = max(largest or 0.0, peak)
    what: What = "dtype" if not same_dtype else "values" if differing else "equal"
    if not differing:
        largest = 0.0
    return TensorDiff(
        name=name, what=what, a=left, b=right, differing=differing, max_abs=largest, nans=nans, first=first
    )


def _chunks(
    a: Snapshot, left: TensorEntry, b: Snapshot, right: TensorEntry
) -> Iterator[tuple[Box, torch.Tensor, torch.Tensor]]:
    item = max(ITEM_BYTES[left.dtype], ITEM_BYTES[right.dtype])
    for box in cut_box(whole(left.shape), CHUNK_BYTES // item):
        yield box, _read(a, left, box), _read(b, right, box)


def _read(snapshot: Snapshot, entry: TensorEntry, box: Box) -> torch.Tensor:
    data = torch.empty(box.volume, dtype=DTYPES[entry.dtype])
    snapshot.read_into([NamedRange(tensor=entry.name, shape=entry.shape, boxes=(box,), data=data)])
    return data


def _block(x: torch.Tensor, y: torch.Tensor) -> tuple[int, int, float, int] | None:
    """(elements that differ, those that are NaN on one side, greatest distance, place of the first); None when equal.

    Elements differ by bits, of two dtypes by value.
    """
    if x.dtype == y.dtype:
        raw = _RAW[x.element_size()]
        apart = x.view(torch.uint8).numpy().view(raw) != y.view(torch.uint8).numpy().view(raw)
        if not apart.any():
            return None
        left, right = _double(x), _double(y)
    else:
        left, right = _double(x), _double(y)
        apart = ((left != right) & ~(left.isnan() & right.isnan())).numpy()
        if not apart.any():
            return None
    lone = int((left.isnan() ^ right.isnan()).sum())
    # A difference is NaN where a side is NaN, and of two equal infinities, which are no distance apart.
    distance = left.sub_(right).abs_().nan_to_num_(nan=0.0, posinf=float("inf"))
    return int(np.count_nonzero(apart)), lone, float(distance.max()), int(apart.argmax())


def _double(x: torch.Tensor) -> torch.Tensor:
    # fp8 converts through float32 only.
    wide = x.float() if x.element_size() == 1 and x.is_floating_point() else x
    return wide.to(torch.float64, copy=True)


def _index(box: Box, place: int) -> tuple[int, ...]:
    inside = np.unravel_index(place, box.size) if box.size else ()
    return tuple(int(i) + o for i, o in zip(inside, box.offset, strict=True))


def _fingerprint(m: Manifest, entry: TensorEntry) -> list[tuple[Box, bytes]]:
    """The tensor's boxes with their hashes, whatever the files."""
    found = [(m.box(int(i)), m.pieces.hash(int(i))) for i in m.pieces_of(m.tensor_index[entry.name])]
    return sorted(found, key=lambda pair: pair[0].offset)
