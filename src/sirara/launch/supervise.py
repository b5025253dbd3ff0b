"""The agent: starts the workers of this node, watches them, starts them again; torch.distributed.elastic does
the work.

    supervise()   one attempt after the other: own the run -> agent.run() -> done | stopped | failed ->
    restart? _Agent        elastic's local agent, with three changes:
                    a failed worker ends its peers in a second (their stacks first), not after a polite half
                    minute SIGTERM and Ctrl-C go to the workers, which save at a step boundary and exit 0; the
                    second one kills elastic itself never restarts: an attempt has a number in the run folder,
                    which elastic cannot raise

Workers are started by command line, in sessions of their own, and die with the agent.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from sirara.config.run_folder import RunFolder
from sirara.errors import Exit
from sirara.events import JsonLines, Record
from sirara.launch.crash import AttemptFailed, Failure, collect, explain, root_cause
from sirara.launch.logs import agent_logs
from sirara.launch.restart import Lost, decide
from sirara.launch.signals import DUMP_SIGNAL, HANDLED_SIGNALS, SECOND_AFTER_S, STOP_SIGNALS, is_requested
from sirara.launch.worker import Result, result_of

log = logging.getLogger("sirara.launch")

POLL_S = 0.1
# Time for the peers of a failed worker to say what they saw and to write their stacks.
LAST_WORDS_S = 1.0
# Elastic catches these signals itself unless told otherwise; SIGQUIT stays its own.
ELASTIC_SIGNALS = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What to start.

    command: (attempt, resume) -> command line of a worker; elastic's environment tells it its rank.
    env: added to the workers' environment.
    """

    nproc: int
    command: Callable[[int, bool], Sequence[str]]
    env: Mapping[str, str]
    max_restarts: int
    stop_grace_s: float


def supervise(
    run: RunFolder, crew: Crew, *, begin: Callable[[], int], advice: Sequence[str], poll_s: float = POLL_S
) -> Result:
    """Runs attempts until the workers are done or stopped; returns what rank 0 left as the record of that.

    Args:    begin: makes this process the owner of the run under a new attempt number.
             advice: what a person may do after a failure, one command a line.
    Raises:  AttemptFailed, with the root cause, when there is no point in another attempt.
    """
    lost: list[Lost] = []
    with agent_logs(), _Asked().installed() as asked:
        while True:
            attempt = begin()
            command = crew.command(attempt, run.resumes())
            agent = _Agent.of(run, crew, attempt, command, asked=asked, poll_s=poll_s)
            # Elastic gives workers the environment of the agent.
            with _environment({**crew.env, **ELASTIC_SIGNALS}):
                agent.run()
            result = result_of(run, attempt)
            if not agent.ended and result is not None:
                return result
            if agent.killed_why:
                report = f"the workers of {run.id} were ended without a save: {agent.killed_why}"
                raise AttemptFailed(report, exit_status=128 + asked.number)
            failures = collect(run, attempt, list(agent.ended.values()) or [_vanished(attempt)])
            cause = root_cause(failures)
            lost.append(Lost(cause=cause, committed_step=max(run.committed_steps(), default=0)))
            stop = bool(asked.count) or is_requested(run, "stop")
            decision = decide(lost, max_restarts=crew.max_restarts, stop_requested=stop)
            _note_error(run, attempt, cause, decision.restart)
            report = explain(
                run,
                attempt=attempt,
                world=crew.nproc,
                failures=failures,
                advice=[] if decision.restart else advice,
            )
            if not decision.restart:
                raise AttemptFailed(
                    f"{report}\n\nnot restarting: {decision.why}", exit_status=cause.exit_code
                )
            log.error("%s\nrestarting: %s", report, decision.why)


