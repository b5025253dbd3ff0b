"""As little recompute as makes a layout fit: a knapsack per pipeline stage, whose items are the modules of a block.

    need        what a stage has too much, over its blocks and the microbatches that are alive there
    items       norms, activation, then attention or MLP, whichever saves more per second, then the whole block
    search      the items in that order, the last one of a share of the blocks: all layouts at once, [n, 3 stages]
    one layout  any two sets of modules, the first for as many blocks as it takes: of all pairs the cheapest, by stage

Early stages of 1f1b hold more microbatches than late ones, so each has its own need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sirara.plan.constants import Constants
from sirara.plan.cost import again_s
from sirara.plan.hardware import Table
from sirara.plan.held import Held
from sirara.plan.kernels import rates
from sirara.plan.memory import (
    ON_DEVICE,
    activations,
    in_flight,
    kept_each,
    let_go,
    made_again,
    memory,
    put_off,
)
from sirara.plan.points import PIECES, Launch, Points, pieces_of, stages
from sirara.pure.recompute import FULL, MODULES, NONE, Kinds, Recipe, Setting, recipe_of
from sirara.pure.split import blocks_per_stage

Floats = NDArray[np.float64]
SETS: tuple[Kinds, ...] = (
    *(
        frozenset(some)
        for n in range(len(MODULES) + 1)
        for some in combinations(MODULES, n)
        # The output of the activation is made again with the MLP anyway.
        if not {"act", "mlp"} <= set(some)
    ),
    FULL,
)
"""What a block can make again."""


def room_bytes(p: Points, hardware: Table, constants: Constants, capacity_bytes: float | Floats) -> Floats:
    """[n]: allocated bytes that a device has room for; the inverse of `memory`'s allocator and context."""
    holes = 1 + constants.fragmentation * (p.launch == Launch.EAGER)
    return (capacity_bytes - hardware.overhead_bytes[p.accelerator]) / holes


def shares(p: Points, hardware: Table, constants: Constants, capacity_bytes: float | Floats) -> Floats:
    """[n, 3, piece] as `Points.again`: the least that makes each stage fit, or everything where nothing does."""
    plain = p.with_(recompute=0, again=0)
    s, kept = stages(p), activations(p)
    gone = let_go(p, kept)
    held_here = in_flight(p, s) * s.blocks * np.where(p.offload_activations > 0, ON_DEVICE, 1.0)[:, None]
    over = (
        memory(plain, hardware, constants).by_stage
        - room_bytes(p, hardware, constants, capacity_bytes)[:, None]
    )
    order, bytes_of = _ladder(p, gone, hardware, constants)
    found = np.zeros((len(p), 3, len(PIECES)))
    for _ in range(2):
        # What is made again at a time has to have room too.
        again = p.with_(again=found)
        more = made_again(again, kept) + put_off(again, s, kept, kept_each(again, kept))
        need = np.where(s.count > 0, np.maximum(0.0, over + more), 0.0) / np.maximum(held_here, 1e-9)
        found = _filled(need, order, bytes_of)
    return found


def _ladder(p: Points, gone: Floats, hardware: Table, constants: Constants) -> tuple[Floats, Floats]:
    """(pieces [n, rung, piece], bytes [n, rung]) of one more rung for a block."""
    r = rates(p, hardware, constants)
    size = {name: gone[:, i] for i, name in enumerate(PIECES)}
    width = p.heads * p.head_dim / p.tp
    # Seconds without tiles: only which of the two is dearer counts.
    scores_s = 2 * p.seq * width / r.flash
    wide_s = 2 * p.hidden * (1 + p.gated) * p.ffn / p.tp / r.matmul
    first = size["attention"] / scores_s >= size["wide"] / wide_s
    rung = {
        "norm": (("norm1", "norm2"), size["norm1"] + size["norm2"]),
        "act": (("act",), size["act"]),
        "attention": (("attention",), size["attention"]),
        "mlp": (("wide",), size["wide"]),
    }
    small = sum(bytes_ for _, bytes_ in rung.values())
    rung["full"] = (PIECES, np.maximum(0.0, size["block"] - small))
    pieces = {name: np.array([float(piece in some) for piece in PIECES]) for name, (some, _) in rung.items()}
    # A block that is run again as a whole has no modules of its own.
    pieces["full"] = np.array([1.0 if piece == "block" else -1.0 for piece in PIECES])
    names = [("norm", "norm"), ("act", "act"), ("attention", "mlp"), ("mlp", "attention"), ("full", "full")]
    order = np.stack([np.where(first[:, None], pieces[a], pieces[b]) for a, b in names], axis=1)
    return order, np.stack([np.where(first, rung[a][1], rung[b][1]) for a, b in names], axis=1)


