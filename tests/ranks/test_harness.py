"""What every test of ranks stands on: values, first failures, deaths, deadlines, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sirara.errors import LayoutError
from tests.harness import RankFailed, RanksTimedOut, run_ranks


@dataclass(frozen=True)
class Pair:
    rank: int
    total: torch.Tensor


def sum_over_ranks(x):
    x = x + dist.get_rank()
    dist.all_reduce(x)
    return Pair(dist.get_rank(), x)


def test_every_rank_returns_its_value_in_rank_order():
    pairs = run_ranks(3, sum_over_ranks, torch.tensor([1.0, 2.0]))
    assert [pair.rank for pair in pairs] == [0, 1, 2]
    for pair in pairs:
        torch.testing.assert_close(pair.total, torch.tensor([6.0, 9.0]), rtol=0, atol=0)


def who_am_i():
    return os.getpid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), dist.get_backend()


def test_ranks_are_one_threaded_gloo_processes_kept_between_calls():
    first = run_ranks(2, who_am_i)
    second = run_ranks(2, who_am_i)
    assert first == second
    assert len({pid for pid, *_ in first} | {os.getpid()}) == 3
    assert all(rest == ["1", 1, "gloo"] for _, *rest in first)


def leave_traces():
    os.environ["SIRARA_TRACE"] = "left"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)


def find_traces():
    return os.environ.get("SIRARA_TRACE"), torch.get_default_dtype(), torch.initial_seed()


def test_a_call_does_not_see_what_an_earlier_one_changed():
    run_ranks(2, leave_traces)
    assert run_ranks(2, find_traces) == [(None, torch.float32, 0)] * 2


def second_rank_refuses():
    if dist.get_rank() == 1:
        raise LayoutError("mesh.tp=3 does not divide model.heads=8", why="8 mod 3 is 2")
    dist.barrier()


def test_the_failing_rank_is_named_with_its_traceback_and_exception():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 raised LayoutError") as caught:
        run_ranks(2, second_rank_refuses)
    assert time.monotonic() - start < 10
    assert "in second_rank_refuses" in str(caught.value)
    assert "rank 0 had not finished" in str(caught.value)
    assert isinstance(caught.value.error, LayoutError)
    assert caught.value.error.why == "8 mod 3 is 2"


def one_is_killed(victim, number):
    if dist.get_rank() == victim:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_is_named_by_its_signal_and_not_hidden_by_broken_connections(number):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank 2 of 3 was killed by {number.name}") as caught:
        run_ranks(3, one_is_killed, 2, number)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 10


def one_exits():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_exits_is_reported_with_its_code():
    with pytest.raises(RankFailed, match="rank 0 of 2 ended with exit code 7"):
        run_ranks(2, one_exits)


def crash_while_sending_too_much():
    # gloo aborts the receiving process when sizes differ.
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1000), 1)
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.barrier()


def test_the_last_output_of_an_aborted_rank_is_shown():
    with pytest.raises(
        RankFailed, match=r"rank 1 of 2 was killed by SIGABRT[\s\S]*last output of rank 1[\s\S]*gloo"
    ):
        run_ranks(2, crash_while_sending_too_much)


def wait_for_ever():
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_a_hang_ends_at_the_deadline_with_the_stack_of_the_late_rank():
    with pytest.raises(
        RanksTimedOut, match=r"ranks \[1\] of 2 did not answer within 1 s[\s\S]*in wait_for_ever"
    ):
        run_ranks(2, wait_for_ever, deadline_s=1)


def test_the_next_call_after_a_failure_gets_new_workers():
    before = {pid for pid, *_ in run_ranks(2, who_am_i)}
    with pytest.raises(RankFailed):
        run_ranks(2, one_exits)
    after = {pid for pid, *_ in run_ranks(2, who_am_i)}
    assert not before & after
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def unpicklable():
    return threading.Lock()


def test_a_value_that_cannot_travel_is_an_error_of_that_rank():
    with pytest.raises(RankFailed, match="cannot pickle"):
        run_ranks(1, unpicklable)


def test_a_nested_function_is_refused():
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(1, lambda: None)


PROGRAM = """
import os, signal, sys
from tests.harness import run_ranks
from tests.ranks.test_harness import who_am_i
print(*(pid for pid, *_ in run_ranks(2, who_am_i)), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["returns", "killed"])
def test_nothing_is_left_behind(end, tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, end], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if end == "returns" else -signal.SIGKILL), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end_s = time.monotonic() + 5
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < end_s, "workers outlived the process that started them"
    assert list(tmp_path.iterdir()) == []


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
