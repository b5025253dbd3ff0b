"""Whatever dies, the job ends on all ranks within seconds, with one cause, and goes on where it was.

The training is a stand-in (fake_training.py); agent, worker frame, signals, watchdog and run folder are the
real ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.run_folder import RunFolder
from sirara.events import live, read

PROGRAM = Path(__file__).with_name("fake_training.py")
LONG = 10**9  # a run of this many steps ends by our hand only


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "fake"


class Job:
    """One run and the process that was started for it; ends what it started."""

    def __init__(self, tmp_path):
        self.run = RunFolder.create(Named(tmp_path / "runs"), "")
        self.started = []

    def start(self, role, *args, **plan):
        (self.run.path / "fake.json").write_text(json.dumps(plan))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROGRAM), role, str(self.run.path), *map(str, args)]
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def workers(self, attempt):
        return [p for p in self.run.processes(attempt)[1:] if p.alive]

    def by_rank(self, attempt):
        records = read(self.run.control / "attempts" / f"{attempt:04d}.jsonl")
        return {r["rank"]: r["pid"] for r in records if r["role"] == "worker"}

    def reaches(self, step, process):
        """Waits until the run has done a step; fails as soon as the process ends before."""
        until(
            lambda: any(r["step"] >= step for r in read(self.run.metrics)[-3:]) or process.poll() is not None
        )
        assert process.poll() is None, process.communicate()[1]

    def ends(self, process, timeout_s=40):
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


def until(condition, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    left = job.workers(job.run.attempt()) if job.run.attempt() else []
    job.close()
    assert left == [], "workers were left behind"


def test_a_run_of_two_workers_ends_with_0_and_one_record(job):
    code, out, err = job.ends(job.start("agent", 2, steps=5))
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["reason"], result["step"], result["loss_hex"]) == ("done", 5, (1.5).hex())
    assert [e["kind"] for e in read(job.run.events)] == ["start", "end"]
    assert not any((job.run.path / "crash").iterdir())


def test_an_attempt_leaves_nothing_in_the_temporary_folder(job, tmp_path, monkeypatch):
    # Elastic made a folder for its logs, of which we use none, and left it.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    code, _, err = job.ends(job.start("agent", 2, steps=5))
    assert code == 0, err
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_sigkill_of_one_worker_ends_all_within_seconds_and_names_it(job, victim):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(3, process)
    os.kill(job.by_rank(1)[victim], signal.SIGKILL)
    begun = time.monotonic()
    code, _, err = job.ends(process)
    assert time.monotonic() - begun < 12  # a hang would take 60
    assert code == 128 + signal.SIGKILL
    assert f"rank {victim} of 2 failed first: killed by SIGKILL" in err
    assert f"rank {1 - victim}  CommError[SR700]: a peer left during talk" in err
    assert f"sirara resume {job.run.id}" in err
    assert job.workers(1) == []


def test_the_first_traceback_is_shown_once_with_log_lines_and_what_peers_waited_for(job):
    fault = {"attempt": 1, "rank": 1, "step": 4, "how": "raise"}
    code, _, err = job.ends(job.start("agent", 3, steps=LONG, faults=[fault]))
    assert code == 1
    assert "rank 1 of 3 failed first: ValueError: boom" in err
    assert err.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("boom")' in err
    for peer in (0, 2):
        assert f"rank {peer}  was in" in err or f"rank {peer}  CommError" in err
    assert [e["kind"] for e in read(job.run.events)] == ["start", "error"]


def test_a_worker_that_aborts_in_c_is_the_cause_and_its_stack_is_in_the_report(job):
    fault = {"attempt": 1, "rank": 0, "step": 4, "how": "abort"}
    code, _, err = job.ends(job.start("agent", 2, steps=LONG, faults=[fault]))
    assert code == 128 + signal.SIGABRT
    assert "rank 0 of 2 failed first: killed by SIGABRT" in err
    assert "Fatal Python error: Aborted" in err and "in fail" in err


def test_what_the_user_must_correct_is_one_message_and_is_not_tried_again(job):
    fault = {"attempt": 1, "rank": 1, "step": 1, "how": "usage"}
    code, _, err = job.ends(job.start("agent", 2, 3, steps=LONG, faults=[fault]))
    assert code == 2
    assert "data.seq_len=5000 is longer than model.max_seq=256" in err and "Traceback" not in err
    assert job.run.attempt() == 1


def test_a_restart_resumes_from_the_committed_step_under_a_new_attempt(job):
    faults = [
        {"attempt": 1, "rank": 1, "step": 17, "how": "exit"},
        {"attempt": 2, "rank": 0, "step": 25, "how": "raise"},
    ]
    code, out, err = job.ends(job.start("agent", 2, 2, steps=30, save_every=10, faults=faults))
    assert code == 0, err
    assert json.loads(out)["attempt"] == 3
    begun = [(e["kind"], e["from_step"]) for e in read(job.run.events) if e["kind"] in ("start", "resume")]
    assert begun == [("start", 0), ("resume", 10), ("resume", 20)]
    steps = [r["step"] for r in live(read(job.run.metrics), read(job.run.events))]
    assert steps == list(range(1, 31))
    assert "restart 1 of 2" in err and "restart 2 of 2" in err


def test_the_same_failure_without_progress_is_not_repeated_for_ever(job):
    faults = [{"attempt": attempt, "rank": 0, "step": 3, "how": "raise"} for attempt in range(1, 9)]
    code, _, err = job.ends(job.start("agent", 2, 7, steps=LONG, faults=faults), timeout_s=30)
    assert code == 1
    assert "not restarting: the same failure twice without a new checkpoint" in err
    assert job.run.attempt() == 2


def test_workers_die_with_an_agent_that_is_killed_and_the_run_can_be_taken_over(job):
    process = job.start("agent", 2, steps=LONG, save_every=5)
    job.reaches(6, process)
    assert len(job.workers(1)) == 2
    process.kill()
    until(lambda: job.workers(1) == [], timeout_s=5)
    job.close()
    code, out, err = job.ends(job.start("agent", 2, steps=max(job.run.committed_steps()) + 20))
    assert code == 0, err
    assert json.loads(out)["attempt"] == 2
    resume = next(e for e in read(job.run.events) if e["kind"] == "resume")
    assert resume["from_step"] >= 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent_saves_at_a_step_boundary_and_leaves_with_75(job, number):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(3, process)
    process.send_signal(number)
    code, out, err = job.ends(process)
    assert code == 75, err
    result = json.loads(out)
    assert result["reason"] == "stopped"
    assert job.run.committed_steps() == [result["step"]]
    assert read(job.run.events)[-1]["reason"] == "stopped"


def test_a_worker_that_fails_at_once_does_not_make_its_starting_peers_look_guilty(job):
    fault = {"attempt": 1, "rank": 1, "step": 0, "how": "raise"}
    plan = {"steps": LONG, "faults": [fault], "slow_start": {"rank": 0, "seconds": 5}}
    code, _, err = job.ends(job.start("agent", 2, **plan))
    assert code == 1
    assert "rank 1 of 2 failed first: ValueError: boom" in err
    assert "SIGUSR2" not in err


def test_a_signal_to_one_rank_stops_all(job):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(3, process)
    os.kill(job.by_rank(1)[1], signal.SIGTERM)
    code, _, err = job.ends(process)
    assert code == 75, err


def test_a_signal_to_every_process_of_the_job_is_one_wish(job):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(3, process)
    for pid in (process.pid, *job.by_rank(1).values()):
        os.kill(pid, signal.SIGTERM)
    code, _, err = job.ends(process)
    assert code == 75, err


def test_touching_control_stop_stops_and_control_save_saves(job):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(2, process)
    (job.run.control / "save").touch()
    until(lambda: len(job.run.committed_steps()) == 1)
    assert process.poll() is None
    (job.run.control / "stop").touch()
    code, _, err = job.ends(process)
    assert code == 75, err
    assert len(job.run.committed_steps()) == 2
    assert not (job.run.control / "save").exists() and not (job.run.control / "stop").exists()


def test_a_second_signal_ends_workers_that_do_not_stop(job):
    fault = {"attempt": 1, "rank": 1, "step": 5, "how": "deaf"}
    process = job.start("agent", 2, steps=LONG, faults=[fault])
    job.reaches(4, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.1)  # two signals within a second are one wish
    process.send_signal(signal.SIGTERM)
    code, _, err = job.ends(process, timeout_s=5)
    assert code == 128 + signal.SIGTERM
    assert "ended without a save: asked twice" in err


def test_workers_that_do_not_stop_within_the_grace_are_ended(job):
    fault = {"attempt": 1, "rank": 0, "step": 5, "how": "deaf"}
    process = job.start("agent", 2, 0, 0.5, steps=LONG, faults=[fault])
    job.reaches(4, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = job.ends(process, timeout_s=5)
    assert code == 128 + signal.SIGTERM
    assert "did not stop within launch.stop_grace=0.5s" in err


def test_a_hang_ends_with_124_and_the_stacks_of_every_rank(job):
    fault = {"attempt": 1, "rank": 1, "step": 5, "how": "hang"}
    code, _, err = job.ends(job.start("agent", 2, steps=LONG, hang_timeout_s=1.0, faults=[fault]))
    assert code == 124
    assert "no step finished for" in err
    folder = job.run.crash(1)
    assert "in fail" in (folder / "rank-00001.stacks").read_text()
    assert "in talk" in (folder / "rank-00000.stacks").read_text()


def test_a_worker_of_an_older_attempt_ends_once_a_newer_one_owns_the_run(job):
    process = job.start("agent", 2, steps=LONG)
    job.reaches(2, process)
    # As a resume on another host would, which cannot reach this host's processes.
    (job.run.control / "attempts" / "0002.jsonl").write_text("")
    code, _, err = job.ends(process)
    assert code == 2
    assert "attempt 2 owns the run" in err


def test_a_process_alone_saves_on_sigterm_and_leaves_with_75(job):
    process = job.start("alone", steps=LONG)
    job.reaches(3, process)
    process.terminate()
    code, _, err = job.ends(process)
    assert code == 75, err
    assert read(job.run.events)[-1]["reason"] == "stopped"


def test_a_process_alone_dies_by_the_second_signal(job):
    fault = {"attempt": 1, "rank": 0, "step": 5, "how": "hang"}
    process = job.start("alone", steps=LONG, faults=[fault])
    job.reaches(4, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1.1)  # two signals within a second are one wish
    process.send_signal(signal.SIGINT)
    assert job.ends(process)[0] == -signal.SIGINT


def test_a_process_alone_is_debuggable_it_raises_its_own_error(job):
    fault = {"attempt": 1, "rank": 0, "step": 2, "how": "raise"}
    code, _, err = job.ends(job.start("alone", steps=LONG, faults=[fault]))
    assert code == 1
    assert 'raise ValueError("boom")' in err
    assert read(job.run.events)[-1]["error"] == "ValueError: boom"
    assert "boom" in (job.run.logs(1) / "rank-00000.log").read_text()
