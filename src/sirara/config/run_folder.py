"""The run folder: where a run lives, and who owns it.

    runs/<name>-<8 hex>/
      run.json        identity, and what later attempts keep (threads); written last, so it makes the run
      config.yaml     the resolved configuration of the newest attempt
      env.json        versions, host, command line
      plan.json       what was predicted for each attempt
      events.jsonl  metrics.jsonl  logs/attempt-NNNN/  checkpoints/  exports/  crash/
      control/        save, stop: requests by touch;  deadline: epoch seconds;  bandwidth.json: of the tiers;  lock;
                      attempts/NNNN.jsonl: an attempt and its processes

One attempt owns a run.  `begin_attempt` takes the lock (flock, so it ends with its holder), raises the
attempt number by creating its file exclusively (which also holds on file systems without locks), and ends
what an older attempt has left alive on this host.  Whoever commits asks `check_attempt` first, so a process
of an older attempt that nobody could reach changes nothing.
"""

import difflib
import errno
import fcntl
import json
import os
import platform
import secrets
import socket
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from sirara.config.processes import ProcessId, end_processes, wait_for_processes
from sirara.errors import CheckpointError, ConfigError, RunBusyError, StorageError
from sirara.events import JsonLines, read

FORMAT = 1
WRITERS_S = 120.0
"""How long a new attempt waits for the writers of older ones to commit what they have in hand."""
FOLDERS = ("checkpoints", "exports", "crash", "logs", "control/attempts")
RECORDED_PACKAGES = (
    "sirara",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "xxhash",
    "pydantic",
    "transformers",
)
RECORDED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
)


class NamedRun(Protocol):
    """The two things of a configuration that decide where a run lives."""

    @property
    def name(self) -> str: ...

    @property
    def run_dir(self) -> Path | str: ...


