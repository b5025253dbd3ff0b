"""A plan in words: tables, a memory bar per stage and a timeline for a terminal.

Nothing here decides or computes: it shows a `Plan` (verdict.py). The same as a page is in page.py, as a picture in
draw.py; a search is in explain_search.py.
"""

from collections.abc import Iterator, Sequence

from sirara.plan.advice import Change
from sirara.plan.held import StageMemory
from sirara.plan.residuals import Residual
from sirara.plan.verdict import GIB, MIB, RATES, UNITS, Plan, in_words
from sirara.pure.schedule import Kind
from sirara.pure.simulate import Costs, Result, simulate

BAR = 46
"""Characters of a memory bar."""
MOST_STAGES = 8
"""Lines of a table of stages; others are those that are alike, and are left out."""
TERMS = (
    ("weights", "w", "weights"),
    ("gradients", "g", "gradient sums and exchange"),
    ("optimizer", "o", "optimizer state and masters"),
    ("window", "z", "gathered weights"),
    ("activations", "a", "activations"),
    ("work", "t", "loss, or the work of one block"),
    ("rest", "r", "allocator, context, libraries"),
)
SOURCES = {
    "weights": "flat groups and their shards (pure/groups.py)",
    "gradients": "buffers of the reduction tree (pure/tree.py), played",
    "optimizer": "flat groups and their shards (pure/groups.py)",
    "window": "two units, as parallel/window.py lays them out",
    "activations": "formula (docs/planner.md) x microbatches alive in the schedule's table (pure/simulate.py)",
    "work": "formula (docs/planner.md)",
    "rest": "fitted share of the allocator, context of the hardware table",
}


def terms_of(plan: Plan, stage: StageMemory) -> dict[str, float]:
    """Bytes of a stage by `TERMS`, adding up to what its device shows."""
    over = plan.reserved_bytes / plan.allocated_bytes - 1 if plan.allocated_bytes else 0.0
    context = plan.device_bytes - plan.reserved_bytes
    return {
        "weights": float(stage.weights),
        "gradients": float(stage.gradients),
        "optimizer": float(stage.optimizer + stage.masters),
        "window": float(stage.window),
        "activations": stage.activations,
        "work": max(stage.loss, stage.transient),
        "rest": stage.step * over + context + stage.libraries,
    }


def text(plan: Plan, *, assumed: Sequence[str] = ()) -> str:
    """The whole plan for a terminal; a person reads it in a minute."""
    parts = [_head(plan, assumed), _memory(plan), _phases(plan), _time(plan), _pipeline(plan), _saves(plan)]
    return "\n\n".join(
        "\n".join(lines) for lines in (*map(list, parts), [*_bars(plan), verdict_of(plan)]) if lines
    )


def _head(plan: Plan, assumed: Sequence[str]) -> Iterator[str]:
    c, m, t = plan.config, plan.config.mesh, plan.config.train
    cluster = plan.setting.cluster
    shape = plan.shape
    # What everything below hangs on comes first.
    first = [line for line in assumed if "(--gpu)" in line]
    yield from (f"assumed: {line}" for line in first)
    yield (
        f"{c.name}: {shape.family}, {shape.layers} layers x {shape.hidden}, {_size(plan)} on "
        f"{plan.setting.machines}, {min(cluster.per_node, plan.gpus)} per node"
    )
    yield (
        f"  pp {m.pp}  dp {int(plan.point.dp[0])}  cp {m.cp}  tp {m.tp}{' +sp' if m.sequence_parallel else ''}  "
        f"zero {m.zero}  {m.schedule}{f' x {m.chunks}' if m.chunks > 1 else ''}  micro_batch {t.micro_batch}  "
        f"global_batch {t.global_batch:,}  seq_len {c.data.seq_len:,}  recompute {t.recompute}  {t.precision}"
    )
    deal = plan.held.deal
    auto = " (chosen)" if m.block == "auto" else ""
    if c.numerics == "exact":
        blocks = f"blocks of {1 << deal.k}{auto}, {deal.rounds} exchanges a step"
        yield f"  numerics exact: microbatches added locally in {blocks}"
    else:
        yield "  numerics fast: one buffer, library reductions"
    for line in assumed:
        if line not in first:
            yield f"  assumed: {line}"
    if plan.not_run:
        yield f"  predicted only: {plan.not_run}"


