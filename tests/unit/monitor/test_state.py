"""The state of a run is read off its folder."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.processes import ProcessId
from sirara.config.run_folder import RunFolder
from sirara.events import JsonLines
from sirara.monitor.state import curves, duration, follow, live_metrics, look, step_row
from sirara.monitor.view import metrics_table, run_panel, status_lines


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(Named(tmp_path), "schema: 1\ntrain: {steps: 100}\n")


def begin(run, **owner):
    """An attempt whose owner is this process, or one that is described."""
    number = run.begin_attempt()
    if owner:
        record = {**ProcessId.current().as_record(), **owner, "role": "owner"}
        (run.control / "attempts" / f"{number:04d}.jsonl").write_text(json.dumps(record) + "\n")
    return number


def event(run, **fields):
    with JsonLines(run.events) as events:
        events.append(fields)


def steps(run, attempt, first, last, **fields):
    with JsonLines(run.metrics, attempt=attempt) as metrics:
        for step in range(first, last + 1):
            metrics.append({"step": step, "train/loss": 1 / step, "time/step_s": 2.0, **fields})


def test_a_run_that_never_started_is_new(run):
    state = look(run)
    assert (state.state, state.step, state.steps, state.checkpoint) == ("new", 0, 100, None)


def test_a_run_whose_owner_lives_is_running_with_pace_and_time_left(run):
    begin(run)
    event(run, kind="start", attempt=1, grade="exact")
    steps(run, 1, 1, 40, **{"train/tokens_total": 512})
    state = look(run)
    assert (state.state, state.attempt, state.step, state.loss) == ("running", 1, 40, 1 / 40)
    assert (state.step_s, state.eta_s, state.tokens, state.grade) == (2.0, 120.0, 512, "exact")


@pytest.mark.parametrize(
    ("last", "state", "why"),
    [
        ({"kind": "end", "reason": "done"}, "done", ""),
        ({"kind": "end", "reason": "stopped"}, "stopped", ""),
        ({"kind": "error", "error": "ValueError: boom"}, "failed", "ValueError: boom"),
        (None, "failed", "was killed"),
    ],
)
def test_a_run_without_a_living_owner_says_how_it_ended(run, last, state, why):
    begin(run, started=1)
    if last:
        event(run, attempt=1, **last)
    found = look(run)
    assert found.state == state and why in found.why and found.eta_s is None


def test_the_end_of_an_older_attempt_is_not_that_of_the_run(run):
    begin(run)
    event(run, attempt=1, kind="end", reason="stopped")
    begin(run)
    assert look(run).state == "running"


def test_a_run_on_another_host_is_running_as_far_as_can_be_told(run):
    begin(run, host="gpu7")
    state = look(run)
    assert state.state == "running" and "gpu7" in state.why


def test_a_resume_takes_the_step_back_at_once(run):
    begin(run)
    event(run, kind="start", attempt=1)
    steps(run, 1, 1, 40)
    begin(run)
    event(run, kind="resume", attempt=2, from_step=30, grade="close")
    assert (look(run).step, look(run).grade) == (30, "close")
    steps(run, 2, 31, 33)
    assert look(run).step == 33
    assert [r["step"] for r in live_metrics(run)] == list(range(1, 34))


def test_the_newest_committed_step_is_the_checkpoint(run):
    for step in (9, 10):
        (run.checkpoints / f"step-{step:09d}").mkdir()
    (run.checkpoints / "step-000000009" / "manifest.json").touch()
    assert look(run).checkpoint == 9


def test_status_and_panel_say_the_same(run):
    from rich.console import Console

    begin(run)
    event(run, kind="start", attempt=1, grade="exact")
    steps(run, 1, 1, 40)
    state = look(run)
    lines = status_lines(state, [3.0, 2.0, 1.0])
    assert lines[0] == f"{run.id}  running (process {os.getpid()})"
    assert any("40/100  40 %" in line for line in lines) and any("█▅▁" in line for line in lines)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(run_panel(state, [1, 2], [2.0, 1.0], width=80))
    text = console.export_text()
    for words in ("40/100  40 %", "2 min", run.id, "step 2"):
        assert words in text


def test_rows_and_curves_of_metrics():
    records = [
        {"step": 1, "train/loss": 2.0, "train/loss_hex": "0x1p+1", "train/lr": 1e-3, "time/step_s": 0.5},
        {"step": 2, "train/loss": None, "train/loss_hex": "nan", "eval/held/loss": 2.5},
    ]
    assert step_row(records[0])["loss_hex"] == "0x1p+1" and step_row(records[1])["eval/held/loss"] == 2.5
    assert curves(records) == {"train": ([1], [2.0]), "held": ([2], [2.5])}
    header, first, second = metrics_table([step_row(r) for r in records])
    assert header.split() == ["step", "loss", "grad_norm", "lr", "tokens", "seconds"]
    assert first.split() == ["1", "2.000000", "nan", "1.00e-03", "-", "0.500"]
    assert second.split()[1] == "nan" and len(first) == len(second) == len(header)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (3600, "1 h"),
        (90061, "1 d 1 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_follow_goes_on_into_the_next_attempt_and_stops_with_the_run(run):
    begin(run)

    def file_of(attempt):
        return run.path / f"log-{attempt}"

    file_of(1).write_bytes(b"one\nhal")
    script = [
        lambda: file_of(1).open("ab").write(b"f\nlast"),
        lambda: (begin(run), file_of(2).write_bytes(b"two\n")),
        lambda: event(run, attempt=2, kind="end", reason="done"),
    ]
    lines = list(follow(run, file_of, attempt=1, pause=lambda: script.pop(0)()))
    assert lines == ["one", "half", "last", "two"]


def test_watching_needs_no_torch(tmp_path):
    program = "import sys, sirara.cli.look, sirara.monitor.view; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 0
