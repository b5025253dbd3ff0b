"""Restoring: the newest step that all ranks can read, from whatever tiers hold it, and what was wrong with others.

    rank 0        asks the nodes, the run's folder and the object store ─► <run>/control/restore-<attempt>.json
    all ranks     candidates, newest first ─► prepare ─ open ─ read, agreeing after each
                    ├── all ranks could      restored
                    └── one could not        the next older one, with the reason

Each piece comes from the first of these that has it right: own memory, memory of another node, parity, a disk, the
object store.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import xxhash

from sirara.checkpoint.copies import Copy, FolderCopy, ImagesCopy, ParityCopy
from sirara.checkpoint.handing import appeared, share_descriptions
from sirara.checkpoint.image import Image
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.serve import NodeView
from sirara.checkpoint.share import Agree, OtherRankFailed, reason
from sirara.checkpoint.sources import Source, TierRow, choose
from sirara.checkpoint.step_folder import check_identity, open_manifest, read_manifest
from sirara.checkpoint.steps import committed_steps, step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, CommError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest

_log = logging.getLogger("sirara")

MOST_STEPS = 256
"""Committed steps that a resume looks at, newest first."""

_FAULTS = (CheckpointError, StorageError, CommError)


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
        f"none of the {len(skipped)} steps that were found can be read",
        code="SR530",
        where=str(where),
        why="; ".join(f"step {step}: {fault}" for step, fault in skipped),
        try_=[
            "sirara ckpt why RUN    which steps there were, and where",
            "sirara ckpt verify RUN    every bad piece by name",
        ],
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


class Restorer:
    """What a resume asks of all tiers; every rank has one and calls it alike.

    Args:  checkpoints, control: of the run.  views: node -> what it holds, for the nodes of this attempt.
           objects: the object store, if it is among the tiers.  node: of this rank.
           decode: has a node decode an image from parity into its memory: (node, step, uuid, rank).
           leads: this rank has its own node do its share of that before a step is read.
           agree: the first fault of any rank.  texts: this rank's text to all, in rank order; both collective.
    """

    def __init__(
        self,
        *,
        checkpoints: Path,
        control: Path,
        run: str,
        attempt: int,
        rank: int,
        node: int,
        agree: Agree,
        texts: Callable[[str], Sequence[str]],
        views: Mapping[int, NodeView] | None = None,
        objects: ObjectTier | None = None,
        decode: Callable[[int, int, str, int], object] | None = None,
        leads: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self.checkpoints, self.control, self.run, self.attempt = checkpoints, control, run, attempt
        self.rank, self.node, self.agree, self.texts = rank, node, agree, texts
        self.views, self.objects, self.decode, self.leads = dict(views or {}), objects, decode, leads
        self._disk = disk or Disk()
        self.table: list[TierRow] = []
        self._images: dict[int, Image] = {}  # of the step in hand

    def restore(
        self, read: Callable[[Snapshot], None], *, distrust: Callable[[int, str], None]
    ) -> tuple[Snapshot, Restored] | None:
        """Reads the newest step that every rank can read; None when no tier has any.  Collective.

        Raises:  CheckpointError naming every step and its reason when there are some and none can be read;
                 StorageError when there is none, but a tier could not be asked.
        """
        sources = self._sources()
        try:
            found = read_first(
                [
                    Candidate(step=s.step, prepare=partial(self._prepare, s), open=partial(self._open, s))
                    for s in sources
                ],
                read,
                agree=self.agree,
                distrust=distrust,
                where=str(self.checkpoints),
            )
        finally:
            if self.rank == 0:
                self._clean()
        if found is None:
            return None
        snapshot, skipped = found
        if self._sum_up(snapshot, skipped):
            distrust(snapshot.step, "pieces of it are bad on the disk; they were taken from another copy")
        return snapshot, Restored(step=snapshot.step, skipped=skipped, table=tuple(self.table))

    # ---- what there is

    def _sources(self) -> list[Source]:
        """Rank 0 asks, all know."""
        path, fault, check = self.control / f"restore-{self.attempt}.json", "", ""
        sources: list[Source] = []
        if self.rank == 0:
            try:
                sources = self._ask()
                raw = json.dumps(
                    {
                        "attempt": self.attempt,
                        "sources": [s.to_json() for s in sources],
                        "table": [asdict(row) for row in self.table],
                    }
                ).encode()
                self._disk.make_folder(self.control)
                self._disk.write_file(path, raw)
                check = xxhash.xxh3_128_hexdigest(raw)
            except _FAULTS as error:
                fault = reason(error)
        fault = self.agree(fault)
        if fault:
            raise StorageError(f"nobody knows which steps can be restored: {fault}", code="SR605")
        check = self.texts(check)[0]
        if self.rank:
            try:
                fields = json.loads(appeared(path, check))
                sources = [Source.from_json(f) for f in fields["sources"]]
                self.table = [TierRow(**row) for row in fields["table"]]
            except _FAULTS as error:
                fault = reason(error)
        fault = self.agree(fault)
        if fault:
            raise StorageError(f"the plan of the restore cannot be read: {fault}", code="SR605")
        return sources

    def _ask(self) -> list[Source]:
        """On rank 0: the inventory of all tiers.  A tier that cannot be asked is not an empty one."""
        silent: list[StorageError | CheckpointError | CommError] = []
        held = {}
        for node, view in self.views.items():
            try:
                held[node], faults, replaced = view.inventory()
            except _FAULTS as fault:
                silent.append(fault)
                self.table.append(
                    TierRow(step=None, tier="memory", what=f"{view.name} cannot be asked", why=reason(fault))
                )
                continue
            for what in faults:
                self.table.append(
                    TierRow(step=None, tier="memory", what=f"unusable on {view.name}", why=what)
                )
            if replaced:
                what = f"{len(replaced)} older images on {view.name} made room for later saves, as arenas do"
                self.table.append(TierRow(step=None, tier="memory", what=what))
        stored: list[tuple[int, str]] = []
        if self.objects is not None:
            try:
                stored = [(save.step, save.uuid) for save in self.objects.steps()][:MOST_STEPS]
            except _FAULTS as fault:
                silent.append(fault)
                row = TierRow(step=None, tier="object", what="the store cannot be asked", why=reason(fault))
                self.table.append(row)
        elsewhere = {h.step for inventory in held.values() for h in inventory} | {step for step, _ in stored}
        folder = {
            step: self._uuid_of(step) if step in elsewhere else ""
            for step in committed_steps(self.checkpoints)[:MOST_STEPS]
        }
        sources, rows = choose(held, folder=folder, stored=stored)
        self.table = rows + self.table
        if not sources and silent:
            raise silent[0]
        return sources

    def _uuid_of(self, step: int) -> str:
        try:
            return open_manifest(self.checkpoints / step_name(step), check_sizes=False).uuid
        except _FAULTS as fault:
            self.table.append(TierRow(step=step, tier="disk", what="not usable", why=reason(fault)))
            return ""

    # ---- one step

    def _prepare(self, source: Source) -> None:
        """All that must be there before a rank opens the step.  Collective, also where it raises."""
        fault: Exception | None = None
        try:
            self._provide(source)
        except _FAULTS as error:
            fault = error
        self._images = self._share_descriptions(source)
        if fault is not None:
            raise fault

    def _provide(self, source: Source) -> None:
        """Rank 0 hands over the manifest where the folder has none; each node decodes its share of lost images."""
        if self.rank == 0 and not source.folder:
            self._disk.write_file(self._handed(source), self._manifest_of(source))
        for rank in (rank for rank, node in source.absent if node == self.node and self.leads):
            try:
                self._decode(self.node, source, rank)
            except _FAULTS as fault:
                if not source.folder and not source.stored:
                    raise
                _log.warning("the image of rank %d was not decoded: %s", rank, reason(fault))

    def _manifest_of(self, source: Source) -> bytes:
        faults = []
        for node in sorted({p.node for p in source.images} | {node for _, node in source.parity}):
            try:
                raw = self.views[node].manifest(source.step, source.uuid)
            except _FAULTS as fault:
                faults.append(reason(fault))
                continue
            if raw is not None:
                return raw
        if source.stored and self.objects is not None:
            return self.objects.manifest(source.step, source.uuid)
        raise CheckpointError(
            f"no node has the manifest of step {source.step}", code="SR513", why="; ".join(faults)
        )

    def _open(self, source: Source) -> Snapshot:
        path = self.checkpoints / step_name(source.step)
        if source.folder and not source.images and not source.parity and not source.stored:
            return Snapshot(path, run=self.run, step=source.step)
        where = path / MANIFEST if source.folder else self._handed(source)
        raw = read_manifest(path) if source.folder else appeared(where)
        manifest = parse_manifest(raw, where=str(where))
        check_identity(manifest, str(where), run=self.run, step=source.step)
        if manifest.uuid != source.uuid:
            raise CheckpointError(f"{where} is of save {manifest.uuid}, not {source.uuid}", code="SR512")
        copies = self._image_copies(source, manifest)
        if source.folder:
            copies.append(FolderCopy(path, manifest))
        if source.stored and self.objects is not None:
            copies.append(self.objects.copy(manifest))
        return Snapshot.over(manifest, copies, path=path if source.folder else None)

    def _image_copies(self, source: Source, manifest: Manifest) -> list[Copy]:
        """What nodes hold, nearest first: own memory, other nodes' memory, parity, disks of nodes."""
        images = self._images
        # From the next node on, so that not all ask the same one.
        nodes = sorted(self.views, key=lambda node: (node - self.node) % (1 + max(self.views)))
        copies: list[Copy] = []
        for tier in ("memory", "parity", "disk"):
            for node in nodes:
                far, view = node != self.node, self.views[node]
                away = f" on node {node}" if far else ""
                if tier == "parity":
                    there = [images[r] for r, by in source.parity if by == node and r in images]
                    decode = partial(self._decode_at, node, source)
                    copy = ParityCopy(f"parity{away}", manifest, there, view, far=far, decode=decode)
                else:
                    near_name = "memory" if tier == "memory" else "disk of this node"
                    name = near_name if not far else "peer" if tier == "memory" else "disk"
                    there = [
                        images[p.rank]
                        for p in source.images
                        if (p.node, p.tier) == (node, tier) and p.rank in images
                    ]
                    copy = ImagesCopy(name + away, manifest, there, view, far=far)
                if copy.ranks:
                    copies.append(copy)
        return copies

    def _decode_at(self, node: int, source: Source, rank: int) -> None:
        if (rank, node) not in source.absent:  # those were decoded before
            self._decode(node, source, rank)

    def _decode(self, node: int, source: Source, rank: int) -> None:
        if self.decode is None:
            raise CheckpointError(f"the image of rank {rank} cannot be decoded: there is no parity tier")
        self.decode(node, source.step, source.uuid, rank)

    def _share_descriptions(self, source: Source) -> dict[int, Image]:
        """Of the images of all ranks; they are alike wherever the image lies.  Collective."""
        holders: dict[int, list[int]] = {}
        for rank, node in [(p.rank, p.node) for p in source.images] + list(source.absent):
            if node in self.views:
                holders.setdefault(rank, []).append(node)
        if not holders:
            return {}
        return share_descriptions(
            holders,
            ask=lambda node, image: self.views[node].image(source.step, source.uuid, image),
            rank=self.rank,
            node=self.node,
            texts=self.texts,
            stem=self._handed(source).with_suffix(".images"),
            disk=self._disk,
        )

    # ---- the end

    def _sum_up(self, snapshot: Snapshot, skipped: Sequence[tuple[int, str]]) -> bool:
        """Adds to the table what was taken from where, on all ranks together, and logs it on rank 0.

        Returns:  whether pieces are bad in the run's folder.
        """
        own: dict[str, int] = {}
        for name, size in snapshot.taken.items():
            own[name.split()[0]] = own.get(name.split()[0], 0) + size
        total: dict[str, int] = {}
        for text in self.texts(json.dumps(own)):
            for tier, size in json.loads(text or "{}").items():
                total[tier] = total.get(tier, 0) + size
        on_disk = sum(note.copy == "disk" for note in snapshot.notes)
        counts = [text.split() for text in self.texts(f"{len(snapshot.notes)} {on_disk}")]
        bad = sum(int(count) for count, _ in counts)
        for note in snapshot.notes:
            _log.warning("step %d: %s", snapshot.step, note)
        self.table += [TierRow(step=step, tier="", what="skipped", why=why) for step, why in skipped]
        self.table += [
            TierRow(
                step=snapshot.step, tier=name.split()[0], what=f"{size / 2**20:.1f} MiB taken from {name}"
            )
            for name, size in total.items()
        ]
        if bad:
            self.table.append(
                TierRow(
                    step=snapshot.step, tier="", what=f"{bad} pieces were bad in one copy and good in another"
                )
            )
        if self.rank == 0 and (self.views or self.objects or skipped or bad):
            _log.info("where the checkpoints were:\n%s", "\n".join(map(str, self.table)))
        return any(int(count) for _, count in counts)

    def _handed(self, source: Source) -> Path:
        return self.control / f"restore-{self.attempt}-{source.uuid}.manifest"

    def _clean(self) -> None:
        for path in (*self.control.glob("restore-*.manifest"), *self.control.glob("restore-*.images*")):
            with suppress(StorageError):
                self._disk.remove(path)
