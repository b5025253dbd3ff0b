"""The best layout of a space, and what the outcome says about each knob.

plan/table.py: every layout's memory and time ─► ranked ─► the best whose memory fits by the executor's rules too
    (plan/counted.py) ─► nearest alternatives, the best per value of every knob, why families are left out
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.errors import PlanError
from sirara.plan.counted import Layouts, as_needed, keys_at, runs_now, words_at
from sirara.plan.from_config import even_nodes
from sirara.plan.layouts import WHY, Reason, Space, knob_values, words_of
from sirara.plan.table import BEYOND, Table, evaluated
from sirara.plan.verdict import UNITS, Plan, Setting, in_words
from sirara.pure.shape import ModelShape

Floats = NDArray[np.float64]
ALTERNATIVES = 5
SLOWER = 1.25
"""How much slower than the fastest a layout may be that is wanted for its little memory."""
TRIED = 60
"""Candidates whose memory is counted exactly, at most."""
VALUE_TRIED = 8
"""And of each value of a knob, beside those that were counted before."""
TIMED = 100
"""Of the best by formulas, those that are timed by a profile's units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout: what it is in words, how a configuration spells it, and what it costs."""

    words: Mapping[str, str]
    overrides: tuple[str, ...]
    step_s: float
    device_bytes: float
    runs: bool
    measured: bool = False
    """Whether its step is made of times that were measured for its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The best step with one knob held at one value, and the keys that make it; `reason`: why there is none."""

    knob: str
    value: str
    step_s: float
    device_bytes: float
    chosen: bool
    reason: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.  best_now: the best that this version runs; alternatives: the next best."""

    best: Plan
    best_words: Mapping[str, str]
    best_overrides: tuple[str, ...]
    best_now: Plan | None
    now_words: Mapping[str, str]
    now_overrides: tuple[str, ...]
    alternatives: tuple[Candidate, ...]
    sensitivity: tuple[Sensitivity, ...]
    reasons: Mapping[str, int]
    layouts: int
    legal: int
    fitting: int
    seconds: float
    objective: str
    numerics: str
    """"fast" where nothing fits with the exact sums that the configuration asks for."""
    tight: bool = False
    """Nothing fits that leaves the mean error of predicted memory free, so nothing is left free for it."""


def search(
    config: RunConfig, shape: ModelShape, setting: Setting, space: Space, *, objective: str = "time",
) -> Found:  # fmt: skip
    """The best layout of a space for an objective: "time", "cost" or "memory".

    It leaves the mean error of predicted memory free, unless nothing fits so with the sums that are asked for.
    Raises:  PlanError SR215 when nothing fits, with what comes nearest.
    """
    found, refused = None, None
    try:
        found = _search(config, shape, setting, space, objective)
    except PlanError as error:
        refused = error
    if setting.ceiling_bytes is None and (found is None or found.numerics != config.numerics):
        try:
            closely = _search(config, shape, replace(setting, keep_free=False), space, objective)
        except PlanError:
            closely = None
        if closely is not None and (found is None or closely.numerics == config.numerics):
            return closely
    if found is None:
        raise refused or PlanError("no layout fits", code="SR215")
    return found


def _search(config: RunConfig, shape: ModelShape, setting: Setting, space: Space, objective: str) -> Found:
    counter, seconds = _evaluated(config, shape, setting, space, objective)
    best = _first(counter, objective, now=False)
    if best is None and config.numerics == "exact":
        fast = config.model_copy(update={"numerics": "fast"})
        counter, more = _evaluated(fast, shape, setting, space, objective)
        seconds, best = seconds + more, _first(counter, objective, now=False)
    table = counter.table
    if best is None:
        raise _nothing(table, setting)
    now = _first(counter, objective, now=True)
    values = _values(counter)
    alternatives = _alternatives(counter, _ranked(table, objective), best)
    # Whatever was counted on the way may be better.
    while objective != "memory" and (faster := counter.fastest(best)) != best:
        best, alternatives = faster, _alternatives(counter, _ranked(table, objective), faster)
    if objective != "memory" and now is not None:
        now = counter.fastest(now, now=True)
    beyond = np.isfinite(table.step) & (table.device > table.limit)
    table.step[beyond], table.reason[beyond] = np.nan, Reason.MEMORY
    return Found(
        best=counter.plans[best],
        best_words=words_at(table, best),
        best_overrides=keys_at(table, best, shape),
        best_now=None if now is None else counter.plans[now],
        now_words={} if now is None else words_at(table, now),
        now_overrides=() if now is None else keys_at(table, now, shape),
        alternatives=alternatives,
        sensitivity=tuple(_sensitivity(counter, value, best) for value in values),
        reasons=_reasons(table),
        layouts=table.reason.size,
        legal=int((table.reason == Reason.LEGAL).sum() + (table.reason == Reason.MEMORY).sum()),
        fitting=int(np.isfinite(table.step).sum()),
        seconds=seconds,
        objective=objective,
        numerics=counter.config.numerics,
        tight=not setting.keep_free,
    )


def _evaluated(
    config: RunConfig, shape: ModelShape, setting: Setting, space: Space, objective: str
) -> tuple[Layouts, float]:
    """(what counts layouts of a table that was evaluated, seconds that it took)."""
    began = time.perf_counter()
    table = evaluated(config, shape, setting, space)
    seconds = time.perf_counter() - began
    counter = Layouts(config=config, shape=shape, setting=setting, table=table)
    if setting.profile is not None:
        off = _timed_by_units(counter, objective)
        counter = replace(counter, setting=replace(setting, formulas_off=off), plans={})
    return counter, seconds


def _ranked(table: Table, objective: str, *, now: bool = False) -> NDArray[np.int64]:
    """Flat indices of what fits, best first.  now: what is near the fastest is near the fastest that runs."""
    step, device = table.step.ravel(), table.device.ravel()
    fit = np.flatnonzero(np.isfinite(step))
    if objective == "memory":
        fastest = (step[at] for at in map(int, _ranked(table, "time")) if not now or runs_now(table, at))
        fit = fit[step[fit] <= SLOWER * next(fastest, 0.0)]
        return fit[np.lexsort((step[fit], device[fit]))]
    # Of layouts that take the same time (to a thousandth) the one that needs least memory.
    rounded = np.round(np.log(step[fit]) * 1000)
    return fit[np.lexsort((device[fit], rounded))]


def _first(counter: Layouts, objective: str, *, now: bool) -> int | None:
    """The best that fits when its memory is counted by the executor's rules too."""
    order = _ranked(counter.table, objective, now=now)
    return _best_of(counter, order, TRIED, now=now, first=objective == "memory")


