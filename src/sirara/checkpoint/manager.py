"""Saves and opens the steps of one run, seen from one rank.

    save   in line: each rank writes its files ─ report ─► rank 0: wait for all reports ─ commit ─ verify ─ retention
    start  agree (one small gather) ─► stage into the arena ─► job to the keeper, which does all that in its process
    poll   what has ended since (rank 0 speaks for the save);  wait: all ranks, until it has ended

Names, files, places and writers follow from the plan, the uuid from (run, attempt, step, count of saves). A step exists
only if its manifest does. Nothing is overwritten in place.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from sirara.checkpoint.arena import reap
from sirara.checkpoint.background import Background
from sirara.checkpoint.commit import Committer
from sirara.checkpoint.deciding import Move, Row, first_fault, joint, ordered, own_move
from sirara.checkpoint.in_line import InLine, SaveTimes, State
from sirara.checkpoint.job import JobEnd, KeeperSettings, SaveJob, SaveOutcome, TierResult
from sirara.checkpoint.ledger import SOFT_FAULTS, Ledger
from sirara.checkpoint.link import own_host
from sirara.checkpoint.nodes import is_node_tier
from sirara.checkpoint.ranges import NamedRange, check_ranges, dtype_name
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.report import tell_committer
from sirara.checkpoint.space import SMALL_FILES, Need, check_before_save, memory_folder
from sirara.checkpoint.step_folder import committed_manifest
from sirara.checkpoint.steps import committed_steps, save_uuid, step_name, temp_name
from sirara.checkpoint.storage import Disk
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import CheckpointError, ConfigError, SiraraError, StorageError
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import PlannedTensor, SavePlan, plan_save

__all__ = ["CheckpointManager", "NamedRange", "PlannedTensor", "Snapshot", "dtype_name"]

_NEED_OTHERS = frozenset({"peer", "parity"})  # kept by more nodes than one, or not at all
_NAP_S = (0.002, 0.25)
_CLOSE_S = 60.0

_log = logging.getLogger("sirara")


@dataclass(slots=True)
class _Running:
    """The save that the keeper has."""

    step: int
    uuid: str
    tiers: frozenset[str]
    stall_s: float = 0.0


class CheckpointManager:
    """The checkpoints of one run, seen from one rank.

    Args:  folder: <run>/checkpoints, visible to all ranks.  run: its id; steps of other runs are refused.
           attempt: raised at every start of the run, so that no two lives share it.
           node: of this rank; ranks_per_node: consecutive ranks on one node (default: all of them).
           fence: raises when a newer attempt owns the run; called right before the commit.
           deadline_s: how long the committer (rank 0) waits for the other ranks' reports.
           tiers, asynchronous, when_busy, max_failures, retry_s: as configured.  Node tiers and the object store are
           filled by the keeper, also by a save that is not asynchronous.
           run_folder: of the run, whose ownership the keeper asks before a commit.  log: what the keeper says.
           memory: folder for arenas and images in shared memory (default: /dev/shm/sirara-<user>); token: the run's
           secret, which keepers of its nodes prove to each other.
           agree: given this rank's row of bytes returns all ranks' rows; the default is for one rank.
    Every rank calls `save`, `start` and `wait` equally often.
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
        keep_best: str | None = None,
        ranks_per_node: int | None = None,
        fence: Callable[[], None] | None = None,
        deadline_s: float = 600.0,
        disk: Disk | None = None,
        tiers: Sequence[TierConfig] = (TierConfig(tier="disk"),),
        asynchronous: bool = False,
        when_busy: Literal["queue", "skip", "wait"] = "queue",
        max_failures: int = 5,
        retry_s: float = 30.0,
        run_folder: RunFolder | None = None,
        log: Path | None = None,
        memory: Path | None = None,
        token: str = "",
        agree: Callable[[bytes], list[bytes]] = lambda row: [row],
    ) -> None:
        self.folder, self.run, self.rank, self.world, self.attempt = folder, run, rank, world, attempt
        self._per_node = ranks_per_node or world
        if rank // self._per_node != node:
            raise ConfigError(
                f"rank {rank} cannot be on node {node} with {self._per_node} ranks per node",
                try_="pass ranks_per_node",
            )
        self._node, self._deadline_s = node, deadline_s
        self._disk = disk or Disk()
        self._committer = Committer(
            self._disk,
            folder,
            run=run,
            attempt=attempt,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            fence=fence,
        )
        self._tiers, self._when_busy, self._agree = tuple(tiers), when_busy, agree
        # A run that lost all nodes but one goes on: what can be kept by nobody is no failure of a save.
        alone = _NEED_OTHERS if world <= self._per_node else frozenset()
        self._usable = tuple(t for t in self._tiers if t.tier not in alone)
        self.asynchronous = asynchronous
        self._keeps = (keep_last, keep_every, keep_best)
        self._run_folder, self._log_file = run_folder, log
        self._saves, self._begun = 0, -1
        self._faulty: set[int] = set()  # steps that could not be read back
        self._planned: tuple[Sequence[PlannedTensor], bool, SavePlan] | None = None
        self._background: Background | None = None
        self._running: _Running | None = None
        self._needs_addresses = any(is_node_tier(t) for t in tiers)
        root = memory or memory_folder(tiers, node=node)
        # The copy of a run has its name: what need not be found by a restart lies where no copy looks.
        place = xxhash.xxh3_64_hexdigest(str(folder.absolute()).encode())[:8]
        self._memory = root / (run if self._needs_addresses else f"{run}-{place}")
        self._token = token
        self._spread = self._needs_addresses and world > self._per_node
        self.ledger = Ledger(max_failures=max_failures, retry_s=retry_s)
        self.times: SaveTimes | None = None
        self.scores: dict[int, float] = {}
        if rank == 0:
            for tier in self._tiers:
                if tier.tier in alone:
                    _log.warning("the tier %s keeps nothing while the run has one node", tier.tier)
            self.clean()
        if rank % self._per_node == 0 and self.uses_keeper:
            reap(root, spare=self._memory)

    @property
    def uses_keeper(self) -> bool:
        """Whether saves go through the keeper."""
        return self.asynchronous or any(t.tier != "disk" or t.path is not None for t in self._tiers)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that can keep something with the nodes that there are."""
        return tuple(t.tier for t in self._usable)

    def due_tiers(self, step: int, every: int | None) -> tuple[str, ...]:
        """The tiers that are due at a step, `every` being checkpoint.every."""
        own = ((t.tier, t.every or every) for t in self._usable)
        return tuple(tier for tier, n in own if n is not None and step % n == 0)

    # ---- saving in line

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
        """Makes this rank's ranges durable on the disk; on rank 0 returns the committed folder once all ranks have.

        Args:    as in `State`.
        Raises:  StorageError (disk full, I/O), CommTimeout naming the ranks that did not report, what `fence`
                 raises. Committed steps stay as they are.
        """
        state = State(plan=plan, ranges=ranges, record=record, hf_files=hf_files, aliases=aliases)
        uuid = self._next_uuid(step)
        final = self.folder / step_name(step)
        if self._is_saved(final, step, record):
            return final if self.rank == 0 else None
        files = self._plan(plan, assemble=False)
        check_ranges(files, self.rank, ranges)
        in_line = InLine(
            committer=self._committer,
            disk=self._disk,
            plan=files,
            rank=self.rank,
            world=self.world,
            deadline_s=self._deadline_s,
            check=lambda size: check_before_save([self._need(size, files)]),
        )
        path, self.times = in_line.save(step, uuid, state, scores=self.scores)
        if path is not None:
            self._faulty.discard(step)
        return path

    def _next_uuid(self, step: int) -> str:
        uuid = save_uuid(self.run, self.attempt, step, self._saves)
        self._saves += 1
        self._begun = step
        self._committer.ended.add(uuid)
        return uuid

    def _plan(self, plan: Sequence[PlannedTensor], *, assemble: bool) -> SavePlan:
        """assemble: whether keepers put rows together whose columns lie with several ranks."""
        # A run saves by the same plan again and again.
        known = self._planned
        if known is None or known[1] != assemble or (known[0] is not plan and list(known[0]) != list(plan)):
            files = plan_save(plan, node_of=lambda rank: rank // self._per_node, assemble=assemble)
            known = self._planned = (plan, assemble, files)
        return known[2]

    def _is_saved(self, final: Path, step: int, record: dict[str, Any]) -> bool:
        """True when this very state is committed already: a stop right after a periodic save, a replayed
        step."""
        if step in self._faulty or not (final / MANIFEST).exists():
            return False
        try:
            return Snapshot(final, run=self.run, step=step).record == record
        except (CheckpointError, StorageError):
            return False

    # ---- saving beside the training

    def prepare(self, plan: Sequence[PlannedTensor]) -> None:
        """Starts the keeper and makes the arena, so that the first save does not wait for them."""
        if self.uses_keeper:
            self._line(plan).ready()

    def start(
        self,
        step: int,
        state: State,
        *,
        tiers: Collection[str],
        patient: bool = False,
        alive: Callable[[], object] = lambda: None,
    ) -> bool:
        """Begins a save, or not: all ranks do as rank 0 decides. Returns whether it began.

        Args:  tiers: those that are due.  patient: this save must be made: it waits for the one before and for no
               time of a retry.  alive: called while it waits.
        What becomes of it is told by `poll` and `wait`.
        """
        began = time.perf_counter()
        if not self.uses_keeper:
            self._in_line(step, state, tiers, patient=patient)
            return True
        line = self._line(state.plan)
        # A patient save says itself where it goes: time may be short, or a disk full.
        wanted = frozenset(tiers) if patient else frozenset(tiers) | self.ledger.put_off
        move, rows, fault = self._decide(line, wanted, patient=patient, alive=alive)
        if move is not Move.START:
            self.ledger.later(step, move, wanted, speaks=self.rank == 0)
            return False
        self.ledger.put_off, tiers = frozenset(), rows[0].tiers
        uuid = self._next_uuid(step)
        if fault is not None:
            self._end(JobEnd(step=step, uuid=uuid, fault=fault), tiers)
            return False
        check_ranges(line.plan, self.rank, state.ranges)

        def job(arena: str) -> SaveJob:
            alone = self.rank == 0
            return SaveJob(
                step=step,
                uuid=uuid,
                attempt=self.attempt,
                arena=arena,
                tiers=ordered(tiers),
                deadline_s=self._deadline_s,
                ended=tuple(self.ledger.lost),
                addresses=tuple(row.address for row in rows),
                record=state.record if alone else {},
                hf_files=state.hf_files if alone else {},
                aliases=state.aliases if alone else {},
                scores=dict(self.scores),
                patient=patient,
            )

        running = self._running = _Running(step, uuid, tiers)
        try:
            line.stage(job, state.ranges)
        except StorageError as error:
            self._end(JobEnd(step=step, uuid=uuid, fault=error), tiers)
        running.stall_s = time.perf_counter() - began
        if not self.asynchronous:
            self.wait(alive=alive)
        return True

    def fence(self) -> None:
        """Called before the state changes: what is being saved is what it was."""
        if self._background is not None:
            self._background.fence()

    def poll(self) -> list[SaveOutcome]:
        """What has ended, was put off or skipped since the last call. On other ranks than 0 little is known.

        Raises:  what no run survives, RunBusyError for one.
        """
        self._hear()
        return self.ledger.take()

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is still being written or uploaded, as far as it has heard."""
        line = self._background
        return line is not None and (line.busy or line.keeper.uploading)

    def save_due(self) -> bool:
        """On rank 0: whether a save that was put off, or failed, should be made at the next step boundary."""
        self._hear()
        if not self.ledger.put_off or (self._background is not None and self._background.busy):
            return False
        return not self.ledger.backing_off or self.ledger.due_again

    def wait(self, *, alive: Callable[[], object] = lambda: None) -> SaveOutcome | None:
        """Waits until the running save is over and uploaded, on all ranks together. Returns how the last save ended,
        which every rank is told; None when there was none."""
        line, nap_s = self._background, _NAP_S[0]
        while line is not None:
            self._hear(flush=True)
            rows = self._gather(self.ledger.row(busy=line.busy or line.keeper.uploading))
            if not any(r.busy for r in rows):
                if self.rank != 0:
                    self.ledger.told(rows[0], self._begun)
                break
            alive()
            time.sleep(nap_s)
            nap_s = min(_NAP_S[1], 2 * nap_s)
        return self.ledger.last

    def close(self, *, clean: bool = False) -> None:
        """Ends the keeper. clean: all is saved, it is waited for and nothing of the run stays in memory."""
        if self._background is not None:
            self._background.close(wait_s=_CLOSE_S if clean else 0.0, clean=clean)
            self._background = None

    def _in_line(self, step: int, state: State, tiers: Collection[str], *, patient: bool) -> None:
        began = time.perf_counter()
        move = self._own_move(busy=False, patient=patient)
        if self.ledger.backing_off:
            # Only after a failure the ranks need to agree that they save.
            move = self._gather(Row(move=move))[0].move
        if move is not Move.START:
            self.ledger.later(step, move, frozenset(tiers), speaks=self.rank == 0)
            return
        self.ledger.put_off = frozenset()
        fault: SiraraError | None = None
        path = None
        try:
            path = self.save(
                step,
                plan=state.plan,
                ranges=state.ranges,
                record=state.record,
                hf_files=state.hf_files,
                aliases=state.aliases,
            )
        except SOFT_FAULTS as error:
            fault = error
        # All ranks must count the same saves: a disk may be full on one node alone.
        told = first_fault(self._gather(Row(fault=fault.what if fault else "")))
        if fault is None and told is not None:
            fault = StorageError(f"step {step} was not saved: rank {told[0]}: {told[1]}", code="SR603")
        times = self.times or SaveTimes(total_bytes=0, write_s=0.0)
        seconds = {
            "stall": time.perf_counter() - began,
            "write": times.write_s,
            "commit": times.commit_s,
            "verify": times.verify_s,
        }
        end = JobEnd(
            step=step,
            uuid="",
            digest=str(state.record.get("digest", "")),
            path=str(path or ""),
            total_bytes=times.total_bytes,
            tiers={}
            if fault
            else {"disk": TierResult(ok=True, bytes=times.total_bytes, seconds=seconds["write"])},
            seconds=seconds,
            fault=fault,
        )
        self.ledger.ended(end, frozenset(tiers))

    def _decide(
        self, line: Background, wanted: frozenset[str], *, patient: bool, alive: Callable[[], object]
    ) -> tuple[Move, list[Row], SiraraError | None]:
        nap_s, waited = _NAP_S[0], False
        while True:
            self._hear(flush=True)
            move, fault, address = self._own_move(busy=line.busy, patient=patient), None, ""
            if move is Move.START and not line.busy:
                try:
                    # With other tiers the save is worth its while though the disk be full.
                    if self.rank == 0 and wanted <= {"disk", "object"}:
                        check_before_save([self._need(line.plan.total_bytes, line.plan)])
                    line.ready()
                    address = line.keeper.hello().address if self._needs_addresses else ""
                except StorageError as error:
                    fault = error
            rows = self._gather(
                Row(
                    move=move,
                    tiers=wanted,
                    busy=line.busy,
                    kept=self.ledger.kept_in_memory,
                    address=address,
                    fault=fault.what if fault else "",
                )
            )
            move = joint(rows, patient=patient, when_busy=self._when_busy)
            if move is not Move.WAIT:
                break
            waited = True
            alive()
            time.sleep(nap_s)
            nap_s = min(_NAP_S[1], 2 * nap_s)
        if rows[0].kept:
            line.kept()
        self.ledger.counts.waited += waited
        told = first_fault(rows)
        if fault is None and told is not None:
            fault = StorageError(f"no save was begun: rank {told[0]}: {told[1]}", code="SR603")
        return move, rows, fault

    def _need(self, size: int, files: SavePlan) -> Need:
        """What a save will write to the step folder."""
        count = len(files.files) + self.world + SMALL_FILES
        return Need(tier="disk", folder=self.folder, times=1, each=size, files=count)

    def _hear(self, *, flush: bool = False) -> None:
        line = self._background
        if line is None:
            return
        if flush:
            line.flush(wait=True)
        end = line.poll()
        if end is not None and self._running is not None:
            self._end(end, self._running.tiers)
        uploads = line.keeper.uploads()
        if self.rank == 0:
            self.ledger.uploaded(uploads)

    def _end(self, end: JobEnd, tiers: frozenset[str]) -> None:
        """One rank's part of a save is over; on rank 0 the save is."""
        running, self._running = self._running, None
        if self.rank != 0:
            if end.fault is not None:
                if not isinstance(end.fault, SOFT_FAULTS):
                    raise end.fault
                _log.warning("step %d: %s; %s", end.step, end.fault.what, end.fault.why)
                # Nobody else may have said it: a keeper that was killed has not.
                temp = self.folder / temp_name(end.step, end.uuid)
                temp.mkdir(parents=True, exist_ok=True)
                tell_committer(self._disk, temp, self.rank, end.fault)
            return
        if end.fault is not None:
            end = self._committed_after_all(end)
        stall = {"stall": running.stall_s} if running else {}
        self.ledger.ended(replace(end, seconds=stall | end.seconds), tiers)

    def _committed_after_all(self, end: JobEnd) -> JobEnd:
        """A keeper may die after its commit."""
        final = self.folder / step_name(end.step)
        manifest = committed_manifest(final, run=self.run, step=end.step)
        if manifest is None or manifest.uuid != end.uuid or isinstance(end.fault, CheckpointError):
            return end
        _log.warning("step %d is committed, but: %s", end.step, end.fault)
        return replace(
            end,
            fault=None,
            path=str(final),
            digest=str(manifest.record.get("digest", "")),
            tiers={"disk": TierResult(ok=True)},
        )

    def _own_move(self, *, busy: bool, patient: bool) -> Move:
        """What this rank would do; only rank 0 knows enough to hold a save back."""
        if self.rank != 0:
            return Move.START
        return own_move(
            busy=busy,
            patient=patient,
            when_busy=self._when_busy,
            backing_off=self.ledger.backing_off,
            due_again=self.ledger.due_again,
        )

    def _gather(self, row: Row) -> list[Row]:
        return [Row.from_bytes(raw) for raw in self._agree(row.to_bytes())]

    def _line(self, plan: Sequence[PlannedTensor]) -> Background:
        """The way through the keeper, made for the plan that all saves of a run follow."""
        files = self._plan(plan, assemble=True)
        if self._background is not None and self._background.plan is not files:
            self._background.close(wait_s=_CLOSE_S, clean=False)
            self._background = None
        if self._background is None:
            keep_last, keep_every, keep_best = self._keeps
            settings = KeeperSettings(
                folder=str(self.folder.absolute()),
                run=self.run,
                run_folder=None if self._run_folder is None else str(self._run_folder.path),
                rank=self.rank,
                world=self.world,
                node=self._node,
                ranks_per_node=self._per_node,
                attempt=self.attempt,
                plan=str(self._memory / f"plan-{self.rank}"),
                memory=str(self._memory),
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                tiers=[tier.model_dump(mode="json") for tier in self._tiers],
                token=self._token,
                host=own_host(os.environ.get("MASTER_ADDR", "localhost")) if self._spread else "127.0.0.1",
            )
            self._background = Background(settings, files, log=self._log_file)
        return self._background

    # ---- reading

    def newest(self) -> list[int]:
        """Committed steps, newest first (by number, not by name)."""
        return committed_steps(self.folder)

    def open(self, step: int) -> Snapshot:
        """A committed step of this run. Raises CheckpointError when it is not one, or not whole."""
        return Snapshot(self.folder / step_name(step), run=self.run, step=step)

    def distrust(self, step: int, fault: str) -> None:
        """A step that cannot be read is not verified any more, and is written anew when reached again."""
        self._faulty.add(step)
        if self.rank == 0:
            _log.warning("checkpoint of step %d cannot be used: %s", step, fault)
            self._committer.distrust(step)

    def clean(self) -> list[str]:
        """Removes what dead attempts and failed saves left. Returns the names of the removed folders."""
        return self._committer.clean()
