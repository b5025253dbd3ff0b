"""What became of a run, attempt by attempt, told from its folder alone: steps, times, saves, and the plan's grade."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sirara.config.run_folder import RunFolder
from sirara.events import BEGINNINGS, Record, live, read
from sirara.monitor.state import RunState, duration, look, plan_of
from sirara.plan.grading import RunGrade, grade_lines

SAVES = {"save": "kept", "upload": "uploaded", "save_failed": "failed", "save_skipped": "put off or skipped"}
"""Kind of event -> what became of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One attempt.

    steps: done in it; kept: of them those that a later attempt has not done again.  end: done, stopped, its error, or
    "killed".  wall_s: from its beginning to its last record.  step_s: median.  plan, plan_note: see `RunState`.
    """

    attempt: int
    layout: Mapping[str, int]
    grade: str
    from_step: int
    to_step: int
    steps: int
    kept: int
    skipped: int
    end: str
    wall_s: float
    steps_s: float
    step_s: float | None
    data_wait_s: float
    ckpt_stall_s: float
    saves: Mapping[str, int]
    plan: RunGrade | None
    plan_note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run.  goodput: seconds of steps that count over wall time; None before the first step.

    losses: of the first and the last step that count.  evals: set -> (step, loss) of the best evaluation.
    """

    run: RunState
    losses: tuple[float | None, float | None]
    evals: Mapping[str, tuple[int, float]]
    wall_s: float
    goodput: float | None
    lost_steps: int
    attempts: tuple[AttemptReport, ...]

    def as_record(self) -> dict[str, Any]:
        """Plain data, for --json."""
        return {
            **asdict(self),
            "run": self.run.as_record(),
            "attempts": [
                {**asdict(a), "plan": None if a.plan is None else a.plan.as_record()} for a in self.attempts
            ],
        }


def report(run: RunFolder) -> Report:
    """The report of a run as it stands now."""
    events, metrics = read(run.events), read(run.metrics)
    counting = live(metrics, events)
    attempts = tuple(_attempt(run, n, events, metrics, counting) for n in range(1, run.attempt() + 1))
    wall_s = sum(a.wall_s for a in attempts)
    useful_s = sum(float(r.get("time/step_s") or 0.0) for r in counting)
    return Report(
        run=look(run),
        losses=(counting[0].get("train/loss"), counting[-1].get("train/loss")) if counting else (None, None),
        evals=_best(counting),
        wall_s=wall_s,
        goodput=min(1.0, useful_s / wall_s) if wall_s > 0 else None,
        lost_steps=sum(a.steps - a.kept for a in attempts),
        attempts=attempts,
    )


def report_lines(found: Report) -> list[str]:
    """The report for a terminal."""
    run = found.run
    steps = f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}"
    lines = [
        f"{run.run}  {run.state}{f' ({run.why})' if run.why else ''}",
        f"  steps       {steps}, {run.tokens:,} tokens; {found.lost_steps:,} steps were lost and done again",
    ]
    first, last = found.losses
    if first is not None and last is not None:
        lines.append(f"  loss        {first:.4f} at first, {last:.4f} at last")
    lines += [
        f"  eval        {name}: best {loss:.4f} at step {step}" for name, (step, loss) in found.evals.items()
    ]
    if found.goodput is not None:
        lines.append(
            f"  time        {duration(found.wall_s)} in {len(found.attempts)} attempts, "
            f"{found.goodput:.0%} of it in steps that count"
        )
    lines.append(f"  checkpoint  {'none' if run.checkpoint is None else f'step {run.checkpoint}'}")
    lines.append(f"  folder      {run.path}")
    for attempt in found.attempts:
        lines += ["", *_attempt_lines(attempt)]
    return lines


def _attempt(
    run: RunFolder,
    number: int,
    events: Sequence[Record],
    metrics: Sequence[Record],
    counting: Sequence[Record],
) -> AttemptReport:
    mine = [e for e in events if e.get("attempt") == number]
    rows = [r for r in metrics if r.get("attempt") == number]
    began: Record = next((e for e in mine if e.get("kind") in BEGINNINGS), {})
    start = int(began.get("from_step") or 0)
    times = [float(r["time/step_s"]) for r in rows if r.get("time/step_s")]
    moments = [float(r["time"]) for r in (*mine, *rows) if r.get("time")]
    plan, note = plan_of(run, number, events)
    kinds = [str(e.get("kind")) for e in mine]
    return AttemptReport(
        attempt=number,
        layout=began.get("layout") or {},
        grade=str(began.get("grade") or ""),
        from_step=start,
        to_step=int(rows[-1]["step"]) if rows else start,
        steps=len(rows),
        kept=sum(r.get("attempt") == number for r in counting),
        skipped=kinds.count("skip"),
        end=_end(mine),
        wall_s=max(moments) - min(moments) if moments else 0.0,
        steps_s=sum(times),
        step_s=statistics.median(times) if times else None,
        data_wait_s=sum(float(r.get("time/data_wait_s") or 0.0) for r in rows),
        ckpt_stall_s=sum(float(r.get("time/ckpt_stall_s") or 0.0) for r in rows),
        saves={what: kinds.count(kind) for kind, what in SAVES.items() if kind in kinds},
        plan=plan,
        plan_note=note,
    )


def _end(events: Sequence[Record]) -> str:
    for event in reversed(events):
        if event.get("kind") == "end":
            return str(event.get("reason"))
        if event.get("kind") == "error":
            return str(event.get("error"))
    return "killed, or it still runs"


def _best(counting: Sequence[Record]) -> dict[str, tuple[int, float]]:
    best: dict[str, tuple[int, float]] = {}
    for record in counting:
        for name, value in record.items():
            kind, _, rest = name.partition("/")
            if kind == "eval" and isinstance(value, int | float):
                label = rest.removesuffix("/loss")
                if label not in best or value < best[label][1]:
                    best[label] = (int(record["step"]), float(value))
    return best


def _attempt_lines(a: AttemptReport) -> Iterator[str]:
    layout = " ".join(f"{k} {v}" for k, v in a.layout.items() if k in ("world", "pp", "dp", "tp", "zero"))
    yield f"attempt {a.attempt}: {layout}{f', {a.grade}' if a.grade else ''}; ended: {a.end}"
    again = f", {a.steps - a.kept} of them done again later" if a.kept < a.steps else ""
    skipped = f", {a.skipped} skipped" if a.skipped else ""
    yield f"  steps       {a.steps} from {a.from_step} on{again}{skipped}"
    if a.step_s is not None:
        yield (
            f"  time        {duration(a.wall_s)}: steps {duration(a.steps_s)} (median {a.step_s:.3f} s), of them data "
            f"{duration(a.data_wait_s)}; saves held training up {duration(a.ckpt_stall_s)}"
        )
    if a.saves:
        yield "  saves       " + ", ".join(f"{n} {what}" for what, n in a.saves.items())
    if a.plan is not None:
        yield "  plan"
        yield from (f"    {line}" for line in grade_lines(a.plan))
    elif a.plan_note:
        yield f"  plan        {a.plan_note}"
