"""Saves and opens the steps of one run: the commit protocol, in the order that survives a crash at any point.

    each rank        .step-N.tmp-<uuid>/  files ─ fsync ─ report-<rank>.json ─ fsync ─ fsync folder
    committer        wait for all reports ─ manifest.json ─ fsync ─ fence ─ rename to step-N ─ fsync parent
    then             re-read every piece ─ verified.json ─ retention

No collective is used: names, files, places and writers follow from the plan, the uuid from (run, attempt,
step, count of saves). A step exists only if its manifest does. Nothing is overwritten in place.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from sirara.checkpoint.ranges import NamedRange, dtype_name
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.report import assemble, failure_name, report_name, wait_for_reports
from sirara.checkpoint.restore import Candidate, Restored, read_first
from sirara.checkpoint.retention import VERIFIED, delete_step, expendable, is_verified, mark_verified
from sirara.checkpoint.scrub import scrub_pieces
from sirara.checkpoint.steps import clear_leftovers, committed_steps, save_uuid, step_name
from sirara.checkpoint.storage import Disk, names_in
from sirara.checkpoint.writer import check_ranges, write_part
from sirara.errors import (
    CheckpointError,
    ConfigError,
    InvariantError,
    SiraraError,
    StorageError,
)
from sirara.pure.manifest import MANIFEST, FileEntry, Manifest
from sirara.pure.saveplan import INDEX, PlannedTensor, SavePlan, plan_save, weight_index

__all__ = ["CheckpointManager", "NamedRange", "PlannedTensor", "Restored", "Snapshot", "dtype_name"]

_log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """The last save, seen from this rank: bytes of the whole step; seconds until its own bytes were durable,
    until the commit, and to read everything back (0 where another rank does it)."""

    total_bytes: int
    write_s: float
    commit_s: float = 0.0
    verify_s: float = 0.0


class CheckpointManager:
    """The checkpoints of one run, seen from one rank.

    Args:  folder: <run>/checkpoints, visible to all ranks.  run: its id; steps of other runs are refused.
           attempt: raised at every start of the run, so that no two lives share it.
           node: of this rank; ranks_per_node: consecutive ranks on one node (default: all of them).
           fence: raises when a newer attempt owns the run; called right before the commit.
           deadline_s: how long the committer (rank 0) waits for the other ranks' reports.
    Every rank calls `save` equally often.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        rank: int,
        world: int,
        node: int,
        attempt: int,
        keep_last: int,
        keep_every: int | None,
        ranks_per_node: int | None = None,
        fence: Callable[[], None] | None = None,
        deadline_s: float = 600.0,
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.run, self.rank, self.world, self.attempt = folder, run, rank, world, attempt
        self._per_node = ranks_per_node or world
        if rank // self._per_node != node:
            raise ConfigError(
                f"rank {rank} cannot be on node {node} with {self._per_node} ranks per node",
                try_="pass ranks_per_node",
            )
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fence = fence
        self._deadline_s = deadline_s
        self._disk = disk or Disk()
        self._uuids: list[str] = []  # of this attempt's saves, the one in progress last
        self._verified: set[str] = set()
        self._faulty: set[int] = set()  # steps that could not be read back
        self._planned: tuple[Sequence[PlannedTensor], SavePlan] | None = None
        self.times: SaveTimes | None = None
        if rank == 0:
            self.clean()

    # ---- saving

    def save(
        self,
        step: int,
        *,
        plan: Sequence[PlannedTensor],
        ranges: Sequence[NamedRange],
        record: dict[str, Any],
        hf_files: dict[str, bytes],
        aliases: dict[str, str],
    ) -> Path | None:
        """Makes this rank's ranges durable; on rank 0 returns the committed folder once all ranks have.

        Args:  plan: all ranks' boxes.  record: the training state's JSON.  Both are the same on every rank.
               hf_files: config.json, tokenizer.json, ...; rank 0's are written.
               aliases: tied name -> the name of the tensor that holds its values.
        Raises:  StorageError (disk full, I/O), CommTimeout naming the ranks that did not report, what `fence`
                 raises. Committed steps stay as they are.
        """
        began = time.perf_counter()
        uuid = save_uuid(self.run, self.attempt, step, len(self._uuids))
        self._uuids.append(uuid)
        final = self.folder / step_name(step)
        if self._is_saved(final, step, record):
            return final if self.rank == 0 else None
        files = self._plan(plan)
        check_ranges(files, self.rank, ranges)
        temp = self.folder / f".{step_name(step)}.tmp-{uuid}"
        try:
            self._write(files, temp, ranges, uuid, step)
            written = time.perf_counter()
            self.times = SaveTimes(total_bytes=files.total_bytes, write_s=written - began)
            if self.rank != 0:
                return None
            extras = self._write_extras(files, temp, hf_files)
            reports = wait_for_reports(files, temp, uuid=uuid, step=step, deadline_s=self._deadline_s)
            manifest = assemble(
                files,
                reports,
                extras,
                uuid=uuid,
                run=self.run,
                attempt=self.attempt,
                step=step,
                record=record,
                aliases=aliases,
            )
            self._commit(temp, final, manifest)
        except (SiraraError, OSError):
            if self.rank == 0:
                self._abandon(temp)
            raise
        committed = time.perf_counter()
        self._verify(final, step)
        self._tidy(step)
        self.times = SaveTimes(
            total_bytes=files.total_bytes,
            write_s=written - began,
            commit_s=committed - written,
            verify_s=time.perf_counter() - committed,
        )
        return final

    def _plan(self, plan: Sequence[PlannedTensor]) -> SavePlan:
        # A run saves by the same plan again and again.
        if self._planned is None or list(self._planned[0]) != list(plan):
            self._planned = (plan, plan_save(plan, node_of=lambda rank: rank // self._per_node))
        return self._planned[1]

    def _is_saved(self, final: Path, step: int, record: dict[str, Any]) -> bool:
        """True when this very state is committed already: a stop right after a periodic save, a replayed
        step."""
        if step in self._faulty or not (final / MANIFEST).exists():
            return False
        try:
            return Snapshot(final, run=self.run, step=step).record == record
        except (CheckpointError, StorageError):
            return False

    def _write(self, files: SavePlan, temp: Path, ranges: Sequence[NamedRange], uuid: str, step: int) -> None:
        try:
            self._disk.require(self.folder, sum(p.length for p in files.pieces_of.get(self.rank, ())))
            if self.world == 1:
                self._disk.remove_tree(temp)
            self._disk.make_folder(temp)
            self._disk.remove(temp / report_name(self.rank))
            if self.rank in files.writers:
                write_part(
                    self._disk,
                    temp,
                    plan=files,
                    rank=self.rank,
                    ranges=ranges,
                    uuid=uuid,
                    attempt=self.attempt,
                    step=step,
                )
        except SiraraError as fault:
            if self.rank != 0:
                self._tell_committer(temp, fault)
            raise

    def _tell_committer(self, temp: Path, fault: SiraraError) -> None:
        # With this the committer need not wait for its deadline; on a full disk it may have to.
        try:
            self._disk.write_file(temp / failure_name(self.rank), str(fault).encode())
        except StorageError:
            _log.warning("rank %d could not tell rank 0 that its part of the save failed", self.rank)

    def _write_extras(self, files: SavePlan, temp: Path, hf_files: dict[str, bytes]) -> list[FileEntry]:
        """config.json and its kind, and the index of the weights."""
        extras = dict(hf_files)
        if any(t.is_weight for t in files.tensors):
            extras[INDEX] = weight_index(files)
        taken = {f.name for f in files.files} | {MANIFEST, VERIFIED}
        entries = []
        for name, data in extras.items():
            if name in taken or "/" in name or name.startswith("."):
                raise InvariantError(f"{name!r} cannot be the name of a file beside the weights")
            self._disk.write_file(temp / name, data)
            check = xxhash.xxh3_128_hexdigest(data)
            entries.append(FileEntry(name=name, size=len(data), head=len(data), hash=check))
        return entries

    def _commit(self, temp: Path, final: Path, manifest: Manifest) -> None:
        disk = self._disk
        disk.write_file(temp / MANIFEST, manifest.to_bytes())
        planned = {f.name for f in manifest.files} | {MANIFEST}
        for name in sorted(names_in(temp) - planned):
            disk.remove(temp / name)
        disk.sync_folder(temp)
        if self._fence is not None:
            self._fence()
        if final.exists():
            # Another state of this step (damaged, or of an abandoned branch) moves aside, whole.
            disk.rename(final, self.folder / f".{final.name}.old-{manifest.uuid}")
        disk.rename(temp, final)
        disk.sync_folder(self.folder)

    def _abandon(self, temp: Path) -> None:
        try:
            self._disk.remove_tree(temp)
        except StorageError as fault:
            _log.warning("could not remove %s: %s", temp, fault.why)

    def _verify(self, final: Path, step: int) -> None:
        """Reads every piece of the committed step back; raises CheckpointError when the disk returns
        other bytes."""
        snapshot = Snapshot(final, run=self.run, step=step)
        for fault in scrub_pieces(snapshot):
            raise fault.error()
        uuid = snapshot.manifest.uuid
        self._verified.add(uuid)
        self._faulty.discard(step)
        try:
            total = sum(f.size for f in snapshot.manifest.files)
            mark_verified(self._disk, final, uuid=uuid, bytes_read=total)
        except StorageError as fault:
            # The step is committed and good; a later attempt counts it as not verified, no more.
            _log.warning("step %d is verified, but this could not be noted: %s", step, fault)

    def _tidy(self, step: int) -> None:
        """Retention, now that `step` is committed and verified. What cannot be deleted is tried again
        next time."""
        committed = committed_steps(self.folder)
        verified: set[int] = set()
        for s in committed:
            if s <= step and len(verified) < self._keep_last and self._is_verified(s):
                verified.add(s)
        try:
            for old in expendable(
                committed, verified, newest=step, keep_last=self._keep_last, keep_every=self._keep_every
            ):
                trash = self.folder / f".{step_name(old)}.gone-{self._uuids[-1]}"
                delete_step(self._disk, self.folder / step_name(old), trash=trash)
                _log.info("checkpoint of step %d deleted (keep_last %d)", old, self._keep_last)
            self.clean()
        except StorageError as fault:
            _log.warning("step %d is committed, but older ones could not be deleted: %s", step, fault)

    def _is_verified(self, step: int) -> bool:
        try:
            snapshot = self.open(step)
        except (CheckpointError, StorageError):
            return False
        uuid = snapshot.manifest.uuid
        return uuid in self._verified or is_verified(snapshot.path, uuid=uuid)

    # ---- reading

    def newest(self) -> list[int]:
        """Committed steps, newest first (by number, not by name)."""
        return committed_steps(self.folder)

    def open(self, step: int) -> Snapshot:
        """A committed step of this run. Raises CheckpointError when it is not one, or not whole."""
        return Snapshot(self.folder / step_name(step), run=self.run, step=step)

    def restore(
        self,
        read: Callable[[Snapshot], None],
        *,
        steps: Sequence[int] | None = None,
        agree: Callable[[str], str] = lambda fault: fault,
    ) -> Restored | None:
        """Reads the newest step that can be read: a faulty one is skipped for the next older, with its
        reason.

        Args:  read: takes the snapshot (and calls `read_into`).
               steps: candidates, newest first (default: `newest()`).
               agree: given this rank's fault ("" when it read well) returns the first fault of any rank, so
               that all ranks take the same step; the default is for one rank.
        Returns:  None when there is no committed step.
        Raises:  CheckpointError naming every step and its reason when none can be read.
        """
        steps = self.newest() if steps is None else steps
        found = read_first(
            [Candidate(step=step, open=partial(self.open, step)) for step in steps],
            read,
            agree=agree,
            distrust=self.distrust,
            where=str(self.folder),
        )
        return None if found is None else Restored(step=found[0].step, skipped=found[1])

    def distrust(self, step: int, fault: str) -> None:
        """A step that cannot be read is not verified any more, and is written anew when reached again."""
        self._faulty.add(step)
        if self.rank == 0:
            _log.warning("checkpoint of step %d cannot be used: %s", step, fault)
            try:
                self._disk.remove(self.folder / step_name(step) / VERIFIED)
            except StorageError as error:
                _log.warning("%s", error)

    def clean(self) -> list[str]:
        """Removes what dead attempts and failed saves left. Returns the names of the removed folders."""
        return clear_leftovers(self._disk, self.folder, attempt=self.attempt, ended=self._uuids)
