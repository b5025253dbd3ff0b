"""The best layout of a space, and what the outcome says about each knob.

plan/table.py: every layout's memory and time ─► ranked ─► the first whose memory fits by the executor's rules too
    ─► nearest alternatives, the best per value of every knob, why families are left out
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.errors import PlanError, SiraraError
from sirara.plan.exact import counted
from sirara.plan.from_config import even_nodes
from sirara.plan.layouts import (
    NEEDED,
    WHY,
    Reason,
    Space,
    knob_values,
    overrides_of,
    words_of,
)
from sirara.plan.table import Table, evaluated
from sirara.plan.verdict import GIB, UNITS, Plan, Setting
from sirara.pure.shape import ModelShape

Floats = NDArray[np.float64]
ALTERNATIVES = 5
SLOWER = 1.25
"""How much slower than the fastest a layout may be that is wanted for its little memory."""
TRIED = 60
"""Candidates whose memory is counted exactly, at most."""
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
    """The best step with one knob held at one value; `reason`: why there is none."""

    knob: str
    value: str
    step_s: float
    device_bytes: float
    chosen: bool
    reason: str


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
    began = time.perf_counter()
    table = evaluated(config, shape, setting, space)
    numerics = config.numerics
    if numerics == "exact" and not np.isfinite(table.step).any():
        config = config.model_copy(update={"numerics": "fast"})
        table, numerics = evaluated(config, shape, setting, space), "fast"
    seconds = time.perf_counter() - began
    if not np.isfinite(table.step).any():
        raise _nothing(table, setting)
    if setting.profile is not None:
        setting = replace(setting, formulas_off=_timed_by_units(config, shape, setting, table, objective))
    best, at = _first(config, shape, setting, table, objective, now=False)
    if best is None:
        raise _nothing(table, setting)
    now, now_at = _first(config, shape, setting, table, objective, now=True)
    order = _ranked(table, objective)
    return Found(
        best=best,
        best_words=_words(table, at),
        best_overrides=_overrides(table, at, shape),
        best_now=now,
        now_words=_words(table, now_at) if now else {},
        now_overrides=_overrides(table, now_at, shape) if now else (),
        alternatives=_alternatives(config, shape, setting, table, order, at),
        sensitivity=tuple(_sensitivity(table, at)),
        reasons=_reasons(table),
        layouts=table.reason.size,
        legal=int((table.reason == Reason.LEGAL).sum() + (table.reason == Reason.MEMORY).sum()),
        fitting=int(np.isfinite(table.step).sum()),
        seconds=seconds,
        objective=objective,
        numerics=numerics,
        tight=not setting.keep_free,
    )


# ---- outcome


def _ranked(table: Table, objective: str, *, now: bool = False) -> NDArray[np.int64]:
    """Flat indices of what fits, best first.  now: what is near the fastest is near the fastest that runs."""
    step, device = table.step.ravel(), table.device.ravel()
    fit = np.flatnonzero(np.isfinite(step))
    if objective == "memory":
        fastest = (step[at] for at in map(int, _ranked(table, "time")) if not now or _runs(table, at))
        fit = fit[step[fit] <= SLOWER * next(fastest, 0.0)]
        return fit[np.lexsort((step[fit], device[fit]))]
    # Of layouts that take the same time (to a thousandth) the one that needs least memory.
    rounded = np.round(np.log(step[fit]) * 1000)
    return fit[np.lexsort((device[fit], rounded))]


def _first(
    config: RunConfig, shape: ModelShape, setting: Setting, table: Table, objective: str, *, now: bool,
) -> tuple[Plan | None, int]:  # fmt: skip
    """The best that fits when its memory is counted by the executor's rules too; the table learns what was counted."""
    tried, off, best, best_at = 0, 1.0, None, -1
    for at in map(int, _ranked(table, objective, now=now)):
        if now and not _runs(table, at):
            continue
        if best is not None and table.step.flat[at] >= best.step_s:
            break
        # Where the closed form was too low once, layouts as near to the limit are not tried; recompute as needed comes
        # as near as it may.
        needed = _needed(table, at)
        near = not needed and float(table.device.flat[at]) * off > float(table.limit.flat[at])
        tried += not near
        if tried > TRIED:
            break
        found = None if near else _counted(config, shape, setting, table, at)
        if found is None or not found.chosen:
            _too_large(table, at)
        if found is not None and not found.chosen and not needed:
            off = max(off, found.device_bytes / float(table.device.flat[at]))
        if found is None or not found.chosen or (now and found.not_run):
            continue
        if best is None or found.step_s < best.step_s:
            best, best_at = found, at
        if not needed or objective == "memory":
            break
    return best, best_at


