"""Wishes reach the loop once, from signals and from the run folder, and only rank 0 reads the folder."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.run_folder import RunFolder
from sirara.errors import RunBusyError
from sirara.launch.signals import FENCE_EVERY_S, ORPHAN_EXIT, Requests, is_requested, request


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(Named(tmp_path), "")
    run.begin_attempt()
    return run


@pytest.fixture
def handlers():
    """Signal handlers and mask of this process, restored; under nohup the tests begin as elsewhere."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def requests_of(run, **options):
    return Requests(run, attempt=1, **{"rank": 0, "agent": None, **options})


def test_nothing_is_asked_at_first(run):
    assert requests_of(run)() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_is_a_stop_at_every_later_step(run, handlers, number):
    asked = requests_of(run, rank=1)
    with asked.installed():
        signal.raise_signal(number)
        assert [asked(), asked()] == ["stop", "stop"]


EARLY = """
import os, signal, sys
from sirara.config.run_folder import RunFolder
from sirara.launch.signals import Requests
ours = sys.argv[2] == "ours"
asked = Requests(RunFolder(sys.argv[1]), attempt=1, rank=1, agent=os.getppid(), supervised=ours)
with asked.installed():
    if sys.argv[3] == "stepping":
        asked()
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked(), flush=True)
"""


@pytest.mark.parametrize(
    ("agent", "moment", "code"),
    [("ours", "joining", 0), ("torchrun", "joining", -signal.SIGTERM), ("torchrun", "stepping", 0)],
)
def test_under_a_foreign_agent_a_stop_before_the_first_step_ends_at_once(run, agent, moment, code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", EARLY, str(run.path), agent, moment]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "" if code else "stop\n"), done.stderr


def test_a_save_signal_is_one_save(run, handlers):
    asked = requests_of(run, rank=1)
    with asked.installed():
        signal.raise_signal(signal.SIGUSR1)
        assert [asked(), asked()] == ["save", ""]


def test_an_ignored_hangup_stays_ignored(run, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = requests_of(run)
    with asked.installed():
        signal.raise_signal(signal.SIGHUP)
        assert asked() == ""


def test_a_signal_that_came_before_the_handlers_is_not_lost(run, handlers):
    # To this thread: a signal for the process would find another one under pytest-xdist and kill the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.raise_signal(signal.SIGTERM)
    asked = requests_of(run)
    with asked.installed():
        assert asked() == "stop"


def test_a_signal_after_the_work_does_not_kill(run, handlers):
    with requests_of(run).installed():
        pass
    signal.raise_signal(signal.SIGTERM)


def test_requests_in_the_folder_are_taken_once_by_rank_0(run):
    zero, one = requests_of(run), requests_of(run, rank=1)
    request(run, "save")
    assert one() == "" and is_requested(run, "save")
    assert [zero(), zero()] == ["save", ""]
    request(run, "stop")
    assert [zero(), zero()] == ["stop", "stop"]
    assert not is_requested(run, "stop")


def test_a_poll_is_a_sign_of_life(run):
    now = [5.0]
    asked = requests_of(run, clock=lambda: now[0])
    now[0] = 9.0
    asked()
    assert (asked.polls, asked.last_poll) == (1, 9.0)


def test_long_work_between_polls_gives_signs_of_life_and_takes_no_request(run):
    # An evaluation of more than launch.hang_timeout was ended as a hang, and again by each resume.
    now = [5.0]
    asked = requests_of(run, clock=lambda: now[0])
    request(run, "save")
    now[0] = 9.0
    asked.alive()
    assert (asked.polls, asked.last_poll) == (0, 9.0)
    assert asked() == "save"


def test_rank_0_notices_that_a_newer_attempt_owns_the_run(run):
    now = [0.0]
    asked = requests_of(run, clock=lambda: now[0])
    run.begin_attempt()
    asked()
    now[0] = FENCE_EVERY_S
    with pytest.raises(RunBusyError, match="attempt 2 owns the run"):
        asked()


def test_a_worker_without_its_agent_leaves(run):
    left = []
    requests_of(run, agent=os.getppid(), leave=left.append)()
    assert left == []
    requests_of(run, agent=os.getppid() + 1, leave=left.append)()
    assert left == [ORPHAN_EXIT]


BINDING = """
import os, sys
from sirara.launch.signals import die_with_parent
die_with_parent(os.getppid() + int(sys.argv[1]))
"""


@pytest.mark.parametrize(("off", "code"), [(0, 0), (1, 1)])
def test_binding_to_a_parent_that_is_gone_is_refused(off, code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", BINDING, str(off)], env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert ("ended while this worker started" in done.stderr) == bool(off)


def test_without_word_of_a_deadline_there_is_none(run):
    assert requests_of(run, env={}, stop_grace_s=60.0).deadline() is None


def test_a_stop_signal_leaves_the_grace_and_a_request_by_file_does_not_start_it(run, handlers):
    now = [1000.0]
    asked = requests_of(run, stop_grace_s=60.0, clock=lambda: now[0], wall=lambda: 5e8 + now[0], env={})
    request(run, "stop")
    assert asked() == "stop" and asked.deadline() is None
    with asked.installed():
        signal.raise_signal(signal.SIGTERM)
        now[0] += 25.0
        assert asked.deadline() == 5e8 + 1060.0


def test_the_earliest_of_all_deadlines_counts(run):
    asked = requests_of(run, env={"SIRARA_DEADLINE": "2000.5"})
    assert asked.deadline() == 2000.5
    (run.control / "deadline").write_text("1990\n")
    assert asked.deadline() == 1990.0
    (run.control / "deadline").write_text("2010")
    assert asked.deadline() == 2000.5


def test_a_deadline_that_is_no_number_is_told_once_and_not_used(run, caplog):
    asked = requests_of(run, env={"SIRARA_DEADLINE": "tomorrow"})
    (run.control / "deadline").write_text("nan")
    assert [asked.deadline(), asked.deadline()] == [None, None]
    assert [r.getMessage() for r in caplog.records] == [
        "SIRARA_DEADLINE is not used: 'tomorrow' is no time in epoch seconds",
        f"{run.control / 'deadline'} is not used: 'nan' is no time in epoch seconds",
    ]