def _size(plan: Plan) -> str:
    """Parameters in words."""
    n = plan.as_record()["model"]["parameters"]
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n:,} parameters"


def bar(terms: dict[str, float], capacity: float) -> str:
    """One letter per capacity / BAR bytes, dots for what is free, ! for what is too much."""
    line, used = "", 0.0
    for name, letter, _ in TERMS:
        used += terms[name]
        line += letter * max(0, round(used / capacity * BAR) - len(line))
    over = line[BAR:]
    return line[:BAR].ljust(BAR, ".") + ("|" + "!" * min(len(over), 12) if over else "|")


def shown_stages(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """All stages, or the first and last ones and the busiest."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    busiest = max(stages, key=lambda s: s.step).rank
    keep = {0, 1, 2, len(stages) - 2, len(stages) - 1, busiest, len(stages) // 2}
    return [s for s in stages if s.rank in keep]


def _error(residual: Residual | None) -> str:
    return "" if residual is None else f" +- {residual.mean:.0%}"


def _unit(plan: Plan) -> tuple[str, float]:
    """(name, bytes) of the unit that a device's memory is told in."""
    return ("GiB", GIB) if plan.allocated_bytes >= 0.1 * GIB else ("MiB", MIB)


def _memory(plan: Plan) -> Iterator[str]:
    capacity = plan.setting.capacity_bytes
    error = _error(plan.bars.memory)
    name, unit = _unit(plan)
    yield (
        f"memory, {name} per device{error}: allocated {plan.allocated_bytes / unit:.1f}, "
        f"reserved {plan.reserved_bytes / unit:.1f}, device {plan.device_bytes / unit:.1f} of {capacity / unit:.1f}"
    )
    names = [name for name, _, _ in TERMS if any(terms_of(plan, s)[name] for s in plan.held.stages)]
    yield f"  {'stage':<6}{'blocks':>6} " + "".join(f"{n:>12}" for n in names) + f"{'total':>9}"
    for s in shown_stages(plan.held.stages):
        found = terms_of(plan, s)
        mark = " <" if s.rank == plan.held.busiest.rank and len(plan.held.stages) > 1 else ""
        yield (
            f"  {s.rank:<6}{s.blocks:>6} "
            + "".join(f"{found[n] / unit:>12.2f}" for n in names)
            + f"{sum(found.values()) / unit:>9.2f}{mark}"
        )
    for s in shown_stages(plan.held.stages):
        yield f"  {s.rank:<4}|{bar(terms_of(plan, s), capacity)}"
    yield "  " + "  ".join(f"{letter} {name}" for name, letter, _ in TERMS if name in names)
    yield "  counted by the executor's rules: weights, gradients, optimizer, window; formulas: activations, work"


def _phases(plan: Plan) -> Iterator[str]:
    over = plan.reserved_bytes / plan.allocated_bytes
    context = plan.device_bytes - plan.reserved_bytes
    unit_name, unit = _unit(plan)
    yield f"{f'phase, {unit_name}':<18}{'allocated':>10}{'reserved':>10}{'device':>10}"
    for name, size in plan.held.busiest.phases().items():
        yield f"  {name:<16}{size / unit:>10.2f}{size * over / unit:>10.2f}{(size * over + context) / unit:>10.2f}"
    host = {**plan.saves.host, "offloaded": plan.offloaded_bytes}
    host = {name: size for name, size in host.items() if size}
    if host:
        listed = " + ".join(f"{name} {in_words(size)}" for name, size in host.items())
        yield f"  host memory of a node: {in_words(sum(host.values()))} ({listed})"
    if plan.on_disk_bytes:
        yield f"  disks of a node: {in_words(plan.on_disk_bytes)} offloaded"


def _time(plan: Plan) -> Iterator[str]:
    error = _error(plan.bars.time)
    yield (
        f"step {duration(plan.step_s)}{error}: {plan.tokens_per_s:,.0f} tokens/s "
        f"({plan.tokens_per_s / plan.gpus:,.0f} per device), MFU {plan.mfu:.1%} "
        f"(causal half of attention; whole square {plan.mfu_whole:.1%}), HFU {plan.hfu:.1%}"
    )
    if plan.how:
        yield f"  by {plan.how}"
    exposed = {k: float(v[0]) for k, v in plan.times.exposed().items()}
    for name, value in exposed.items():
        hidden = (
            float(getattr(plan.times, f"hidden_{name}")[0]) if hasattr(plan.times, f"hidden_{name}") else 0.0
        )
        if value < 5e-4 * plan.step_s and hidden < 5e-4 * plan.step_s:
            continue
        beside = f"   + {duration(hidden)} hidden" if hidden > 0 else ""
        share = value / plan.step_s
        yield f"  {name.replace('_', '-'):<14}{duration(value):>10}{share:>7.1%} {'#' * round(share * 40)}{beside}"


def played(plan: Plan) -> Result | None:
    """The schedule's table on the clock, all stages alike; None without a pipeline."""
    if plan.config.mesh.pp == 1:
        return None
    chunks = plan.config.mesh.chunks
    forward, backward = float(plan.times.forward_s[0]) / chunks, float(plan.times.backward_s[0]) / chunks
    costs = Costs.uniform(
        plan.held.table.stages, forward_s=forward, input_s=backward / 2, weight_s=backward / 2
    )
    return simulate(plan.held.table, costs)


_LETTERS = {Kind.FORWARD: "f", Kind.BACKWARD: "B", Kind.INPUT: "i", Kind.WEIGHT: "w"}


def timeline(result: Result, width: int = 92) -> list[str]:
    """One row per pipeline rank: what it computes when; dots are waiting."""
    scale = width / result.makespan_s
    rows = []
    for spans in result.timeline:
        line = ["."] * width
        for span in spans:
            start, stop = (
                round(span.start_s * scale),
                max(round(span.start_s * scale) + 1, round(span.stop_s * scale)),
            )
            letter = _LETTERS.get(span.action.kind, "?")
            body = letter if span.action.kind is not Kind.FORWARD else str(span.action.microbatch % 10)
            for at in range(start, min(stop, width)):
                line[at] = body
        rows.append("".join(line))
    return rows


def _pipeline(plan: Plan) -> Iterator[str]:
    result = played(plan)
    if result is None:
        return
    table = plan.held.table
    some = (
        f", the first {table.microbatches} of {plan.held.places}"
        if table.microbatches < plan.held.places
        else ""
    )
    yield (
        f"schedule {table.name}, {plan.held.places} microbatches per pipeline{some}: "
        f"alive at most {max(result.live_peak)}, idle {result.bubble_fraction:.1%} of what is shown"
    )
    rows = timeline(result)
    most = 12
    for rank, row in enumerate(rows[:most]):
        yield f"  {rank:<4}{row}"
    if len(rows) > most:
        yield f"  ... and {len(rows) - most} more"
    yield "  a digit is a microbatch's forward, B its backward, i and w its halves"


def _saves(plan: Plan) -> Iterator[str]:
    s, g = plan.saves, plan.goodput
    tiers = ", ".join(f"{name} {duration(t)}" for name, t in s.tiers.items())
    yield (
        f"checkpoint {_sized(s.bytes)} in about {s.files} files; durable on {tiers}; "
        f"training waits {duration(s.stall_s)}"
    )
    every = (
        f"every {s.every_steps} steps ({duration(g.every_s)})" if s.every_steps else "at the best interval"
    )
    steps = max(1, round(g.best_s / plan.step_s))
    yield (
        f"goodput {g.ratio:.1%} {every}: a failure each {duration(g.failures_s)}, restart {duration(g.restart_s)}; "
        f"best checkpoint.every={steps} ({duration(g.best_s)}): {g.best_ratio:.1%}"
    )
    money = "" if plan.money is None else f", {hours(plan.money)} at {plan.setting.price_per_hour:g} an hour"
    tokens = plan.config.train.steps * plan.config.train.global_batch * plan.config.data.seq_len
    yield (
        f"run of {plan.config.train.steps:,} steps, {_counted(tokens)} tokens: "
        + (f"{duration(plan.run_s)}, {hours(plan.gpu_hours)} device hours{money}" if plan.ends else _NEVER)
    )


_NEVER = "never ends: it fails more often than it gets to save (--mtbf, checkpoint.every, faster tiers)"


def _sized(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _counted(n: float) -> str:
    return f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:,.2f} M"


def hours(value: float) -> str:
    """Device hours, with places where there are few."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _bars(plan: Plan) -> Iterator[str]:
    found = [(what, r) for what, r in (("step times", plan.bars.time), ("memory", plan.bars.memory)) if r]
    for what, r in found:
        yield (
            f"error bars: {what} of {r.n} published runs ({plan.bars.alike}) were {r.mean:.1%} off on average, "
            f"{r.p90:.1%} in the worst tenth"
        )
    if plan.bars.why_none:
        yield f"error bars: {plan.bars.why_none}"


def verdict_of(plan: Plan) -> str:
    """One line: whether it fits, and what the step is made of."""
    left = plan.setting.capacity_bytes - plan.device_bytes
    if plan.over_budget:
        return f"does not fit: a node has to hold {in_words(plan.offloaded_bytes)} of what is offloaded"
    if not plan.fits:
        return f"does not fit: {in_words(-left)} too much on stage {plan.held.busiest.rank}"
    exposed = {k: float(v[0]) for k, v in plan.times.exposed().items()}
    first = max(exposed, key=lambda k: exposed[k])
    waits = {k: exposed[k] for k in ("tp", "cp", "ep", "pp", "dp", "bubble", "offload", "launch")}
    second = max(waits, key=lambda k: waits[k])
    waiting = waits[second] / plan.step_s
    near = ""
    if plan.within_error:
        why = f"{in_words(plan.setting.capacity_bytes - plan.room_bytes)} ({plan.margin:.1%})"
        near = f", but within the error bar of {why}: it may not"
    return (
        f"fits, {in_words(left)} to spare{near}; most of the step is {first.replace('_', '-')} "
        f"({exposed[first] / plan.step_s:.0%}), "
        + (f"most of the waiting {second} ({waiting:.0%})" if waiting >= 0.005 else "next to no waiting")
        + _idle(plan)
        + ("; does not run yet" if plan.not_run else "")
    )


def _idle(plan: Plan) -> str:
    """What data-parallel ranks without a microbatch are worth saying."""
    t, dp = plan.config.train, int(plan.point.dp[0])
    idle = dp - t.global_batch // t.micro_batch
    return f"; {idle:,} of {dp:,} data-parallel ranks have no microbatch" if idle > 0 else ""


def changes_text(plan: Plan, changes: Sequence[Change], title: str) -> str:
    """A table of changes beside the plan."""
    lines = [f"{title:<36}{'step':>10}{'tokens/s':>10}{'device':>12}"]
    for c in changes:
        if c.error:
            lines.append(f"  {c.keys:<34}{c.error.splitlines()[0]}")
            continue
        verdict = "fits" if c.fits else "does not fit"
        verdict += "" if c.runs else ", predicted only"
        verdict += ", by formulas" if plan.how == UNITS and not c.measured else ""
        verdict += ", by measured times" if plan.how == RATES and c.measured else ""
        lines.append(
            f"  {c.keys:<34}{duration(c.step_s):>10}{c.tokens_per_s / plan.tokens_per_s - 1:>+10.1%}"
            f"{in_words(c.device_bytes):>12}  {verdict}"
        )
    return "\n".join(lines)


def duration(value: float) -> str:
    """Seconds in the unit that a person would say."""
    if value >= 2 * 86_400:
        return f"{value / 86_400:.1f} d"
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    if value >= 1000:
        return f"{value / 60:.1f} min"
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 or not value else f"{value * 1e6:.0f} us"
