"""What a keeper does with a save, phase by phase. No torch here.

    arena, whole and of this save? ─► rows from neighbours' arenas ─► hashes and state digest (threads)
        ├─► node tiers   keep ─ report over the link ─► rank 0: manifest to every node
        └─► disk         files of the step folder ─ report file ─► rank 0: commit ─ read back ─ retention
                             └─► object store   each rank its share of the committed folder ─► rank 0: commit, while
                                                the next saves go on

Node tiers and the disk go on at the same time and do not wait for each other; the manifest is the same, byte for byte,
because everything in it follows from the job and the reports.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sirara.checkpoint.arena import Arena, ArenaState, arena_name, claim, withdraw
from sirara.checkpoint.assembly import Assembly
from sirara.checkpoint.commit import Committer, extra_entries, extra_files, wait_for_commit
from sirara.checkpoint.image import Image, ImagePlan, image_plan
from sirara.checkpoint.job import (
    JobEnd,
    KeeperSettings,
    SaveJob,
    TierResult,
    UploadEnd,
    fault_fields,
    fault_from,
)
from sirara.checkpoint.nodes import NodeTiers, is_node_tier
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.readback import Rests
from sirara.checkpoint.report import (
    Report,
    assemble,
    begin_part,
    checked_report,
    report_name,
    tell_committer,
    told_failure,
    wait_for_reports,
)
from sirara.checkpoint.steps import step_name, temp_name
from sirara.checkpoint.storage import Disk
from sirara.checkpoint.uploading import Uploads
from sirara.checkpoint.writer import hash_image, write_image
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import InvariantError, SiraraError, StorageError
from sirara.pure.digest import UNSIGNED, Digest, digest_box
from sirara.pure.manifest import FileEntry, Manifest
from sirara.pure.saveplan import ITEM_BYTES, SavePlan

ORPHAN_S = 10.0
"""How long a committer without a trainer waits for reports, at least: the other trainers may be gone as well."""

NODE_DISK = "node disk"
"""What outcomes call the images on a node's own disk; "disk" is the step folder that all ranks share."""

_log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True)
class _Taken:
    """What is computed of an image beside the writing: hashes of its pieces, its part of the state digest."""

    hashes: Future[bytes]
    digest: Future[Digest]


