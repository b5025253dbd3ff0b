"""Measures this machine by the executor's own parts, for the planner: see plan/profile.py.

    units     an embedding, one block and a head of the model                          train/timed_units.py
    moves     exchanges, small gathers and letters over the links of a run             train/timed_moves.py
    rates     sums, copies, norms and updates on flat buffers, products, attention     train/timed_moves.py

One world of processes measures all: of it the first 1, 2, .. compute while the others wait, so that one machine, in
one and the same state, tells how much slower a process is beside others on its cores.  Every measurement comes up in
every round (train/rounds.py); what is kept is the lower quartile.
"""

import os
import time
from collections.abc import Sequence
from itertools import product

import torch

from sirara.comm.group import Comm
from sirara.comm.world import World
from sirara.config.schema import RunConfig
from sirara.model.decoder import can_be_dealt
from sirara.plan.calibrated import Measured
from sirara.plan.profile import UnitTime
from sirara.pure.families import ModelShape
from sirara.pure.recompute import FULL, NONE, Kinds, all_kinds, name_of
from sirara.train.rounds import Job, Place, Say, go_round, warm
from sirara.train.timed_moves import disk, host_link, moves, passes
from sirara.train.timed_units import Units, make_units

NOISE = 0.15
"""Less than this much contradicts nothing."""
WARM = 0.4
"""Share of the time budget after which no further measurement is begun: the rest is for repeating those that are."""


def measure(
    config: RunConfig,
    shape: ModelShape,
    *,
    world: World,
    comm: Comm,
    device: torch.device,
    budget_s: float,
    tps: Sequence[int],
    say: Say,
) -> Measured:
    """Measures in this world for about `budget_s` seconds.  Collective; the same on all ranks but for bandwidths.

    Args:  tps: tensor-parallel degrees whose units are measured beside 1.  say: takes one line per finding.
    """
    began = time.monotonic()
    place = Place(world=world, comm=comm, device=device, stop_at=began + budget_s, say=say)
    crowds = _crowds(world.size, len(os.sched_getaffinity(0))) if device.type == "cpu" else [(world.size, 1)]
    together = dict(crowds)
    # Passes and exchanges are soon measured; without units formulas would stand for them.
    rates = [r for n, t in together.items() for r in passes(place, config, shape, active=n, threads=t)]
    moved = [m for n, t in together.items() if n > 1 for m in moves(place, config, shape, ranks=n, threads=t)]
    jobs = [timed.job for timed in (*rates, *moved)]
    for job in jobs:
        warm(place, job)
    by_tp = {tp: make_units(place, config, shape, tp=tp) for tp in _dealt(shape, world.size, tps, say)}
    units: list[tuple[Units, Job, Kinds]] = []
    for tp, again, active, threads in _cases(config, by_tp, crowds):
        late = place.agreed(time.monotonic() - began - WARM * budget_s) > 0
        job = by_tp[tp].job(active=active, threads=threads, again=again)
        if late and units:
            say(f"left out, no time: {job.what}")
            continue
        warm(place, job)
        units.append((by_tp[tp], job, again))
    doubts = go_round(place, [*(job for _, job, _ in units), *jobs])
    rows = [row for made, job, again in units for row in made.rows(job, again=again)]
    found = Measured(
        units=tuple(rows),
        moves=tuple(m.row(place) for m in moved),
        rates=tuple(r.row(place) for r in rates),
        bandwidth={**disk(say), **host_link(place)} if world.rank == 0 else {},
        doubts="; ".join(filter(None, (doubts, _contradicted(rows)))),
    )
    _tell(found, say)
    return found


def _dealt(shape: ModelShape, size: int, tps: Sequence[int], say: Say) -> list[int]:
    """1, and of `tps` those that divide the processes and the model."""
    found = [1]
    for tp in tps:
        if size % tp:
            say(f"left out, tp {tp}: it does not divide {size} processes")
        elif not can_be_dealt(shape, tp):
            say(f"left out, tp {tp}: the model's heads or ffn cannot be dealt out to so many")
        else:
            found.append(tp)
    return found


def _contradicted(rows: Sequence[UnitTime]) -> str:
    """Whether a block was measured to take much less time when it computes more."""
    blocks = {(u.tp, u.processes, u.threads, u.recompute): u for u in rows if u.unit == "block"}
    for (tp, processes, threads, again), u in blocks.items():
        plain = blocks.get((tp, processes, threads, name_of(NONE)), u)
        more, less = u.forward_s + u.backward_s, plain.forward_s + plain.backward_s
        if more < (1 - NOISE) * less:
            return (
                f"with {processes} at once a block that recomputes {again} took {more * 1e3:.1f} ms, one that "
                f"recomputes nothing {less * 1e3:.1f} ms"
            )
    return ""


def _crowds(size: int, cores: int) -> list[tuple[int, int]]:
    """(processes that compute at once, threads of each): one, two, one per core, all; and one with as few threads.

    Of several rows with as many processes the last has the threads that so many would be given.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    counts = sorted({n for n in (1, 2, cores, size) if n <= size})
    threads = {n: int(asked) if asked.isdecimal() else max(1, cores // n) for n in counts}
    alone = sorted({(1, t) for t in threads.values()})
    return [*alone, *((n, t) for n, t in threads.items() if n > 1)]


def _cases(
    config: RunConfig, by_tp: dict[int, Units], crowds: Sequence[tuple[int, int]]
) -> list[tuple[int, Kinds, int, int]]:
    """(tp, recompute, processes, threads), the most needed first: of one block, then as the configuration has it."""
    asked = all_kinds(config.train.recompute) - {FULL}
    kinds = [NONE, *sorted(all_kinds("selective") | asked, key=name_of)]
    cases = [
        (tp, again, active, threads)
        for again, tp, (active, threads) in product(kinds, by_tp, crowds)
        if active % tp == 0
    ]

    def turn(case: tuple[int, Kinds, int, int]) -> tuple[bool, bool]:
        tp, again, _, _ = case
        own = tp == config.mesh.tp and (again in asked or not (again or asked))
        return (tp, again) != (1, NONE), not own

    return sorted(cases, key=turn)


def _tell(found: Measured, say: Say) -> None:
    if found.doubts:
        say(f"warning: {found.doubts}")
    for u in found.units:
        if u.unit == "block":
            say(
                f"block tp {u.tp}, {u.processes} at once with {u.threads} threads, recompute {u.recompute}: "
                f"forward {u.forward_s * 1e3:.1f} ms, "
                f"backward {u.backward_s * 1e3:.1f} ms"
            )
    for m in found.moves:
        say(f"{m.kind} of {m.bytes:,} bytes among {m.ranks} ranks: {m.seconds * 1e3:.2f} ms")
    for r in found.rates:
        say(f"{r.kind}, {r.processes} at once: {r.per_s / 1e9:.2f} G/s")
