"""Checkpoint intervals and goodput: closed forms against a simulation and against published figures."""

import numpy as np
import pytest

from sirara.plan.goodput import HOUR_S, Reliability, daly, goodput, ratio


def simulated(every_s, *, stall_s, restart_s, failures_s, seed=0, work_s=3e7):
    """Progress over wall time, failures drawn; what was done since the last checkpoint is lost."""
    rng = np.random.default_rng(seed)
    done = wall = 0.0
    left = rng.exponential(failures_s)
    while done < work_s:
        segment = every_s + stall_s
        if left >= segment:
            left -= segment
            wall += segment
            done += every_s
            continue
        wall += left
        # Restarts can fail too.
        while (left := rng.exponential(failures_s)) < restart_s:
            wall += left
        wall += restart_s
        left -= restart_s
    return done / wall


@pytest.mark.parametrize("every_s", [300, 1200, 4000])
def test_the_ratio_is_that_of_drawn_failures(every_s):
    case = {"stall_s": 30.0, "restart_s": 300.0, "failures_s": 9000.0}
    assert ratio(every_s, durable_s=0.0, **case) == pytest.approx(simulated(every_s, **case), abs=0.01)


def test_the_best_interval_is_best():
    case = {"stall_s": 30.0, "durable_s": 0.0, "restart_s": 600.0, "failures_s": 11_000.0}
    best = daly(30.0, 11_000.0)
    tried = np.linspace(0.3, 3, 55) * best
    ratios = [ratio(t, **case) for t in tried]
    assert abs(tried[int(np.argmax(ratios))] / best - 1) < 0.1
    assert ratio(best, **case) >= max(ratios) - 1e-4


def test_daly_tends_to_young_for_short_stalls():
    # Young's interval is sqrt(2CM), doi:10.1145/361147.361115.
    assert daly(0.01, 1e6) == pytest.approx((2 * 0.01 * 1e6) ** 0.5, rel=1e-2)
    assert daly(100.0, 40.0) == 40.0


def test_failures_of_the_job_are_those_of_all_devices():
    # 419 interruptions of 16,384 devices in 54 days: one in 3.09 hours (arXiv:2407.21783).
    found = goodput(gpus=16_384, stall_s=3.0, durable_s=0.0, every_s=None, reliability=Reliability())
    assert found.failures_s / HOUR_S == pytest.approx(54 * 24 / 419, rel=1e-3)
    assert 0.9 < found.ratio == found.best_ratio


def test_a_slow_save_and_a_long_interval_cost_progress():
    def at(**case):
        return goodput(
            gpus=4096,
            reliability=Reliability(),
            **{"stall_s": 5.0, "durable_s": 0.0, "every_s": 900.0, **case},
        )

    assert at(every_s=20_000.0).ratio < at().ratio
    assert at(stall_s=200.0).ratio < at().ratio
    assert at(durable_s=2000.0).ratio < at().ratio
    assert at().best_ratio >= at().ratio


def test_a_job_that_fails_faster_than_it_saves_gets_nowhere():
    assert ratio(1e6, stall_s=10.0, durable_s=0.0, restart_s=60.0, failures_s=100.0) == 0.0
