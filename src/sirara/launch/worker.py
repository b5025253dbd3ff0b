"""The frame of one training process: logs, signals, watchdog, crash report, and the record of how it ended.

The training itself is handed in, so this file knows neither torch nor the model:

    work(seat, entry)   logs -> recorded as a process of the attempt -> bound to its agent -> watchdog
                        outcome = entry(requests)            requests(): polled at step boundaries;
                                                             requests.alive() within long work
                        rank 0 writes the event "end"        an error: report, event, raised on
"""

import contextlib
import faulthandler
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sirara.config.run_folder import RunFolder
from sirara.errors import CommTimeout, StorageError
from sirara.events import JsonLines, Record, read
from sirara.launch.crash import Failure, report_failure, stacks_file
from sirara.launch.logs import FILE_ONLY, worker_logs
from sirara.launch.signals import DUMP_SIGNAL, Requests, die_with_parent
from sirara.launch.watchdog import Watchdog

# Whoever started this process shows the error on the console: the agent, or the command line.
file_log = logging.getLogger(FILE_ONLY)

END = "end"
"""Kind of the event by which rank 0 says that the work of an attempt is over; it holds the whole Result."""


class Outcome(Protocol):
    """What training returns; `reason` is "done" or "stopped", `checkpoint` the last committed one."""

    @property
    def reason(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def digest(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def grade(self) -> str: ...
    @property
    def checkpoint(self) -> Path | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One process among those of an attempt.

    agent: pid of the process that started this one and decides about it, None for a process alone.
    supervised: that agent is ours; it tells about failures, so the worker does not.
    stop_grace_s: how long after a stop signal this process is killed.
    """

    run: RunFolder
    attempt: int
    rank: int = 0
    world: int = 1
    agent: int | None = None
    supervised: bool = False
    hang_timeout_s: float = 600.0
    stop_grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an attempt ended, as `--json` prints it."""

    run: str
    path: str
    attempt: int
    reason: str
    step: int
    loss: float | None
    loss_hex: str
    digest: str
    tokens: int
    grade: str
    checkpoint: str | None

    def as_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def work(seat: Seat, entry: Callable[[Requests], Outcome]) -> Result:
    """Trains by `entry(requests)` in this process.  Errors are reported in the run folder and raised on."""
    with worker_logs(seat.run, attempt=seat.attempt, rank=seat.rank, world=seat.world):
        try:
            seat.run.record_process(seat.attempt, role="worker", rank=seat.rank)
            if seat.agent is not None:
                die_with_parent(seat.agent)
            requests = Requests(
                seat.run,
                attempt=seat.attempt,
                rank=seat.rank,
                agent=seat.agent,
                supervised=seat.supervised,
                stop_grace_s=seat.stop_grace_s,
            )
            with requests.installed(), _stacks_on_demand(seat), _watchdog(seat, requests):
                outcome = entry(requests)
            result = _result(seat, outcome)
            if seat.rank == 0:
                _record_end(seat, result)
        except BaseException as error:
            _tell(seat, report_failure(seat.run, attempt=seat.attempt, rank=seat.rank, error=error))
            file_log.error("%s", error, exc_info=error)
            raise
    return result


def result_of(run: RunFolder, attempt: int) -> Result | None:
    """The record that rank 0 has left of a finished attempt, None if it has not."""
    found: Record | None = None
    for event in read(run.events):
        if event.get("kind") == END and event.get("attempt") == attempt:
            found = event
    return Result(**{name: found.get(name) for name in Result.__slots__}) if found else None  # type: ignore[arg-type]


def _result(seat: Seat, outcome: Outcome) -> Result:
    return Result(
        run=seat.run.id,
        path=str(seat.run.path),
        attempt=seat.attempt,
        reason=outcome.reason,
        step=outcome.step,
        loss=outcome.loss,
        loss_hex=float(outcome.loss).hex(),
        digest=outcome.digest,
        tokens=outcome.tokens,
        grade=outcome.grade,
        checkpoint=str(outcome.checkpoint) if outcome.checkpoint else None,
    )


def _tell(seat: Seat, failure: Failure) -> None:
    if seat.supervised:
        return
    event = {"kind": "error", "rank": failure.rank, "error": failure.summary, "exit_code": failure.exit_code}
    with contextlib.suppress(OSError):  # the disk may be what failed; the report and the exit code remain
        _append_event(seat, {**event, "secondary": failure.secondary})


def _record_end(seat: Seat, result: Result) -> None:
    try:
        _append_event(seat, {"kind": END, **result.as_record()})
    except OSError as fault:
        raise StorageError(
            f"the end of the run could not be recorded: {fault}",
            code="SR609",
            where=str(seat.run.events),
            why=f"{result.reason} at step {result.step}",
            try_=[f"sirara resume {seat.run.id}   (its checkpoint is committed)"],
        ) from fault


def _append_event(seat: Seat, event: Record) -> None:
    with JsonLines(seat.run.events, attempt=seat.attempt) as events:
        events.append(event, durable=True)


@contextlib.contextmanager
def _stacks_on_demand(seat: Seat) -> Iterator[None]:
    """Stacks go to the crash folder on SIGUSR2; those of a segmentation fault to stderr, which is the log."""
    path = stacks_file(seat.run, seat.attempt, seat.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.enable(file=2)
    with open(path, "a") as file:
        # What unregister puts back: a request that comes when this process is leaving must not be what ends it.
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [DUMP_SIGNAL])  # blocked by the agent until here
        try:
            yield
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            if path.stat().st_size == 0:
                path.unlink()
                with contextlib.suppress(OSError):  # other ranks have their files there
                    path.parent.rmdir()


@contextlib.contextmanager
def _watchdog(seat: Seat, requests: Requests) -> Iterator[None]:
    def report(error: CommTimeout) -> None:
        _tell(seat, report_failure(seat.run, attempt=seat.attempt, rank=seat.rank, error=error))
        file_log.error("%s", error)

    watchdog = Watchdog(
        lambda: (requests.polls, requests.last_poll),
        timeout_s=seat.hang_timeout_s,
        stacks=stacks_file(seat.run, seat.attempt, seat.rank),
        report=report,
    )
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
