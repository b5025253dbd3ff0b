"""Real training, killed in every way a job dies, goes on with equal bits: loss and digest are those of a run
in peace."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from sirara.events import live, read
from tests.project import Project, alive, until, worker_pids

TWO = ("launch.nproc=2",)
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2")
EQUAL = ("step", "loss_hex", "digest", "tokens")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture(scope="module")
def peace(project):
    """The result of the run that nobody disturbs, on one process."""
    done = project.sirara("run", "toy.yaml", "name=peace", "--json")
    assert done.code == 0, done.err
    return {name: done.result[name] for name in EQUAL}


def equal(result):
    return {name: result[name] for name in EQUAL}


def start(project, name, *words, **options):
    known = len(project.runs())
    process = project.start("run", "toy.yaml", f"name={name}", *words, **options)
    return process, lambda step: project.wait_for_step(step, process, more_than=known)


def test_the_agent_is_killed_its_workers_die_and_resume_is_equal(project, peace):
    process, wait = start(project, "agent", *TWO)
    run = wait(23)
    assert len(run.processes(1, role="worker")) == 2 and len(alive(run, 1)) >= 3
    process.kill()
    until(lambda: alive(run, 1) == [], timeout_s=5)
    done = project.sirara("resume", run.id, "--json")
    assert done.code == 0, done.err
    assert equal(done.result) == peace
    assert done.result["grade"] == "exact"
    resumed = next(e for e in read(run.events) if e["kind"] == "resume")
    assert resumed["from_step"] >= 20
    assert [r["step"] for r in live(read(run.metrics), read(run.events))] == list(range(1, 61))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_all_end_with_one_cause_and_resume_on_another_layout_is_equal(
    project, peace, victim
):
    process, wait = start(project, f"worker{victim}", *TWO)
    run = wait(13)
    os.kill(worker_pids(run, 1)[victim], signal.SIGKILL)
    begun = time.monotonic()
    done = project.finish(process)
    assert time.monotonic() - begun < 6
    assert done.code == 128 + signal.SIGKILL
    assert f"rank {victim} of 2 failed first: killed by SIGKILL" in done.err
    assert "Traceback" not in done.err
    assert f"sirara resume {run.id}" in done.err
    resumed = project.sirara(
        "resume", run.id, "launch.nproc=3" if victim else "launch.nproc=1", "mesh.zero=0", "--json"
    )
    assert resumed.code == 0, resumed.err
    assert equal(resumed.result) == peace


def test_the_agent_restarts_after_a_killed_worker_and_the_end_is_equal(project, peace):
    process, wait = start(project, "restart", *TWO, "launch.max_restarts=2", "--json")
    run = wait(13)
    os.kill(worker_pids(run, 1)[1], signal.SIGKILL)
    done = project.finish(process)
    assert done.code == 0, done.err
    assert "restarting: restart 1 of 2" in done.err
    assert done.result["attempt"] == 2 and equal(done.result) == peace


def test_a_process_alone_is_killed_and_resume_is_equal(project, peace):
    process, wait = start(project, "alone")
    run = wait(7)
    process.kill()
    process.wait()
    done = project.sirara("resume", run.id, "--json")
    assert done.code == 0, done.err
    assert equal(done.result) == peace


@pytest.mark.parametrize("layout", [(), TWO], ids=["alone", "two"])
def test_sigterm_saves_leaves_with_75_and_resume_is_equal(project, peace, layout):
    process, wait = start(project, "term", *layout, "--json")
    run = wait(3)
    process.terminate()
    done = project.finish(process)
    assert done.code == 75, done.err
    assert done.result["reason"] == "stopped"
    assert done.result["step"] in run.committed_steps()
    resumed = project.sirara("resume", run.id, "--json")
    assert resumed.code == 0, resumed.err
    assert equal(resumed.result) == peace


def test_under_torchrun_a_stop_ends_with_0_and_the_record_says_stopped(project, peace):
    process, wait = start(project, "torchrun", "--json", launcher=TORCHRUN)
    run = wait(5)
    stop = project.sirara("stop", run.id)
    assert stop.code == 0, stop.err
    done = project.finish(process)
    assert done.code == 0, done.err
    assert done.result["reason"] == "stopped" and done.result["exit_code"] == 75
    assert read(run.events)[-1]["reason"] == "stopped"
    resumed = project.sirara("resume", run.id, "--json", launcher=TORCHRUN)
    assert resumed.code == 0, resumed.err
    assert equal(resumed.result) == peace


def test_torchrun_restarts_find_their_run_again(project, peace):
    process, wait = start(project, "again", "--json", launcher=(*TORCHRUN, "--max-restarts", "1"))
    run = wait(13)
    os.kill(worker_pids(run, 1)[1], signal.SIGKILL)
    done = project.finish(process)
    assert done.code == 0, done.err
    assert done.result["run"] == run.id and done.result["attempt"] == 2
    assert equal(done.result) == peace


def test_workers_die_with_a_torchrun_that_is_killed(project):
    process, wait = start(project, "orphans", "train.steps=100000", launcher=TORCHRUN)
    run = wait(3)
    assert len(alive(run, 1)) >= 2
    process.kill()
    until(lambda: alive(run, 1) == [], timeout_s=5)


def test_srun_tasks_meet_without_an_agent(project, peace):
    """Two tasks of a Slurm step: rank 0 serves the store that both agree over."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    tasks = [
        project.start(
            "run", "toy.yaml", "name=srun", "--json", env={**step, "SLURM_PROCID": r, "SLURM_LOCALID": r}
        )
        for r in ("0", "1")
    ]
    first, second = (project.finish(task) for task in tasks)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert equal(first.result) == peace and second.out == ""


def test_a_bad_value_under_torchrun_is_one_message_and_exit_code_2_on_every_rank(project):
    done = project.sirara("run", "toy.yaml", "train.global_batch=13", launcher=TORCHRUN)
    assert done.code != 0
    assert "train.global_batch=13" in done.err
