"""A small real project on disk, trained through the command line in processes of its own, to watch and to
kill."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sirara.config.run_folder import RunFolder, list_runs
from sirara.data.store import write_store
from sirara.events import read

CONFIG = """\
schema: 1
name: toy
seed: 7
model: {family: llama, layers: 2, hidden: 32, heads: 2, ffn: 64, vocab: 61, max_seq: 32}
data: {train: [{path: store}], seq_len: 32}
train:
  steps: 60
  global_batch: 12
  micro_batch: 2
  optimizer: {name: adamw, lr: 1e-2}
  lr_schedule: {name: cosine, warmup_steps: 2}
checkpoint: {every: 10}
launch: {nproc: 1, threads: 1, max_restarts: 0}
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def result(self):
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


class Project:
    """A folder with a token store and toy.yaml; `close` ends everything that was started."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(3)
        write_store(folder / "store", [rng.integers(1, 61, n) for n in (900, 40, 700)], vocab=61, eot=0)
        (folder / "toy.yaml").write_text(CONFIG)
        self._started = []

    def start(self, *words, launcher=(), env=None):
        """`sirara WORDS` in this folder, not waited for; under a launcher command if one is given."""
        command = [*launcher, *(() if launcher else (sys.executable,)), "-m", "sirara", *map(str, words)]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def sirara(self, *words, timeout_s=90, **options) -> Done:
        """`sirara WORDS` to its end."""
        return self.finish(self.start(*words, **options), timeout_s=timeout_s)

    def finish(self, process, *, timeout_s=90) -> Done:
        out, err = process.communicate(timeout=timeout_s)
        return Done(process.returncode, out, err)

    def runs(self) -> list[RunFolder]:
        return list_runs(self.folder / "runs")

    def wait_for_step(self, step, process, *, more_than=0) -> RunFolder:
        """The newest run, as soon as it has done a step; fails when its process ends before."""
        until(
            lambda: (
                process.poll() is not None
                or (len(self.runs()) > more_than and done_step(self.runs()[-1]) >= step)
            )
        )
        assert process.poll() is None, process.communicate()
        return self.runs()[-1]

    def close(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def done_step(run: RunFolder) -> int:
    records = read(run.metrics)
    return records[-1]["step"] if records else 0


def worker_pids(run: RunFolder, attempt: int) -> dict[int, int]:
    """Rank -> process id of the workers of an attempt."""
    records = read(run.control / "attempts" / f"{attempt:04d}.jsonl")
    return {r["rank"]: r["pid"] for r in records if r["role"] == "worker"}


def alive(run: RunFolder, attempt: int) -> list[int]:
    return [process.pid for process in run.processes(attempt) if process.alive]


def until(condition, *, timeout_s=60):
    """Waits for something that another process does; fails when it takes too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
