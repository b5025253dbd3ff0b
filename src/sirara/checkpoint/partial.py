"""Part of a checkpoint into a model that may be another one: weights only, some names, larger shapes.  Nothing silent.

names     globs of weights ("model.layers.*"); what they do not match stays as it is, in the model and in the report
strict    every matching weight of either side must be on the other as well
grow      a weight may be larger here: what the checkpoint holds fills its first corner, the rest stays as it is
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from sirara.checkpoint.ranges import DTYPES, NamedRange, dtype_name
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.layout import Box, intersection, whole
from sirara.pure.manifest import Manifest
from sirara.pure.saveplan import PlannedTensor

MASTER = "/master"

Read = Callable[[Sequence[PlannedTensor], Sequence[NamedRange]], None]
"""Fills this rank's ranges, given what all ranks want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """What became of each weight, by name.

    taken: filled from the checkpoint.  grown: of these, filled in part (name, shape there, shape here).  converted: of
    these, stored in another dtype (name, dtype there, here).  missing: of the model, not in the checkpoint.
    unexpected: of the checkpoint, not in the model.  left: of the model, matched by none of the names.
    """

    taken: tuple[str, ...]
    grown: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    converted: tuple[tuple[str, str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} weights taken"]
        parts += [
            f"{len(self.grown)} of them smaller than here: {_some([n for n, *_ in self.grown])}"
        ] * bool(self.grown)
        parts += [f"{len(self.converted)} of them converted"] * bool(self.converted)
        parts += [f"{len(self.missing)} missing: {_some(self.missing)}"] * bool(self.missing)
        parts += [f"{len(self.unexpected)} unexpected: {_some(self.unexpected)}"] * bool(self.unexpected)
        parts += [f"{len(self.left)} left as they were"] * bool(self.left)
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """One of our tensors, the saved one that fills it, and that one's dtype and shape."""

    ours: str
    source: str
    dtype: str
    shape: tuple[int, ...]


def load_weights(
    snapshot: Snapshot,
    ranges: Sequence[NamedRange],
    *,
    plan: Sequence[PlannedTensor] | None = None,
    names: Sequence[str] = ("*",),
    strict: bool = True,
    grow: bool = False,
    read: Read | None = None,
) -> WeightsReport:
    """Fills weights, through their full-precision values where either side has them; other state is not touched.

    Args:    ranges: of weights and masters; of a weight that has a master only the master is filled.  plan: what all
             ranks hold (default: `ranges` are all there is); then `read` is collective, and so is this.
    Raises:  CheckpointError naming what is missing, unexpected or of another shape; ConfigError for a name that
             matches nothing.  Nothing has been changed then.
    """
    held = plan or [
        PlannedTensor(name=r.tensor, dtype=dtype_name(r.data.dtype), shape=r.shape, boxes={0: r.boxes})
        for r in ranges
    ]
    fills, report = choose_weights(
        snapshot.manifest, {t.name: (t.dtype, t.shape) for t in held}, names=names, strict=strict, grow=grow
    )
    by_name = {fill.ours: fill for fill in fills}
    wanted = [
        PlannedTensor(
            name=fill.source,
            dtype=fill.dtype,
            shape=fill.shape,
            boxes={rank: _clipped(boxes, fill.shape) for rank, boxes in t.boxes.items()},
        )
        for t in held
        if (fill := by_name.get(t.name)) is not None
    ]
    filled: list[NamedRange] = []
    late: list[tuple[NamedRange, NamedRange]] = []
    for r in ranges:
        fill = by_name.get(r.tensor)
        if fill is None:
            continue
        boxes, data = _clipped(r.boxes, fill.shape), r.data
        if fill.dtype != dtype_name(r.data.dtype) or fill.shape != tuple(r.shape):
            data = torch.empty(
                sum(box.volume for box in boxes), dtype=DTYPES[fill.dtype], device=r.data.device
            )
        filled.append(NamedRange(tensor=fill.source, shape=fill.shape, boxes=boxes, data=data))
        if data is not r.data:
            late.append((r, filled[-1]))
    if read is None:
        snapshot.read_into(filled)
    else:
        read(wanted, filled)
    for r, source in late:
        _copy(r, source)
    return report