def _filled(need: Floats, order: Floats, bytes_of: Floats) -> Floats:
    """[n, 3, piece]: rung by rung until the need [n, 3] of a block is met."""
    before = np.cumsum(bytes_of, axis=1) - bytes_of
    part = (need[:, :, None] - before[:, None, :]) / np.maximum(bytes_of, 1e-9)[:, None, :]
    return np.clip(np.einsum("nsr,nrp->nsp", np.clip(part, 0.0, 1.0), order), 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """What one block gains and pays when it makes `kinds` again; `work`: bytes that are made again at a time."""

    kinds: Kinds
    saved: float
    seconds: float
    work: float


def recipe(
    p: Points, ranks: Held, hardware: Table, constants: Constants, room: float, *, more: Sequence[float] = ()
) -> Setting | None:
    """`train.recompute` of one layout that was counted without any, None where even whole blocks are not enough.

    Args:  p, ranks: of the layout without recompute.  room: allocated bytes.  more: by rank, that another recipe took.
    """
    sets = _sets(p, hardware, constants)
    split = sorted((r for stage in ranks.stages for r in stage.units), key=lambda r: r.start)
    counts = blocks_per_stage(split)
    found: list[Recipe] = ["none"] * len(split)
    for rank, extra in zip(ranks.stages, more or [0.0] * len(ranks.stages), strict=True):
        here = sorted(split.index(r) for r in rank.units)
        # The loss may be more than a block's work: so much can be made again beside it for nothing.
        free = max(0.0, rank.loss - rank.transient)
        dealt = _cheapest(rank.step + extra - room, rank.alive, rank.blocks, free, sets)
        if dealt is None:
            return None
        for stage, part in zip(here, _over_chunks(dealt, [counts[s] for s in here]), strict=True):
            found[stage] = recipe_of(part, counts[stage])
    return found[0] if len(set(found)) == 1 else found


def _sets(p: Points, hardware: Table, constants: Constants) -> list[_Set]:
    kept = activations(p)
    gone, seconds = let_go(p, kept)[0], again_s(p, hardware, constants)[0]
    on_host = ON_DEVICE if p.offload_activations[0] > 0 else 1.0
    found = []
    for kinds in SETS:
        pieces = pieces_of(kinds)
        work = made_again(p.with_(again=pieces), kept)[0].max()
        saved = float((pieces * gone).sum()) * on_host
        found.append(
            _Set(kinds=kinds, saved=saved, seconds=float((pieces * seconds).sum()), work=float(work))
        )
    return found


def _cheapest(
    over: float, alive: float, blocks: int, free: float, sets: Sequence[_Set]
) -> list[tuple[Kinds, int]] | None:
    """The cheapest two sets and how many blocks have each, that take `over` bytes off; None if none does.

    Args:  free: bytes that can be made again at a time without a higher peak.
    """
    if over <= 0:
        return [(NONE, blocks)]
    best: tuple[float, list[tuple[Kinds, int]]] | None = None
    for more in sets:
        for less in sets:
            if not more.kinds or more.saved < less.saved or not alive:
                continue
            work = max(0.0, max(more.work, less.work) - free)
            need = (over + work) / alive - blocks * less.saved
            gain = more.saved - less.saved
            n = 0 if need <= 0 else -(-need // gain) if gain > 0 else blocks + 1
            if n > blocks:
                continue
            cost = n * more.seconds + (blocks - n) * less.seconds
            if best is None or cost < best[0]:
                best = cost, [(more.kinds, int(n)), (less.kinds, blocks - int(n))]
    return None if best is None else best[1]


def _over_chunks(dealt: Sequence[tuple[Kinds, int]], counts: Sequence[int]) -> list[list[tuple[Kinds, int]]]:
    """The blocks of a rank, dealt to its chunks in order."""
    left = [kinds for kinds, n in dealt for _ in range(n)]
    found: list[list[tuple[Kinds, int]]] = []
    for count in counts:
        part, left = left[:count], left[count:]
        runs: list[tuple[Kinds, int]] = []
        for kinds in part:
            if runs and runs[-1][0] == kinds:
                runs[-1] = kinds, runs[-1][1] + 1
            else:
                runs.append((kinds, 1))
        found.append(runs)
    return found
