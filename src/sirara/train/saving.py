"""When a run saves, and what becomes of its saves: tiers that are due, deadlines, failures in a row.

`Saves` decides; what is saved comes from `Saved`, which the trainer meets, and `checkpoint.manager` keeps it.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Protocol

from sirara.checkpoint.deadline import FILE as BANDWIDTH
from sirara.checkpoint.deadline import Pace
from sirara.checkpoint.digest import Digest
from sirara.checkpoint.job import SaveOutcome
from sirara.checkpoint.manager import CheckpointManager, PlannedTensor, State
from sirara.config.run_folder import RunFolder
from sirara.config.schema import CheckpointConfig
from sirara.errors import InvariantError, StorageError
from sirara.pure.saveplan import ITEM_BYTES

SAVE, STOP, GIVE_UP = 1, 2, 3
"""Requests as ranks agree on them: the largest one of all ranks wins."""

_TIERS_BYTES = 64

Alive = Callable[[], object]


def _nothing() -> None:
    return


class Saved(Protocol):
    """What is saved: the state of the step just done."""

    @property
    def step(self) -> int: ...

    def save_plan(self) -> list[PlannedTensor]:
        """All tensors of the run and who holds which boxes of them; the same at every step."""
        ...

    def snapshot(self) -> State:
        """The state as it is now; compares replicas first."""
        ...


class Saves:
    """The saves of one attempt.  All ranks call its methods at the same step; what rank 0 knows decides for all.

    Args:  gather: what every rank says, by rank: rows of equal length.  speaks: of rank 0.
    """

    def __init__(
        self,
        saved: Saved,
        manager: CheckpointManager,
        *,
        run: RunFolder,
        config: CheckpointConfig,
        gather: Callable[[bytes], list[bytes]],
        speaks: bool,
    ) -> None:
        self._saved, self._manager, self._run = saved, manager, run
        self._config, self._gather, self._speaks = config, gather, speaks
        self._clock: Pace | None = None
        self._stall_s = 0.0
        self.on_disk = True
        """Whether the last complete save is on disk, so that nothing is lost when the keeper ends with the run."""

    def prepare(self) -> None:
        """The first periodic save finds a keeper and an arena; one on request may have to wait for them."""
        if self._config.every or any(tier.every for tier in self._config.tiers):
            self._manager.prepare(self._saved.save_plan())

    def write(self, *, deadline: float | None = None, alive: Alive = _nothing) -> Digest:
        """Saves the state of the step just done in all tiers, waits until it is committed and returns its digest.

        Args:    deadline: epoch seconds; tiers that would not end before it are left out, as rank 0 says.
        Raises:  StorageError when it could not be written, or no tier would end in time; older steps are untouched
                 then.
        """
        tiers = self._tiers_in_time(deadline)
        if not tiers:
            raise self._pace.too_late(self._saved.step, deadline)
        self.on_disk = "disk" in tiers
        self.begin(tiers=tiers, patient=True, alive=alive)
        outcome = self.wait(alive=alive)
        if outcome is None or outcome.fault is not None:
            raise (outcome and outcome.fault) or InvariantError("a save that was begun has no end")
        return Digest.parse(outcome.digest)

    def begin(
        self, *, tiers: Collection[str] | None = None, patient: bool = False, alive: Alive = _nothing
    ) -> bool:
        """Begins a save of the step just done; with `checkpoint.async` the training goes on while it is written.

        Args:    tiers: default: those that are due at this step.  patient: it must be made, so it waits for a save
                 that is still being written, and for no time of a retry.  alive: called while it waits.
        Returns: whether it began; how it ends is told by `ended` and `wait`.
        """
        began = time.perf_counter()
        tiers = self.due() if tiers is None else tiers
        begun = self._manager.start(
            self._saved.step, self._saved.snapshot(), tiers=tiers, patient=patient, alive=alive
        )
        self._stall_s += time.perf_counter() - began
        return begun

    def due(self, *, requested: bool = False) -> tuple[str, ...]:
        """The tiers of a save of this step: those that are due, all of them when somebody has asked for it."""
        # What asked may be a save that was put off; its tiers are known.
        if requested and not self._manager.ledger.put_off:
            return self._manager.tiers
        return self._manager.due_tiers(self._saved.step, self._config.every)

    def ended(self) -> list[SaveOutcome]:
        """The saves that ended, or were put off or skipped, since the last call; rank 0 knows of them."""
        outcomes = self._manager.poll()
        self._pace.learn(outcomes)
        return outcomes

    def wait(self, *, alive: Alive = _nothing) -> SaveOutcome | None:
        """Waits, on all ranks together, until no save is being written; how the last one ended, None without one."""
        return self._manager.wait(alive=alive)

    def wish(self, *, deadline: float | None = None, step_s: float = 0.0) -> int:
        """What this rank asks of the next step for the sake of saves: SAVE for one that was put off, STOP when a save
        after one more step, of `step_s` seconds, would not end before `deadline`, GIVE_UP after too many failures in a
        row, otherwise 0."""
        if self._manager.ledger.failures.fatal:
            return GIVE_UP
        if self._pace.must_stop(deadline, step_s=step_s):
            return STOP
        return SAVE if self._manager.save_due() else 0

    def give_up(self, *, alive: Alive = _nothing) -> StorageError:
        """The error that ends a run which cannot save any more; the state is kept in memory where there is such a
        tier."""
        count = self._manager.ledger.failures.in_a_row  # a save to memory is no failure and forgets them
        kept = "memory" in self._manager.tiers
        if kept:
            self.begin(tiers=("memory",), patient=True, alive=alive)
            last = self.wait(alive=alive)
            kept = last is not None and last.fault is None
        return StorageError(
            f"{count or 'too many'} saves in a row have failed",
            code="SR606",
            why=f"step {self._saved.step} is kept in memory" if kept else "nothing of the last steps is kept",
            try_=[
                f"free some space, then: sirara resume {self._run.name_to_type}",
                "checkpoint.max_failures=20",
            ],
        )

    def take_stall_s(self) -> float:
        """Seconds that training stood still for saves since the last call."""
        taken, self._stall_s = self._stall_s, 0.0
        return taken

    @property
    def _pace(self) -> Pace:
        if self._clock is None:
            self._clock = Pace(
                self._run.path / BANDWIDTH,
                tiers=self._manager.tiers,
                total_bytes=sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in self._saved.save_plan()),
                speaks=self._speaks,
            )
        return self._clock

    def _tiers_in_time(self, deadline: float | None) -> tuple[str, ...]:
        """What rank 0 chooses: clocks, and what ranks know of a deadline, may differ."""
        said = ",".join(self._pace.tiers_in_time(deadline)).encode()
        rows = self._gather(said.ljust(_TIERS_BYTES, b" "))
        return tuple(tier for tier in rows[0].decode().strip().split(",") if tier)
