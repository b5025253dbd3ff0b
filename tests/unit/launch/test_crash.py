"""Many failures, one cause."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.run_folder import RunFolder
from sirara.errors import CommError, CommTimeout, ConfigError, StorageError
from sirara.events import JsonLines
from sirara.launch.crash import (
    AttemptFailed,
    Failure,
    collect,
    exit_code_of,
    explain,
    last_step,
    report_failure,
    root_cause,
    stacks_file,
    waiting_in,
)
from sirara.launch.logs import log_file


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(Named(tmp_path), "")


def failing(error):
    try:
        raise error
    except type(error) as caught:
        return caught


FIRST = Failure(rank=2, code=1, moment=10.0, kind="ValueError", message="boom")
LATER = Failure(rank=0, code=1, moment=11.0, kind="KeyError", message="'x'")
ECHO = Failure(rank=1, code=1, moment=9.0, kind="CommError", message="a peer left", secondary=True)
DEATH = Failure(rank=3, code=-9, moment=12.0)


@pytest.mark.parametrize("order", list(itertools.permutations([FIRST, LATER, ECHO, DEATH])))
def test_the_cause_is_the_first_failure_that_is_no_echo(order):
    assert root_cause(order) is FIRST


def test_a_killed_rank_is_the_cause_of_broken_connections_noticed_before_its_death():
    assert root_cause([ECHO, DEATH]) is DEATH


def test_when_all_only_lost_a_peer_the_first_one_counts():
    assert root_cause([ECHO, Failure(rank=0, code=1, moment=9.5, kind="CommError", secondary=True)]) is ECHO


@pytest.mark.parametrize(
    ("failure", "summary", "code"),
    [
        (FIRST, "ValueError: boom", 1),
        (DEATH, "killed by SIGKILL", 137),
        (Failure(rank=0, code=3, moment=0.0), "ended with exit code 3 and left no report", 3),
        (Failure(rank=0, code=1, moment=0.0, kind="KeyError"), "KeyError", 1),
    ],
)
def test_summary_and_exit_code(failure, summary, code):
    assert failure.summary == summary
    assert failure.exit_code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (ConfigError("x"), 2),
        (StorageError("x"), 74),
        (CommTimeout("x"), 124),
        (KeyboardInterrupt(), 1),
        (AttemptFailed("x", exit_status=137), 137),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exit_code_of(error) == code


def test_reports_are_joined_with_exit_codes_and_a_torn_one_is_left_out(run):
    report_failure(run, attempt=1, rank=0, error=failing(CommError("a peer left")))
    report_failure(run, attempt=1, rank=1, error=failing(ConfigError("wrong")))
    (run.crash(1) / "rank-00002.json").write_text('{"rank": 2, "co')
    codes = {0: 1, 1: 2, 2: -11}
    found = collect(run, 1, [Failure(rank=r, code=c, moment=5.0) for r, c in codes.items()])
    assert [(f.rank, f.code, f.kind, f.secondary) for f in found] == [
        (0, 1, "CommError", True),
        (1, 2, "ConfigError", False),
        (2, -11, "", False),
    ]
    assert "in failing" in found[1].trace


def test_the_report_names_cause_traceback_log_peers_and_the_next_command(run):
    failure = report_failure(run, attempt=1, rank=1, error=failing(ValueError("boom")))
    log = log_file(run, 1, 1)
    log.parent.mkdir(parents=True)
    log.write_text("step 7 was fine\n" + failure.trace)
    stacks_file(run, 1, 0).write_text(STACKS)
    JsonLines(run.metrics).append({"step": 7})
    text = explain(run, attempt=1, world=3, failures=[failure], advice=[f"sirara resume {run.id}"])
    assert text.startswith("rank 1 of 3 failed first: ValueError: boom\n")
    assert "after step 7" in text
    assert text.count("Traceback") == 1
    assert "step 7 was fine" in text
    assert "rank 0  was in reduce.py:40 in wait (in recv)" in text
    assert "rank 2  was ended with the others" in text
    assert text.endswith(f"  sirara resume {run.id}")


def test_what_the_user_must_correct_is_the_message_alone(run):
    failure = report_failure(run, attempt=1, rank=0, error=failing(ConfigError("seq_len is 0")))
    text = explain(run, attempt=1, world=2, failures=[failure], advice=["x"])
    assert text == "error[SR100]: seq_len is 0"


STACKS = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/usr/lib/torch/distributed.py", line 9 in recv
  File "/home/x/sirara/parallel/reduce.py", line 40 in wait
  File "/home/x/sirara/train/step.py", line 12 in step
"""


def test_waiting_in_reads_the_main_thread():
    assert waiting_in(STACKS) == "reduce.py:40 in wait (in recv)"
    assert waiting_in("") == ""


def test_last_step_reads_the_end_of_the_metrics(run):
    assert last_step(run) == 0
    with JsonLines(run.metrics) as metrics:
        for step in range(3000):
            metrics.append({"step": step, "train/loss": 1.0})
    assert last_step(run) == 2999