def _timed_by_units(
    config: RunConfig, shape: ModelShape, setting: Setting, table: Table, objective: str
) -> float:
    """Replaces formulas by measured times where the profile has them; all others are as far off as those were.

    Returns:  how far.
    """
    measured, ratios = dict[int, float](), list[float]()
    for at in map(int, _ranked(table, objective)[:TIMED]):
        formula_s = float(table.step.flat[at])
        found = _counted(config, shape, setting, table, at)
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


def _too_large(table: Table, at: int) -> None:
    table.step.flat[at] = np.nan
    table.reason.flat[at] = Reason.MEMORY


def _counted(config: RunConfig, shape: ModelShape, setting: Setting, table: Table, at: int) -> Plan | None:
    """The plan of a layout of the table, the recompute that it needs noted; None where the executor refuses it."""
    dp, needed = table.outers[at // len(table.inside)].dp, _needed(table, at)
    try:
        found, words = counted(config, shape, setting, _overrides(table, at, shape), dp=dp, needed=needed)
    except SiraraError:
        # A split or a share that the closed rules let pass.
        return None
    if needed and found.chosen:
        table.recipes[at] = next(w for w in words if w.startswith("train.recompute="))
        table.step.flat[at], table.device.flat[at] = found.step_s, found.device_bytes
    return found


def _needed(table: Table, at: int) -> bool:
    inside = table.inside
    return table.space.recompute[inside.at["recompute"][at % len(inside)]][0] == NEEDED


def _runs(table: Table, at: int) -> bool:
    """Whether this version runs a layout."""
    o, i = divmod(at, len(table.inside))
    outer, words = table.outers[o], words_of(table.space, table.outers[o], table.inside, i)
    runs = outer.cp == 1 and outer.ep == 1 and words["offload"] == "none"
    return runs and words["precision"] in ("bf16", "fp32", "fp64")


def _words(table: Table, at: int) -> dict[str, str]:
    o, i = divmod(at, len(table.inside))
    words = words_of(table.space, table.outers[o], table.inside, i)
    if at in table.recipes:
        words["recompute"] = _short(table.recipes[at].partition("=")[2])
    return {**words, "block": "1" if table.one[o, i] else "auto"}


def _short(recipe: str) -> str:
    """Long lists by their ends."""
    stages = recipe.strip("[]").split(", ")
    return recipe if len(stages) <= 4 else f"[{stages[0]}, {stages[1]}, ..., {stages[-1]}]"


def _overrides(table: Table, at: int, shape: ModelShape) -> tuple[str, ...]:
    o, i = divmod(at, len(table.inside))
    block = 1 if table.one[o, i] else None
    words = overrides_of(table.space, table.outers[o], table.inside, i, layers=shape.layers, block=block)
    found = table.recipes.get(at)
    return tuple(found if found and w.startswith("train.recompute=") else w for w in words)


def _alternatives(
    config: RunConfig, shape: ModelShape, setting: Setting, table: Table, order: NDArray[np.int64], best: int
) -> tuple[Candidate, ...]:
    """The next best, each of other degrees, ZeRO stage or schedule than those before it."""
    seen, found = {_family(table, best), _twins(table, best)}, list[Candidate]()
    for at in order[:20_000]:
        both = _family(table, int(at)), _twins(table, int(at))
        if not seen.isdisjoint(both):
            continue
        if _needed(table, int(at)) and int(at) not in table.recipes:
            there = _counted(config, shape, setting, table, int(at))
            if there is None or not there.chosen:
                continue
        seen.update(both)
        found.append(
            Candidate(
                words=_words(table, int(at)),
                overrides=_overrides(table, int(at), shape),
                step_s=float(table.step.flat[at]),
                device_bytes=float(table.device.flat[at]),
                runs=_runs(table, int(at)),
                measured=int(at) in table.timed,
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


def _sensitivity(table: Table, best: int) -> list[Sensitivity]:
    """Every value of every knob: the best that it allows, or why it allows nothing."""
    o, i = divmod(best, len(table.inside))
    rows: list[Sensitivity] = []
    for knob in ("pp", "tp", "cp", "ep"):
        for value in sorted({getattr(x, knob) for x in table.outers}):
            which = np.array([getattr(x, knob) == value for x in table.outers])
            chosen = getattr(table.outers[o], knob) == value
            rows.append(_value(knob, str(value), table, (which, slice(None)), chosen))
    for knob, n, value in knob_values(table.space):
        which = table.inside.at[knob] == n
        rows.append(_value(knob, value, table, (slice(None), which), bool(which[i])))
    return rows


def _value(knob: str, value: str, table: Table, part: Any, chosen: bool) -> Sensitivity:
    step, device, reason = table.step[part], table.device[part], table.reason[part]
    if np.isfinite(step).any():
        at = np.nanargmin(step)
        return Sensitivity(
            knob=knob, value=value, step_s=float(step.flat[at]), device_bytes=float(device.flat[at]), chosen=chosen,
            reason="",
        )  # fmt: skip
    counts = Counter(reason.ravel().tolist())
    if counts.get(Reason.MEMORY):
        least = float(np.min(device))
        why = f"none of {counts[Reason.MEMORY]:,} legal layouts fits: the least needs {least / GIB:.1f} GiB"
    else:
        why = WHY[Reason(counts.most_common(1)[0][0])]
        least = float("nan")
    return Sensitivity(
        knob=knob, value=value, step_s=float("nan"), device_bytes=least, chosen=chosen, reason=why
    )


def _reasons(table: Table) -> dict[str, int]:
    counts = np.bincount(table.reason.ravel(), minlength=int(Reason.MEMORY) + 1)
    found = {WHY[reason]: int(counts[reason]) for reason in WHY if counts[reason]}
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def _nothing(table: Table, setting: Setting) -> PlanError:
    reasons = _reasons(table)
    memory_bound = np.isfinite(table.device).any()
    least = float(np.min(table.device)) if memory_bound else float("nan")
    why = "; ".join(f"{count:,} {reason}" for reason, count in list(reasons.items())[:4])
    tries = ["--gpus with more devices", "train.recompute=full", "another --gpu"]
    if memory_bound:
        o, i = divmod(int(np.argmin(table.device)), len(table.inside))
        nearest = ", ".join(
            f"{k} {v}" for k, v in words_of(table.space, table.outers[o], table.inside, i).items()
        )
        tries.insert(0, f"nearest, {least / GIB:.1f} GiB: {nearest}")
    return PlanError(
        f"none of {table.reason.size:,} layouts on {table.space.gpus} devices fits",
        code="SR215",
        where="plan, search",
        why=f"each device has {setting.capacity_bytes / GIB:.1f} GiB; {why}",
        try_=tries,
    )


def smaller(setting: Setting, gpus: int) -> Setting:
    """The same machines, fewer of them."""
    cluster = setting.cluster
    per_node = even_nodes(gpus, cluster.per_node)
    return replace(setting, cluster=replace(cluster, per_node=per_node, nodes=gpus // per_node))
