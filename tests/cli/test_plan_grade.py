"""A run that was planned, measured and graded; resumed in another layout; and one whose plan cannot be made."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.events import read
from sirara.plan.stored import read_entries
from tests.project import Project

STEPS, MORE = 10, 18


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("project"))
    env = {"SIRARA_PROFILE": "none"}
    words = ["checkpoint.every=100", "log.every=4", "train.global_batch=4"]
    first = project.sirara("run", "toy.yaml", f"train.steps={STEPS}", *words, env=env)
    assert first.code == 0, first.err
    second = project.sirara(
        "resume", "latest", f"train.steps={MORE}", "launch.nproc=2", "mesh.pp=2", *words, env=env
    )
    assert second.code == 0, second.err
    yield project
    project.close()


def grades(project, attempt):
    found = [e for e in read(project.runs()[0].events) if e["kind"] == "plan_grade"]
    return [e["plan"] for e in found if e["attempt"] == attempt]


def test_each_attempt_stores_the_plan_of_its_own_layout(project):
    first, second = read_entries(project.runs()[0].path)
    assert [e["attempt"] for e in (first, second)] == [1, 2]
    assert (first["plan"]["layout"]["pp"], second["plan"]["layout"]["pp"]) == (1, 2)
    assert [len(e["plan"]["memory"]["stages"]) for e in (first, second)] == [1, 2]
    assert first["hardware"]["how"] == "placeholder" and first["hardware"]["device"] == "cpu"
    # What is graded is what ran: `auto` stands for a number in the plan.
    event = next(e for e in read(project.runs()[0].events) if e["kind"] == "start")
    assert first["plan"]["layout"]["block"] == event["layout"]["block"]


def test_the_end_of_an_attempt_grades_every_stage_by_the_rank_that_held_most(project):
    for attempt, stages in ((1, 1), (2, 2)):
        last = grades(project, attempt)[-1]
        entry = read_entries(project.runs()[0].path)[attempt - 1]
        assert [s["stage"] for s in last["stages"]] == list(range(stages))
        assert [s["rank"] for s in last["stages"]] == list(range(stages))
        for stage, planned in zip(last["stages"], entry["plan"]["memory"]["stages"], strict=True):
            assert stage["peak"]["predicted"] == planned["step"] - planned.get("libraries", 0)
            assert stage["peak"]["measured"] >= stage["between"]["measured"] > 0
        peak, step = last["peak"], last["step"]
        assert peak["error_pct"] == pytest.approx(100 * (peak["predicted"] / peak["measured"] - 1), abs=0.01)
        assert step["error_pct"] == pytest.approx(100 * (step["predicted"] / step["measured"] - 1), abs=0.01)
        assert step["predicted"] == entry["plan"]["time"]["step_s"]


def test_what_lives_on_between_steps_is_measured_to_the_size_of_a_few_buffers(project):
    # The executor holds what the planner counts, by the same tables: what is left is what libraries allocate meanwhile.
    (stage,) = grades(project, 1)[-1]["stages"]
    assert abs(stage["between"]["measured"] - stage["between"]["predicted"]) < 1 << 20


def test_the_measured_time_is_that_of_steps_that_only_trained(project):
    last = grades(project, 1)[-1]
    # Not the first two, nor the watched ones: 4 and 8.
    assert 1 <= last["steps"] <= STEPS - 4
    rows = [r["time/step_s"] for r in read(project.runs()[0].metrics) if r["attempt"] == 1]
    assert min(rows) <= last["step"]["measured"] <= max(rows[2:])
    parts = grades(project, 2)[-1]["parts"]
    assert parts["pipeline"]["measured"] > 0 and parts["computation"]["measured"] > 0
    assert parts["pipeline"]["predicted"] > 0


def test_the_errors_are_metrics_at_log_intervals(project):
    rows = [r for r in read(project.runs()[0].metrics) if r["attempt"] == 1]
    told = [r["step"] for r in rows if "plan/peak_error_pct" in r]
    assert told and set(told) <= {4, 8, STEPS} and STEPS in told
    assert rows[-1]["plan/step_error_pct"] == pytest.approx(
        grades(project, 1)[-1]["step"]["error_pct"], abs=60
    )


def test_status_prints_the_grade_of_the_newest_attempt(look, project):
    last = grades(project, 2)[-1]
    state = json.loads(look("status", "--json"))
    assert state["plan"] == last and state["plan_note"] == ""
    text = look("status")
    assert f"{last['peak']['error_pct']:+.1f} %" in text and f"{last['step']['error_pct']:+.1f} %" in text
    assert "stage 0 peak" in text and "stage 1 peak" in text
    assert "which do not describe this device" in text


def test_report_tells_every_attempt_and_its_grade(look, project):
    run = project.runs()[0]
    said = json.loads(look("report", "--json"))
    first, second = said["attempts"]
    assert (first["steps"], second["steps"]) == (STEPS, MORE - STEPS)
    assert (first["layout"]["pp"], second["layout"]["pp"]) == (1, 2)
    assert first["plan"] == grades(project, 1)[-1] and second["plan"] == grades(project, 2)[-1]
    assert said["run"]["run"] == run.id and said["lost_steps"] == 0 and 0 < said["goodput"] <= 1
    assert (first["end"], first["saves"]) == ("done", {"kept": 1})
    text = look("report")
    assert text.count("memory  predicted ") == 2 and "attempt 2: world 2 pp 2" in text
    assert f"steps       {MORE}/{MORE}" in text


def test_a_run_whose_plan_fails_says_why_and_trains_on(project, monkeypatch):
    code = (
        "import sirara.train.compare as compare\n"
        "def plan(*args, **named): raise ZeroDivisionError('a model of no layers')\n"
        "compare.plan = plan\n"
        "from sirara.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "toy.yaml", "train.steps=3", "name=unplanned"],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    run = next(run for run in project.runs() if run.id.startswith("unplanned"))
    (entry,) = read_entries(run.path)
    assert entry["reason"] == "ZeroDivisionError: a model of no layers" and "plan" not in entry
    assert not [e for e in read(run.events) if e["kind"] == "plan_grade"]
    assert "no plan to be held against" in done.stderr
    monkeypatch.chdir(project.folder)
    said = CliRunner().invoke(cli, ["status", run.id]).stdout
    assert "plan        none: ZeroDivisionError: a model of no layers" in said
    assert "none: ZeroDivisionError" in CliRunner().invoke(cli, ["report", run.id]).stdout