class RunFolder:
    """One run on disk.  Paths are properties; nothing is cached, so that every process sees the same."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._lock_fd = -1

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @staticmethod
    def create(config: NamedRun, resolved_yaml: str, *, identity: str = "") -> "RunFolder":
        """A new folder `<run_dir>/<name>-<8 hex>`.

        Args:    identity: names the launch (a Slurm job, a torchrun agent), so that its restarts find the run
        again. Raises:  StorageError when it cannot be written.
        """
        run = RunFolder(Path(config.run_dir) / f"{config.name}-{secrets.token_hex(4)}")
        try:
            run.path.mkdir(parents=True)
            for folder in FOLDERS:
                (run.path / folder).mkdir(parents=True)
            write_durably(run.config, resolved_yaml)
            write_durably(run.path / "env.json", json.dumps(_environment(), indent=1))
            now = datetime.now(UTC).isoformat(timespec="microseconds")
            record = {
                "format": FORMAT,
                "run": run.id,
                "name": config.name,
                "created": now,
                "identity": identity,
                "token": secrets.token_hex(16),
            }
            write_durably(run.path / "run.json", json.dumps(record, indent=1))
        except OSError as error:
            raise StorageError(
                f"the run folder {run.path} cannot be made",
                code="SR601",
                why=str(error),
                try_=["run_dir=<a folder that you may write to>", "sirara doctor"],
            ) from error
        return run

    @staticmethod
    def find(name_or_path: str | Path, *, run_dir: Path | str | None = None) -> "RunFolder":
        """The run with this path, this name, this beginning of a name, or the newest one ("latest").

        Args:    run_dir: where runs lie; default: SIRARA_RUN_DIR, else `runs`.
        Raises:  ConfigError when there is none or more than one.
        """
        asked = str(name_or_path)
        if (Path(asked) / "run.json").is_file():
            return RunFolder(asked)
        home = Path(run_dir or os.environ.get("SIRARA_RUN_DIR") or "runs")
        runs = list_runs(home)
        if asked == "latest" and runs:
            return runs[-1]
        exact = [run for run in runs if run.id == asked]
        found = exact or [run for run in runs if run.id.startswith(asked)] if asked else []
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(run.id for run in found)
            raise ConfigError(
                f"{asked!r} is the beginning of {len(found)} runs",
                code="SR110",
                where=str(home),
                why=names,
                try_=[f"the whole name, like {found[-1].id}", "latest"],
            )
        near = difflib.get_close_matches(asked, [run.id for run in runs], n=3, cutoff=0.4)
        known = f"{len(runs)} runs there, the newest is {runs[-1].id}" if runs else "no runs there"
        raise ConfigError(
            f"there is no run {asked!r}",
            code="SR111",
            where=str(home.absolute()),
            why=known,
            try_=near or ["the path of a run folder", "run_dir of your configuration in SIRARA_RUN_DIR"],
        )

    @property
    def id(self) -> str:
        """`<name>-<8 hex>`"""
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def control(self) -> Path:
        return self.path / "control"

    def logs(self, attempt: int) -> Path:
        """Folder of the logs (`rank-NNNNN.log`) and of the configuration of one attempt."""
        return self.path / "logs" / f"attempt-{attempt:04d}"

    def crash(self, attempt: int) -> Path:
        """Folder of the crash reports and stacks of one attempt."""
        return self.path / "crash" / f"attempt-{attempt:04d}"

    @property
    def name_to_type(self) -> str:
        """What a command finds this run by, from this folder: its id, or its path where no id is looked for."""
        home = Path(os.environ.get("SIRARA_RUN_DIR") or "runs")
        return self.id if self.path.parent.resolve() == home.resolve() else str(self.path)

    def record(self) -> dict[str, Any]:
        """run.json: identity, and what later attempts keep."""
        try:
            return json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is not a run folder", code="SR112", why=str(error)) from error

    def keep(self, **fields: object) -> None:
        """Adds fields to run.json, durably; only the owner of the run calls it."""
        write_durably(self.path / "run.json", json.dumps({**self.record(), **fields}, indent=1))

    def committed_steps(self) -> list[int]:
        """Steps whose checkpoint is committed (its manifest exists), ascending.

        Raises:  StorageError when the folder cannot be read, which is not the same as empty.
        """
        if not os.path.lexists(self.checkpoints) and (self.path / "run.json").is_file():
            return []  # somebody removed it; the events say whether steps were in it

        try:
            names = [
                name.removeprefix("step-")
                for name in os.listdir(self.checkpoints)
                if name.startswith("step-")
            ]
        except OSError as error:
            raise StorageError(f"{self.checkpoints} cannot be read", code="SR602", why=str(error)) from error
        whole = [
            name
            for name in names
            if name.isdigit() and (self.checkpoints / f"step-{name}/manifest.json").exists()
        ]
        return sorted(map(int, whole))

    def resumes(self) -> bool:
        """Whether the next attempt continues from a checkpoint; otherwise it starts at step 0.

        Raises:  CheckpointError when the run has saved, but no checkpoint is left: step 0 would be a silent
        loss.
        """
        if self.committed_steps():
            return True
        saved = self._kept()
        if not any(tiers - {"disk"} for _, tiers in saved):
            self.check_nothing_kept()
        # What was kept by nodes or in an object store may be there or not: the resume finds out.
        return bool(saved)

    def check_nothing_kept(self) -> None:
        """Raises CheckpointError when the events say that a save was kept where it outlives nodes."""
        durable = [step for step, tiers in self._kept() if tiers & {"disk", "object"}]
        if durable:
            raise CheckpointError(
                f"the checkpoints of {self.id} are gone",
                code="SR520",
                where=str(self.checkpoints),
                why=f"its events say that step {durable[-1]} was saved",
                try_=["put the step folders back", "sirara run CONFIG   (a new run, from step 0)"],
            )

    def _kept(self) -> list[tuple[object, set[str]]]:
        """Per save or upload that ended well its step and the tiers that kept it."""
        saved = [event for event in read(self.events) if event.get("kind") in ("save", "upload")]
        return [
            (
                e.get("step"),
                {name for name, what in e.get("tiers", {"disk": "kept"}).items() if what == "kept"},
            )
            for e in saved
        ]

    # ------------------------------------------------------------------------------------------------
    # ownership

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
        if not os.path.lexists(self.checkpoints):
            self.checkpoints.mkdir()  # somebody removed it; its steps may be in another tier
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
            _fsync_folder(self.control / "attempts")
            return number

    def _attempt_file(self, attempt: int) -> Path:
        return self.control / "attempts" / f"{attempt:04d}.jsonl"


def list_runs(home: Path) -> list[RunFolder]:
    """The runs of a folder, oldest first."""
    found = [RunFolder(file.parent) for file in home.glob("*/run.json")]
    return sorted(found, key=lambda run: (str(run.record().get("created", "")), run.id))


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file so that a kill leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync_folder(path.parent)


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


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _environment() -> dict[str, Any]:
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": {"python": platform.python_version(), **versions},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "argv": sys.argv,
        "python": sys.executable,
        "cwd": os.getcwd(),
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }
