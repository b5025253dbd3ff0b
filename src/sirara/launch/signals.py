"""What a worker is asked while it trains, and whether anybody still wants it.

Signal handlers only set flags; the training loop asks `Requests()` once per step boundary, on every rank, and
combines the answers of all ranks, so one signal to one rank stops them all at the same step.

    SIGTERM SIGINT SIGHUP, control/stop    "stop": save, then leave
    SIGUSR1, control/save                  "save"
    SIRARA_DEADLINE, control/deadline      epoch seconds: when the machine will be taken away
    SIGUSR2                                stacks of all threads at once, even out of a blocked call
    (faulthandler) a second SIGTERM or SIGINT             dies at once (without an agent; an agent decides for
    its workers)

A worker whose agent is gone must not go on beside the run that is resumed in its place: the kernel kills it
(PR_SET_PDEATHSIG), and each step looks at its parent as well, in case the kernel could not.
"""

import contextlib
import ctypes
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from sirara.config.run_folder import RunFolder
from sirara.errors import InvariantError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
DUMP_SIGNAL = signal.SIGUSR2
HANDLED_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL, DUMP_SIGNAL)
# Schedulers signal every process of a job and agents pass signals on: both copies are one wish.
SECOND_AFTER_S = 1.0
FENCE_EVERY_S = 2.0
DEADLINE = "SIRARA_DEADLINE"
ORPHAN_EXIT = 128 + signal.SIGKILL
PR_SET_PDEATHSIG = 1

log = logging.getLogger("sirara.launch")


class Requests:
    """Callable that the training loop polls: "" | "save" | "stop".  A call is also the sign of life of this
    worker.

    Args:    attempt: the attempt that this worker belongs to; rank 0 raises RunBusyError once a newer one
    owns the run.
             agent: pid of the agent that started this worker, None if it has none.
             supervised: the agent is ours.  Another one that signals before the first step ends a broken
             start. leave: ends the process when the agent is gone.
             stop_grace_s: how long after a stop signal the process is killed.
             wall: epoch seconds.  env: where SIRARA_DEADLINE may stand.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        attempt: int,
        rank: int,
        agent: int | None,
        supervised: bool = False,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
        stop_grace_s: float | None = None,
        wall: Callable[[], float] = time.time,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._rank = rank
        self._agent = agent
        self._supervised = supervised
        self._clock = clock
        self._leave = leave
        self._stop_grace_s = stop_grace_s
        self._wall = wall
        self._env = env
        self._stop_since: float | None = None
        self._signalled_at: float | None = None
        self._doubted: set[str] = set()
        self._save = False
        self._fence_at = clock() + FENCE_EVERY_S
        self.polls = 0
        self.last_poll = clock()

    def __call__(self) -> str:
        self.polls += 1
        self.alive()
        now = self.last_poll
        if self._rank == 0:
            self._read_control()
            if now >= self._fence_at:
                self._fence_at = now + FENCE_EVERY_S
                self._run.check_attempt(self._attempt)
        if self._stop_since is not None:
            return "stop"
        asked, self._save = "save" if self._save else "", False
        return asked

    def deadline(self) -> float | None:
        """When this process must have ended, in epoch seconds; None when nobody has said.

        The earliest of: stop_grace_s after the first stop signal, SIRARA_DEADLINE, and on rank 0 the number in
        control/deadline.
        """
        said = [self._epoch(DEADLINE, self._env.get(DEADLINE, ""))]
        if self._rank == 0:
            said.append(self._epoch(*self._deadline_file()))
        if self._signalled_at is not None and self._stop_grace_s is not None:
            said.append(self._wall() + self._stop_grace_s - (self._clock() - self._signalled_at))
        return min((d for d in said if d is not None), default=None)

    def _deadline_file(self) -> tuple[str, str]:
        path = self._run.control / "deadline"
        try:
            return str(path), path.read_text()
        except FileNotFoundError:
            return str(path), ""
        except (OSError, ValueError) as fault:
            return str(path), f"({fault})"

    def _epoch(self, source: str, text: str) -> float | None:
        try:
            value = float(text) if text.strip() else None
        except ValueError:
            value = math.nan
        if value is None or math.isfinite(value):
            return value
        if source not in self._doubted:
            self._doubted.add(source)
            log.warning("%s is not used: %r is no time in epoch seconds", source, text.strip()[:80])
        return None

    def alive(self) -> None:
        """A sign of life between polls, for work that may take longer than a step, such as an evaluation."""
        self.last_poll = self._clock()
        if self._agent is not None and os.getppid() != self._agent:
            log.error("the agent (process %d) is gone: this worker ends at once", self._agent)
            self._leave(ORPHAN_EXIT)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handlers are in place inside; only the main thread may enter.  A SIGHUP that is ignored stays
        ignored.

        Afterwards the wishes are ignored: the work is done, and a late signal must not turn its exit code
        into a death.
        """
        # `nohup` ignores SIGHUP on purpose; a shell without job control ignores SIGINT for whatever it starts with &.
        caught = [
            number
            for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in caught:
            signal.signal(number, self._on_stop)
        signal.signal(SAVE_SIGNAL, self._on_save)
        # The agent starts workers with these blocked, so that a wish of the first second is not lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))
        try:
            yield
        finally:
            for number in (*caught, SAVE_SIGNAL):
                signal.signal(number, signal.SIG_IGN)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        first, self._stop_since = self._stop_since is None, self._stop_since or now
        self._signalled_at = self._signalled_at or now
        again = self._agent is None and not first and now - self._stop_since >= SECOND_AFTER_S
        # torchrun ends the peers of a rank that failed; one that still joins has nothing to save.
        joining = self._agent is not None and not self._supervised and self.polls == 0
        if again or joining:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    def _read_control(self) -> None:
        if _take(self._run, "stop"):
            self._stop_since = self._stop_since or self._clock()
        if _take(self._run, "save"):
            self._save = True


def request(run: RunFolder, what: str) -> None:
    """Asks the workers of a run to "save" or to "stop" at their next step boundary."""
    (run.control / what).touch()


def is_requested(run: RunFolder, what: str) -> bool:
    """Whether a request lies in the run folder that no worker has taken yet."""
    return (run.control / what).exists()


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when `parent` dies.

    Raises:  InvariantError when the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        log.warning(
            "the kernel refuses PR_SET_PDEATHSIG (errno %d): workers look at their parent per step",
            ctypes.get_errno(),
        )
    # The parent may have died before the call above.
    if os.getppid() != parent:
        raise InvariantError(f"the agent (process {parent}) ended while this worker started", code="SR910")


def _take(run: RunFolder, what: str) -> bool:
    try:
        (run.control / what).unlink()
    except FileNotFoundError:
        return False
    return True
