"""No step for too long: the stacks of all threads go to the crash folder and the worker ends with 124.

A hang in a collective shows on every rank at the same time; each one writes its own stacks, so the rank that
does something else than the others is the one to look at.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sirara.errors import CommTimeout, Exit

CHECKS_PER_TIMEOUT = 20
LONGEST_PAUSE_S = 1.0
# A rank that leaves breaks the connections of the others; they shall have written their stacks by then.
PAUSES_FOR_PEERS = 3
# Before the first step a run loads its checkpoint, compiles and builds its groups.
FIRST_STEP_FACTOR = 3


class Watchdog:
    """Watches signs of life from a thread of its own.

    Args:    signs: () -> (number of signs so far, moment of the last one on `clock`).
             stacks: where the stacks go.     report: told once, with the error, before the process ends.
    """

    def __init__(
        self,
        signs: Callable[[], tuple[int, float]],
        *,
        timeout_s: float,
        stacks: Path,
        report: Callable[[CommTimeout], object],
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._signs = signs
        self._timeout_s = timeout_s
        self._stacks = stacks
        self._report = report
        self._clock = clock
        self._leave = leave
        self._pause_s = min(timeout_s / CHECKS_PER_TIMEOUT, LONGEST_PAUSE_S)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sirara-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> bool:
        """Ends the process if the last sign of life is too old; whether it did (for tests, where `leave`
        returns)."""
        count, last = self._signs()
        limit_s = self._timeout_s * (1 if count > 1 else FIRST_STEP_FACTOR)
        silent_s = self._clock() - last
        if silent_s < limit_s:
            return False
        with open(self._stacks, "a") as file:
            file.write(f"no step finished for {silent_s:.1f} s (limit {limit_s:g} s)\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        self._report(
            CommTimeout(
                f"no step finished for {silent_s:.0f} s",
                code="SR751",
                where=f"step boundary {count} of this attempt",
                why=f"the limit is {limit_s:g} s (launch.hang_timeout); stacks are in {self._stacks}",
                try_=[
                    "compare the stacks of the ranks: the odd one out is the cause",
                    "launch.hang_timeout=30m",
                ],
            )
        )
        self._done.wait(PAUSES_FOR_PEERS * self._pause_s)
        self._leave(Exit.NO_PROGRESS)
        return True

    def _watch(self) -> None:
        while not self._done.wait(self._pause_s):
            if self.check():
                return
