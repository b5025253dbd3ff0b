"""A run whose machine will be taken away saves in time, and starts no save that cannot end."""

import json
import os
import time
from collections.abc import Iterator

import pytest

from sirara.checkpoint.deadline import FILE
from sirara.checkpoint.steps import incomplete_steps
from sirara.events import read
from tests.project import Project

LONG = ("train.steps=100000", "checkpoint.every=null")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


def test_a_run_stops_by_itself_and_saves_before_its_deadline(project):
    known = len(project.runs())
    process = project.start("run", "toy.yaml", "name=soon", *LONG, "launch.nproc=2", "--json")
    run = project.wait_for_step(3, process, more_than=known)
    deadline = time.time() + 15
    (run.control / "deadline").write_text(f"{deadline}\n")
    done = project.finish(process)
    assert done.code == 75, done.err
    assert time.time() < deadline + 5
    assert done.result["reason"] == "stopped" and done.result["step"] in run.committed_steps()
    assert json.loads((run.path / FILE).read_text())["disk"]


def test_a_save_that_cannot_end_before_the_kill_is_not_started(project):
    known = len(project.runs())
    process = project.start("run", "toy.yaml", "name=late", "train.steps=60", "checkpoint.every=null")
    run = project.wait_for_step(3, process, more_than=known)
    process.terminate()
    assert project.finish(process).code == 75
    (saved,) = run.committed_steps()
    # A disk of a few bytes per second, as the next attempt believes.
    (run.path / FILE).write_text(json.dumps({"disk": [10.0]}))
    process = project.start("resume", run.id, "train.steps=100000", "launch.stop_grace=30s")
    project.wait_for_step(saved + 3, process)
    process.terminate()
    late = project.finish(process)
    assert late.code == 74, late.err
    assert "error[SR608]: the save of step" in late.err and "disk needs" in late.err
    assert run.committed_steps() == [saved] and incomplete_steps(run.checkpoints) == []
    os.unlink(run.path / FILE)
    done = project.sirara("resume", run.id, "train.steps=60", "--json")
    assert done.code == 0, done.err
    resumed = [e["from_step"] for e in read(run.events) if e["kind"] == "resume"]
    assert resumed == [saved, saved]


def test_a_save_goes_to_the_tier_that_ends_in_time_and_resume_finds_it_there(project, tmp_path):
    known = len(project.runs())
    tiers = f"checkpoint.tiers=[{{tier: memory, path: {tmp_path / 'shm'}}}, disk]"
    process = project.start("run", "toy.yaml", "name=quick", *LONG, tiers)
    run = project.wait_for_step(3, process, more_than=known)
    process.terminate()
    assert project.finish(process).code == 75
    (saved,) = run.committed_steps()
    (run.path / FILE).write_text(json.dumps({"disk": [10.0], "memory": [1e12]}))
    process = project.start("resume", run.id, "launch.stop_grace=60s", "--json")
    project.wait_for_step(saved + 3, process)
    process.terminate()
    quick = project.finish(process)
    assert quick.code == 75, quick.err
    assert "a save to all tiers would not end in time" in quick.err
    assert run.committed_steps() == [saved] and quick.result["step"] > saved
    done = project.sirara("resume", run.id, f"train.steps={quick.result['step'] + 2}", "--json")
    assert done.code == 0, done.err
    resumed = [e["from_step"] for e in read(run.events) if e["kind"] == "resume"]
    assert resumed == [saved, quick.result["step"]]