class _Asked:
    """Counts the wishes of the person or scheduler: 1 stop, 2 stop now."""

    def __init__(self) -> None:
        self.count = 0
        self.number = int(signal.SIGTERM)
        self._last = 0.0

    @contextlib.contextmanager
    def installed(self) -> Iterator["_Asked"]:
        before: dict[int, Any] = {}
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[int(number)] = signal.signal(number, self._on_signal)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # One wish may arrive twice: a scheduler signals every process, a terminal the whole group.
        if self.count == 0 or now - self._last >= SECOND_AFTER_S:
            self.count += 1
            self._last = now
            self.number = number


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, *, asked: _Asked, stop_grace_s: float) -> None:
        # Workers keep their own logs; elastic would leave an empty folder in /tmp for each attempt.
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), exit_barrier_timeout=30)
        self._asked = asked
        self._stop_grace_s = stop_grace_s
        self._stop_sent_at: float | None = None
        self.ended: dict[int, Failure] = {}
        self.killed_why = ""

    @staticmethod
    def of(
        run: RunFolder, crew: Crew, attempt: int, command: Sequence[str], *, asked: _Asked, poll_s: float
    ) -> "_Agent":
        rendezvous = RendezvousParameters(
            backend="c10d",
            endpoint=f"{LOOPBACK}:0",
            run_id=f"{run.id}-{attempt}",
            min_nodes=1,
            max_nodes=1,
            local_addr=LOOPBACK,
        )
        spec = WorkerSpec(
            role="worker",
            local_world_size=crew.nproc,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=get_rendezvous_handler(rendezvous),
            max_restarts=0,
            monitor_interval=poll_s,
            local_addr=LOOPBACK,
        )
        return _Agent(spec, asked=asked, stop_grace_s=crew.stop_grace_s)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore
        # A signal that arrives while Python starts would kill the worker; it waits until there is a handler.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            return super()._start_workers(worker_group)  # pyright: ignore
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # The library's decorator hides the type of the method.
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        pids = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        codes = _exit_codes(pids)
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            self._end_peers(pids, failed)
        elif len(codes) < len(pids):
            self._pass_on_stop(pids, codes)
            # Elastic's own look would end the peers of a worker that fails just now, slowly.
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _end_peers(self, pids: Mapping[int, int], failed: Mapping[int, int]) -> None:
        self._note(failed)
        alive = {rank: pid for rank, pid in pids.items() if rank not in _exit_codes(pids)}
        for pid in alive.values():
            _send(pid, DUMP_SIGNAL)
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end and len(_exit_codes(pids)) < len(pids):
            time.sleep(0.02)
        self._note({rank: code for rank, code in _exit_codes(pids).items() if code})
        for rank, pid in alive.items():
            if rank not in _exit_codes(pids):
                _kill_session(pid)

    def _note(self, codes: Mapping[int, int]) -> None:
        for rank, code in codes.items():
            self.ended.setdefault(rank, Failure(rank=rank, code=code, moment=time.time()))

    def _pass_on_stop(self, pids: Mapping[int, int], codes: Mapping[int, int]) -> None:
        now = time.monotonic()
        alive = [pid for rank, pid in pids.items() if rank not in codes]
        if self._asked.count and self._stop_sent_at is None:
            self._stop_sent_at = now
            log.info("stopping: the workers save at the next step boundary; once more to stop at once")
            for pid in alive:
                _send(pid, signal.SIGTERM)
        late = self._stop_sent_at is not None and now - self._stop_sent_at > self._stop_grace_s
        if self._asked.count > 1 or late:
            grace = f"they did not stop within launch.stop_grace={self._stop_grace_s:g}s"
            self.killed_why = grace if late else "asked twice"
            for pid in alive:
                _kill_session(pid)


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _exit_codes(pids: Mapping[int, int]) -> dict[int, int]:
    """Exit codes (-n for signal n) of the workers that have ended, by rank; they stay to be waited for."""
    codes = {}
    for rank, pid in pids.items():
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # waited for already
            codes[rank] = 0
            continue
        if status is not None:
            codes[rank] = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    return codes


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_session(pid: int) -> None:
    # Elastic starts each worker in a session of its own, so its group holds its helpers as well.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _vanished(attempt: int) -> Failure:
    return Failure(
        rank=0,
        code=int(Exit.USER_CODE),
        moment=time.time(),
        kind="InvariantError",
        message=f"all workers of attempt {attempt} ended with 0, but rank 0 left no record of the end",
    )


def _note_error(run: RunFolder, attempt: int, cause: Failure, restarting: bool) -> None:
    event: Record = {
        "kind": "error",
        "rank": cause.rank,
        "error": cause.summary,
        "exit_code": cause.exit_code,
    }
    with contextlib.suppress(OSError), JsonLines(run.events, attempt=attempt) as events:
        events.append({**event, "restarting": restarting}, durable=True)
