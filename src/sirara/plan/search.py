"""All layouts at once: memory first, then the time of those that fit, and what the outcome says about each knob.

    for each choice of the degrees        a few hundred
        legal?                            a code per choice of the other knobs, some thousands
        memory -> fits?                   blocks of microbatches down to one where that is what it takes
        step time of those that fit
    best, nearest alternatives, best per value of every knob, why families are left out

Everything is kept as matrices [outer, inner] of codes, bytes and seconds: a million layouts are 13 MB.
"""

import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.errors import PlanError, SiraraError
from sirara.plan.exact import counted
from sirara.plan.from_config import Columns, as_points, even_nodes, model_columns
from sirara.plan.layouts import (
    NEEDED,
    WHY,
    Inner,
    Outer,
    Reason,
    Space,
    inner,
    knob_values,
    legal,
    outers,
    overrides_of,
    words_of,
)
from sirara.plan.memory import Memory, memory
from sirara.plan.needed import shares
from sirara.plan.offload import slowest
from sirara.plan.points import PIECES, Points, pieces_of
from sirara.plan.verdict import GIB, Plan, Setting
from sirara.pure.recompute import parse
from sirara.pure.shape import ModelShape

Floats = NDArray[np.float64]
ALTERNATIVES = 5
CHUNK = 16_384
"""Layouts that are evaluated at once: their columns stay in the cache."""
THREADS = 2
SLOWER = 1.25
"""How much slower than the fastest a layout may be that is wanted for its little memory."""
TRIED = 60
"""Candidates whose memory is counted exactly, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout: what it is in words, how a configuration spells it, and what it costs."""

    words: Mapping[str, str]
    overrides: tuple[str, ...]
    step_s: float
    device_bytes: float
    runs: bool


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


@dataclass(slots=True)
class _Table:
    """Matrices [outer, inner]."""

    space: Space
    outers: list[Outer]
    inside: Inner
    reason: NDArray[np.int8]
    device: NDArray[np.float32]
    limit: NDArray[np.float32]
    """Device bytes up to which it is chosen."""
    step: NDArray[np.float32]
    one: NDArray[np.bool_]
    """Fits with blocks of one microbatch alone."""
    recipes: dict[int, str]
    """Flat index -> the recompute that its stages need, of those that were counted exactly."""


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
    table = _evaluated(config, shape, setting, space)
    numerics = config.numerics
    if numerics == "exact" and not np.isfinite(table.step).any():
        config = config.model_copy(update={"numerics": "fast"})
        table, numerics = _evaluated(config, shape, setting, space), "fast"
    seconds = time.perf_counter() - began
    if not np.isfinite(table.step).any():
        raise _nothing(table, setting)
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


# ---- evaluation


def _evaluated(config: RunConfig, shape: ModelShape, setting: Setting, space: Space) -> _Table:
    model = model_columns(config, shape)
    out, inside = outers(space), inner(space)
    size = (len(out), len(inside))
    table = _Table(
        space=space,
        outers=out,
        inside=inside,
        reason=np.zeros(size, dtype=np.int8),
        device=np.full(size, np.inf, dtype=np.float32),
        limit=np.full(size, setting.capacity_bytes, dtype=np.float32),
        step=np.full(size, np.nan, dtype=np.float32),
        one=np.zeros(size, dtype=bool),
        recipes={},
    )
    for o, outer in enumerate(out):
        columns = {**inside.columns, **_degrees(outer)}
        table.reason[o] = legal(
            columns, model, domain=setting.cluster.accelerator.domain, compiled=config.train.compile
        )
    rows, entries = np.nonzero(table.reason == Reason.LEGAL)
    degrees = {k: np.array([getattr(x, k) for x in out]) for k in ("pp", "tp", "cp", "ep", "dp")}

    def evaluate(low: int) -> None:
        r, e = rows[low : low + CHUNK], entries[low : low + CHUNK]
        some = {**{k: v[e] for k, v in inside.columns.items()}, **{k: v[r] for k, v in degrees.items()}}
        _evaluate(table, setting, {**model, **some}, r, e)

    # Chunks write to cells of their own, and numpy lets go of the interpreter while it computes.
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(evaluate, range(0, len(rows), CHUNK)))
    return table


def _degrees(outer: Outer) -> Columns:
    return {"pp": outer.pp, "tp": outer.tp, "cp": outer.cp, "ep": outer.ep, "dp": outer.dp}