def choose_weights(
    manifest: Manifest,
    ours: Mapping[str, tuple[str, Sequence[int]]],
    *,
    names: Sequence[str] = ("*",),
    strict: bool = True,
    grow: bool = False,
) -> tuple[list[_Fill], WeightsReport]:
    """What fills what, without reading; `ours`: name -> (dtype, shape) of the model's weights and masters.

    Raises:  as `load_weights`.
    """
    saved = {t.name: t for t in manifest.tensors}
    there = {name for name in (*saved, *manifest.aliases) if "/" not in name}
    here = {name for name in ours if "/" not in name}
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in there | here):
            near = difflib.get_close_matches(pattern, there | here, n=1)
            raise ConfigError(
                f"no weight is called {pattern!r}",
                why=f"the checkpoint has {len(there)}, the model {len(here)}"
                + (f"; the nearest name is {near[0]!r}" if near else ""),
            )
    fills: list[_Fill] = []
    grown, converted, missing, left = [], [], [], []
    used: set[str] = set()
    for name in (n for n in ours if n in here):
        if not _matches(name, names):
            left.append(name)
            continue
        owner = manifest.aliases.get(name, name)
        if owner not in saved:
            missing.append(name)
            continue
        used |= {name, owner}
        target = name + MASTER if name + MASTER in ours else name
        dtype, shape = ours[target]
        source = owner if saved[owner].dtype == dtype or owner + MASTER not in saved else owner + MASTER
        if saved[source].shape != tuple(shape):
            grown.append((name, saved[source].shape, tuple(shape)))
        if saved[source].dtype != dtype:
            converted.append((name, saved[source].dtype, dtype))
        fills.append(_Fill(ours=target, source=source, dtype=saved[source].dtype, shape=saved[source].shape))
    unexpected = sorted(n for n in there - used - here if _matches(n, names) and n not in manifest.aliases)
    report = WeightsReport(
        taken=tuple(fill.ours.removesuffix(MASTER) for fill in fills),
        grown=tuple(grown),
        converted=tuple(converted),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        left=tuple(left),
    )
    _check(manifest, report, strict=strict, grow=grow)
    return fills, report


def _check(manifest: Manifest, report: WeightsReport, *, strict: bool, grow: bool) -> None:
    where = f"step {manifest.step} of run {manifest.run}"
    wrong = [
        (name, a, b)
        for name, a, b in report.grown
        if not grow or len(a) != len(b) or any(m > n for m, n in zip(a, b, strict=True))
    ]
    if wrong:
        name, a, b = wrong[0]
        raise CheckpointError(
            f"{name} has shape {list(a)} in the checkpoint and {list(b)} here",
            code="SR525",
            where=where,
            why=f"{len(wrong)} weights do not fit",
            try_=[] if grow else "grow=True fills the first corner of larger weights and leaves the rest",
        )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"the weights do not match: {report}",
            code="SR525",
            where=where,
            try_=["name those that are meant, for example names=['model.layers.*']", "strict=False"],
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _clipped(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[Box, ...]:
    """The boxes as far as they lie within a tensor of this shape."""
    found = (intersection(box, whole(shape)) for box in boxes)
    return tuple(box for box in found if box is not None)


def _copy(target: NamedRange, source: NamedRange) -> None:
    """Copies, with conversion, the elements of `source` to where `target` holds them."""
    at = start = 0
    for box in target.boxes:
        block = target.data[start : start + box.volume].view(box.size)
        start += box.volume
        common = intersection(box, whole(source.shape))
        if common is not None:
            values = source.data[at : at + common.volume].view(common.size)
            at += common.volume
            block[common.relative_to(box).slices].copy_(values)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
