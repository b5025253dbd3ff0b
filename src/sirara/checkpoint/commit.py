"""The committer's part of a save: small files, manifest, rename, reading back, retention. No torch.

    reports of all ranks ─► manifest.json ─ fsync ─ fence ─ rename to step-N ─ fsync parent
    then                    re-read every piece ─► verified.json ─► retention

The trainer of rank 0 does it in line for a synchronous save, the keeper of rank 0 for all others.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import xxhash

from sirara.checkpoint.pins import pinned
from sirara.checkpoint.readback import NO_RESTS, Rests, faulty_pieces
from sirara.checkpoint.retention import VERIFIED, delete_step, is_verified, mark_verified
from sirara.checkpoint.step_folder import committed_manifest
from sirara.checkpoint.steps import clear_leftovers, committed_steps, step_name, temp_name
from sirara.checkpoint.storage import Disk, names_in, read_file
from sirara.errors import InvariantError, StorageError
from sirara.pure.manifest import MANIFEST, FileEntry, Manifest, parse_manifest
from sirara.pure.retain import best_step, expendable
from sirara.pure.saveplan import INDEX, SavePlan, weight_index

_log = logging.getLogger("sirara")


class Committer:
    """Commits, verifies and thins out the steps of one run.

    Args:  folder: <run>/checkpoints.  run: its id.  fence: raises when a newer attempt owns the run; called right
           before the commit.  The rest says which steps stay (pure/retain.py).
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        *,
        run: str,
        attempt: int,
        keep_last: int,
        keep_every: int | None,
        keep_best: str | None = None,
        fence: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.run, self.attempt = folder, run, attempt
        self._disk, self._fence = disk, fence
        self._keep_last, self._keep_every, self._keep_best = keep_last, keep_every, keep_best
        self._verified: set[str] = set()
        self.ended: set[str] = set()
        """Uuids of this attempt's saves that are over: what is left of them may go."""

    def write_extras(self, plan: SavePlan, temp: Path, hf_files: Mapping[str, bytes]) -> list[FileEntry]:
        """config.json and its kind, and the index of the weights, durable; their entries in the manifest."""
        extras = extra_files(plan, hf_files)
        for name, data in extras.items():
            self._disk.write_file(temp / name, data)
        return extra_entries(extras)

    def commit(self, temp: Path, final: Path, manifest: Manifest) -> None:
        """Makes `temp` the committed step; until the rename nothing that was committed changes."""
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

    def abandon(self, temp: Path) -> None:
        """Removes what a failed save has written."""
        try:
            self._disk.remove_tree(temp)
        except StorageError as fault:
            _log.warning("could not remove %s: %s", temp, fault.why)

    def verify(self, final: Path, *, rests: Rests = NO_RESTS) -> None:
        """Reads every piece of the committed step back; raises CheckpointError when the disk returns other bytes."""
        manifest = parse_manifest(read_file(final / MANIFEST), where=str(final / MANIFEST))
        for fault in faulty_pieces(final, manifest, rests=rests):
            raise fault.error()
        self._verified.add(manifest.uuid)
        try:
            total = sum(f.size for f in manifest.files)
            mark_verified(self._disk, final, uuid=manifest.uuid, bytes_read=total)
        except StorageError as fault:
            # The step is committed and good; a later attempt counts it as not verified, no more.
            _log.warning("step %d is verified, but this could not be noted: %s", manifest.step, fault)

    def tidy(
        self,
        step: int,
        uuid: str,
        *,
        scores: Mapping[int, float] | None = None,
        spare: Collection[int] = (),
    ) -> None:
        """Retention, now that `step` is committed and verified. What cannot be deleted is tried again next time.

        spare: steps that somebody reads at this moment.
        """
        try:
            committed = committed_steps(self.folder)
            verified: set[int] = set()
            for s in committed:
                if s <= step and len(verified) < self._keep_last and self._is_verified(s):
                    verified.add(s)
            verified |= self._best(committed, step, scores or {})
            if step not in verified:
                _log.warning("step %d could not be looked at again, so older ones stay", step)
                return
            for old in expendable(
                committed,
                verified,
                newest=step,
                keep_last=self._keep_last,
                keep_every=self._keep_every,
                keep_best=self._keep_best,
                pinned=pinned(self.folder, committed) | set(spare),
                scores=scores,
            ):
                trash = self.folder / f".{step_name(old)}.gone-{uuid}"
                delete_step(self._disk, self.folder / step_name(old), trash=trash)
                _log.info("checkpoint of step %d deleted (keep_last %d)", old, self._keep_last)
            self.clean()
        except StorageError as fault:
            _log.warning("step %d is committed, but older ones could not be deleted: %s", step, fault)

    def _best(self, committed: Sequence[int], newest: int, scores: Mapping[int, float]) -> set[int]:
        """The verified step of the lowest score, which may be far older than the last ones."""
        left = {s: scores[s] for s in committed if self._keep_best and s <= newest and s in scores}
        while (best := best_step(left)) is not None and not self._is_verified(best):
            del left[best]
        return set() if best is None else {best}

    def clean(self) -> list[str]:
        """Removes what dead attempts and failed saves left. Returns the names of the removed folders."""
        return clear_leftovers(self._disk, self.folder, attempt=self.attempt, ended=self.ended)

    def distrust(self, step: int) -> None:
        """A step that could not be read is not verified any more."""
        manifest = committed_manifest(self.folder / step_name(step), run=self.run, step=step)
        if manifest is not None:
            self._verified.discard(manifest.uuid)
        try:
            self._disk.remove(self.folder / step_name(step) / VERIFIED)
        except StorageError as error:
            _log.warning("%s", error)

    def _is_verified(self, step: int) -> bool:
        folder = self.folder / step_name(step)
        manifest = committed_manifest(folder, run=self.run, step=step)
        if manifest is None:
            return False
        return manifest.uuid in self._verified or is_verified(folder, uuid=manifest.uuid)


def wait_for_commit(folder: Path, *, run: str, step: int, uuid: str, wait_s: float) -> Manifest | None:
    """The manifest of a save once it is committed on the disk, None when it is given up, or not in time."""
    final, temp = folder / step_name(step), folder / temp_name(step, uuid)
    until, pause_s = time.monotonic() + wait_s, 0.002
    while True:
        manifest = committed_manifest(final, run=run, step=step)
        if manifest is not None and manifest.uuid == uuid:
            return manifest
        if (not temp.exists() and not final.exists()) or time.monotonic() >= until:
            return None
        time.sleep(pause_s)
        pause_s = min(0.1, 2 * pause_s)


def extra_files(plan: SavePlan, hf_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files of a step. Raises InvariantError when one has the name of another file."""
    extras = dict(hf_files)
    if any(t.is_weight for t in plan.tensors):
        extras[INDEX] = weight_index(plan)
    taken = {f.name for f in plan.files} | {MANIFEST, VERIFIED}
    for name in extras:
        if name in taken or "/" in name or name.startswith("."):
            raise InvariantError(f"{name!r} cannot be the name of a file beside the weights")
    return extras


def extra_entries(extras: Mapping[str, bytes]) -> list[FileEntry]:
    """How the manifest names small files: their hash covers all of each."""
    return [
        FileEntry(name=name, size=len(data), head=len(data), hash=xxhash.xxh3_128_hexdigest(data))
        for name, data in extras.items()
    ]
