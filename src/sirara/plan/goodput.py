"""How much of the time a run makes progress: failures, checkpoints, restarts.

M  mean time between interruptions of the whole job       C  stall of one checkpoint
W  from the snapshot until it is durable                  R  detect, restart, load, warm up
tau  time of work between two checkpoints

best interval   Daly, doi:10.1016/j.future.2004.11.016, equation 20: sqrt(2CM) [1 + (1/3) sqrt(C/2M) + C/(18M)] - C
expected time   the same, equation 13: M exp(R/M) (exp((tau + C)/M) - 1) T / tau, failures exponential; what was
                written but not durable yet is lost too, so W counts as half an interval more of lost work
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What is assumed of the machines; each default with its source."""

    gpu_hours_per_failure: float = 50_677.0
    """Llama 3 405B: 419 unexpected interruptions of 16,384 H100 in 54 days (arXiv:2407.21783, section 3.3.4)."""
    restart_s: float = 600.0
    """Detect, replace a node, start, load: an assumption; measure it with `sirara bench` or your own runs."""
    write_bytes_per_s_per_node: float = 1.2e9
    """To a shared file system: BLOOM's chronicles, 2.3 TB in 40 s from 48 nodes (github.com/bigscience-workshop)."""
    object_bytes_per_s_per_node: float = 0.6e9
    """To an object store: an assumption, half of a file system."""
    memory_bytes_per_s_per_node: float = 10e9
    """Into the shared memory of the node, over the host links of its devices: the slower of the two counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds, but for `ratio`: progress over wall time.  every_s: the interval that was asked for or is best."""

    failures_s: float
    """Mean time between interruptions of the job."""
    stall_s: float
    durable_s: float
    restart_s: float
    every_s: float
    best_s: float
    ratio: float
    best_ratio: float


def daly(stall_s: float, failures_s: float) -> float:
    """The best work between two checkpoints; at stalls of two failures' time and more, that time itself."""
    c, m = stall_s, failures_s
    if c >= 2 * m:
        return m
    return float(np.sqrt(2 * c * m) * (1 + np.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c)


def ratio(every_s: float, *, stall_s: float, durable_s: float, restart_s: float, failures_s: float) -> float:
    """Progress over wall time at one interval; 0 where the job cannot get anywhere."""
    m = failures_s
    grown = (every_s + stall_s) / m
    if grown > 50 or every_s <= 0:
        return 0.0
    # Work between the snapshot and its commit is lost with a chance of W / tau more of an interval.
    late = durable_s / m
    wall = m * np.exp((restart_s + 0.0) / m) * np.expm1(grown) / every_s
    return float(min(1.0, max(0.0, 1 / (wall * (1 + late)))))


def goodput(
    *, gpus: int, stall_s: float, durable_s: float, every_s: float | None, reliability: Reliability
) -> Goodput:
    """The goodput of a job at its own interval (None: the best one) and at the best one."""
    failures_s = reliability.gpu_hours_per_failure * HOUR_S / gpus
    best = max(daly(stall_s, failures_s), stall_s, durable_s, 1.0)
    every = best if every_s is None else every_s

    def at(interval_s: float) -> float:
        return ratio(
            interval_s,
            stall_s=stall_s,
            durable_s=durable_s,
            restart_s=reliability.restart_s,
            failures_s=failures_s,
        )

    return Goodput(
        failures_s=failures_s,
        stall_s=stall_s,
        durable_s=durable_s,
        restart_s=reliability.restart_s,
        every_s=every,
        best_s=best,
        ratio=at(every),
        best_ratio=at(best),
    )
