"""Processes by identity: a pid alone may be reused, a pid with its start time and boot cannot.

A run records the processes of each attempt; the next attempt ends those that are still alive on its host
before it touches anything (Linux: /proc and pidfds).
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process, for ever: `started` is in clock ticks since the boot `boot` of `host`."""

    host: str
    boot: str
    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> "ProcessId":
        """The process that has this pid now; `started` is 0 when there is none."""
        return ProcessId(host=socket.gethostname(), boot=_boot_id(), pid=pid, started=_stat(pid)[1])

    @staticmethod
    def current() -> "ProcessId":
        return ProcessId.of(os.getpid())

    @staticmethod
    def from_record(record: dict[str, Any]) -> "ProcessId | None":
        """From a record made with `as_record`, None if it is not one."""
        try:
            return ProcessId(
                host=str(record["host"]),
                boot=str(record["boot"]),
                pid=int(record["pid"]),
                started=int(record["started"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether it was started on this host since its last boot; only then `alive` can tell."""
        return self.host == socket.gethostname() and self.boot == _boot_id()

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs here (a zombie does not)."""
        state, started = _stat(self.pid)
        return self.here and self.started == started and state not in ("", "Z", "X")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def end_processes(processes: Iterable[ProcessId], *, grace_s: float, kill_s: float = 10.0) -> list[ProcessId]:
    """Ends those that are alive here: SIGTERM, after grace_s SIGKILL.  Returns those that outlive even
    that."""
    left = [process for process in processes if process.alive]
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_s)):
        with _watching(left) as watched:
            for process, _ in watched:
                if process.alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            _wait_for_exit([fd for _, fd in watched], time.monotonic() + wait_s)
        left = [process for process in left if process.alive]
    return left


def wait_for_processes(processes: Iterable[ProcessId], *, wait_s: float) -> list[ProcessId]:
    """Waits until those that are alive here have ended by themselves.  Returns those that have not."""
    left = [process for process in processes if process.alive]
    with _watching(left) as watched:
        _wait_for_exit([fd for _, fd in watched], time.monotonic() + wait_s)
    return [process for process in left if process.alive]


@contextlib.contextmanager
def _watching(processes: Iterable[ProcessId]) -> Iterator[list[tuple[ProcessId, int]]]:
    watched: list[tuple[ProcessId, int]] = []
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                watched.append((process, os.pidfd_open(process.pid)))
        yield watched
    finally:
        for _, fd in watched:
            os.close(fd)


def _wait_for_exit(fds: list[int], end: float) -> None:
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    left = set(fds)
    while left and (rest_s := end - time.monotonic()) > 0:
        for fd, _ in waiting.poll(rest_s * 1000):
            waiting.unregister(fd)
            left.discard(fd)


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a pid; ("", 0) if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    # The command name, in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