def _best_of(
    counter: Layouts, order: NDArray[np.int64], tries: int, *, now: bool = False, first: bool = False
) -> int | None:
    """The fastest of an order that fits, or the `first`; of so many tries at most.

    A counted step is not shorter than by closed forms, so what is behind the best by those is not looked at.
    """
    table, tried, off, best = counter.table, 0, 1 / BEYOND, None
    for at in map(int, order):
        if not np.isfinite(table.step.flat[at]) or (now and not runs_now(table, at)):
            continue
        if best is not None and table.step.flat[at] >= counter.plans[best].step_s:
            break
        # Where the closed form was too low once, layouts as near to the limit are not tried; recompute as needed comes
        # as near as it may.
        known = at in counter.plans
        near = not as_needed(table, at) and float(table.device.flat[at]) * off > float(table.limit.flat[at])
        if near and not known:
            continue
        tried += not known
        if tried > tries:
            break
        found = counter.plan(at)
        off = max(off, float(table.off.flat[at]))
        if found is None or (now and found.not_run):
            continue
        if best is None or found.step_s < counter.plans[best].step_s:
            best = at
        if first:
            break
    return best


def _timed_by_units(counter: Layouts, objective: str) -> float:
    """Replaces formulas by measured times where the profile has them; all others are as far off as those were.

    Returns:  how far.
    """
    table, measured, ratios = counter.table, dict[int, float](), list[float]()
    for at in map(int, _ranked(table, objective)[:TIMED]):
        formula_s = float(table.step.flat[at])
        found = counter.plan(at)
        if found is not None and found.how == UNITS:
            measured[at] = found.step_s
            ratios.append(found.step_s / formula_s)
    if not measured:
        return 1.0
    off = float(np.median(ratios))
    table.step *= off
    table.step.flat[list(measured)] = list(measured.values())
    table.timed |= measured.keys()
    return off


# ---- outcome


def _alternatives(counter: Layouts, order: NDArray[np.int64], best: int) -> tuple[Candidate, ...]:
    """The next best that fit, each of other degrees, ZeRO stage or schedule than those before it."""
    table, left = counter.table, TRIED
    seen, found = {_family(table, best), _twins(table, best)}, list[Candidate]()
    for at in map(int, order[:20_000]):
        both = _family(table, at), _twins(table, at)
        if not seen.isdisjoint(both):
            continue
        left -= at not in counter.plans
        if left < 0:
            break
        there = counter.plan(at)
        if there is None:
            continue
        seen.update(both)
        found.append(
            Candidate(
                words=words_at(table, at),
                overrides=keys_at(table, at, counter.shape),
                step_s=there.step_s,
                device_bytes=there.device_bytes,
                runs=runs_now(table, at),
                measured=at in table.timed,
            )
        )
        if len(found) == ALTERNATIVES:
            break
    return tuple(sorted(found, key=lambda a: a.step_s))


