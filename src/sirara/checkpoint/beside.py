"""Saving beside the training: a save goes through the keeper's process while steps go on.

    begin  all ranks agree (one small gather) ─► stage into the arena ─► job to the keeper, which does all that is left
    poll   what has ended since (rank 0 speaks for the save);  wait: all ranks, until it has ended

The keeper is started for the plan that all saves of a run follow (background.py); what becomes of saves stands in the
ledger.
"""

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sirara.checkpoint.background import Background
from sirara.checkpoint.deciding import Move, Row, first_fault, joint, ordered, own_move
from sirara.checkpoint.in_line import State
from sirara.checkpoint.job import JobEnd, KeeperSettings, SaveJob, SaveOutcome, TierResult
from sirara.checkpoint.ledger import SOFT_FAULTS, Ledger
from sirara.checkpoint.link import own_host
from sirara.checkpoint.ranges import check_ranges
from sirara.checkpoint.report import tell_committer
from sirara.checkpoint.space import Need, check_before_save
from sirara.checkpoint.step_folder import committed_manifest
from sirara.checkpoint.steps import step_name, temp_name
from sirara.checkpoint.storage import Disk
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import CheckpointError, SiraraError, StorageError
from sirara.pure.saveplan import SavePlan

_NAP_S = (0.002, 0.25)
_CLOSE_S = 60.0