class Keeper:
    """Keeps what lies in an arena: hashes it, gives it to the tiers that are due, reports; rank 0 commits.

    Args:  orphaned: whether the trainer is gone.  uploaded: told, from another thread, how an upload ended.
    """

    def __init__(
        self,
        settings: KeeperSettings,
        *,
        orphaned: Callable[[], bool] = lambda: False,
        uploaded: Callable[[UploadEnd], None] = lambda end: None,
        disk: Disk | None = None,
    ) -> None:
        self._settings, self._orphaned = settings, orphaned
        self._disk = disk or Disk()
        self._plan = SavePlan.from_bytes(Path(settings.plan).read_bytes())
        Path(settings.plan).unlink(missing_ok=True)  # it may be large, and every keeper gets it anew
        self._image = image_plan(self._plan, settings.rank)
        self._folder, self._memory = Path(settings.folder), Path(settings.memory)
        self._assembly = Assembly(self._plan, self._image, self._memory)
        run = RunFolder(settings.run_folder) if settings.run_folder else None
        if run is not None:
            run.record_process(settings.attempt, role="writer", rank=settings.rank)
        self._fence = None if run is None else partial(run.check_attempt, settings.attempt)
        claim(self._memory, f"keeper-{settings.rank}", checkpoints=self._folder)
        self._committer = Committer(
            self._disk,
            self._folder,
            run=settings.run,
            attempt=settings.attempt,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.keep_best,
            fence=self._fence,
        )
        self._arenas: dict[str, Arena] = {}
        self._files: dict[str, bytes] = {}
        self._last: SaveJob | None = None
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="keep")
        tiers = [TierConfig.model_validate(tier) for tier in settings.tiers]
        self._nodes = self._open_nodes(tiers)
        store = next((tier for tier in tiers if tier.tier == "object"), None)
        self._uploads = None
        if store is not None:
            self._uploads = Uploads(
                ObjectTier(store.url or "", store.options, settings.run, attempt=settings.attempt),
                settings,
                total_bytes=self._plan.total_bytes,
                fence=self._fence,
                ended=uploaded,
            )

    @property
    def address(self) -> str:
        """Where keepers of other nodes find this one, "" without node tiers."""
        return self._nodes.address if self._nodes else ""

    def keep(self, job: SaveJob) -> JobEnd:
        """Does one job to its end; what fails is in the result."""
        self._last = job
        try:
            return self._keep(job)
        except Exception as fault:  # noqa: BLE001  whatever it is, the trainer must hear of it
            _log.exception("the save of step %d failed", job.step)
            return JobEnd(step=job.step, uuid=job.uuid, fault=as_ours(fault))

    def leave(self) -> None:
        """The trainer is gone: arenas that no restart would read go as well."""
        if self._nodes is not None:
            return
        if self._last is not None:
            # Keepers of the same node may still copy their rows from this arena.
            wait_for_commit(
                self._folder,
                run=self._settings.run,
                step=self._last.step,
                uuid=self._last.uuid,
                wait_s=ORPHAN_S,
            )
        names = [
            Path(self._settings.plan).name,
            *(arena_name(self._settings.rank, which) for which in (0, 1)),
        ]
        withdraw(self._memory, names, who=(f"keeper-{self._settings.rank}", f"trainer-{self._settings.rank}"))

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        if self._uploads is not None:
            self._uploads.close()
        self._threads.shutdown()

    # ---- one save

    def _keep(self, job: SaveJob) -> JobEnd:
        clock, s = Clock(), self._settings
        if s.rank == 0:
            self._files = job.hf_files or self._files
        with contextlib.ExitStack() as undo:
            undo.push(partial(self._undo, job))
            data = self._arena(job).data
            self._assembly.fill(
                data, job.uuid, deadline_s=job.deadline_s, orphaned=self._orphaned, orphan_s=ORPHAN_S
            )
            clock.lap("assemble")
            taken = _Taken(
                self._threads.submit(hash_image, self._image, data),
                self._threads.submit(_digest, self._plan, self._image, data),
            )
            nodes = self._threads.submit(self._keep_in_nodes, job, data, taken)
            end = self._keep_on_disk(job, data, taken, clock) if "disk" in job.tiers else None
            undo.pop_all()
        kept, digest = nodes.result()
        if end is None:
            end = JobEnd(step=job.step, uuid=job.uuid, digest=digest, fault=_none_kept(job, kept))
        if self._uploads is not None and "object" in job.tiers and end.fault is None:
            self._uploads.begin(job)
        total = self._plan.total_bytes if s.rank == 0 else 0
        return replace(end, tiers=kept | end.tiers, seconds=clock.laps, total_bytes=total)

    def _undo(self, job: SaveJob, kind: object, fault: BaseException | None, trace: object) -> None:
        """What a save that failed leaves to the others: the news, or on rank 0 nothing."""
        if fault is None:
            return
        temp = self._folder / temp_name(job.step, job.uuid)
        if self._settings.rank == 0:
            self._committer.abandon(temp)
        else:
            with contextlib.suppress(StorageError):
                self._disk.make_folder(temp)
            tell_committer(self._disk, temp, self._settings.rank, as_ours(fault))

    def _report(self, job: SaveJob, taken: _Taken, tiers: Mapping[str, TierResult] | None = None) -> Report:
        return Report(
            uuid=job.uuid,
            attempt=job.attempt,
            step=job.step,
            rank=self._settings.rank,
            plan=self._plan.digest,
            lengths=tuple(self._image.length.tolist()),
            hashes=taken.hashes.result(),
            digest=taken.digest.result().signed(),
            tiers=dict(tiers or {}),
        )

    def _manifest(
        self, job: SaveJob, reports: Mapping[int, Report], extras: Sequence[FileEntry]
    ) -> tuple[Manifest, str]:
        digest = str(Digest.from_rows(report.digest for report in reports.values()))
        manifest = assemble(
            self._plan,
            reports,
            extras,
            uuid=job.uuid,
            run=self._settings.run,
            attempt=job.attempt,
            step=job.step,
            record={**job.record, "digest": digest},
            aliases=job.aliases,
        )
        return manifest, digest

    # ---- the step folder

    def _keep_on_disk(self, job: SaveJob, data: memoryview, taken: _Taken, clock: "Clock") -> JobEnd:
        temp, final = self._folder / temp_name(job.step, job.uuid), self._folder / step_name(job.step)
        self._write(job, temp, data, taken)
        clock.lap("write")
        if self._settings.rank != 0:
            return JobEnd(step=job.step, uuid=job.uuid)
        committer = self._committer
        committer.ended.update(job.ended)
        reports = wait_for_reports(
            self._plan,
            temp,
            uuid=job.uuid,
            step=job.step,
            deadline_s=job.deadline_s,
            orphaned=self._orphaned,
            # The others write about as much as this rank did.
            orphan_s=max(ORPHAN_S, 4 * sum(clock.laps.values())),
        )
        # Only now: while others write, every fsync waits for what the device has taken in from them.
        extras = committer.write_extras(self._plan, temp, self._files)
        manifest, digest = self._manifest(job, reports, extras)
        committer.commit(temp, final, manifest)
        clock.lap("commit")
        rests = Rests(hurry=lambda: job.patient or self._orphaned())
        committer.verify(final, rests=rests)
        spare = frozenset(self._uploads.under_way) if self._uploads is not None else frozenset()
        committer.tidy(job.step, job.uuid, scores=job.scores, spare=spare)
        clock.lap("verify", without_s=rests.rested_s)
        kept = TierResult(ok=True, bytes=self._plan.total_bytes, seconds=sum(clock.laps.values()))
        return JobEnd(step=job.step, uuid=job.uuid, digest=digest, path=str(final), tiers={"disk": kept})

    def _write(self, job: SaveJob, temp: Path, data: memoryview, taken: _Taken) -> None:
        """This rank's part of the step folder, and its report."""
        disk, s, plan, image = self._disk, self._settings, self._plan, self._image
        begin_part(disk, temp, rank=s.rank, size=int(image.length.sum()), alone=s.world == 1)
        if s.rank in plan.writers:
            write_image(
                disk, temp, plan=plan, rank=s.rank, data=data, image=image, uuid=job.uuid, step=job.step
            )
            disk.write_file(temp / report_name(s.rank), self._report(job, taken).to_bytes(), durable=False)

    # ---- node tiers

    def _open_nodes(self, tiers: Sequence[TierConfig]) -> NodeTiers | None:
        s = self._settings
        if not any(is_node_tier(tier) for tier in tiers):
            return None
        return NodeTiers(
            tiers,
            run=s.run,
            rank=s.rank,
            world=s.world,
            local_size=s.ranks_per_node,
            node=s.node,
            attempt=s.attempt,
            token=s.token,
            memory=self._memory.parent,
            host=s.host,
            disk=self._disk,
        )

    def _keep_in_nodes(
        self, job: SaveJob, data: memoryview, taken: _Taken
    ) -> tuple[dict[str, TierResult], str]:
        """Results of the node tiers that are due (rank 0: over all ranks), and the state digest on rank 0."""
        nodes, s = self._nodes, self._settings
        due = [] if nodes is None else [t for t in job.tiers if t in nodes.names]
        if nodes is None or not due:
            return {}, ""
        nodes.meet(dict(enumerate(job.addresses)))
        image = Image(
            uuid=job.uuid,
            run=s.run,
            attempt=job.attempt,
            step=job.step,
            rank=s.rank,
            world=s.world,
            node=s.node,
            size=self._image.size,
            index=self._image.index,
            position=self._image.position,
            length=self._image.length,
            hashes=taken.hashes.result(),
        )
        kept = nodes.keep(
            image,
            data[: self._image.size],
            tiers=due,
            arena=Path(job.arena),
            deadline_s=job.deadline_s,
        )
        try:
            nodes.report(job.uuid, self._report(job, taken, kept).to_bytes())
            if s.rank != 0:
                return _named(kept), ""
            return self._commit_in_nodes(job, nodes, due)
        except SiraraError as fault:
            _log.warning("step %d: %s", job.step, fault)
            lost = TierResult(ok=False, fault=fault.what + (f" ({fault.why})" if fault.why else ""))
            return _named(dict.fromkeys(due, lost)), ""

    def _commit_in_nodes(
        self, job: SaveJob, nodes: NodeTiers, due: Sequence[str]
    ) -> tuple[dict[str, TierResult], str]:
        # Every rank has a node, so every rank reports, also one without pieces.
        raw = nodes.reports(
            job.uuid,
            range(self._settings.world),
            deadline_s=job.deadline_s,
            hopeless=partial(self._hopeless, job),
            patience_s=ORPHAN_S,
        )
        reports = {r: checked_report(self._plan, raw[r], r, job.uuid, where="its report") for r in raw}
        kept = {tier: _joint([report.tiers.get(tier) for report in reports.values()]) for tier in due}
        manifest, digest = self._manifest(job, reports, extra_entries(extra_files(self._plan, self._files)))
        if any(result.ok for result in kept.values()):
            if self._fence is not None:
                self._fence()
            faults = nodes.commit(job.step, job.uuid, manifest.to_bytes(), deadline_s=job.deadline_s)
            if faults:
                node, why = min(faults.items())
                what = f"the manifest did not reach {len(faults)} nodes; node {node}: {why}"
                kept = {tier: replace(r, ok=False, fault=r.fault or what) for tier, r in kept.items()}
        return _named(kept), digest

    def _hopeless(self, job: SaveJob) -> str:
        """Why reports that are missing will hardly come: a keeper that was killed reports to nobody."""
        if self._orphaned():
            return "the training has ended"
        return told_failure(self._folder / temp_name(job.step, job.uuid))

    def _arena(self, job: SaveJob) -> Arena:
        arena = self._arenas.get(job.arena)
        if arena is None or arena.size != Path(job.arena).stat().st_size:
            arena = self._arenas[job.arena] = Arena.open(Path(job.arena))
        head = arena.head
        if (head.state, head.uuid) != (ArenaState.READY, job.uuid):
            raise InvariantError(
                f"the arena does not hold save {job.uuid}",
                where=job.arena,
                why=f"it is {head.state.name} with save {head.uuid}",
            )
        return arena


