"""What is said of saves that did not begin: once for each reason, the rest as a number."""

import pytest

from sirara.checkpoint.deciding import Move
from sirara.checkpoint.job import JobEnd
from sirara.checkpoint.ledger import Ledger
from sirara.errors import StorageError

DISK = frozenset({"disk"})
FULL = StorageError("no space left", code="SR601")


def told(ledger: Ledger) -> list[tuple[str, int, int]]:
    return [(o.kind, o.step, o.untold) for o in ledger.take()]


def test_saves_that_wait_for_a_retry_are_told_once_per_failure_and_counted():
    ledger = Ledger(max_failures=5, retry_s=1000.0)
    ledger.ended(JobEnd(step=10, uuid="a", fault=FULL), DISK)
    for step in (20, 30, 40, 50):
        ledger.later(step, Move.BACK_OFF, DISK, speaks=True)
    assert told(ledger) == [("failed", 10, 0), ("queued", 20, 0)]
    ledger.ended(JobEnd(step=55, uuid="b", fault=FULL), DISK)
    ledger.later(60, Move.BACK_OFF, DISK, speaks=True)
    ledger.later(70, Move.BACK_OFF, DISK, speaks=True)
    assert told(ledger) == [("failed", 55, 3), ("queued", 60, 0)]
    ledger.ended(JobEnd(step=75, uuid="c", path="x"), DISK)
    assert told(ledger) == [("saved", 75, 1)]
    assert (ledger.counts.held_back, ledger.counts.queued, ledger.counts.failed) == (6, 0, 2)


def test_another_reason_is_told_and_what_is_skipped_is_told_each_time():
    ledger = Ledger(max_failures=5, retry_s=1000.0)
    for move in (Move.QUEUE, Move.QUEUE, Move.BACK_OFF, Move.SKIP, Move.SKIP):
        ledger.later(1, move, DISK, speaks=True)
    assert [(o.kind, o.why) for o in ledger.take()] == [
        ("queued", "a save is still being written"),
        ("queued", "the save before it failed"),
        ("skipped", "a save is still being written"),
        ("skipped", "a save is still being written"),
    ]
    assert (ledger.counts.queued, ledger.counts.held_back, ledger.counts.skipped) == (2, 1, 2)


@pytest.mark.parametrize("move", [Move.QUEUE, Move.BACK_OFF])
def test_what_was_put_off_is_owed_also_when_it_was_not_told(move):
    ledger = Ledger(max_failures=5, retry_s=0.0)
    ledger.later(1, move, DISK, speaks=True)
    ledger.later(2, move, DISK | {"memory"}, speaks=True)
    assert ledger.put_off == {"disk", "memory"}
