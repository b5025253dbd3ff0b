"""Restoring: the newest step that all ranks can read, and what was wrong with the newer ones.

candidates, newest first ─► prepare ─ open ─ read, agreeing after each
    ├── all ranks could      restored
    └── one could not        the next older one, with the reason
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.share import Agree, OtherRankFailed, reason
from sirara.errors import CheckpointError, CommError, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One line of what a resume did: a step, a tier, what was found there or done with it, and why."""

    step: int
    tier: str
    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"step {self.step:>9}  {self.tier:<8} {self.what}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The step that was read, and the newer ones that were not, each with its reason (newest first).

    table: every tier that was asked, step by step.
    """

    step: int
    skipped: tuple[tuple[int, str], ...]
    table: tuple[TierRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A step that may be read.

    prepare: what must be done on all ranks before any of them opens it.  open: gives its snapshot.  Both raise
    CheckpointError or StorageError.
    """

    step: int
    open: Callable[[], Snapshot]
    prepare: Callable[[], None] = lambda: None


def read_first(
    candidates: Sequence[Candidate],
    read: Callable[[Snapshot], None],
    *,
    agree: Agree,
    distrust: Callable[[int, str], None] = lambda step, fault: None,
    where: str = "",
) -> tuple[Snapshot, tuple[tuple[int, str], ...]] | None:
    """Reads the first candidate that every rank can read: its snapshot, and the ones before with their reasons.

    Args:    agree: given this rank's fault ("" when there is none) returns the first fault of any rank, so that all
             ranks take the same step.  distrust: told of each step that could not be read.
    Returns: None without candidates.
    Raises:  CheckpointError naming every step and its reason when none can be read.
    """
    skipped: list[tuple[int, str]] = []
    for candidate in candidates:
        opened: list[Snapshot] = []
        fault = (
            _tried(candidate.prepare, agree)
            or _tried(lambda c=candidate, o=opened: o.append(c.open()), agree)
            or _tried(lambda o=opened: read(o[0]), agree)
        )
        if not fault:
            return opened[0], tuple(skipped)
        skipped.append((candidate.step, fault))
        distrust(candidate.step, fault)
    if not skipped:
        return None
    raise CheckpointError(
        f"none of the {len(skipped)} committed steps in {where} can be read",
        code="SR530",
        why="; ".join(f"step {step}: {fault}" for step, fault in skipped),
        try_="sirara ckpt verify names every bad piece",
    )


def _tried(action: Callable[[], None], agree: Agree) -> str:
    """The first fault of any rank in doing `action`."""
    fault = ""
    try:
        action()
    except OtherRankFailed:
        pass  # that rank tells
    except (CheckpointError, StorageError, CommError) as error:
        fault = reason(error)
    return agree(fault)
