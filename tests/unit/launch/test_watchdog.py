"""The watchdog ends a worker that makes no step, with the stacks of all threads."""

import threading

import pytest

from sirara.errors import CommTimeout, Exit
from sirara.launch.watchdog import FIRST_STEP_FACTOR, Watchdog


@pytest.fixture
def watch(tmp_path):
    class Watch:
        now, signs = 0.0, (5, 0.0)
        left, told = [], []
        stacks = tmp_path / "rank-00000.stacks"

    state = Watch()
    state.left, state.told = [], []
    state.watchdog = Watchdog(
        lambda: state.signs,
        timeout_s=0.1,
        stacks=state.stacks,
        report=state.told.append,
        clock=lambda: state.now,
        leave=state.left.append,
    )
    return state


def test_steps_in_time_are_left_alone(watch):
    watch.now = 0.0999
    assert not watch.watchdog.check()
    assert watch.left == [] and not watch.stacks.exists()


def test_silence_ends_with_124_a_report_and_all_stacks(watch):
    watch.now = 0.1
    assert watch.watchdog.check()
    assert watch.left == [Exit.NO_PROGRESS]
    (error,) = watch.told
    assert isinstance(error, CommTimeout)
    assert "launch.hang_timeout" in str(error) and str(watch.stacks) in str(error)
    text = watch.stacks.read_text()
    assert "test_silence_ends_with_124" in text and "no step finished" in text


def test_the_first_step_may_take_longer(watch):
    watch.signs = (1, 0.0)
    watch.now = 0.1 * FIRST_STEP_FACTOR - 0.001
    assert not watch.watchdog.check()
    watch.now = 0.1 * FIRST_STEP_FACTOR
    assert watch.watchdog.check()


def test_the_thread_fires_once_and_stops(watch, tmp_path):
    fired = threading.Event()
    watchdog = Watchdog(
        lambda: (9, 0.0),
        timeout_s=0.02,
        stacks=tmp_path / "s",
        report=watch.told.append,
        clock=lambda: 1.0,
        leave=lambda code: fired.set(),
    )
    watchdog.start()
    assert fired.wait(10)
    watchdog.stop()
    assert len(watch.told) == 1


def test_a_watchdog_that_is_stopped_in_time_never_fires(watch):
    watch.watchdog.start()
    watch.watchdog.stop()
    watch.now = 100.0
    assert watch.left == []
