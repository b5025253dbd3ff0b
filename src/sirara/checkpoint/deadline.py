"""Saves against the clock: how fast each tier has been, and which of them end before a deadline.

The slowest of the last few saves counts, because a save that does not end in time is worth nothing. The figures live
in the run folder, so that the first save of an attempt knows them.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sirara.checkpoint.job import SaveOutcome
from sirara.config.run_folder import write_durably
from sirara.errors import StorageError

_log = logging.getLogger("sirara")

FILE = "control/bandwidth.json"
"""In the run folder."""
SAMPLES = 5
PHASES = ("hash", "write", "commit", "verify")
UNMEASURED, FIRST_S = 200e6, 3.0
"""Of a disk that no save has measured: bytes per second, and what a first save takes to start its keeper."""
MARGIN_S = 0.5
"""Left over for what no save measures: ranks agree, and what the slowest of the last steps did not know."""
STEPS = 16
"""Last steps, of which the slowest counts."""
SAFETY = 1.25
"""A deadline comes when everybody else is saving as well."""
# Too small a save measures only its own fixed costs, which are not per byte.
FIXED_S = 0.05


class Bandwidth:
    """Bytes per second of each tier, of the last saves; only rank 0 notes and stores.

    Args:  path: `<run>/control/bandwidth.json`; read when it is there, a damaged one counts as none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._samples: dict[str, list[float]] = _read(path)

    def note(self, tier: str, *, size: int, seconds: float) -> None:
        """Counts a part of a save that ended well: `size` bytes of this node (or of the step) in `seconds`."""
        if size > 0 and seconds > 0:
            rate = size / max(seconds - FIXED_S, seconds / 10)
            self._samples[tier] = [*self._samples.get(tier, []), rate][-SAMPLES:]

    def store(self) -> None:
        """Keeps the figures for the next attempt; that they are lost is no reason to fail a save."""
        try:
            write_durably(self._path, json.dumps(self._samples))
        except OSError as fault:
            _log.warning("the measured bandwidths could not be stored in %s: %s", self._path, fault)

    def rate(self, tier: str) -> float | None:
        """Bytes per second, the slowest of the last saves; None when there was none."""
        return min(self._samples.get(tier, []), default=None)

    def seconds(self, tier: str, size: int) -> float | None:
        """How long `size` bytes will take, with a margin; None when nobody knows."""
        rate = self.rate(tier)
        return None if rate is None else SAFETY * (FIXED_S + size / rate)


def choose(
    sizes: Mapping[str, int],
    seconds_left: float | None,
    bandwidth: Bandwidth,
) -> list[str]:
    """The tiers that a save should be given to, in the order in which they should be written, fastest first.

    Args:    sizes: bytes by tier, in the order of the configuration.  seconds_left: None when there is no deadline.
    Returns: without a deadline all of them; with one those that end in time one after the other, then those that no
             save has measured: the state is safe by then, or nothing known would end. Empty: nothing must be started.
    """
    if seconds_left is None:
        return list(sizes)
    known = {t: s for t in sizes if (s := bandwidth.seconds(t, sizes[t])) is not None}
    chosen, spent = [], 0.0
    for tier in sorted(known, key=lambda t: known[t]):
        if spent + known[tier] <= seconds_left:
            chosen.append(tier)
            spent += known[tier]
    return chosen + [tier for tier in sizes if tier not in known and spent < seconds_left]


def why_not(
    sizes: Mapping[str, int], seconds_left: float, bandwidth: Bandwidth, chosen: Sequence[str]
) -> str:
    """The numbers behind a choice that leaves tiers out, "" when it leaves none out."""
    out = []
    for tier in sizes:
        if tier not in chosen:
            seconds = bandwidth.seconds(tier, sizes[tier])
            out.append(tier if seconds is None else f"{tier} needs {seconds:.1f} s")
    return f"{max(0.0, seconds_left):.1f} s left; {', '.join(out)}" if out else ""


class Pace:
    """What a run asks about its saves and the clock.

    Args:  path: `<run>/control/bandwidth.json`.  tiers: all of the run, in the order of the configuration.
           total_bytes: of one step.  speaks: whether this rank hears how saves end (rank 0) and decides for all.
    """

    def __init__(
        self,
        path: Path,
        *,
        tiers: Sequence[str],
        total_bytes: int,
        speaks: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.bandwidth = Bandwidth(path)
        self._sizes = dict.fromkeys(tiers, total_bytes)
        self._speaks, self._now = speaks, now
        self._steps_s: deque[float] = deque(maxlen=STEPS)

    def learn(self, outcomes: Iterable[SaveOutcome]) -> None:
        """Takes the times of saves that ended well and keeps them for later attempts."""
        kept = [o for o in outcomes if o.kind in ("saved", "uploaded") and o.fault is None]
        if not self._speaks or not kept:
            return
        for outcome in kept:
            for tier, result in outcome.tiers.items():
                whole = sum(outcome.seconds.get(phase, 0.0) for phase in PHASES) if tier == "disk" else 0.0
                if result.ok:
                    size = outcome.total_bytes or result.bytes
                    self.bandwidth.note(tier, size=size, seconds=max(whole, result.seconds))
        self.bandwidth.store()

    def tiers_in_time(self, deadline: float | None) -> tuple[str, ...]:
        """The tiers of a last save that must end before `deadline` (epoch seconds); none when none would."""
        if deadline is None:
            return tuple(self._sizes)
        left = deadline - self._now()
        chosen = choose(self._sizes, left, self.bandwidth)
        said = why_not(self._sizes, left, self.bandwidth, chosen)
        if said and self._speaks:
            _log.warning("a save to all tiers would not end in time: %s", said)
        return tuple(chosen)

    def must_stop(self, deadline: float | None, *, step_s: float) -> bool:
        """Whether the last save must begin at the next step boundary, because after one more step the time would no
        longer do.  step_s: of the last step."""
        self._steps_s.append(step_s)
        if deadline is None or not self._speaks:
            return False
        seconds = self.bandwidth.seconds("disk", self._sizes["disk"])
        if seconds is None:
            seconds = SAFETY * (FIRST_S + self._sizes["disk"] / UNMEASURED)
        return deadline - self._now() < 2 * max(self._steps_s) + seconds + MARGIN_S

    def too_late(self, step: int, deadline: float | None) -> StorageError:
        """The error of a save that is not started."""
        left = max(0.0, (deadline or 0.0) - self._now())
        return StorageError(
            f"the save of step {step} cannot end before the deadline and was not started",
            code="SR608",
            why=why_not(self._sizes, left, self.bandwidth, []),
            try_=[
                "a larger launch.stop_grace, if whoever stops the run waits as long",
                "a tier that is faster",
            ],
        )


def _read(path: Path) -> dict[str, list[float]]:
    try:
        found = json.loads(path.read_text())
        return {str(t): [float(v) for v in rates if float(v) > 0][-SAMPLES:] for t, rates in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as fault:
        _log.warning("the measured bandwidths in %s are not used: %s", path, fault)
        return {}
