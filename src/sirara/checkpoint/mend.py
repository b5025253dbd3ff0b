"""Repairs one step of a run wherever its bytes can be found: which manifest, which copies, mend or rebuild."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sirara.checkpoint.copies import Copy, FolderCopy
from sirara.checkpoint.find import Found
from sirara.checkpoint.places import Places, copies_of, manifests_of
from sirara.checkpoint.readback import Fault
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.repair import Mended, Repaired, rebuild_step, repair_manifest, repair_step
from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError
from sirara.pure.manifest import MANIFEST, Manifest

FOREIGN = "SR512"


def mend(
    found: Found,
    step: int,
    places: Places,
    *,
    replicas: Sequence[Snapshot] = (),
    scratch: Path,
    dry_run: bool = False,
) -> tuple[Repaired, list[str]]:
    """What became of one step, and the places that could not be asked.

    A step without a folder is rebuilt whole.  A manifest that is torn is taken from the place that has the one of this
    save; one of another run or step is no damage that a copy mends.

    Args:    replicas: folders that hold this step, asked first.  scratch: for images that are decoded from parity.
    Raises:  StorageError.
    """
    path = found.only or found.folder / step_name(step)
    manifests, unasked = manifests_of(places, step)
    manifests = [*((s.manifest, str(s.path)) for s in replicas if s.step == step), *manifests]
    rebuilt = not path.is_dir()
    try:
        manifest, source = _manifest(path, step, places.run, manifests, found, dry_run=dry_run)
        copies: list[Copy] = [
            FolderCopy(s.path, s.manifest, name=str(s.path))
            for s in replicas
            if s.manifest.uuid == manifest.uuid
        ]
        more, why = copies_of(places, manifest, scratch=scratch)
        copies += more
        others = [p for p in found.paths() if p != path]
        if rebuilt:
            done = rebuild_step(found.folder, manifest, copies, others=others, dry_run=dry_run)
        else:
            done = repair_step(path, manifest, copies, others=others, dry_run=dry_run)
    except CheckpointError as fault:
        lost = Fault(file=MANIFEST, what=": ".join(filter(None, (fault.what, fault.why))))
        return Repaired(step=step, path=path, mended=(), lost=(lost,)), unasked
    if source and not rebuilt:
        whole = Mended(file=MANIFEST, what="all of it is good again", taken_from=source)
        done = replace(done, mended=(whole, *done.mended))
    return replace(done, rebuilt=rebuilt), [*unasked, *why]


def _manifest(
    path: Path,
    step: int,
    run: str,
    manifests: Sequence[tuple[Manifest, str]],
    found: Found,
    *,
    dry_run: bool,
) -> tuple[Manifest, str]:
    """The manifest of the step, and the place that it was taken from, "" when it is in the folder."""
    if not path.is_dir():
        if not manifests:
            raise CheckpointError(
                f"step {step} is not in {found.folder}, and no other place has it", code="SR513"
            )
        return max(manifests, key=lambda pair: pair[0].attempt)
    try:
        return Snapshot(path, run=run or None, step=step, check_sizes=False).manifest, ""
    except CheckpointError as fault:
        if fault.code == FOREIGN:
            raise
        return repair_manifest(path, manifests, dry_run=dry_run)
