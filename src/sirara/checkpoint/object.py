"""The object tier: committed steps, copied file by file into an object store.

    <url>/<run>/step-000001200/<uuid>/model.safetensors ...    the files of the step folder
                                      objects-<rank>.json      what a rank has uploaded
                                      failed-<rank>.txt        why a rank could not
                                      manifest.json            the commit: created once, after everything else

The uuid makes every name one that is never used again.  There is no rename in an object store, so nothing counts
before the manifest is there, and that is created by one conditional request.  Whatever has no manifest is a leftover:
of this attempt it may still be growing, of an older attempt it is removed.  No torch here: the writer process does
without it.
"""

import contextlib
import heapq
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from sirara.checkpoint.bucket import Bucket, Stored
from sirara.checkpoint.filecheck import FileCheck, checked_chunks
from sirara.checkpoint.object_copy import ObjectCopy
from sirara.checkpoint.readback import Fault
from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError, CommTimeout, InvariantError, SiraraError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest
from sirara.pure.retain import expendable

_SAVE = re.compile(r"step-(\d+)/([0-9a-f]{8}-[0-9a-f-]{27})/([^/]+)")
_OURS = re.compile(r"objects-\d+\.json|failed-\d+\.txt")
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StoredStep:
    """A committed save in the store; a later one of the same step is greater.  bytes: of all its objects."""

    step: int
    attempt: int
    modified: datetime
    uuid: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadReport:
    """What one rank has uploaded of a save; files: name and bytes."""

    uuid: str
    rank: int
    world: int
    files: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was removed at the start of an attempt, and what was met and left.

    saves: uncommitted ones of older attempts.  uploads: keys of unfinished multipart uploads.  foreign: keys below the
    run that no save of ours has written.  notes: what could not be looked for.
    """

    saves: tuple[str, ...]
    uploads: tuple[str, ...]
    foreign: tuple[str, ...]
    notes: tuple[str, ...]


class ObjectTier:
    """The saves of one run in an object store.

    Args:    url, options, patience_s: as in `Bucket`.  attempt: the life of the run that asks; what newer ones left is
             not touched.
    Raises:  every method StorageError when the store cannot be used.
    """

    def __init__(
        self, url: str, options: Mapping[str, str], run: str, *, attempt: int, patience_s: float = 120.0
    ) -> None:
        self.bucket = Bucket(url, options, patience_s=patience_s)
        self.run, self.attempt = run, attempt

    # ---- saving

    def clean(self) -> Cleaned:
        """Removes what older attempts left without a commit.  Called by one rank, when no older attempt writes."""
        saves, foreign = self._saves()
        gone = []
        for (step, uuid), objects in sorted(saves.items()):
            if MANIFEST not in objects and _attempt(uuid) < self.attempt:
                self.bucket.delete([self._key(step, uuid, name) for name in sorted(objects)])
                gone.append(f"{step_name(step)}/{uuid}")
        uploads, note = self._abort_uploads()
        notes = (note,) if note else ()
        return Cleaned(saves=tuple(gone), uploads=tuple(uploads), foreign=tuple(foreign), notes=notes)

    def upload_part(self, folder: Path, manifest: Manifest, rank: int, world: int) -> UploadReport:
        """Uploads this rank's share of the files of a step folder and reports them in the store.

        Every byte is compared with the manifest's hashes while it is read.  Raises CheckpointError naming tensor and
        file when one is not right: then nothing of that file appears.
        """
        began = time.monotonic()
        owners = deal([f.size for f in manifest.files], world)
        files: dict[str, int] = {}
        try:
            for f in (f for f, owner in enumerate(owners) if owner == rank):
                entry = manifest.files[f]
                self.bucket.upload(
                    self._key(manifest.step, manifest.uuid, entry.name),
                    entry.size,
                    partial(checked_chunks, folder, manifest, f),
                )
                files[entry.name] = entry.size
            seconds = time.monotonic() - began
            report = UploadReport(uuid=manifest.uuid, rank=rank, world=world, files=files, seconds=seconds)
            if files:
                raw = json.dumps(asdict(report)).encode() + b"\n"
                self.bucket.put(self._key(manifest.step, manifest.uuid, f"objects-{rank}.json"), raw)
        except SiraraError as fault:
            self._say_failed(manifest, rank, fault)
            raise
        return report

    def commit(
        self, manifest_raw: bytes, *, world: int, deadline_s: float, fence: Callable[[], None] | None = None
    ) -> StoredStep:
        """Waits for the reports of all ranks that had files to upload, then creates the manifest.

        fence: raises when a newer attempt owns the run; called right before the commit.

        Raises:  CommTimeout naming the ranks that did not report in time; StorageError when a rank says that it failed;
                 CheckpointError when an object is missing or has another size, or somebody else committed this save.
        """
        manifest = parse_manifest(manifest_raw, where=f"the manifest for {self.bucket.url}")
        objects = self._wait(manifest, world, deadline_s)
        faults = _size_faults(manifest, objects)
        if faults:
            raise CheckpointError(
                f"{faults[0]}; step {manifest.step} is not committed",
                code="SR521",
                where=self._place(manifest.step, manifest.uuid),
                why=f"{len(faults)} of {len(manifest.files)} objects are not as they were reported",
            )
        key = self._key(manifest.step, manifest.uuid, MANIFEST)
        if fence is not None:
            fence()
        self.bucket.create(key, manifest_raw)
        head = self.bucket.head(key)
        if head is None:
            raise StorageError(f"{self.bucket.url}/{key} was created and is not there", code="SR661")
        size = sum(o.size for o in objects.values()) + head.size
        return StoredStep(
            step=manifest.step,
            attempt=_attempt(manifest.uuid),
            modified=head.modified,
            uuid=manifest.uuid,
            bytes=size,
        )

    def discard(self, step: int, uuid: str) -> None:
        """Removes a save that was given up.  Raises InvariantError when it is committed."""
        objects = self._objects(step, uuid)
        if MANIFEST in objects:
            raise InvariantError(f"save {uuid} of step {step} is committed: it is deleted, not discarded")
        self.bucket.abort(self._key(step, uuid, ""))
        self.bucket.delete([self._key(step, uuid, name) for name in sorted(objects)])

    # ---- reading

    def steps(self) -> list[StoredStep]:
        """All committed saves, newest first.  Asked by one rank; a store that cannot be listed is an error."""
        found = []
        for (step, uuid), objects in self._saves()[0].items():
            if MANIFEST in objects:
                size = sum(o.size for o in objects.values())
                modified = objects[MANIFEST].modified
                found.append(
                    StoredStep(step=step, attempt=_attempt(uuid), modified=modified, uuid=uuid, bytes=size)
                )
        return sorted(found, reverse=True)

    def open(self, step: int | StoredStep) -> tuple[Manifest, ObjectCopy]:
        """A committed save, its manifest and the sizes of all objects checked; of a number the newest save.

        Raises:  CheckpointError when it is not there, torn, of another run or step, or an object is missing or has
                 another size.
        """
        save = self._find(step)
        place = self._place(save.step, save.uuid)
        manifest = parse_manifest(self.manifest(save.step, save.uuid), where=f"{place}/{MANIFEST}")
        if (manifest.run, manifest.step, manifest.uuid) != (self.run, save.step, save.uuid):
            raise CheckpointError(
                f"{place} holds step {manifest.step} of run {manifest.run!r}, save {manifest.uuid}: it was copied here",
                code="SR512",
            )
        objects = self._objects(save.step, save.uuid)
        faults = _size_faults(manifest, objects)
        if faults:
            more = f"; {len(faults) - 1} more objects are not right" if faults[1:] else ""
            raise CheckpointError(f"{faults[0]}{more}", code="SR521", where=place)
        known = {f.name for f in manifest.files} | {MANIFEST}
        foreign = sorted(name for name in objects if name not in known and not _OURS.fullmatch(name))
        return manifest, ObjectCopy(
            self.bucket, manifest, prefix=self._key(save.step, save.uuid, ""), foreign=tuple(foreign)
        )

    def manifest(self, step: int, uuid: str) -> bytes:
        """The commit of one save, as it was written.  Raises CheckpointError when there is none."""
        raw = self.bucket.get(self._key(step, uuid, MANIFEST))
        if raw is None:
            raise CheckpointError(f"{self._place(step, uuid)} has no {MANIFEST}", code="SR513")
        return raw

    def copy(self, manifest: Manifest) -> ObjectCopy:
        """The objects of a committed save whose manifest is known; nothing is listed or asked."""
        return ObjectCopy(self.bucket, manifest, prefix=self._key(manifest.step, manifest.uuid, ""))

    def scrub(self, step: int | StoredStep) -> list[Fault]:
        """Reads every byte of a save and says what is not as it was written."""
        manifest, copy = self.open(step)
        faults = [Fault(file=name, what="is not part of this step") for name in copy.foreign]
        for f, entry in enumerate(manifest.files):
            check = FileCheck(manifest, f)
            bad: list[Fault] = []
            try:
                for at in range(0, entry.size, _CHUNK_BYTES):
                    chunk = memoryview(bytearray(min(_CHUNK_BYTES, entry.size - at)))
                    copy.read(entry.name, [chunk], at)
                    bad += check.feed(chunk, at)
            except CheckpointError as fault:
                bad.append(Fault(file=entry.name, what=fault.what))
            if bad and (said := copy.suspicion(entry.name)):
                bad.append(Fault(file=entry.name, what=said))
            faults += bad
        return faults

    # ---- deleting

    def delete(self, step: int | StoredStep) -> None:
        """Takes the commit away first, so that a crash leaves no save that looks whole; of a number all saves."""
        saves = [step] if isinstance(step, StoredStep) else [s for s in self.steps() if s.step == step]
        for save in saves:
            self.bucket.delete([self._key(save.step, save.uuid, MANIFEST)])
            left = self._objects(save.step, save.uuid)
            self.bucket.delete([self._key(save.step, save.uuid, name) for name in sorted(left)])

    def retain(
        self, *, newest: int, keep_last: int, keep_every: int | None, keep: Collection[int] = ()
    ) -> list[StoredStep]:
        """Deletes what may go now that step `newest` is committed here; returns it, oldest first.

        A committed save was compared with its hashes on the way in, so it counts as verified.  keep: steps that stay
        for other reasons (pinned, best).  Of a step that was saved again the older saves go as well.
        """
        saves = self.steps()
        steps = sorted({s.step for s in saves})
        going = set(
            expendable(steps, steps, newest=newest, keep_last=keep_last, keep_every=keep_every, pinned=keep)
        )
        seen: set[int] = set()
        gone = []
        for save in saves:
            if save.step in going or (save.step in seen and save.step <= newest):
                gone.append(save)
            seen.add(save.step)
        for save in reversed(gone):
            self.delete(save)
        return gone[::-1]

    # ---- keys

    def _key(self, step: int, uuid: str, name: str) -> str:
        return f"{self.run}/{step_name(step)}/{uuid}/{name}"

    def _place(self, step: int, uuid: str) -> str:
        return f"{self.bucket.url}/{self._key(step, uuid, '')}".rstrip("/")

    def _saves(self) -> tuple[dict[tuple[int, str], dict[str, Stored]], list[str]]:
        """{(step, uuid): {name: object}} of everything below the run, and the keys that are nothing of ours."""
        saves: dict[tuple[int, str], dict[str, Stored]] = {}
        foreign = []
        for stored in self.bucket.objects(f"{self.run}/"):
            found = _SAVE.fullmatch(stored.key.removeprefix(f"{self.run}/"))
            if found is None or step_name(int(found[1])) != f"step-{found[1]}":
                foreign.append(stored.key)
            else:
                saves.setdefault((int(found[1]), found[2]), {})[found[3]] = stored
        return saves, sorted(foreign)

    def _objects(self, step: int, uuid: str) -> dict[str, Stored]:
        prefix = self._key(step, uuid, "")
        return {o.key.removeprefix(prefix): o for o in self.bucket.objects(prefix)}

    def _find(self, step: int | StoredStep) -> StoredStep:
        if isinstance(step, StoredStep):
            return step
        saves = self.steps()
        for save in saves:
            if save.step == step:
                return save
        held = ", ".join(str(s.step) for s in saves[:10]) or "none"
        raise CheckpointError(
            f"step {step} is not committed in {self.bucket.url}/{self.run}",
            code="SR513",
            why=f"committed there, newest first: {held}",
        )

    def _abort_uploads(self) -> tuple[list[str], str]:
        """Keys of the unfinished uploads of older attempts, now aborted; and why there may be more."""
        why = "the keys of the store are not known here"
        if self.bucket.can_list_multiparts:
            try:
                return self.bucket.abort(f"{self.run}/", keep=self._not_older), ""
            except StorageError as fault:
                why = f"{fault.what}: {fault.why}"
        return [], (
            f"unfinished uploads are not looked for: {why}; "
            "let the bucket abort them after some days (lifecycle rule AbortIncompleteMultipartUpload)"
        )

    def _not_older(self, key: str) -> bool:
        """An unfinished upload that is none of an older attempt's."""
        found = _SAVE.fullmatch(key.removeprefix(f"{self.run}/"))
        return found is None or _attempt(found[2]) >= self.attempt

    # ---- the wait before a commit

    def _wait(self, manifest: Manifest, world: int, deadline_s: float) -> dict[str, Stored]:
        """The objects of a save once all uploaders have reported, listed after the last report."""
        owners = deal([f.size for f in manifest.files], world)
        step, uuid = manifest.step, manifest.uuid
        until, pause_s = time.monotonic() + deadline_s, 0.05
        while True:
            objects = self._objects(step, uuid)
            missing = [rank for rank in sorted(set(owners)) if f"objects-{rank}.json" not in objects]
            if not missing:
                break
            for rank in missing:
                if f"failed-{rank}.txt" in objects:
                    said = self.bucket.get(self._key(step, uuid, f"failed-{rank}.txt")) or b""
                    raise StorageError(
                        f"rank {rank} could not upload its part of step {step}",
                        code="SR603",
                        where=self._place(step, uuid),
                        why=said.decode(errors="replace"),
                    )
            if time.monotonic() >= until:
                ranks = ", ".join(map(str, missing))
                raise CommTimeout(
                    f"the upload of step {step} lacks {len(missing)} of {len(set(owners))} ranks: {ranks}",
                    where=self._place(step, uuid),
                    why=f"no report within {deadline_s:g} s",
                    try_="look at the logs of these ranks; committed checkpoints are untouched",
                )
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
        for rank in sorted(set(owners)):
            wanted = {
                f.name: f.size for f, owner in zip(manifest.files, owners, strict=True) if owner == rank
            }
            key = self._key(step, uuid, f"objects-{rank}.json")
            try:
                report = json.loads(self.bucket.get(key) or b"")
                found = (report["uuid"], report["rank"], report["world"], report["files"])
            except (ValueError, KeyError, TypeError) as fault:
                raise CheckpointError(f"the report {key} cannot be read: {fault!r}", code="SR561") from fault
            if found != (uuid, rank, world, wanted):
                raise InvariantError(
                    f"rank {rank} uploaded other files than it was dealt",
                    where=f"{self.bucket.url}/{key}",
                    why=f"it reports {found[3]}, dealt were {wanted}",
                )
        return objects

    def _say_failed(self, manifest: Manifest, rank: int, fault: SiraraError) -> None:
        """Tells rank 0, which otherwise learns it from the deadline: so it must when the store itself is the fault."""
        with contextlib.suppress(StorageError):
            key = self._key(manifest.step, manifest.uuid, f"failed-{rank}.txt")
            if not fault.code.startswith("SR66"):
                self.bucket.put(key, str(fault).encode())


def deal(sizes: Sequence[int], world: int) -> list[int]:
    """The rank that uploads each file: largest first to the rank with the fewest bytes, ties to the lowest rank.

    Every rank computes the same without talking.  The busiest rank has at most 4/3 of what is unavoidable.
    """
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(world)]
    for f in sorted(range(len(sizes)), key=lambda f: (-sizes[f], f)):
        load, owners[f] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[f], owners[f]))
    return owners


def _size_faults(manifest: Manifest, objects: Mapping[str, Stored]) -> list[str]:
    faults = []
    for f in manifest.files:
        if f.name not in objects:
            faults.append(f"{f.name} is missing")
        elif objects[f.name].size != f.size:
            faults.append(f"{f.name} has {objects[f.name].size} bytes, the manifest says {f.size}")
    return faults


def _attempt(uuid: str) -> int:
    return int(uuid[:8], 16)
