"""One rank's way of a save beside the training: two arenas, the stager that fills, the keeper that empties them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.arena import Arena, ArenaState, arena_head, arena_name, claim, release
from sirara.checkpoint.image import image_plan
from sirara.checkpoint.job import JobEnd, KeeperSettings, SaveJob
from sirara.checkpoint.keeping import KeeperProcess
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.stage import Stager
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import SavePlan


@dataclass(slots=True)
class _Staged:
    """A save whose copies may be under way."""

    arena: Arena
    job: SaveJob


class Background:
    """Stages saves and gives them to the keeper, one at a time.

    Args:  settings: of the keeper.  plan: of all saves.  log: file for what the keeper says.
    """

    def __init__(self, settings: KeeperSettings, plan: SavePlan, *, log: Path | None) -> None:
        self.plan, self._settings = plan, settings
        self._image = image_plan(plan, settings.rank)
        self._memory = Path(settings.memory)
        self._keeps_memory = any(tier["tier"] in ("memory", "peer", "parity") for tier in settings.tiers)
        self.keeper = KeeperProcess(settings, plan=plan.to_bytes, log=log)
        self._arenas: dict[int, Arena] = {}
        self._used = -1
        self._protected: int | None = None
        self._stager: Stager | None = None
        self._staged: _Staged | None = None
        claim(self._memory, f"trainer-{settings.rank}", checkpoints=Path(settings.folder))
        if self._keeps_memory:
            self._protected = self._newest_committed()

    @property
    def busy(self) -> bool:
        """Whether a save was begun whose end was not heard."""
        return self._staged is not None or self.keeper.busy

    def ready(self) -> None:
        """Makes sure that there is a keeper and arenas to fill. Raises StorageError when there cannot be."""
        self.keeper.start()
        for which in (0, 1) if self._keeps_memory else (0,):
            if which != self._protected:
                self._arena(which)

    def kept(self) -> None:
        """The last save is committed in memory: its arena is not filled again before the next one is."""
        if self._keeps_memory and self._used >= 0:
            self._protected = self._used

    def stage(self, job: Callable[[str], SaveJob], ranges: Sequence[NamedRange]) -> None:
        """Copies the ranges into an arena; `job` makes the job when it is told the path of the arena.

        The copies may be under way when this returns; until `fence` has been called the ranges must not change.
        """
        self._used = 1 if self._protected == 0 else 0
        arena = self._arena(self._used)
        made = job(str(arena.path))
        arena.mark_writing(made.step, made.uuid)
        if self._stager is None or not self._stager.fits(ranges):
            if self._stager is not None:
                self._stager.close()
            self._stager = Stager(self.plan, self._image, ranges)
        self._stager.copy(arena.data[: self._image.total])
        self._staged = _Staged(arena, made)
        self.flush()

    def fence(self) -> None:
        """From here on the ranges may change."""
        if self._stager is not None:
            self._stager.fence()

    def flush(self, *, wait: bool = False) -> None:
        """Gives the keeper what is staged, once its copies are done. Raises StorageError when the keeper is gone."""
        if self._staged is None or self._stager is None or not self._stager.done(wait=wait):
            return
        staged, self._staged = self._staged, None
        staged.arena.mark_ready()
        self.keeper.give(staged.job)

    def poll(self) -> JobEnd | None:
        """How the save ended, once."""
        staged = self._staged
        try:
            self.flush()
        except StorageError as fault:
            # The keeper died before it was given the job.
            job = staged.job if staged else None
            return JobEnd(step=job.step if job else -1, uuid=job.uuid if job else "", fault=fault)
        return self.keeper.poll()

    def close(self, *, wait_s: float, clean: bool) -> None:
        """Ends the keeper after what it has in hand. clean: what lies in memory is not needed any more."""
        if self._stager is not None:
            self._stager.close()
        self.keeper.close(wait_s=wait_s)
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        s = self._settings
        if clean and s.rank % s.ranks_per_node == 0:
            release(self._memory)

    def _arena(self, which: int) -> Arena:
        if which not in self._arenas:
            self._arenas[which] = Arena.create(
                self._memory,
                arena_name(self._settings.rank, which),
                self._image.total,
                run=self._settings.run,
                outlives=self._keeps_memory,
            )
        return self._arenas[which]

    def _newest_committed(self) -> int | None:
        """Of the arenas that an older attempt has left, the one that a restart would read."""
        found = []
        for which in (0, 1):
            try:
                head = arena_head(self._memory / arena_name(self._settings.rank, which))
            except (CheckpointError, StorageError):
                continue
            generation = self._memory / f"gen-{head.step:09d}-{head.uuid}" / MANIFEST
            if head.state is ArenaState.READY and generation.exists():
                found.append((head.uuid[:8], head.step, which))
        return max(found)[2] if found else None
