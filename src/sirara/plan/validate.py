"""Predictions beside measurements: per source the errors of time and memory, the ranking, the first choice."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.errors import ConfigError
from sirara.plan.constants import Constants
from sirara.plan.cost import step_time
from sirara.plan.fit import fit
from sirara.plan.hardware import Table
from sirara.plan.memory import memory
from sirara.plan.points import Points, Recompute, concatenate
from sirara.plan.rows import Refusal, Rows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors, as fractions; bias: mean of predicted / measured - 1."""

    n: int
    mean: float
    median: float
    p90: float
    largest: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source, or a part of it.  tau, regret: means over its sweeps; NaN without one."""

    source: str
    time: Errors | None
    memory: Errors | None
    sweeps: int
    tau: float
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """One row: what was measured (NaN: was not) and predicted, and what the row does not say."""

    id: str
    source: str
    model: str
    step_s: float
    predicted_s: float
    memory_bytes: float
    predicted_bytes: float
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """tau, regret: means over all sweeps."""

    reports: tuple[SourceReport, ...]
    rows: tuple[RowReport, ...]
    tau: float
    regret: float
    refused: tuple[Refusal, ...]
    labels: int
    """Rows that say whether they ran and state all that memory needs."""
    wrong_labels: tuple[str, ...]
    left_out: bool
    predicted_s: Floats
    predicted_bytes: Floats


def project(source: str) -> str:
    """What a source belongs to, its first word: releases and tables of one project are left out together."""
    return (source.split() or [""])[0]


def resolve(rows: Rows, hardware: Table, constants: Constants) -> Points:
    """The rows' points with what they leave open decided: the fastest micro_batch and recompute that fit."""
    p = rows.points
    for is_open, options in (
        (rows.open_micro_batch, _micro_batches),
        (rows.open_recompute, _recomputes),
    ):
        at = np.flatnonzero(is_open)
        if len(at):
            p = _decide(p, at, options, hardware, constants)
    return p


def _decide(
    p: Points, at: NDArray[np.int64], options: Callable[[Points], list[Points]], hw: Table, k: Constants
) -> Points:
    some = p.take(at)
    made = options(some)
    every = concatenate(made)
    time = step_time(every, hw, k).step_s.reshape(len(made), -1)
    held = memory(every, hw, k).device.reshape(len(made), -1)
    fits = held <= hw.hbm_bytes[some.accelerator]
    # Where nothing fits, what takes least.
    score = np.where(fits.any(axis=0), np.where(fits, time, np.inf), held)
    best = score.argmin(axis=0)
    whole = concatenate([p, *made])
    index = np.arange(len(p))
    index[at] = len(p) + best * len(at) + np.arange(len(at))
    return whole.take(index)


def _micro_batches(p: Points) -> list[Points]:
    own = p.global_batch / p.dp
    made = []
    for b in (1.0, 2.0, 4.0, 8.0, 16.0):
        size = np.where((own % b == 0) & (b <= own), b, 1.0)
        made.append(p.with_(micro_batch=size))
    return made


def _recomputes(p: Points) -> list[Points]:
    r = Recompute
    light, some = r.NORM | r.ACT, r.NORM | r.MLP | r.UP
    sets = (r.NONE, light, r.UP, light | r.UP, some, some | r.CORE)
    return [p.with_(recompute=int(s)) for s in sets] + [
        p.with_(recompute=int(r.FULL), recompute_share=share) for share in (0.25, 0.5, 0.75, 1.0)
    ]


def validate(
    rows: Rows,
    hardware: Table,
    constants: Constants,
    *,
    start: Constants | None = None,
    leave_out: bool = False,
) -> Validation:
    """Errors per source; with `leave_out` each project is predicted by constants that were fitted without it."""
    points = resolve(rows, hardware, constants)
    if leave_out:
        predicted_s = left_out(rows, points, hardware, start or Constants())
    else:
        predicted_s = step_time(points, hardware, constants).step_s
    m = memory(points, hardware, constants)
    by_level = {"allocated": m.allocated, "reserved": m.reserved, "device": m.device}
    predicted_bytes = np.array([by_level[level][i] for i, level in enumerate(rows.memory_level)])
    labelled = ~np.isnan(rows.fits) & ~rows.open_recompute & ~rows.open_micro_batch
    says = m.device <= hardware.hbm_bytes[points.accelerator]
    wrong = labelled & (says != (rows.fits == 1))
    parts = [part_of(rows, i) for i in range(len(rows))]
    reports = [
        _report(part, np.flatnonzero([q == part for q in parts]), rows, predicted_s, predicted_bytes)
        for part in dict.fromkeys(parts)
    ]
    each = [
        RowReport(
            id=rows.ids[i],
            source=rows.sources[i],
            model=rows.models[i],
            step_s=float(rows.step_s[i]),
            predicted_s=float(predicted_s[i]),
            memory_bytes=float(rows.memory_bytes[i]),
            predicted_bytes=float(predicted_bytes[i]),
            assumed=rows.assumed[i],
        )
        for i in range(len(rows))
    ]
    swept = [r for r in reports if r.sweeps]
    count = sum(r.sweeps for r in swept) or float("nan")
    return Validation(
        reports=tuple(reports),
        rows=tuple(each),
        tau=sum(r.tau * r.sweeps for r in swept) / count,
        regret=sum(r.regret * r.sweeps for r in swept) / count,
        refused=rows.refused,
        labels=int(labelled.sum()),
        wrong_labels=tuple(rows.ids[i] for i in np.flatnonzero(wrong)),
        left_out=leave_out,
        predicted_s=predicted_s,
        predicted_bytes=predicted_bytes,
    )