_log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where this rank sits, and what its keeper is told once.

    addresses: nodes keep images for each other.  spread: there are several nodes, so that they must be reached.
    memory: folder for arenas and images.  keeps: keep_last, keep_every, keep_best.
    """

    folder: Path
    run: str
    rank: int
    world: int
    node: int
    ranks_per_node: int
    attempt: int
    deadline_s: float
    tiers: tuple[TierConfig, ...]
    keeps: tuple[int, int | None, str | None]
    run_folder: RunFolder | None
    log: Path | None
    memory: Path
    token: str
    addresses: bool
    spread: bool


@dataclass(slots=True)
class _Running:
    """The save that the keeper has."""

    step: int
    uuid: str
    tiers: frozenset[str]
    stall_s: float = 0.0


class Beside:
    """One rank's saves through its keeper.

    Args:  need: what a save of so many bytes will write to its step folder.  agree: all ranks' rows for this rank's.
    """

    def __init__(
        self,
        seat: Seat,
        ledger: Ledger,
        *,
        disk: Disk,
        asynchronous: bool,
        when_busy: Literal["queue", "skip", "wait"],
        need: Callable[[int, SavePlan], Need],
        agree: Callable[[bytes], list[bytes]],
    ) -> None:
        self.seat, self.ledger, self.asynchronous = seat, ledger, asynchronous
        self.background: Background | None = None
        self.begun = -1  # the step of the last save that was begun, in line or here
        self._disk, self._when_busy, self._need, self._agree = disk, when_busy, need, agree
        self._running: _Running | None = None

    def line(self, plan: SavePlan) -> Background:
        """The way through the keeper, made for one plan."""
        if self.background is not None and self.background.plan is not plan:
            self.background.close(wait_s=_CLOSE_S, clean=False)
            self.background = None
        if self.background is None:
            seat = self.seat
            keep_last, keep_every, keep_best = seat.keeps
            settings = KeeperSettings(
                folder=str(seat.folder.absolute()),
                run=seat.run,
                run_folder=None if seat.run_folder is None else str(seat.run_folder.path),
                rank=seat.rank,
                world=seat.world,
                node=seat.node,
                ranks_per_node=seat.ranks_per_node,
                attempt=seat.attempt,
                plan=str(seat.memory / f"plan-{seat.rank}"),
                memory=str(seat.memory),
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                tiers=[tier.model_dump(mode="json") for tier in seat.tiers],
                token=seat.token,
                host=own_host(os.environ.get("MASTER_ADDR", "localhost")) if seat.spread else "127.0.0.1",
            )
            self.background = Background(settings, plan, log=seat.log)
        return self.background

    def begin(
        self,
        step: int,
        state: State,
        *,
        plan: SavePlan,
        uuid: Callable[[int], str],
        scores: dict[int, float],
        tiers: Collection[str],
        patient: bool,
        alive: Callable[[], object],
    ) -> bool:
        """Begins a save, or not: all ranks do as rank 0 decides. Returns whether it began.

        Args:  uuid: of a save that is begun.  scores: of steps, for keep_best.  The others as in
               `CheckpointManager.start`.
        """
        began = time.perf_counter()
        line = self.line(plan)
        # A patient save says itself where it goes: time may be short, or a disk full.
        wanted = frozenset(tiers) if patient else frozenset(tiers) | self.ledger.put_off
        move, rows, fault = self._decide(line, wanted, patient=patient, alive=alive)
        if move is not Move.START:
            self.ledger.later(step, move, wanted, speaks=self.seat.rank == 0)
            return False
        self.ledger.put_off, tiers = frozenset(), rows[0].tiers
        own = uuid(step)
        if fault is not None:
            self._end(JobEnd(step=step, uuid=own, fault=fault), tiers)
            return False
        check_ranges(line.plan, self.seat.rank, state.ranges)

        def job(arena: str) -> SaveJob:
            alone = self.seat.rank == 0
            return SaveJob(
                step=step,
                uuid=own,
                attempt=self.seat.attempt,
                arena=arena,
                tiers=ordered(tiers),
                deadline_s=self.seat.deadline_s,
                ended=tuple(self.ledger.lost),
                addresses=tuple(row.address for row in rows),
                record=state.record if alone else {},
                hf_files=state.hf_files if alone else {},
                aliases=state.aliases if alone else {},
                scores=dict(scores),
                patient=patient,
            )

        running = self._running = _Running(step, own, tiers)
        try:
            line.stage(job, state.ranges)
        except StorageError as error:
            self._end(JobEnd(step=step, uuid=own, fault=error), tiers)
        running.stall_s = time.perf_counter() - began
        if not self.asynchronous:
            self.wait(alive=alive)
        return True

    def fence(self) -> None:
        """Called before the state changes: what is being saved is what it was."""
        if self.background is not None:
            self.background.fence()

    def poll(self) -> list[SaveOutcome]:
        """What has ended, was put off or skipped since the last call. On other ranks than 0 little is known.

        Raises:  what no run survives, RunBusyError for one.
        """
        self._hear()
        return self.ledger.take()

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is still being written or uploaded, as far as it has heard."""
        line = self.background
        return line is not None and (line.busy or line.keeper.uploading)

    def save_due(self) -> bool:
        """On rank 0: whether a save that was put off, or failed, should be made at the next step boundary."""
        self._hear()
        if not self.ledger.put_off or (self.background is not None and self.background.busy):
            return False
        return not self.ledger.backing_off or self.ledger.due_again

    def wait(self, *, alive: Callable[[], object] = lambda: None) -> SaveOutcome | None:
        """Waits until the running save is over and uploaded, on all ranks together. Returns how the last save ended,
        which every rank is told; None when there was none."""
        line, nap_s = self.background, _NAP_S[0]
        while line is not None:
            self._hear(flush=True)
            rows = self.gather(self.ledger.row(busy=line.busy or line.keeper.uploading))
            if not any(r.busy for r in rows):
                if self.seat.rank != 0:
                    self.ledger.told(rows[0], self.begun)
                break
            alive()
            time.sleep(nap_s)
            nap_s = min(_NAP_S[1], 2 * nap_s)
        return self.ledger.last

    def close(self, *, clean: bool = False) -> None:
        """Ends the keeper. clean: all is saved, it is waited for and nothing of the run stays in memory."""
        if self.background is not None:
            self.background.close(wait_s=_CLOSE_S if clean else 0.0, clean=clean)
            self.background = None

    def own_move(self, *, busy: bool, patient: bool) -> Move:
        """What this rank would do; only rank 0 knows enough to hold a save back."""
        if self.seat.rank != 0:
            return Move.START
        return own_move(
            busy=busy,
            patient=patient,
            when_busy=self._when_busy,
            backing_off=self.ledger.backing_off,
            due_again=self.ledger.due_again,
        )

    def gather(self, row: Row) -> list[Row]:
        """All ranks' rows.  Collective."""
        return [Row.from_bytes(raw) for raw in self._agree(row.to_bytes())]

    def _decide(
        self, line: Background, wanted: frozenset[str], *, patient: bool, alive: Callable[[], object]
    ) -> tuple[Move, list[Row], SiraraError | None]:
        nap_s, waited = _NAP_S[0], False
        while True:
            self._hear(flush=True)
            move, fault, address = self.own_move(busy=line.busy, patient=patient), None, ""
            if move is Move.START and not line.busy:
                try:
                    # With other tiers the save is worth its while though the disk be full.
                    if self.seat.rank == 0 and wanted <= {"disk", "object"}:
                        check_before_save([self._need(line.plan.total_bytes, line.plan)])
                    line.ready()
                    address = line.keeper.hello().address if self.seat.addresses else ""
                except StorageError as error:
                    fault = error
            rows = self.gather(
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

    def _hear(self, *, flush: bool = False) -> None:
        line = self.background
        if line is None:
            return
        if flush:
            line.flush(wait=True)
        end = line.poll()
        if end is not None and self._running is not None:
            self._end(end, self._running.tiers)
        uploads = line.keeper.uploads()
        if self.seat.rank == 0:
            self.ledger.uploaded(uploads)

    def _end(self, end: JobEnd, tiers: frozenset[str]) -> None:
        """One rank's part of a save is over; on rank 0 the save is."""
        running, self._running = self._running, None
        if self.seat.rank != 0:
            if end.fault is not None:
                if not isinstance(end.fault, SOFT_FAULTS):
                    raise end.fault
                _log.warning("step %d: %s; %s", end.step, end.fault.what, end.fault.why)
                # Nobody else may have said it: a keeper that was killed has not.
                temp = self.seat.folder / temp_name(end.step, end.uuid)
                temp.mkdir(parents=True, exist_ok=True)
                tell_committer(self._disk, temp, self.seat.rank, end.fault)
            return
        if end.fault is not None:
            end = self._committed_after_all(end)
        stall = {"stall": running.stall_s} if running else {}
        self.ledger.ended(replace(end, seconds=stall | end.seconds), tiers)

    def _committed_after_all(self, end: JobEnd) -> JobEnd:
        """A keeper may die after its commit."""
        final = self.seat.folder / step_name(end.step)
        manifest = committed_manifest(final, run=self.seat.run, step=end.step)
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
