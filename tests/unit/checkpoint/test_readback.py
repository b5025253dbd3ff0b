"""Reading back leaves the disk to the training: it rests as long as it reads, unless somebody waits for it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sirara.checkpoint import readback
from sirara.checkpoint.readback import Rests, faulty_pieces
from sirara.checkpoint.reader import Snapshot
from tests.checkpoints import flip_bit, save, small_state

READ_S, LATE_S = 3.0, 0.5


class Time:
    """A clock that only reads and rests move."""

    def __init__(self) -> None:
        self.now, self.reads, self.rests = 0.0, 0, list[float]()
        self.read_s = READ_S

    def slow(self, real: Callable[..., int]) -> Callable[..., int]:
        def preadv(fd: int, buffers: Sequence[Any], position: int) -> int:
            self.reads += 1
            self.now += self.read_s
            return real(fd, buffers, position)

        return preadv

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds + LATE_S


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save(tmp_path, 5, small_state())


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(os, "preadv", time.slow(os.preadv))
    monkeypatch.setattr(readback, "BATCH_BYTES", 4096)
    return time


def test_it_reads_for_at_most_half_of_the_time(step, time):
    m = Snapshot(step).manifest
    rests = Rests(clock=lambda: time.now, sleep=time.sleep)
    assert list(faulty_pieces(step, m, rests=rests)) == []
    assert time.reads > len(m.files) and time.rests == [READ_S] * time.reads
    assert rests.rested_s == (READ_S + LATE_S) * time.reads
    assert time.now == rests.rested_s + READ_S * time.reads


def test_short_rests_are_put_together(step, time):
    time.read_s = 0.02
    rests = Rests(clock=lambda: time.now, sleep=time.sleep)
    assert list(faulty_pieces(step, Snapshot(step).manifest, rests=rests)) == []
    assert time.rests == [pytest.approx(0.06)] * (time.reads // 3)


def test_it_rests_no_more_once_somebody_waits(step, time):
    m = Snapshot(step).manifest
    rests = Rests(clock=lambda: time.now, sleep=time.sleep, hurry=lambda: time.reads >= 3)
    assert list(faulty_pieces(step, m, rests=rests)) == []
    assert time.reads > 3 and time.rests == [READ_S] * 2


def test_without_training_there_are_no_rests_and_what_is_found_is_the_same(step, time):
    m = Snapshot(step).manifest
    flip_bit(step / m.files[0].name, int(m.pieces.position[0]))
    at_once = [str(fault) for fault in faulty_pieces(step, m)]
    assert time.rests == [] and len(at_once) == 1
    rests = Rests(clock=lambda: time.now, sleep=time.sleep)
    assert [str(fault) for fault in faulty_pieces(step, m, rests=rests)] == at_once and time.rests
