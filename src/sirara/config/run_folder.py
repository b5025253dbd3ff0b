"""The run folder: where a run lives; who owns it is in ownership.py.

runs/<name>-<8 hex>/
  run.json        identity, and what later attempts keep (threads); written last, so it makes the run
  config.yaml     the resolved configuration of the newest attempt
  env.json        versions, host, command line
  plan.json       what was predicted for each attempt
  events.jsonl  metrics.jsonl  logs/attempt-NNNN/  checkpoints/  exports/  crash/
  control/        save, stop: requests by touch;  deadline: epoch seconds;  bandwidth.json: of the tiers;  lock;
                  attempts/NNNN.jsonl: an attempt and its processes

"""

import difflib
import json
import os
import platform
import secrets
import socket
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from sirara.config.ownership import Ownership, sync_folder
from sirara.errors import CheckpointError, ConfigError, StorageError
from sirara.events import read

FORMAT = 1
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


class RunFolder(Ownership):
    """One run on disk.  Paths are properties; nothing is cached, so that every process sees the same."""

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
    sync_folder(path.parent)


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
