"""Timing in rounds: every job comes up in each, bursts are averaged, people are told when a machine was not quiet."""

import time

import pytest
import torch

from sirara.comm.group import Comm
from sirara.comm.world import World
from sirara.plan.calibrated import crowd_of
from sirara.pure.shape import ModelShape
from sirara.train import rounds
from sirara.train.calibrate import _crowds, _dealt
from sirara.train.rounds import Job, Place, burst_of, doubts_of, go_round, quantile, warm
from tests.unit.plan.test_profile import unit


def place(budget_s: float = 60.0) -> tuple[Place, list[str]]:
    said: list[str] = []
    found = Place(
        world=World(rank=0, size=1, local_rank=0, local_size=1, node=0),
        comm=Comm([0], 0, group=None, timeout_s=1),
        device=torch.device("cpu"),
        stop_at=time.monotonic() + budget_s,
        say=said.append,
    )
    return found, said


def job(run, *, active: int = 1, threads: int = 1) -> Job:
    return Job(what="x", run=run, active=active, threads=threads)


def test_every_job_comes_up_in_every_round_and_the_first_run_is_not_counted(monkeypatch):
    monkeypatch.setattr(rounds, "MOST", 5)
    there, said = place()
    order: list[str] = []
    jobs = [job(lambda n=n: order.append(n)) for n in "ab"]
    for each in jobs:
        warm(there, each)
        assert not each.times
        each.burst = 1
    order.clear()
    go_round(there, jobs)
    assert order == list("ab") * 5
    assert [len(each.times[""]) for each in jobs] == [5, 5]
    assert said[0].startswith("5 rounds of 2 measurements")


def test_a_burst_counts_once_with_the_mean_of_its_parts():
    there, _ = place()
    seconds = iter([1.0, 3.0, 5.0, 7.0])
    each = job(lambda: {"f": [next(seconds), next(seconds)]})
    each.burst = 2
    there.once(each)
    assert each.times == {"f": [4.0]}


def test_a_short_job_is_run_in_bursts_and_a_long_one_once():
    assert burst_of(0.0) == burst_of(1e-5) == rounds.BURST
    assert burst_of(rounds.BURST_S / 3) == 3 and burst_of(2 * rounds.BURST_S) == 1
    there, _ = place()
    long = job(lambda: time.sleep(2 * rounds.BURST_S))
    long.burst = 7
    there.once(long)
    assert len(long.times[""]) == 1 and long.times[""][0] >= 2 * rounds.BURST_S
    warm(there, long)
    assert long.burst == 1 and not long.times


def test_on_more_processes_than_cores_each_goes_on_until_all_are_done(monkeypatch):
    # Who is done first would leave its core to the others, whose last parts would look fast.
    monkeypatch.setattr(rounds.os, "sched_getaffinity", lambda _: {0, 1})
    there, _ = place()
    runs: list[int] = []
    for active, threads, expected in ((1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 1, 2)):
        runs.clear()
        each = job(lambda: runs.append(1), active=active, threads=threads)
        there.once(each)
        assert (len(runs), len(each.times[""])) == (expected, 1)


def test_a_rank_that_only_waits_notes_nothing():
    there, _ = place()
    each = job(lambda: pytest.fail("it was to wait"), active=0)
    there.once(each)
    assert not each.times and there.typical(each.times.get("", [])) == 0.0


def test_when_time_is_up_there_is_one_round_and_a_warning():
    there, said = place(budget_s=-1.0)
    assert go_round(there, [job(lambda: None)]).startswith("one round")
    assert said[0].startswith("1 rounds of 1")


def test_a_machine_that_changes_its_speed_is_told_of():
    assert "3.0 times as long" in doubts_of([0.02] * 4 + [0.06] * 4)
    # One slow round of many is what a lower quartile is for.
    assert not doubts_of([0.02] * 7 + [0.06]) and not doubts_of([1.0, 1.2, 1.4])
    assert "2 rounds" in doubts_of([1.0, 1.0])


def test_what_disturbs_a_few_rounds_is_not_believed():
    there, _ = place()
    assert there.typical([1.0, 1.1, 9.0, 8.0, 1.2]) == 1.1
    assert quantile([3.0, 1.0, 2.0], 1, 2) == 2.0 and quantile([5.0], 1, 4) == 5.0


def test_processes_are_measured_alone_with_as_many_threads_as_they_have_in_a_crowd(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _crowds(4, 2) == [(1, 1), (1, 2), (2, 1), (4, 1)]
    assert _crowds(1, 8) == [(1, 8)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _crowds(4, 2) == [(1, 1), (2, 1), (4, 1)]


def test_crowding_compares_what_has_as_many_threads():
    def block(processes: int, threads: int, seconds: float):
        return unit("block", processes=processes, threads=threads, forward=seconds, backward=0.0)

    found = crowd_of([block(1, 1, 1.0), block(1, 2, 0.6), block(2, 1, 1.1), block(4, 1, 2.2)])
    assert found == pytest.approx({1: 1.0, 2: 1.1, 4: 2.2})
    # Without a measurement alone nothing is known; noise makes nobody faster in a crowd.
    assert crowd_of([block(2, 1, 1.1)]) == {1: 1.0}
    assert crowd_of([block(1, 1, 1.0), block(2, 1, 0.9)]) == {1: 1.0, 2: 1.0}


def test_tensor_parallel_degrees_that_do_not_divide_the_model_or_the_processes_are_left_out():
    said: list[str] = []
    shape = ModelShape(family="gpt2", layers=1, hidden=192, heads=3, vocab=101, max_seq=16)
    assert _dealt(shape, 6, [2, 3, 4], said.append) == [1, 3]
    assert "heads" in said[0] and "6 processes" in said[1]