def _evaluate(
    table: _Table, setting: Setting, columns: Columns, r: NDArray[np.int64], e: NDArray[np.int64]
) -> None:
    """Memory and, where it fits, time of one chunk."""
    layers, pp = columns["layers"], columns["pp"]
    columns["split_counts_ends"] = (pp > 2) & (layers % (pp * columns["vpp"]) != 0)
    # A whole number of blocks of each stage is computed again.
    blocks = np.maximum(1, layers // (pp * columns["vpp"]))
    share = columns["recompute_share"]
    columns["recompute_share"] = np.where(share < 1, np.floor(share * blocks) / blocks, share)
    needs = columns["recompute"] == NEEDED
    columns["recompute"] = np.where(needs, 0, columns["recompute"])
    columns["again"] = np.zeros((len(r), 3, len(PIECES)))
    if table.space.recipe is not None:
        columns["again"] += _roughly(table.space)
    points = as_points(columns, setting.cluster)
    capacity = setting.limits(points)
    used = memory(points, setting.table, setting.constants)
    device = used.device
    # Fewer microbatches added locally: more exchanges, fewer buffers.
    able = (points.block > 0) & bool(columns["exact"])
    tight = (device > capacity) & able & ~needs
    if tight.any():
        tight = _smaller_blocks(setting, columns, points, used, tight)
    short = needs & (device > capacity)
    if short.any():
        points = _as_needed(setting, columns, points, device, short)
        small = short & (device > capacity) & able
        if small.any():
            some = as_points(
                {**_picked(columns, small), "block": np.zeros(int(small.sum()), int)}, setting.cluster
            )
            fewer = {"again": columns["again"][small], "device": device[small]}
            _as_needed(setting, fewer, some, fewer["device"], np.ones(len(some), dtype=bool))
            columns["again"][small], device[small] = fewer["again"], fewer["device"]
            tight = tight | (small & (device <= capacity))
    table.one[r, e], table.limit[r, e] = tight, capacity
    table.device[r, e] = device
    fits = device <= capacity
    for_nothing = needs & ~short
    fits = fits & ~for_nothing
    table.reason[r[for_nothing], e[for_nothing]] = Reason.NOTHING_NEEDED
    table.reason[r[~fits & ~for_nothing], e[~fits & ~for_nothing]] = Reason.MEMORY
    for block, which in ((None, fits & ~tight), (0, fits & tight)):
        if which.any():
            some = _picked(columns, which)
            chosen = points.take(which) if block is None else as_points(
                {**some, "block": np.zeros(int(which.sum()), int)}, setting.cluster
            )  # fmt: skip
            step = slowest(chosen, setting.table, setting.constants).step_s
            table.step[r[which], e[which]] = step


def _as_needed(
    setting: Setting, columns: Columns, points: Points, device: Floats, short: NDArray[np.bool_]
) -> Points:
    """The points with the recompute that those that are `short` of memory need; columns and `device` too."""
    lacking = points.take(short)
    columns["again"][short] = shares(lacking, setting.table, setting.constants, setting.limits(lacking))
    helped = lacking.with_(again=columns["again"][short])
    device[short] = memory(helped, setting.table, setting.constants).device
    return points.with_(again=columns["again"])


def _roughly(space: Space) -> Floats:
    """[piece] of the recipe that a configuration asks for, as if its first part were of all blocks."""
    recipe = space.recipe
    if not isinstance(recipe, str | int):
        recipe = recipe[0] if recipe else "none"
    return pieces_of(parse(recipe)[0][0])


def _smaller_blocks(
    setting: Setting, columns: Columns, points: Points, used: Memory, tight: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which layouts fit, or come nearest, with blocks of one microbatch; `used.device` is theirs then."""
    at = np.flatnonzero(tight)
    smaller = as_points({**_picked(columns, tight), "block": np.zeros(len(at), int)}, setting.cluster)
    saved = used.gradients[at] * (1 - smaller.grad_bytes / points.grad_bytes[at])
    # With a margin for the allocator's share: what cannot fit is not asked.
    near = used.device[at] - 1.2 * saved <= setting.limits(smaller)
    found = np.zeros(len(points), dtype=bool)
    if near.any():
        used.device[at[near]] = memory(smaller.take(near), setting.table, setting.constants).device
        found[at[near]] = True
    return found


def _picked(columns: Columns, which: NDArray[np.bool_]) -> Columns:
    return {k: v[which] if isinstance(v, np.ndarray) and v.ndim else v for k, v in columns.items()}


# ---- outcome


def _ranked(table: _Table, objective: str) -> NDArray[np.int64]:
    """Flat indices of what fits, best first."""
    step, device = table.step.ravel(), table.device.ravel()
    fit = np.flatnonzero(np.isfinite(step))
    if objective == "memory":
        fit = fit[step[fit] <= SLOWER * np.nanmin(step)]
        return fit[np.lexsort((step[fit], device[fit]))]
    # Of layouts that take the same time (to a thousandth) the one that needs least memory.
    rounded = np.round(np.log(step[fit]) * 1000)
    return fit[np.lexsort((device[fit], rounded))]


def _first(
    config: RunConfig, shape: ModelShape, setting: Setting, table: _Table, objective: str, *, now: bool,
) -> tuple[Plan | None, int]:  # fmt: skip
    """The best that fits when its memory is counted by the executor's rules too; the table learns what was counted."""
    tried, off, best, best_at = 0, 1.0, None, -1
    for at in map(int, _ranked(table, objective)):
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


def _too_large(table: _Table, at: int) -> None:
    table.step.flat[at] = np.nan
    table.reason.flat[at] = Reason.MEMORY


def _counted(config: RunConfig, shape: ModelShape, setting: Setting, table: _Table, at: int) -> Plan | None:
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


def _needed(table: _Table, at: int) -> bool:
    inside = table.inside
    return table.space.recompute[inside.at["recompute"][at % len(inside)]][0] == NEEDED


def _runs(table: _Table, at: int) -> bool:
    """Whether this version runs a layout."""
    o, i = divmod(at, len(table.inside))
    outer, words = table.outers[o], words_of(table.space, table.outers[o], table.inside, i)
    runs = outer.cp == 1 and outer.ep == 1 and words["offload"] == "none"
    return runs and words["precision"] in ("bf16", "fp32", "fp64")


def _words(table: _Table, at: int) -> dict[str, str]:
    o, i = divmod(at, len(table.inside))
    words = words_of(table.space, table.outers[o], table.inside, i)
    if at in table.recipes:
        words["recompute"] = _short(table.recipes[at].partition("=")[2])
    return {**words, "block": "1" if table.one[o, i] else "auto"}


def _short(recipe: str) -> str:
    """Long lists by their ends."""
    stages = recipe.strip("[]").split(", ")
    return recipe if len(stages) <= 4 else f"[{stages[0]}, {stages[1]}, ..., {stages[-1]}]"


def _overrides(table: _Table, at: int, shape: ModelShape) -> tuple[str, ...]:
    o, i = divmod(at, len(table.inside))
    block = 1 if table.one[o, i] else None
    words = overrides_of(table.space, table.outers[o], table.inside, i, layers=shape.layers, block=block)
    found = table.recipes.get(at)
    return tuple(found if found and w.startswith("train.recompute=") else w for w in words)


def _alternatives(
    config: RunConfig, shape: ModelShape, setting: Setting, table: _Table, order: NDArray[np.int64], best: int
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
            )
        )
        if len(found) == ALTERNATIVES:
            break
    return tuple(sorted(found, key=lambda a: a.step_s))


def _twins(table: _Table, at: int) -> tuple[Any, ...]:
    """The same but for cp, which takes the same time and memory, is no other layout to a person who chooses."""
    o, i = divmod(at, len(table.inside))
    x = table.outers[o]
    cost = round(float(np.log(table.step.flat[at])) * 1000), round(float(table.device.flat[at]) / 2**27)
    return x.pp, x.tp, x.ep, int(table.inside.at["zero"][i]), int(table.inside.at["schedule"][i]), cost


def _family(table: _Table, at: int) -> tuple[Any, ...]:
    o, i = divmod(at, len(table.inside))
    return o, int(table.inside.at["zero"][i]), int(table.inside.at["schedule"][i])


def _sensitivity(table: _Table, best: int) -> list[Sensitivity]:
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


def _value(knob: str, value: str, table: _Table, part: Any, chosen: bool) -> Sensitivity:
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


def _reasons(table: _Table) -> dict[str, int]:
    counts = np.bincount(table.reason.ravel(), minlength=int(Reason.MEMORY) + 1)
    found = {WHY[reason]: int(counts[reason]) for reason in WHY if counts[reason]}
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def _nothing(table: _Table, setting: Setting) -> PlanError:
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