def as_ours(fault: BaseException) -> SiraraError:
    """Any error as one of ours."""
    return fault if isinstance(fault, SiraraError) else fault_from(fault_fields(fault))


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str, *, without_s: float = 0.0) -> None:
        """The phase that ends now began with the end of the one before; of it, `without_s` are not counted."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._at - without_s
        self._at = now


def _digest(plan: SavePlan, image: ImagePlan, data: memoryview) -> Digest:
    """The part of the state digest that lies in an image: every element is in one piece of one rank."""
    total = Digest()
    for piece, at in zip(plan.pieces_of.get(image.rank, ()), image.position.tolist(), strict=True):
        tensor = plan.tensors[piece.tensor]
        item = ITEM_BYTES[tensor.dtype]
        bits = np.frombuffer(data, UNSIGNED[item], count=piece.length // item, offset=at)
        total += digest_box(tensor.name, tensor.shape, piece.box, bits)
    return total


def _joint(results: Sequence[TierResult | None]) -> TierResult:
    """One tier over all ranks: kept when every rank kept its part."""
    known = [result or TierResult(ok=False, fault="a rank said nothing") for result in results]
    bad = next((f"rank {rank}: {result.fault}" for rank, result in enumerate(known) if not result.ok), "")
    return TierResult(
        ok=not bad,
        fault=bad,
        bytes=sum(result.bytes for result in known),
        seconds=max(result.seconds for result in known),
    )


def _named(kept: Mapping[str, TierResult]) -> dict[str, TierResult]:
    return {NODE_DISK if tier == "disk" else tier: result for tier, result in kept.items()}


def _none_kept(job: SaveJob, kept: Mapping[str, TierResult]) -> SiraraError | None:
    """The fault of a save that was for node tiers alone."""
    if any(result.ok for result in kept.values()):
        return None
    why = "; ".join(f"{tier}: {result.fault}" for tier, result in kept.items())
    return StorageError(f"step {job.step} is kept by none of {', '.join(job.tiers)}", code="SR607", why=why)
