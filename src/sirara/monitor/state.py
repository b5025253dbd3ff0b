"""What a run is doing, told from its folder alone: events, metrics, checkpoints and the process that owns
it."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sirara.config.run_folder import RunFolder
from sirara.config.yaml_file import read_yaml
from sirara.errors import ConfigError
from sirara.events import BEGINNINGS, Record, live, parse, read
from sirara.plan.grading import RunGrade
from sirara.plan.stored import read_expected

TAIL_BYTES = 1 << 18
SPEED_STEPS = 50  # a pace is the median of that many steps
EVENT_KINDS_OF_AN_END = ("end", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One look at a run.

    state: new | running | done | stopped | failed;  why: a few words about it.
    step, loss, tokens: of the last step that counts; checkpoint: newest committed step, None if there is
    none. eta_s: seconds to the last step at the present pace, None unless it runs.
    plan: how right the plan of the newest attempt is; plan_note: why there is no grade, "" if there is one.
    """

    run: str
    path: str
    state: str
    why: str
    attempt: int
    step: int
    steps: int | None
    loss: float | None
    loss_hex: str | None
    tokens: int
    tokens_per_s: float | None
    step_s: float | None
    eta_s: float | None
    checkpoint: int | None
    grade: str | None
    updated: float | None
    plan: RunGrade | None
    plan_note: str

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "plan": None if self.plan is None else self.plan.as_record()}


def look(run: RunFolder) -> RunState:
    """The state of a run now."""
    events, attempt = read(run.events), run.attempt()
    recent = live(_tail(run.metrics), events)
    last = recent[-1] if recent else {}
    began = [e for e in events if e.get("kind") in BEGINNINGS]
    step = int(last.get("step", began[-1].get("from_step") or 0 if began else 0))
    state, why = _state(run, attempt, events)
    steps, pace = _steps(run), _pace(recent)
    eta_s = pace * max(0, steps - step) if state == "running" and pace and steps else None
    ends = [e for e in events if e.get("kind") == "end"]
    plan, note = plan_of(run, attempt, events)
    grades = [str(e["grade"]) for e in (*began, *ends) if e.get("grade")]
    return RunState(
        run=run.id,
        path=str(run.path),
        state=state,
        why=why,
        attempt=attempt,
        step=step,
        steps=steps,
        loss=last.get("train/loss"),
        loss_hex=last.get("train/loss_hex"),
        tokens=int(last.get("train/tokens_total") or 0),
        tokens_per_s=last.get("throughput/tokens_per_s"),
        step_s=pace,
        eta_s=eta_s,
        checkpoint=max(run.committed_steps(), default=None),
        grade=grades[-1] if grades else None,
        updated=last.get("time"),
        plan=plan,
        plan_note=note,
    )


def plan_of(run: RunFolder, attempt: int, events: Sequence[Record]) -> tuple[RunGrade | None, str]:
    """(the newest grade of an attempt's plan, why there is none or "")."""
    for event in reversed(events):
        if event.get("kind") == "plan_grade" and event.get("attempt") == attempt:
            try:
                return RunGrade.from_record(event["plan"]), ""
            except (KeyError, TypeError, ValueError):
                return None, "graded by another version"
    expected = read_expected(run.path, attempt)
    if expected is None:
        return None, "none is stored for this attempt" if attempt else ""
    return None, f"none: {expected.reason}" if expected.reason else "nothing has been measured yet"


def live_metrics(run: RunFolder) -> list[Record]:
    """The metrics of every step that counts, in order."""
    return live(read(run.metrics), read(run.events))


def step_row(record: Record) -> dict[str, Any]:
    """One step as `metrics --json` prints it, without our units in the names of the most used columns."""
    row = {
        "step": record.get("step"),
        "attempt": record.get("attempt"),
        "loss": record.get("train/loss"),
        "loss_hex": record.get("train/loss_hex"),
        "grad_norm": record.get("train/grad_norm"),
        "grad_norm_hex": record.get("train/grad_norm_hex"),
        "lr": record.get("train/lr"),
        "tokens": record.get("train/tokens_total"),
        "seconds": record.get("time/step_s"),
        "tokens_per_s": record.get("throughput/tokens_per_s"),
    }
    evals = {name: value for name, value in record.items() if name.startswith("eval/")}
    return {**row, "time": record.get("time"), **evals}


def curves(records: Sequence[Record]) -> dict[str, tuple[list[int], list[float]]]:
    """Name -> (steps, losses): `train` and each evaluation set that has points."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            kind, _, rest = name.partition("/")
            label = "train" if name == "train/loss" else rest.removesuffix("/loss") if kind == "eval" else ""
            if label and isinstance(value, int | float):
                steps, losses = found.setdefault(label, ([], []))
                steps.append(int(record["step"]))
                losses.append(float(value))
    return found


def follow(
    run: RunFolder, file_of: Callable[[int], Path], *, attempt: int, pause: Callable[[], object]
) -> Iterator[str]:
    """Lines of a log as they come, on into the logs of later attempts, until the run ends.

    Args:    file_of: attempt -> its file.     pause: called when there is nothing new.
    """
    position, rest = 0, b""
    while True:
        # Asked before reading: what a run writes before it ends is read after.
        running, newest = look(run).state == "running", run.attempt()
        chunk = _read_from(file_of(attempt), position)
        position += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if chunk:
            continue
        later = newest > attempt and file_of(newest).exists()
        if running and not later:
            pause()
            continue
        if rest:
            yield rest.decode(errors="replace")
        if not later:
            return
        attempt, position, rest = newest, 0, b""


def age(moment: float | None) -> str:
    """`3 min ago`"""
    return "" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: two units are enough."""
    parts, left = [], round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def _state(run: RunFolder, attempt: int, events: Sequence[Record]) -> tuple[str, str]:
    if attempt == 0:
        return "new", "not started"
    last = next(
        (
            e
            for e in reversed(events)
            if e.get("attempt") == attempt and e.get("kind") in EVENT_KINDS_OF_AN_END
        ),
        None,
    )
    if last is not None and last["kind"] == "end":
        return str(last.get("reason")), ""
    owner = run.owner()
    if owner is not None and owner.alive:
        return "running", f"process {owner.pid}"
    if last is not None:
        return "failed", str(last.get("error", ""))
    if owner is not None and not owner.here:
        return "running", f"on {owner.host}, as far as its records tell"
    return "failed", f"attempt {attempt} was killed; nothing beyond the last checkpoint is kept"


def _steps(run: RunFolder) -> int | None:
    try:
        steps = read_yaml(run.config)[0].get("train", {}).get("steps")
    except ConfigError:
        return None
    return steps if isinstance(steps, int) else None


def _pace(recent: Sequence[Record]) -> float | None:
    times = [float(r["time/step_s"]) for r in recent[-SPEED_STEPS:] if r.get("time/step_s")]
    return statistics.median(times) if times else None


def _tail(path: Path) -> list[Record]:
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        return []
    lines = _read_from(path, max(0, size - TAIL_BYTES)).splitlines(keepends=True)
    return [record for record in map(parse, lines) if record is not None]


def _read_from(path: Path, position: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            return file.read()
    except FileNotFoundError:
        return b""
