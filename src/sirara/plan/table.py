"""All layouts of a space evaluated: memory first, then the time of those that fit.

    for each choice of the degrees        a few hundred
        legal?                            a code per choice of the other knobs, some thousands
        memory -> fits?                   blocks of microbatches down to one where that is what it takes
        step time of those that fit

Everything is kept as matrices [outer, inner] of codes, bytes and seconds: a million layouts are 13 MB.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.plan.from_config import Columns, as_points, model_columns
from sirara.plan.layouts import NEEDED, Inner, Outer, Reason, Space, inner, legal, outers
from sirara.plan.memory import Memory, memory
from sirara.plan.needed import shares
from sirara.plan.offload import slowest
from sirara.plan.points import PIECES, Points, pieces_of
from sirara.plan.setting import Setting
from sirara.pure.recompute import parse
from sirara.pure.shape import ModelShape

Floats = NDArray[np.float64]
CHUNK = 16_384
"""Layouts that are evaluated at once: their columns stay in the cache."""
THREADS = 2
BEYOND = 1.06
"""Closed forms may be so much too high: what needs no more than so many times what there is, is timed and counted."""


@dataclass(slots=True)
class Table:
    """Matrices [outer, inner]."""

    space: Space
    outers: list[Outer]
    inside: Inner
    reason: NDArray[np.int8]
    device: NDArray[np.float32]
    limit: NDArray[np.float32]
    """Device bytes up to which it is chosen."""
    off: NDArray[np.float32]
    """Device bytes as counted over those by closed forms, of what was counted and does not fit."""
    step: NDArray[np.float32]
    one: NDArray[np.bool_]
    """Fits with blocks of one microbatch alone."""
    recipes: dict[int, str]
    """Flat index -> the recompute that its stages need, of those that were counted exactly."""
    timed: set[int]
    """Flat indices of those whose step is made of measured times."""


def evaluated(config: RunConfig, shape: ModelShape, setting: Setting, space: Space) -> Table:
    model = model_columns(config, shape)
    out, inside = outers(space), inner(space)
    size = (len(out), len(inside))
    table = Table(
        space=space,
        outers=out,
        inside=inside,
        reason=np.zeros(size, dtype=np.int8),
        device=np.full(size, np.inf, dtype=np.float32),
        limit=np.full(size, setting.capacity_bytes, dtype=np.float32),
        off=np.ones(size, dtype=np.float32),
        step=np.full(size, np.nan, dtype=np.float32),
        one=np.zeros(size, dtype=bool),
        recipes={},
        timed=set(),
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
    table: Table, setting: Setting, columns: Columns, r: NDArray[np.int64], e: NDArray[np.int64]
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
    fits = device <= capacity * BEYOND
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
