"""Who owns a run: its lock, its attempts, and the processes of each.

One attempt owns a run.  `begin_attempt` takes the lock (flock, so it ends with its holder), raises the
attempt number by creating its file exclusively (which also holds on file systems without locks), and ends
what an older attempt has left alive on this host.  Whoever commits asks `check_attempt` first, so a process
of an older attempt that nobody could reach changes nothing.
"""

import errno
import fcntl
import json
import os
import time
from pathlib import Path

from sirara.config.processes import ProcessId, end_processes, wait_for_processes
from sirara.errors import RunBusyError, StorageError
from sirara.events import JsonLines, read

WRITERS_S = 120.0
"""How long a new attempt waits for the writers of older ones to commit what they have in hand."""


class Ownership:
    """The attempts of the run in a folder, and the lock of the one that lives.  `RunFolder` is one."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._lock_fd = -1

    @property
    def id(self) -> str:
        """`<name>-<8 hex>`"""
        return self.path.name

    @property
    def control(self) -> Path:
        return self.path / "control"

    def attempt(self) -> int:
        """The newest attempt, 0 before the first."""
        try:
            names = os.listdir(self.control / "attempts")
        except OSError as error:
            raise StorageError(
                f"the run folder {self.path} cannot be read", code="SR602", why=str(error)
            ) from error
        return max(
            (int(name[:-6]) for name in names if name.endswith(".jsonl") and name[:-6].isdigit()), default=0
        )

    def begin_attempt(
        self, *, wait_s: float = 0.0, grace_s: float = 5.0, writers_s: float = WRITERS_S
    ) -> int:
        """Makes the caller the owner of the run under a new attempt number, which is on disk when this
        returns.

        Processes of older attempts that are alive on this host are ended: SIGTERM, after grace_s SIGKILL.
        Writers come first, while their attempt still owns the run: they may be about to commit a step.
        The owner may call it again for its next attempt (a restart).

        Args:    wait_s: how long to wait for another owner to end.  writers_s: how long writers may take.
        Raises:  RunBusyError when another process owns the run, or one of an older attempt cannot be ended.
        """
        first = self._lock_fd < 0
        if first:
            self._take_lock(wait_s)
            for request in ("save", "stop", "deadline"):  # what was said to an older life
                (self.control / request).unlink(missing_ok=True)
        self._wait_for_writers(writers_s, grace_s)
        number = self._raise_attempt()
        old = [process for n in range(1, number) for process in self.processes(n)]
        left = end_processes([process for process in old if process.pid != os.getpid()], grace_s=grace_s)
        if left:
            raise RunBusyError(
                f"{len(left)} processes of an older attempt of {self.id} do not end, even by SIGKILL",
                code="SR803",
                why=", ".join(map(str, left)),
                try_=["see what they wait for: ps -o pid,stat,wchan -p PID"],
            )
        checkpoints = self.path / "checkpoints"
        if not os.path.lexists(checkpoints):
            checkpoints.mkdir()  # somebody removed it; its steps may be in another tier
        return number

    def check_attempt(self, number: int) -> None:
        """Raises RunBusyError if a newer attempt owns the run: nothing may be committed then."""
        newest = self.attempt()
        if newest > number:
            owner = self.owner()
            raise RunBusyError(
                f"attempt {number} of {self.id} is over: attempt {newest} owns the run",
                code="SR802",
                why=f"begun by {owner}" if owner else "",
            )

    def record_process(self, attempt: int, *, role: str, rank: int | None = None) -> None:
        """Notes this process as one of the attempt, so that the next attempt can end it.

        Raises:  RunBusyError when a newer attempt has begun already.
        """
        with JsonLines(self._attempt_file(attempt)) as file:
            file.append({"role": role, "rank": rank, **ProcessId.current().as_record()})
        self.check_attempt(attempt)

    def processes(self, attempt: int, *, role: str | None = None) -> list[ProcessId]:
        """The processes that one attempt has noted, its owner first; only those of a role if it is given."""
        records = read(self._attempt_file(attempt))
        found = (ProcessId.from_record(r) for r in records if role is None or r.get("role") == role)
        return [process for process in found if process is not None]

    def owner(self) -> ProcessId | None:
        """The process that began the newest attempt; it owns the run as long as it is alive."""
        return next(iter(self.processes(self.attempt())), None)

    def release(self) -> None:
        """Gives the lock back; the attempt number stays."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _take_lock(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        (self.control / "attempts").mkdir(parents=True, exist_ok=True)
        fd = os.open(self.control / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while not _flock(fd):
            if time.monotonic() >= end:
                os.close(fd)
                number, owner = self.attempt(), self.owner()
                raise RunBusyError(
                    f"{self.id} is running (attempt {number})",
                    code="SR801",
                    where=str(self.path),
                    why=f"owned by {owner}" if owner else "another process holds its lock",
                    try_=[f"sirara stop {self.id}   (saves, then ends it)", f"sirara status {self.id}"],
                )
            time.sleep(0.05)
        self._lock_fd = fd

    def _wait_for_writers(self, writers_s: float, grace_s: float) -> None:
        """Ends what feeds the writers of older attempts, then gives them time to end by themselves."""
        last = self.attempt() + 1
        writers = [w for n in range(1, last) for w in self.processes(n, role="writer") if w.alive]
        if not writers:
            return
        workers = [p for n in range(1, last) for p in self.processes(n, role="worker")]
        end_processes([p for p in workers if p.pid != os.getpid()], grace_s=grace_s)
        wait_for_processes(writers, wait_s=writers_s)

    def _raise_attempt(self) -> int:
        line = json.dumps({"role": "owner", "rank": None, **ProcessId.current().as_record()}) + "\n"
        while True:
            number = self.attempt() + 1
            try:
                fd = os.open(
                    self._attempt_file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
                )
            except FileExistsError:
                continue  # somebody was faster, on a file system without locks
            try:
                os.write(fd, line.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(self.control / "attempts")
            return number

    def _attempt_file(self, attempt: int) -> Path:
        return self.control / "attempts" / f"{attempt:04d}.jsonl"


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return True  # no locks here: the exclusive attempt file and check_attempt guard the run
        raise
    return True


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
