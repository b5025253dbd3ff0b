"""A save in line: this rank's ranges go straight to the files of the step folder while the training waits.

files ─ fsync ─ report-<rank>.json      rank 0: wait for all reports ─ small files ─ commit ─ verify ─ retention
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sirara.checkpoint.commit import Committer
from sirara.checkpoint.ranges import NamedRange, Sources
from sirara.checkpoint.report import assemble, begin_part, tell_committer, wait_for_reports
from sirara.checkpoint.steps import step_name, temp_name
from sirara.checkpoint.storage import Disk
from sirara.checkpoint.writer import write_part
from sirara.errors import SiraraError
from sirara.pure.manifest import Manifest
from sirara.pure.saveplan import PlannedTensor, SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """The last save, seen from this rank: bytes of the whole step; seconds until its own bytes were durable,
    until the commit, and to read everything back (0 where another rank does it)."""

    total_bytes: int
    write_s: float
    commit_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is saved: all ranks' boxes and this rank's ranges; `record` is the training state's JSON.

    hf_files: config.json, tokenizer.json, ...; rank 0's are written.  aliases: tied name -> the name of the tensor that
    holds its values.  All but `ranges` is the same on every rank.
    """

    plan: Sequence[PlannedTensor]
    ranges: Sequence[NamedRange]
    record: dict[str, Any]
    hf_files: dict[str, bytes]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class InLine:
    """How one rank saves in line.

    deadline_s: how long rank 0 waits for the others.  check: raises StorageError when so many bytes do not fit.
    """

    committer: Committer
    disk: Disk
    plan: SavePlan
    rank: int
    world: int
    deadline_s: float
    check: Callable[[int], None]

    def save(
        self, step: int, uuid: str, state: State, *, scores: Mapping[int, float]
    ) -> tuple[Path | None, SaveTimes]:
        """The committed folder on rank 0, None elsewhere. Raises what kept it from being committed."""
        began = time.perf_counter()
        committer, total = self.committer, self.plan.total_bytes
        final, temp = committer.folder / step_name(step), committer.folder / temp_name(step, uuid)
        try:
            self._write(temp, state.ranges, uuid, step)
            written = time.perf_counter()
            if self.rank != 0:
                return None, SaveTimes(total_bytes=total, write_s=written - began)
            committer.commit(temp, final, self._manifest(temp, uuid, step, state))
        except (SiraraError, OSError):
            if self.rank == 0:
                committer.abandon(temp)
            raise
        committed = time.perf_counter()
        committer.verify(final)
        committer.tidy(step, uuid, scores=scores)
        times = SaveTimes(
            total_bytes=total,
            write_s=written - began,
            commit_s=committed - written,
            verify_s=time.perf_counter() - committed,
        )
        return final, times

    def _write(self, temp: Path, ranges: Sequence[NamedRange], uuid: str, step: int) -> None:
        disk, plan, committer = self.disk, self.plan, self.committer
        try:
            own = plan.bytes_of(self.rank)
            self.check(own)
            begin_part(disk, temp, rank=self.rank, size=own, alone=self.world == 1)
            if self.rank in plan.writers:
                write_part(
                    disk,
                    temp,
                    plan=plan,
                    rank=self.rank,
                    sources=Sources(ranges),
                    uuid=uuid,
                    attempt=committer.attempt,
                    step=step,
                )
        except SiraraError as fault:
            if self.rank != 0:
                tell_committer(disk, temp, self.rank, fault)
            raise

    def _manifest(self, temp: Path, uuid: str, step: int, state: State) -> Manifest:
        reports = wait_for_reports(self.plan, temp, uuid=uuid, step=step, deadline_s=self.deadline_s)
        # Only now: while others write, every fsync waits for what the device has taken in from them.
        extras = self.committer.write_extras(self.plan, temp, state.hf_files)
        return assemble(
            self.plan,
            reports,
            extras,
            uuid=uuid,
            run=self.committer.run,
            attempt=self.committer.attempt,
            step=step,
            record=state.record,
            aliases=state.aliases,
        )
