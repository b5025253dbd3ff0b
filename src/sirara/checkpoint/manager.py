"""Saves and opens the steps of one run, seen from one rank.

    save   in line: each rank writes its files ─ report ─► rank 0: wait for all reports ─ commit ─ verify ─ retention
    start  in line, or beside the training through the keeper's process: checkpoint/beside.py

Names, files, places and writers follow from the plan, the uuid from (run, attempt, step, count of saves). A step exists
only if its manifest does. Nothing is overwritten in place.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from sirara.checkpoint.arena import reap
from sirara.checkpoint.beside import Beside, Seat
from sirara.checkpoint.commit import Committer
from sirara.checkpoint.deciding import Move, Row, first_fault
from sirara.checkpoint.in_line import InLine, SaveTimes, State
from sirara.checkpoint.job import JobEnd, SaveOutcome, TierResult
from sirara.checkpoint.ledger import SOFT_FAULTS, Ledger
from sirara.checkpoint.nodes import is_node_tier
from sirara.checkpoint.ranges import NamedRange, check_ranges, dtype_name
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.space import SMALL_FILES, Need, check_before_save, memory_folder
from sirara.checkpoint.steps import committed_steps, save_uuid, step_name
from sirara.checkpoint.storage import Disk
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import CheckpointError, ConfigError, SiraraError, StorageError
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import PlannedTensor, SavePlan, plan_save

__all__ = ["CheckpointManager", "NamedRange", "PlannedTensor", "Snapshot", "dtype_name"]

_NEED_OTHERS = frozenset({"peer", "parity"})  # kept by more nodes than one, or not at all

_log = logging.getLogger("sirara")


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
        self._deadline_s = deadline_s
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
        self._tiers = tuple(tiers)
        # A run that lost all nodes but one goes on: what can be kept by nobody is no failure of a save.
        alone = _NEED_OTHERS if world <= self._per_node else frozenset()
        self._usable = tuple(t for t in self._tiers if t.tier not in alone)
        self._saves = 0
        self._faulty: set[int] = set()  # steps that could not be read back
        self._planned: tuple[Sequence[PlannedTensor], bool, SavePlan] | None = None
        self.ledger = Ledger(max_failures=max_failures, retry_s=retry_s)
        self.times: SaveTimes | None = None
        self.scores: dict[int, float] = {}
        addresses = any(is_node_tier(t) for t in tiers)
        root = memory or memory_folder(tiers, node=node)
        # The copy of a run has its name: what need not be found by a restart lies where no copy looks.
        place = xxhash.xxh3_64_hexdigest(str(folder.absolute()).encode())[:8]
        seat = Seat(
            folder=folder,
            run=run,
            rank=rank,
            world=world,
            node=node,
            ranks_per_node=self._per_node,
            attempt=attempt,
            deadline_s=deadline_s,
            tiers=self._tiers,
            keeps=(keep_last, keep_every, keep_best),
            run_folder=run_folder,
            log=log,
            memory=root / (run if addresses else f"{run}-{place}"),
            token=token,
            addresses=addresses,
            spread=addresses and world > self._per_node,
        )
        self.beside = Beside(
            seat,
            self.ledger,
            disk=self._disk,
            asynchronous=asynchronous,
            when_busy=when_busy,
            need=self._need,
            agree=agree,
        )
        if rank == 0:
            for tier in self._tiers:
                if tier.tier in alone:
                    _log.warning("the tier %s keeps nothing while the run has one node", tier.tier)
            self.clean()
        if rank % self._per_node == 0 and self.uses_keeper:
            reap(root, spare=seat.memory)

    @property
    def uses_keeper(self) -> bool:
        """Whether saves go through the keeper."""
        return self.beside.asynchronous or any(t.tier != "disk" or t.path is not None for t in self._tiers)

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
        self.beside.begun = step
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

    # ---- saving beside the training, or as if

    def prepare(self, plan: Sequence[PlannedTensor]) -> None:
        """Starts the keeper and makes the arena, so that the first save does not wait for them."""
        if self.uses_keeper:
            self.beside.line(self._plan(plan, assemble=True)).ready()

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
        if not self.uses_keeper:
            self._in_line(step, state, tiers, patient=patient)
            return True
        return self.beside.begin(
            step,
            state,
            plan=self._plan(state.plan, assemble=True),
            uuid=self._next_uuid,
            scores=self.scores,
            tiers=tiers,
            patient=patient,
            alive=alive,
        )

    def fence(self) -> None:
        """Called before the state changes: what is being saved is what it was."""
        self.beside.fence()

    def poll(self) -> list[SaveOutcome]:
        """What has ended, was put off or skipped since the last call. On other ranks than 0 little is known.

        Raises:  what no run survives, RunBusyError for one.
        """
        return self.beside.poll()

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is still being written or uploaded, as far as it has heard."""
        return self.beside.busy

    def save_due(self) -> bool:
        """On rank 0: whether a save that was put off, or failed, should be made at the next step boundary."""
        return self.beside.save_due()

    def wait(self, *, alive: Callable[[], object] = lambda: None) -> SaveOutcome | None:
        """Waits until the running save is over and uploaded, on all ranks together. Returns how the last save ended,
        which every rank is told; None when there was none."""
        return self.beside.wait(alive=alive)

    def close(self, *, clean: bool = False) -> None:
        """Ends the keeper. clean: all is saved, it is waited for and nothing of the run stays in memory."""
        self.beside.close(clean=clean)

    def _in_line(self, step: int, state: State, tiers: Collection[str], *, patient: bool) -> None:
        began = time.perf_counter()
        move = self.beside.own_move(busy=False, patient=patient)
        if self.ledger.backing_off:
            # Only after a failure the ranks need to agree that they save.
            move = self.beside.gather(Row(move=move))[0].move
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
        told = first_fault(self.beside.gather(Row(fault=fault.what if fault else "")))
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

    def _need(self, size: int, files: SavePlan) -> Need:
        """What a save will write to the step folder."""
        count = len(files.files) + self.world + SMALL_FILES
        return Need(tier="disk", folder=self.folder, times=1, each=size, files=count)

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
