"""Nodes of unlike kinds: which of them take which part, when each does what it is good for.

    stages      a pipeline stage is on nodes of one kind, and has as many blocks as its kind is fast; memory is checked
                by kind.  It is `mesh.split`, so it runs
    replicas    every data-parallel rank has a whole pipeline of one kind; microbatches are dealt in turn (exactness
                fixes who computes which), so the slowest kind sets the pace
    by speed    the same, with more microbatches for faster ranks: predicted only, since the order of sums would change

A stage of n blocks takes n b + h: b of its kind, h the head's on the last stage, both from the closed forms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from sirara.config.schema import RunConfig
from sirara.errors import SiraraError
from sirara.plan.exact import configured
from sirara.plan.from_config import as_points, layout_columns, model_columns
from sirara.plan.layouts import divisors
from sirara.plan.offload import slowest, timed
from sirara.plan.verdict import GIB, Plan, Setting, plan
from sirara.pure.shape import ModelShape

_WORK = ("matmul", "attention", "memory_bound", "launch", "recompute", "tp", "cp", "ep")
_SCHEDULES = ("1f1b", "zb-h1", "gpipe")
"""With one stage to a rank: chunks of a rank would be on one kind anyway."""
SHOWN = 3
"""Ways that a search is asked for: a mesh that cannot be better than these is not looked at closely."""
ATTEMPTS = 12
"""Splits that are counted exactly at most, until all stages fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one kind of node takes: pipeline stages, or data-parallel ranks, first and last included."""

    gpu: str
    devices: int
    what: str
    first: int
    last: int
    blocks: tuple[int, ...]
    device_bytes: float
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """One way to use unlike nodes.  overrides: as a configuration spells it; runs: whether this version does."""

    form: str
    step_s: float
    parts: tuple[Part, ...]
    overrides: tuple[str, ...]
    runs: bool
    margin: float = 0.0
    """Share that predicted memory is off on average; 0 with a ceiling."""

    @property
    def fits(self) -> bool:
        return all(p.device_bytes <= p.capacity_bytes for p in self.parts)

    @property
    def roomy(self) -> bool:
        """Whether every kind has the mean error of predicted memory free."""
        return all(p.device_bytes * (1 + self.margin) <= p.capacity_bytes for p in self.parts)

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def arrangements(found: Plan) -> list[Arranged]:
    """All ways to use the nodes for the mesh of a plan, those that fit first, then the fastest."""
    ways = [*_staged(found), *_replicas(found)]
    return sorted(ways, key=_order)


def searched(config: RunConfig, shape: ModelShape, setting: Setting) -> list[tuple[Plan, Arranged]]:
    """The `SHOWN` best ways over pp, tp, ZeRO stage and schedule, one a mesh; those that fit first, then the fastest.

    micro_batch, precision and recompute stay as the configuration has them.
    """
    ways: list[tuple[Plan, Arranged]] = []
    meshes: list[tuple[float, RunConfig, int]] = []
    for words, dp in _meshes(shape, setting):
        try:
            there = configured(config, (words,))
            meshes.append((_at_best(there, shape, setting, dp), there, dp))
        except SiraraError:
            continue
    times: list[float] = []
    for bound, there, dp in sorted(meshes, key=lambda m: m[0]):
        if len(times) >= SHOWN and bound >= sorted(times)[SHOWN - 1]:
            break
        try:
            found = replace(plan(there, shape, _roomiest(setting), dp=dp), setting=setting)
        except SiraraError:
            continue
        ways += [(found, way) for way in arrangements(found)[:1]]
        times = [way.step_s for _, way in ways if way.roomy and way.runs]
    return sorted(ways, key=lambda w: _order(w[1]))[:SHOWN]


def _order(way: Arranged) -> tuple[bool, bool, bool, float]:
    return not way.fits, not way.runs, not way.roomy, way.step_s


def why_none(found: Plan) -> str:
    """Why a mesh uses the nodes in no way that `stages` and `replicas` stand for, and is planned as if all were of
    the slowest kind."""
    counts, m, gpus = found.setting.counts, found.config.mesh, sum(found.setting.counts)
    stages = (
        f"{m.schedule} has {m.chunks} stages to a rank, and one is needed"
        if m.chunks > 1
        else f"a stage is {gpus // m.pp:,} devices, and not every kind has whole stages"
    )
    held, ranks = " + ".join(f"{n:,}" for n in counts), gpus // int(found.point.dp[0])
    return f"{held} devices: {stages}; a data-parallel rank is {ranks:,}, and not every kind has whole ones"


def arranged_text(ways: Sequence[Arranged], why: str = "") -> str:
    """For a terminal.  why: said where there is no way."""
    lines = ["unlike nodes"]
    if not ways:
        lines.append(f"  no way to deal them out; planned as if all were the slowest kind ({why})")
    for way in ways:
        near = "" if way.roomy else " within the error bar of memory"
        verdict = f"fits{near}" if way.fits else "does not fit"
        lines.append(
            f"  {way.form:<10}step {way.step_s:.2f} s, {verdict}{'' if way.runs else ', predicted only'}"
        )
        for p in way.parts:
            which = f"{p.what} {p.first}" if p.first == p.last else f"{p.what}s {p.first} to {p.last}"
            blocks = f", {_runs(p.blocks)} blocks each" if p.blocks else ""
            lines.append(
                f"    {p.devices:>6,} x {p.gpu:<14}{which}{blocks}; "
                f"{p.device_bytes / GIB:.1f} of {p.capacity_bytes / GIB:.1f} GiB"
            )
        if way.overrides:
            lines.append("    " + " ".join(f"'{word}'" for word in way.overrides))
        if way.form == "stages":
            order = ", then ".join(
                f"the {p.devices:,} of {p.gpu}" for p in sorted(way.parts, key=lambda p: p.first)
            )
            lines.append(f"    ranks in this order: {order}")
    return "\n".join(lines)


def _runs(blocks: Sequence[int]) -> str:
    low, high = min(blocks), max(blocks)
    return str(low) if low == high else f"{low} to {high}"


def _roomiest(setting: Setting) -> Setting:
    """Memory is checked by kind later."""
    return replace(setting, ceiling_bytes=None, counts=setting.counts)


def _meshes(shape: ModelShape, setting: Setting) -> Iterator[tuple[str, int]]:
    gpus, domain = sum(setting.counts), int(setting.table.domain.min())
    for pp in divisors(gpus):
        for tp in (t for t in divisors(gpus // pp) if t <= max(1, min(8, domain))):
            dp = gpus // pp // tp
            if pp > min(shape.layers, 64) or shape.heads % tp:
                continue
            for zero in (1, 2, 3) if dp > 1 else (0,):
                for schedule in _SCHEDULES[:2] if pp > 1 else _SCHEDULES[:1]:
                    sequence = str(tp > 1).lower()
                    yield (
                        f"mesh={{pp: {pp}, dp: {dp}, tp: {tp}, zero: {zero}, schedule: {schedule}, "
                        f"sequence_parallel: {sequence}}}",
                        dp,
                    )


def _capacity(setting: Setting, kind: int) -> float:
    own = float(setting.table.hbm_bytes[kind])
    return own if setting.ceiling_bytes is None else min(own, setting.ceiling_bytes)


def _seconds(
    c: RunConfig, shape: ModelShape, setting: Setting, dp: int
) -> tuple[list[float], list[float], list[float]]:
    """By kind: (one block of a microbatch, forward and backward; the head; what a step has beside its microbatches)."""
    columns = {**model_columns(c, shape), **layout_columns(c, shape, dp=dp), "split_counts_ends": 0}
    pp = c.mesh.pp
    each = max(1, shape.layers // pp)
    layers = np.array([pp * each, pp * (each + 1)])
    block, head, rest = [], [], []
    for kind in range(len(setting.counts)):
        p = as_points({**columns, "layers": layers}, setting.cluster, accelerator=kind)
        t = timed(p, setting.table, setting.constants)
        work = sum(getattr(t, name) for name in _WORK) / p.microbatches
        block.append(float(work[1] - work[0]))
        head.append(max(0.0, float(work[0]) - each * block[-1]))
        rest.append(float(t.step_s[0] - work[0] * p.microbatches[0] - t.bubble[0]))
    return block, head, rest


def _at_best(c: RunConfig, shape: ModelShape, setting: Setting, dp: int) -> float:
    """Seconds of a step that no split of a mesh gets below."""
    block, head, rest = _seconds(c, shape, setting, dp)
    each = sum(setting.counts) / c.mesh.pp
    rates = sum(n / each / b for n, b in zip(setting.counts, block, strict=True))
    p = as_points({**model_columns(c, shape), **layout_columns(c, shape, dp=dp)}, setting.cluster)
    staged = (
        float(p.microbatches[0])
        * (shape.layers + min(h / b for h, b in zip(head, block, strict=True)))
        / rates
    )
    alike = float(slowest(p, setting.table, setting.constants).step_s[0])
    return min(alike, staged + min(rest))


def _staged(found: Plan) -> Iterator[Arranged]:
    """Each order of the kinds along the pipeline, split by speed."""
    setting, m = found.setting, found.config.mesh
    each = sum(setting.counts) // m.pp
    if m.pp < len(setting.counts) or m.chunks > 1 or any(n % each for n in setting.counts):
        return
    block, head, rest = _seconds(found.config, found.shape, setting, int(found.point.dp[0]))
    per_stage = [n // each for n in setting.counts]
    for order in permutations(range(len(setting.counts))):
        kinds = [kind for kind in order for _ in range(per_stage[kind])]
        way = _fitted(found, kinds, [block[k] for k in kinds], head[kinds[-1]], max(rest))
        if way is not None:
            yield way


def _fitted(
    found: Plan, kinds: Sequence[int], block: Sequence[float], head: float, rest: float
) -> Arranged | None:
    """The fastest split whose stages fit their kinds with the mean error of memory free; if none does, the fastest that
    fits, and else the last that was tried."""
    m = found.config.mesh
    fixed = None if m.split == "auto" else list(m.split)
    most, way, near = [found.shape.layers] * m.pp, None, None
    for _ in range(ATTEMPTS):
        split = fixed or _by_speed(found.shape.layers, block, head, most)
        if split is None:
            return near or way
        mesh = {"pp": m.pp, "dp": int(found.point.dp[0]), "tp": m.tp, "zero": m.zero, "schedule": m.schedule,
                "sequence_parallel": str(m.sequence_parallel).lower(), "split": split}  # fmt: skip
        word = f"mesh={{{', '.join(f'{k}: {v}' for k, v in mesh.items())}}}"
        try:
            there = plan(configured(found.config, (word,)), found.shape, found.setting, dp=mesh["dp"])
        except SiraraError:
            return near or way
        way = _way(there, kinds, split, block, head, rest, word)
        near = near or (way if way.fits else None)
        limits = [_capacity(found.setting, kind) / (1 + there.margin) for kind in kinds]
        over = {s: size for s, size in enumerate(_sizes(there)) if size > limits[s]}
        if not over or fixed:
            return way
        for stage, size in over.items():
            # A block has no more than its share of the stage, so at least so many are too many.
            most[stage] = split[stage] - max(1, int((size - limits[stage]) / size * split[stage]))
    return near or way


def _by_speed(layers: int, block: Sequence[float], head: float, most: Sequence[int]) -> list[int] | None:
    """Blocks of each stage, dealt one by one to the stage that ends first; between the ends at least one."""
    last = len(block) - 1
    split = [0 if stage in (0, last) else 1 for stage in range(len(block))]
    if any(n > top for n, top in zip(split, most, strict=True)) or sum(most) < layers:
        return None
    for _ in range(layers - sum(split)):
        free = [s for s in range(len(block)) if split[s] < most[s]]
        at = min(free, key=lambda s: (split[s] + 1) * block[s] + head * (s == last))
        split[at] += 1
    return split


def _sizes(there: Plan) -> list[float]:
    """Device bytes of every stage."""
    scale = there.reserved_bytes / there.allocated_bytes
    return [s.step * scale + there.device_bytes - there.reserved_bytes for s in there.held.stages]


def _way(
    there: Plan, kinds: Sequence[int], split: Sequence[int], block: Sequence[float], head: float, rest: float,
    word: str,
) -> Arranged:  # fmt: skip
    last = len(split) - 1
    stage_s = [n * b + head * (s == last) for s, (n, b) in enumerate(zip(split, block, strict=True))]
    slowest = max(stage_s)
    m = float(there.point.microbatches[0])
    plain = float(there.times.bubble[0])
    # What a schedule leaves of filling and draining, as with even stages.
    even = (len(split) - 1) * (there.times.forward_s[0] + there.times.backward_s[0])
    left = min(1.0, plain / float(even)) if even > 0 else 0.0
    sizes, parts, setting = _sizes(there), list[Part](), there.setting
    for kind in dict.fromkeys(kinds):
        mine = [s for s, k in enumerate(kinds) if k == kind]
        parts.append(
            Part(
                gpu=setting.table.names[kind], devices=setting.counts[kind], what="stage", first=mine[0],
                last=mine[-1], blocks=tuple(split[s] for s in mine), device_bytes=max(sizes[s] for s in mine),
                capacity_bytes=_capacity(setting, kind),
            )
        )  # fmt: skip
    return Arranged(
        form="stages", step_s=m * slowest + left * (sum(stage_s) - slowest) + rest, parts=tuple(parts),
        overrides=(word,), runs=not there.not_run, margin=there.margin,
    )  # fmt: skip


def _replicas(found: Plan) -> Iterator[Arranged]:
    """Whole pipelines of one kind each: in turn, and (predicted only) by speed."""
    setting, dp = found.setting, int(found.point.dp[0])
    ranks = sum(setting.counts) // dp
    if any(n % ranks for n in setting.counts) or dp < len(setting.counts):
        return
    parts, first = [], 0
    for kind, count in enumerate(setting.counts):
        parts.append(
            Part(
                gpu=setting.table.names[kind], devices=count, what="dp rank", first=first,
                last=first + count // ranks - 1, blocks=(), device_bytes=found.device_bytes,
                capacity_bytes=_capacity(setting, kind),
            )
        )  # fmt: skip
        first += count // ranks
    yield Arranged(
        form="replicas", step_s=found.step_s, parts=tuple(parts), overrides=(), runs=not found.not_run,
        margin=found.margin,
    )  # fmt: skip
    alone = [
        float(timed(found.point.with_(accelerator=k), setting.table, setting.constants).step_s[0])
        for k in range(len(setting.counts))
    ]
    even = dp / sum(n / ranks / s for n, s in zip(setting.counts, alone, strict=True))
    yield Arranged(
        form="by speed", step_s=even, parts=tuple(parts), overrides=(), runs=False, margin=found.margin
    )