def part_of(rows: Rows, i: int) -> str:
    """A source, and which part of it where it measures things of two natures: one node, experts, accelerator types."""
    source = rows.sources[i]
    name = re.sub(r" NeMo Container$", "", source)
    same = [j for j in range(len(rows)) if rows.sources[j] == source]
    p = rows.points
    if len({bool(p.experts[j] > 0) for j in same}) > 1:
        name += ", experts" if p.experts[i] > 0 else ", dense"
    elif len({rows.gpu_types[j] for j in same}) > 1:
        name += f", {rows.gpu_types[i]}"
    elif min(p.gpus[j] for j in same) <= 8 < max(p.gpus[j] for j in same):
        name += ", one node" if p.gpus[i] <= 8 else ", many nodes"
    return name


def left_out(rows: Rows, points: Points, hardware: Table, start: Constants) -> Floats:
    """Step times [n], each from constants fitted to the other projects' rows.

    Raises:  ConfigError SR213 for a project beside which nothing is measured.
    """
    projects = np.array([project(s) for s in rows.sources])
    measured = ~np.isnan(rows.step_s)
    predicted = np.full(len(rows), np.nan)
    for name in dict.fromkeys(projects.tolist()):
        train = measured & (projects != name)
        if not train.any():
            raise ConfigError(
                f"without {name or 'the rows that name no source'} no step time is left to fit constants to",
                code="SR213", where="--leave-source-out", try_=["rows of other projects", "without the option"],
            )  # fmt: skip
        groups = [rows.sources[i] for i in np.flatnonzero(train)]
        found = fit(points.take(train), rows.step_s[train], groups, hardware, start).constants
        mine = projects == name
        predicted[mine] = step_time(points.take(mine), hardware, found).step_s
    return predicted


def _errors(predicted: Floats, measured: Floats) -> Errors | None:
    ok = ~np.isnan(measured) & ~np.isnan(predicted)
    if not ok.any():
        return None
    e = predicted[ok] / measured[ok] - 1
    a = np.abs(e)
    return Errors(
        n=int(ok.sum()),
        mean=float(a.mean()),
        median=float(np.median(a)),
        p90=float(np.quantile(a, 0.9)),
        largest=float(a.max()),
        bias=float(e.mean()),
    )


def _report(
    name: str, at: NDArray[np.int64], rows: Rows, predicted_s: Floats, predicted_bytes: Floats
) -> SourceReport:
    taus, regrets = [], []
    for sweep in sweeps(rows, at):
        taus.append(kendall_tau(predicted_s[sweep], rows.step_s[sweep]))
        chosen = sweep[predicted_s[sweep].argmin()]
        regrets.append(float(rows.step_s[chosen] / rows.step_s[sweep].min() - 1))
    return SourceReport(
        source=name,
        time=_errors(predicted_s[at], rows.step_s[at]),
        memory=_errors(predicted_bytes[at], rows.memory_bytes[at]),
        sweeps=len(taus),
        tau=float(np.mean(taus)) if taus else float("nan"),
        regret=float(np.mean(regrets)) if regrets else float("nan"),
    )


def sweeps(rows: Rows, at: Sequence[int] | NDArray[np.int64], *, least: int = 4) -> list[NDArray[np.int64]]:
    """Indices of rows of one source, model, accelerator, count, batch and sequence, which differ in layout."""
    groups: dict[tuple[object, ...], list[int]] = {}
    p = rows.points
    for i in at:
        if np.isnan(rows.step_s[i]):
            continue
        shape = tuple(
            float(getattr(p, k)[i]) for k in ("layers", "hidden", "heads", "seq", "global_batch", "dtype")
        )
        key = (rows.sources[i], rows.models[i], rows.gpu_types[i], float(p.gpus[i]), shape)
        groups.setdefault(key, []).append(int(i))
    return [np.array(g) for g in groups.values() if len(g) >= least]


def kendall_tau(a: Floats, b: Floats) -> float:
    """Concordant less discordant pairs over all pairs; ties count as neither."""
    x, y = np.sign(np.subtract.outer(a, a)), np.sign(np.subtract.outer(b, b))
    pairs = len(a) * (len(a) - 1)
    return float((x * y).sum() / pairs) if pairs else float("nan")
