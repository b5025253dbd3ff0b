"""Times things in turn, round after round: what disturbs a machine for a while then meets all of them alike.

    round 0    every job once, not counted: memory is touched, buffers and caches are made
    round n    every job once, short ones a few times, until the time is up

Ranks of one world run the same jobs together; the first `active` ones compute, the others wait for them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sirara.comm.group import Comm
from sirara.comm.world import World

Say = Callable[[str], None]
Parts = Mapping[str, Sequence[float]]

MOST = 60
"""Rounds."""
FEW = 3
"""Of fewer rounds than this, a lower quartile says little, and people are told so."""
BURST_S, BURST = 0.04, 40
"""How long a short job goes on in one round, and how often at most."""
SLOWER = 1.5
"""Of a job that comes up in all rounds: upper over lower quartile from which the machine was not quiet."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One thing that is timed.

    active: ranks that run it.  threads: of each rank, on CPUs.  run: gives seconds of its parts, or None, and then the
    whole is timed as part "".  times: part -> seconds, of this rank, one for each round: the mean of a burst, as a
    single short run may go by between two turns of the others on its core.
    """

    what: str
    run: Callable[[], Parts | None]
    active: int
    threads: int
    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    burst: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where things are timed, and until when (`time.monotonic`)."""

    world: World
    comm: Comm
    device: torch.device
    stop_at: float
    say: Say

    def agreed(self, value: float) -> float:
        """The largest value of all ranks.  Collective."""
        row = torch.tensor([value], dtype=torch.float64, device=self.device)
        return float(self.comm.gather_rows("agree", row).max())

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def typical(self, times: Sequence[float]) -> float:
        """The slowest rank's lower quartile: what disturbs a run lengthens it.  0 without times.  Collective."""
        return self.agreed(quantile(times, 1, 4) if times else 0.0)

    def _crowded(self, job: Job) -> bool:
        return self.device.type == "cpu" and job.active * job.threads > len(os.sched_getaffinity(0))

    def once(self, job: Job) -> float:
        """One run, or burst of runs; seconds of the slowest rank.  Collective."""
        mine = self.world.rank < job.active
        if self.device.type == "cpu" and mine:
            torch.set_num_threads(job.threads)
        self.agreed(0.0)
        whole = self.now()
        found: dict[str, list[float]] = {}
        for _ in range(job.burst if mine else 0):
            for name, seconds in (job.run() or {}).items():
                found.setdefault(name, []).extend(seconds)
        took_s = self.now() - whole
        if mine:
            # Nobody's last part may find cores that another, sooner done, has left.
            for _ in range(job.burst if self._crowded(job) else 0):
                job.run()
            for name, seconds in (found or {"": [took_s / job.burst]}).items():
                job.times.setdefault(name, []).append(sum(seconds) / len(seconds))
        return self.agreed(took_s if mine else 0.0)


def warm(place: Place, job: Job) -> None:
    """Round 0 of one job.  Collective."""
    took_s = place.once(job)
    job.times.clear()
    job.burst = burst_of(took_s)


def burst_of(run_s: float) -> int:
    """How often a job is run in one round that takes so many seconds."""
    return int(min(BURST, max(1, BURST_S / max(run_s, 1e-6))))


def go_round(place: Place, jobs: Sequence[Job]) -> str:
    """All jobs in turn, at least once, while there is time for another round.  Collective.

    Returns:  as `doubts_of`.
    """
    rounds_s = list[float]()
    while len(rounds_s) < MOST:
        began = time.monotonic()
        for job in jobs:
            place.once(job)
        rounds_s.append(place.agreed(time.monotonic() - began))
        if place.agreed(time.monotonic() + max(rounds_s) - place.stop_at) > 0:
            break
    place.say(f"{len(rounds_s)} rounds of {len(jobs)} measurements, {quantile(rounds_s, 1, 2):.1f} s each")
    return doubts_of(rounds_s)


def doubts_of(rounds_s: Sequence[float]) -> str:
    """Why times from rounds that took so long may not be what is usual, "" if nothing speaks for that."""
    count, spread = len(rounds_s), quantile(rounds_s, 3, 4) / max(quantile(rounds_s, 1, 4), 1e-9)
    if count < FEW:
        what = "one round" if count == 1 else f"{count} rounds"
        return f"{what} of measurements tell little of what is usual"
    if spread > SLOWER:
        return (
            f"a quarter of the rounds of measurements took {spread:.1f} times as long as another quarter: something "
            "else used the machine"
        )
    return ""


def quantile(values: Sequence[float], part: int, of: int) -> float:
    """The value at `part`/`of` of all, from below."""
    return sorted(values)[(len(values) - 1) * part // of]