def _twins(table: Table, at: int) -> tuple[Any, ...]:
    """The same but for cp, which takes the same time and memory, is no other layout to a person who chooses."""
    o, i = divmod(at, len(table.inside))
    x = table.outers[o]
    cost = round(float(np.log(table.step.flat[at])) * 1000), round(float(table.device.flat[at]) / 2**27)
    return x.pp, x.tp, x.ep, int(table.inside.at["zero"][i]), int(table.inside.at["schedule"][i]), cost


def _family(table: Table, at: int) -> tuple[Any, ...]:
    o, i = divmod(at, len(table.inside))
    return o, int(table.inside.at["zero"][i]), int(table.inside.at["schedule"][i])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A value of a knob; at: the best that it allows, or None; reason: why it allows nothing."""

    knob: str
    value: str
    part: NDArray[np.bool_]
    at: int | None
    reason: str


def _values(counter: Layouts) -> list[_Value]:
    """Every value of every knob: the best that it allows, or why it allows nothing."""
    table = counter.table
    order, parts = _ranked(table, "time"), list[tuple[str, str, NDArray[np.bool_]]]()
    for knob in ("pp", "tp", "cp", "ep"):
        for value in sorted({getattr(x, knob) for x in table.outers}):
            rows = np.array([getattr(x, knob) == value for x in table.outers])
            parts.append((knob, str(value), np.broadcast_to(rows[:, None], table.step.shape).ravel()))
    for knob, n, value in knob_values(table.space):
        columns = table.inside.at[knob] == n
        parts.append((knob, value, np.broadcast_to(columns, table.step.shape).ravel()))
    found = list[_Value]()
    for knob, value, part in parts:
        at = _best_of(counter, order[part[order]], VALUE_TRIED)
        reason = "" if at is not None else _why_nothing(table, part)
        found.append(_Value(knob=knob, value=value, part=part, at=at, reason=reason))
    return found


def _sensitivity(counter: Layouts, v: _Value, best: int) -> Sensitivity:
    # What other values tried may be better here too.
    able = [at for at in counter.plans if v.part[at]]
    at = min(able, key=lambda at: counter.plans[at].step_s, default=None)
    found = None if at is None else counter.plans[at]
    return Sensitivity(
        knob=v.knob,
        value=v.value,
        step_s=float("nan") if found is None else found.step_s,
        device_bytes=float(np.min(counter.table.device.ravel()[v.part]))
        if found is None
        else found.device_bytes,
        chosen=bool(v.part[best]),
        reason="" if found is not None else v.reason,
        overrides=() if at is None else keys_at(counter.table, at, counter.shape),
    )


def _why_nothing(table: Table, part: NDArray[np.bool_]) -> str:
    counts = Counter(table.reason.ravel()[part].tolist())
    if np.isfinite(table.step.ravel()[part]).any():
        return f"the {VALUE_TRIED} fastest by closed forms do not fit"
    if counts.get(Reason.MEMORY):
        least = float(np.min(table.device.ravel()[part]))
        return f"none of {counts[Reason.MEMORY]:,} legal layouts fits: the least needs {in_words(least)}"
    # What leaves out more here than elsewhere is what the value itself does.
    everywhere = Counter(table.reason.ravel().tolist())
    more = {r: n / part.sum() - everywhere[r] / table.reason.size for r, n in counts.items()}
    return WHY[Reason(max(more, key=lambda r: more[r]))]


def _reasons(table: Table) -> dict[str, int]:
    counts = np.bincount(table.reason.ravel(), minlength=int(Reason.MEMORY) + 1)
    found = {WHY[reason]: int(counts[reason]) for reason in WHY if counts[reason]}
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def _nothing(table: Table, setting: Setting) -> PlanError:
    reasons = {WHY[Reason.MEMORY]: 0, **_reasons(table)}
    listed = "; ".join(f"{count:,} {reason}" for reason, count in list(reasons.items())[:4] if count)
    near = ""
    if np.isfinite(table.device).any():
        o, i = divmod(int(np.argmin(table.device)), len(table.inside))
        words = words_of(table.space, table.outers[o], table.inside, i)
        near = f"the nearest needs {in_words(float(np.min(table.device)))}: "
        near += ", ".join(f"{k} {v}" for k, v in words.items()) + "; "
    gpus = table.space.gpus
    return PlanError(
        f"none of {table.reason.size:,} layouts on {gpus} device{'s' * (gpus > 1)} fits",
        code="SR215",
        where="plan, search",
        why=f"each device has {in_words(setting.capacity_bytes)}; {near}{listed}",
        try_=[f"--gpus {2 * gpus} or more", "train.recompute=full", "another --gpu"],
    )


def smaller(setting: Setting, gpus: int) -> Setting:
    """The same machines, fewer of them."""
    cluster = setting.cluster
    per_node = even_nodes(gpus, cluster.per_node)
    return replace(setting, cluster=replace(cluster, per_node=per_node, nodes=gpus // per_node))
