"""The keeper: the writer process of one rank, `python -m sirara.checkpoint.keeper FD`. It imports no torch.

It lives in a process group of its own and ignores SIGINT and SIGTERM while a job runs, SIGHUP always. When the trainer
is gone it ends the job in hand, without waiting long for ranks whose trainers may be gone as well, and leaves.
"""

import contextlib
import ctypes
import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from sirara.checkpoint.job import Hello, KeeperSettings, SaveJob, failed_line
from sirara.checkpoint.phases import Keeper

_log = logging.getLogger("sirara")

_BEST_EFFORT, _LOWEST, _CLASS_SHIFT, _WHO_PROCESS = 2, 7, 13, 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


class _Signals:
    """Signals that ask to leave wait for the end of a job."""

    def __init__(self) -> None:
        self.working = False
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        # The kernel sends it to a stopped group whose last parent in the session has died.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True
        if not self.working:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.working = True
        try:
            yield
        finally:
            self.working = False


def be_modest(nice: int) -> None:
    """Training comes first: lowest CPU priority, and the last place among those who use the disk.

    Not the idle class: one slow request of anybody, a discard for one, would then hold up all writes.
    """
    os.nice(nice)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT << _CLASS_SHIFT | _LOWEST)


def serve(connection: socket.socket) -> None:
    """Does jobs until the trainer hangs up."""
    signals = _Signals()
    lines = _lines(connection)
    settings = KeeperSettings.from_fields(next(lines))
    say = _Voice(connection)
    be_modest(settings.nice)
    try:
        keeper = Keeper(
            settings,
            orphaned=lambda: _hung_up(connection),
            uploaded=lambda end: say(end.to_line()),
        )
    except Exception as fault:  # noqa: BLE001  whatever it is, the trainer must hear of it
        _log.exception("the writer of rank %d cannot start", settings.rank)
        say(failed_line(fault))
        return
    try:
        say(Hello(pid=os.getpid(), address=keeper.address).to_line())
        for fields in lines:
            with signals.held():
                end = keeper.keep(SaveJob.from_fields(fields))
            say(end.to_line())
            if signals.asked:
                break
        if _hung_up(connection):
            keeper.leave()
    finally:
        keeper.close()


def _lines(connection: socket.socket) -> Iterator[dict]:
    # A trainer that is killed may leave something unread: a reset says no more than an end.
    with contextlib.suppress(ConnectionResetError), connection.makefile("rb") as file:
        for line in file:
            yield json.loads(line)


class _Voice:
    """Says one line after the other, from any thread; a trainer that is gone hears nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(line)


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    logging.basicConfig(format="%(asctime)s writer %(levelname)s %(message)s", level=logging.INFO)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
