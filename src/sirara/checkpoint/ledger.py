"""What became of a run's saves: kept, failed, put off or skipped; what a run survives, what is owed. No torch."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sirara.checkpoint.deciding import Move, Row
from sirara.checkpoint.job import JobEnd, SaveOutcome, UploadEnd
from sirara.errors import CheckpointError, CommError, StorageError
from sirara.pure.failures import Failures

SOFT_FAULTS = (StorageError, CheckpointError, CommError)
"""What a run survives when a save ends with it; anything else ends the run."""

_IN_ARENAS = ("memory", "peer", "parity")  # own images stay where they are
_LOST = 64  # failed saves of which leftovers are looked for

_log = logging.getLogger("sirara")


@dataclass(slots=True)
class Counts:
    """Saves so far, by what became of them."""

    saved: int = 0
    failed: int = 0
    queued: int = 0
    skipped: int = 0
    waited: int = 0
    held_back: int = 0  # until the next try of one that failed


class Ledger:
    """The account of one rank; rank 0 speaks for the saves, the others know little.

    Attributes:  put_off: tiers of a save that waits for its turn, or failed.  last: how the last save ended.
                 lost: uuids of failed saves.  kept_in_memory: the last save is committed in arenas.
    """

    def __init__(self, *, max_failures: int, retry_s: float) -> None:
        self.failures = Failures(most=max_failures, retry_s=retry_s)
        self.counts = Counts()
        self.put_off: frozenset[str] = frozenset()
        self.last: SaveOutcome | None = None
        self.lost: list[str] = []
        self.kept_in_memory = False
        self._outcomes: list[SaveOutcome] = []
        self._told, self._untold = "", 0  # why saves are queued, and how many since that was said

    @property
    def backing_off(self) -> bool:
        """Whether the last save failed, so that the next one waits for its time."""
        return self.failures.in_a_row > 0

    @property
    def due_again(self) -> bool:
        return self.failures.due(time.monotonic())

    def take(self) -> list[SaveOutcome]:
        """What has been written down since the last call."""
        taken, self._outcomes = self._outcomes, []
        return taken

    def ended(self, end: JobEnd, tiers: frozenset[str]) -> None:
        """A save for `tiers` is over. Raises its fault when no run survives it."""
        if end.fault is not None and not isinstance(end.fault, SOFT_FAULTS):
            raise end.fault
        if end.fault is None:
            self.failures.succeeded()
            self.counts.saved += 1
            self.kept_in_memory = any(end.tiers[t].ok for t in _IN_ARENAS if t in end.tiers)
        else:
            self.failures.failed(time.monotonic())
            self.counts.failed += 1
            self.kept_in_memory = False
            self.put_off |= tiers
            self.lost = [*self.lost, end.uuid][-_LOST:]
        self.last = SaveOutcome(
            kind="saved" if end.fault is None else "failed",
            step=end.step,
            digest=end.digest,
            path=Path(end.path) if end.path else None,
            total_bytes=end.total_bytes,
            tiers=end.tiers,
            seconds=end.seconds,
            fault=end.fault,
            in_a_row=self.failures.in_a_row,
            untold=self._untold,
        )
        self._told, self._untold = "", 0
        self._outcomes.append(self.last)

    def later(self, step: int, move: Move, wanted: frozenset[str], *, speaks: bool) -> None:
        """A save of `wanted` was not begun. Told once for each reason until the next save ends; the rest is counted."""
        if move is Move.SKIP:
            self.counts.skipped += 1
        elif move is Move.QUEUE:
            self.counts.queued += 1
        elif move is Move.BACK_OFF:
            self.counts.held_back += 1
        if not speaks:
            return
        if move is not Move.SKIP:
            self.put_off = wanted
        why = "a save is still being written" if move is not Move.BACK_OFF else "the save before it failed"
        kind = "skipped" if move is Move.SKIP else "queued"
        if kind == "queued":
            if self._told == why:
                self._untold += 1
                return
            self._told = why
        self._outcomes.append(SaveOutcome(kind=kind, step=step, why=why))

    def uploaded(self, uploads: Sequence[UploadEnd]) -> None:
        for upload in uploads:
            kept, seconds = {"object": upload.result}, {"object": upload.result.seconds}
            outcome = SaveOutcome(kind="uploaded", step=upload.step, tiers=kept, seconds=seconds)
            self._outcomes.append(replace(outcome, total_bytes=upload.result.bytes))

    def row(self, *, busy: bool) -> Row:
        """What this rank tells the others while all wait for the end of a save."""
        last = self.last
        return Row(
            busy=busy,
            digest=last.digest if last else "",
            fault=str(last.fault) if last and last.fault else "",
        )

    def told(self, row: Row, step: int) -> None:
        """On other ranks: the last save ended as rank 0 says."""
        if not row.digest and not row.fault:
            self.last = None
            return
        fault = StorageError(f"the save failed on rank 0: {row.fault}", code="SR603") if row.fault else None
        kind = "failed" if fault else "saved"
        self.last = SaveOutcome(kind=kind, step=step, digest=row.digest, fault=fault)
