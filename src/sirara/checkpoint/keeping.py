"""The trainer's hold on its keeper: starts it, gives it jobs, hears how they end, starts it again when it died."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from sirara.checkpoint.job import Hello, JobEnd, KeeperSettings, SaveJob, TierResult, UploadEnd, fault_from
from sirara.checkpoint.storage import storage_error
from sirara.errors import SiraraError, StorageError

START_S = 60.0
SEND_S = 60.0
_TAIL_BYTES = 2000

_log = logging.getLogger("sirara")


class KeeperProcess:
    """One rank's keeper.

    Args:  settings: what it is told at its start.  plan: the bytes of the save plan.
           log: file for what it says and for its last words, None to throw them away.
    """

    def __init__(
        self, settings: KeeperSettings, *, plan: Callable[[], bytes], log: Path | None = None
    ) -> None:
        self._settings, self._plan, self._log = settings, plan, log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._heard = b""
        self._hello: Hello | None = None
        self._job: SaveJob | None = None
        self._files: dict[str, bytes] | None = None
        self._fault: SiraraError | None = None
        self._uploading: dict[str, int] = {}
        self._uploads: list[UploadEnd] = []
        self.starts = 0

    @property
    def busy(self) -> bool:
        """Whether a job has been given whose end was not heard."""
        return self._job is not None

    @property
    def uploading(self) -> bool:
        """Whether a save is still on its way to the object store."""
        return bool(self._uploading)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the keeper unless it lives; it is told its settings and gets ready by itself.

        Raises:  StorageError when it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            _log.warning("%s; it is started again", self._death())
            self._drop()
        s = self._settings
        plan = Path(s.plan)
        try:
            plan.write_bytes(self._plan())
        except OSError as fault:
            raise storage_error(fault, plan) from fault
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(theirs.fileno())
        ours.settimeout(SEND_S)
        self._socket, self._heard, self._hello, self._files = ours, b"", None, None
        self._fault = None
        self.starts += 1
        self._send(s.to_line())

    def hello(self, *, timeout_s: float = START_S) -> Hello:
        """What it said when it was ready. Raises StorageError when it died or says nothing."""
        until = time.monotonic() + timeout_s
        while self._hello is None:
            left = until - time.monotonic()
            if left <= 0:
                raise StorageError(
                    f"the writer of rank {self._settings.rank} did not start within {timeout_s:g} s",
                    where=str(self._log or ""),
                )
            end = self._listen(left)
            if end is not None and end.fault is not None:
                raise end.fault
        return self._hello

    def give(self, job: SaveJob) -> None:
        """Hands over one save. Raises StorageError when the keeper is gone."""
        self._job = job
        if "object" in job.tiers:
            self._uploading[job.uuid] = job.step
        sent = job
        if job.hf_files == self._files:
            # They are the same for all saves of a run: they travel once.
            sent = replace(job, hf_files={})
        self._send(sent.to_line())
        self._files = job.hf_files

    def poll(self, *, timeout_s: float = 0.0) -> JobEnd | None:
        """The end of the job, once it is heard. A keeper that died ends it with a fault that names the cause."""
        until = time.monotonic() + timeout_s
        while self._job is not None:
            end = self._listen(max(0.0, until - time.monotonic()))
            if end is not None:
                return end
            if time.monotonic() >= until:
                return None
        return None

    def uploads(self) -> list[UploadEnd]:
        """The uploads that ended since the last call. Those of a keeper that died have failed."""
        while self._job is None and self._uploading and self._socket is not None:
            known = len(self._uploads)
            self._listen(0.0)
            if len(self._uploads) == known:
                break
        ended, self._uploads = self._uploads, []
        return ended

    def close(self, *, wait_s: float) -> None:
        """Lets it go: it finishes what it has begun, then ends. wait_s: how long to wait for that."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and wait_s > 0:
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                _log.warning("the writer of rank %d still works after %g s", self._settings.rank, wait_s)
        if self._process is not None and self._process.poll() is None:
            # It outlives this process on purpose; Popen would warn of that.
            self._process.returncode = 0
        self._process, self._job = None, None

    # ----

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sirara.checkpoint.keeper", str(fd)]
        log: BinaryIO | None = None
        try:
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = self._log.open("ab")
            return subprocess.Popen(
                command,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log or subprocess.DEVNULL,
                # A group of its own: the signals of a terminal and the end of the trainer's group pass it by. Not a
                # session: where the kernel shares the cores out by session (autogroup), niceness counts within one.
                process_group=0,
            )
        except OSError as fault:
            raise StorageError(f"the writer cannot be started: {fault}") from fault
        finally:
            if log is not None:
                log.close()

    def _send(self, line: bytes) -> None:
        try:
            if self._socket is None:
                raise BrokenPipeError
            self._socket.sendall(line)
        except OSError as fault:
            self._hear_last()
            end = self._died()
            raise (end.fault or StorageError(f"the writer cannot be told: {fault}")) from fault

    def _listen(self, timeout_s: float) -> JobEnd | None:
        """Takes in what was said; the end of the job when there is one."""
        if self._socket is None:
            return self._died()
        fields = self._next_line()
        if fields is None:
            self._socket.settimeout(max(timeout_s, 0.0))
            try:
                said = self._socket.recv(1 << 16)
            except (BlockingIOError, TimeoutError):
                return None
            except OSError:
                said = b""
            finally:
                self._socket.settimeout(SEND_S)
            if not said:
                return self._died()
            self._heard += said
            fields = self._next_line()
        if fields is None:
            return None
        if fields["kind"] == "hello":
            self._hello = Hello(pid=fields["pid"], address=fields["address"])
            return None
        if fields["kind"] == "failed":
            self._fault = fault_from(fields["fault"])
            return self._died()
        if fields["kind"] == "upload":
            upload = UploadEnd.from_fields(fields)
            self._uploading.pop(upload.uuid, None)
            self._uploads.append(upload)
            return None
        end = JobEnd.from_fields(fields)
        if end.fault is not None:
            self._uploading.pop(end.uuid, None)
        self._job = None
        return end

    def _next_line(self) -> dict[str, Any] | None:
        line, mark, rest = self._heard.partition(b"\n")
        if not mark:
            return None
        self._heard = rest
        return json.loads(line)

    def _hear_last(self) -> None:
        """What a keeper said before it ended, when it ended while it was being told something."""
        while self._socket is not None and self._fault is None:
            fields = self._next_line()
            if fields is not None:
                if fields["kind"] == "failed":
                    self._fault = fault_from(fields["fault"])
                continue
            try:
                said = self._socket.recv(1 << 16)
            except OSError:
                return
            if not said:
                return
            self._heard += said

    def _died(self) -> JobEnd:
        job, words = self._job, self._death()
        lost = TierResult(ok=False, fault=words)
        self._uploads += [UploadEnd(step=s, uuid=u, result=lost) for u, s in self._uploading.items()]
        self._uploading.clear()
        self._drop()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            return JobEnd(step=job.step if job else -1, uuid=job.uuid if job else "", fault=fault)
        return JobEnd(
            step=job.step if job else -1,
            uuid=job.uuid if job else "",
            fault=StorageError(
                words,
                code="SR604",
                where=str(self._log or ""),
                why=self._last_words(),
                try_="the next save starts another one; committed checkpoints are untouched",
            ),
        )

    def _death(self) -> str:
        who = f"the writer of rank {self._settings.rank}"
        if self._process is None:
            return f"{who} is not running"
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            # It has closed its end and does not leave.
            self._process.kill()
            code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else ""
        return f"{who} (process {self._process.pid}) " + (
            f"was killed by {name}" if name else f"ended with exit code {code}"
        )

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._process, self._job = None, None, None

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            return ""
