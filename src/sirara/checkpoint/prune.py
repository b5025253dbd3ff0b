"""Thins out a run's step folders by hand, with the rules by which a run does it by itself (`pure.retain`).

    committed steps ─► verified ones (mark, sizes) ─► newest one read from end to end ─► verdicts ─► deletion

A mark may be old. Before anything goes, the newest step that stays is read once more, and when it is not good any
more, the next older one takes its place: the last good step never goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.pins import pinned
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.retention import delete_step, is_verified
from sirara.checkpoint.scrub import scrub_pieces
from sirara.checkpoint.steps import committed_steps, fresh_uuid, step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, StorageError
from sirara.pure.retain import Rules, Verdict, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What became of every committed step (or, dry, would become), newest first.

    relied_on: the newest verified step, on whose behalf older ones go; None: nothing goes.  sizes: bytes by step.
    """

    verdicts: tuple[Verdict, ...]
    relied_on: int | None
    sizes: Mapping[int, int]

    @property
    def gone(self) -> tuple[int, ...]:
        return tuple(v.step for v in self.verdicts if not v.stays)

    @property
    def freed(self) -> int:
        return sum(self.sizes[step] for step in self.gone)


def prune(
    folder: Path,
    *,
    rules: Rules,
    run: str | None = None,
    scores: Mapping[int, float] | None = None,
    reread: bool = True,
    dry_run: bool = False,
    disk: Disk | None = None,
) -> Pruned:
    """Deletes the steps of a checkpoints folder that no rule keeps.

    Args:    run: whose steps these are; those of another run stay (None: whatever the newest readable one says).
             scores: the metric of `rules.best` by step.  reread: read the step that is relied on from end to end.
    Raises:  CheckpointError when there is no committed step; StorageError.
    """
    committed = committed_steps(folder)
    if not committed:
        raise CheckpointError(f"{folder} has no committed checkpoint", code="SR513")
    sizes = {step: _size(folder / step_name(step)) for step in committed}
    verified: set[int] = set()
    foreign: dict[int, str] = {}
    faults: dict[int, str] = {}
    for step in committed:
        try:
            snapshot = Snapshot(folder / step_name(step), step=step)
        except (CheckpointError, StorageError) as fault:
            faults[step] = fault.what
            continue
        run = run or snapshot.manifest.run
        if snapshot.manifest.run != run:
            foreign[step] = snapshot.manifest.run
        elif not is_verified(snapshot.path, uuid=snapshot.manifest.uuid):
            faults[step] = "it is not verified"
        else:
            verified.add(step)
    own = [step for step in committed if step not in foreign]
    newest = _newest_good(folder, verified, faults, reread=reread)
    if newest is None:
        verdicts = [Verdict(step=s, stays=True, why="no step is verified and whole") for s in own]
    else:
        kept = pinned(folder, own)
        verdicts = judge(own, verified, newest=newest, rules=rules, pinned=kept, scores=scores)
    verdicts = [_with_fault(v, faults.get(v.step)) for v in verdicts]
    verdicts += [
        Verdict(step=s, stays=True, why=f"it belongs to run {name!r}") for s, name in foreign.items()
    ]
    verdicts.sort(key=lambda v: -v.step)
    pruned = Pruned(verdicts=tuple(verdicts), relied_on=newest, sizes=sizes)
    if not dry_run:
        for step in reversed(pruned.gone):
            trash = folder / f".{step_name(step)}.gone-{fresh_uuid(0)}"
            delete_step(disk or Disk(), folder / step_name(step), trash=trash)
    return pruned


def _newest_good(folder: Path, verified: set[int], faults: dict[int, str], *, reread: bool) -> int | None:
    """The newest verified step whose bytes are good today; damaged ones are taken out of `verified`."""
    for step in sorted(verified, reverse=True):
        fault = None
        if reread:
            snapshot = Snapshot(folder / step_name(step), step=step)
            fault = next(scrub_pieces(snapshot), None)
        if fault is None:
            return step
        verified.discard(step)
        faults[step] = str(fault)
    return None


def _with_fault(verdict: Verdict, fault: str | None) -> Verdict:
    if fault is None:
        return verdict
    return Verdict(step=verdict.step, stays=verdict.stays, why=f"{verdict.why}; {fault}")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
