"""Generations: saves as a node's own tiers keep them, in shared memory or on the node's disk.

    <root>/<run>/gen-000001200-<uuid>/
        image-7        the image of rank 7, or
        arena-7        where it lies: the path of an arena that still holds this save
        rank-7.json    its description, written last: without it there is no image
        parity-0.1-4-0, parity-0.1-4-0.json    a block of parity and its description, also written last
        manifest.json  the commit: a copy of the manifest of this save

What is newest is decided by attempt, then step: the order in which saves were committed, also when a run went
back to an older step. Of each image and each block the newest `keep` committed ones stay; what was never
committed goes when something newer is. No torch here.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from sirara.checkpoint.arena import ArenaState, arena_head
from sirara.checkpoint.image import BLOCK, Image
from sirara.checkpoint.parity_block import ParityBlock
from sirara.checkpoint.slot import Slot, put_file
from sirara.checkpoint.storage import Disk, names_in, read_at, read_file, storage_error
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST, parse_manifest

CHUNK_BYTES = 4 << 20  # what is sent, encoded and hashed at once
Kind = Literal["arena", "image", "parity"]

_REPLACED = "SR552"  # of an arena that serves a later save
_FOLDER = re.compile(r"gen-(\d{9,})-([0-9a-f]{8}-[0-9a-f-]{27})")
_ITEM = re.compile(r"(rank-(\d+)|parity-([0-9.]+-\d+-\d+))\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One thing that a node keeps of a save.

    kind: an image in an arena, in a file of its own, or a block of parity.  tier: "memory" or "disk", where it lies.
    rank, world, node: of the image, node being the one where it was staged; -1, 0, -1 for parity.
    block, covers: name of the block of parity and the ranks whose images it helps to rebuild.
    """

    kind: Kind
    tier: str
    step: int
    uuid: str
    attempt: int
    committed: bool
    size: int
    rank: int = -1
    world: int = 0
    node: int = -1
    block: str = ""
    covers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Held":
        return Held(**{**fields, "covers": tuple(fields["covers"])})


class Replaced(str):
    """A sentence about an image whose arena serves a later save by now. Arenas are used in turn: this is no fault."""

    __slots__ = ()


class GenerationStore:
    """The generations of one run under one root on this node.

    Args:  root: in shared memory, or a folder of the node's disk.  durable: fsync everything (a disk).
           keep: committed generations of each image and block that stay.
    All keepers of the node, and readers, use the same folder at the same time: every file has one writer.
    """

    def __init__(
        self, root: Path, run: str, *, durable: bool = False, disk: Disk | None = None, keep: int = 2
    ) -> None:
        self.root, self.run, self.durable, self.keep = root, run, durable, max(1, keep)
        self.disk = disk or Disk()
        self.folder = root / run
        self.tier = "disk" if durable else "memory"
        self._committed: dict[tuple[str, int, int], bool] = {}

    # ---- writing

    def put_image(self, image: Image, data: memoryview) -> None:
        """Keeps a copy of a rank's image. Raises StorageError (no space, I/O)."""
        slot = self.new_image(image)
        try:
            _copy(data[: image.size], slot.data)
            self.keep_image(image, slot)
        finally:
            slot.discard()

    def new_image(self, image: Image) -> Slot:
        """Memory of a file for the image, to be filled and given to `keep_image`. Makes room: see `trim`."""
        self._check_run(image.run, f"the image of rank {image.rank}")
        self.trim(f"image-{image.rank}", starting=(image.step, image.uuid))
        folder = self._folder(image.step, image.uuid, make=True)
        return Slot(folder / f"image-{image.rank}", image.size, disk=self.disk, durable=self.durable)

    def keep_image(self, image: Image, slot: Slot) -> None:
        slot.keep(slot.path.with_name(f"rank-{image.rank}.json"), image.to_bytes())

    def note_arena(self, image: Image, arena: Path) -> None:
        """The image lies in an arena of this node; it is held until the arena is used for another save."""
        self._check_run(image.run, f"the image of rank {image.rank}")
        self.trim(f"arena-{image.rank}", starting=(image.step, image.uuid))
        folder = self._folder(image.step, image.uuid, make=True)
        self.disk.write_file(folder / f"arena-{image.rank}", str(arena).encode())
        description = folder / f"rank-{image.rank}.json"
        put_file(description, image.to_bytes(), disk=self.disk, durable=self.durable)

    def new_parity(self, step: int, uuid: str, name: str, size: int) -> Slot:
        """Zeros, to which blocks are added."""
        self.trim(f"parity-{name}", starting=(step, uuid))
        folder = self._folder(step, uuid, make=True)
        return Slot(folder / f"parity-{name}", size, disk=self.disk, durable=self.durable)

    def keep_parity(self, block: ParityBlock, slot: Slot) -> None:
        slot.keep(slot.path.with_name(f"parity-{block.name}.json"), block.to_bytes())

    def put_manifest(self, step: int, uuid: str, raw: bytes) -> bool:
        """Commits a generation and drops what is not needed any more; False when nothing of it is held here."""
        manifest = parse_manifest(raw, where=f"the manifest of step {step}")
        if (manifest.step, manifest.uuid, manifest.run) != (step, uuid, self.run):
            raise CheckpointError(
                f"the manifest is of step {manifest.step} ({manifest.uuid}) of run {manifest.run!r}, "
                f"not of step {step} ({uuid}) of run {self.run!r}",
                code="SR512",
            )
        folder = self._folder(step, uuid)
        if not folder.exists():
            return False
        put_file(folder / MANIFEST, raw, disk=self.disk, durable=self.durable)
        self.trim()
        return True

    def drop(self, step: int, uuid: str) -> None:
        """Everything of one generation, its manifest first."""
        folder = self._folder(step, uuid)
        if folder.exists():
            self.disk.remove(folder / MANIFEST)
            self.disk.remove_tree(folder)

    def trim(self, only: str | None = None, *, starting: tuple[int, str] | None = None) -> None:
        """Drops what newer committed generations replace.

        Args:  only: of this item ("image-7", "arena-7", "parity-0.1-4-0"); None: of all.
               starting: (step, uuid) of a save that is about to be written: it counts as one of the kept, so that at
               rest and during a save no more than `keep` of each item are held. The last committed one always stays.
        """
        keep = max(1, self.keep - 1) if starting is not None else self.keep
        committed: dict[str, int] = {}
        for step, uuid, folder in self._generations():
            if (step, uuid) == starting:
                continue
            commit = self._is_committed(folder, step, uuid)
            names = _names(folder)
            items = _items(names)
            for item in items if only is None else items.keys() & {only}:
                if commit:
                    committed[item] = committed.get(item, 0) + 1
                    gone = committed[item] > keep
                else:
                    # In progress, or what a failed save left: memory stays flat only if the next one removes it.
                    gone = item in committed or starting is not None
                if gone:
                    self._remove_item(folder, items[item])
            if commit or committed:
                # A newer one may be empty because another keeper has just made it.
                self._remove_if_empty(folder)

    def _remove_item(self, folder: Path, names: set[str]) -> None:
        # The description first: without it the rest is nothing.
        for name in sorted(names, key=lambda name: not name.endswith(".json")):
            self.disk.remove(folder / name)

    def _remove_if_empty(self, folder: Path) -> None:
        if _names(folder) <= {MANIFEST}:
            self.disk.remove_tree(folder)

    # ---- reading

    def inventory(self) -> list[Held]:
        """What can be read here, newest first; what cannot is left out and named by `faults`."""
        return [found for found in self._scan() if isinstance(found, Held)]

    def faults(self) -> list[str]:
        """One sentence for everything that is here and cannot be used: torn, damaged, foreign."""
        return [found for found in self._scan() if isinstance(found, str) and not isinstance(found, Replaced)]

    def replaced(self) -> list[Replaced]:
        """One sentence for every image whose arena was filled anew by a later save."""
        return [found for found in self._scan() if isinstance(found, Replaced)]

    def _scan(self) -> Iterator[Held | str]:
        for step, uuid, folder in self._generations():
            committed = self._is_committed(folder, step, uuid)
            names = _names(folder)
            if MANIFEST in names and not committed:
                yield f"{folder / MANIFEST} is torn, damaged or of another save"
            for name in sorted(names):
                found = _ITEM.fullmatch(name)
                if found is None:
                    continue
                try:
                    yield self._held(step, uuid, committed, found)
                except (CheckpointError, StorageError) as fault:
                    kind = Replaced if fault.code == _REPLACED else str
                    yield kind(fault.what + (f" ({fault.why})" if fault.why else ""))
            for item, files in sorted(_items(names).items()):
                if not any(name.endswith(".json") for name in files):
                    yield f"{folder / item} is torn: it was never completed"

    def _held(self, step: int, uuid: str, committed: bool, found: "re.Match[str]") -> Held:
        at = {
            "tier": self.tier,
            "step": step,
            "uuid": uuid,
            "attempt": _attempt(uuid),
            "committed": committed,
        }
        if found[2] is None:
            block = self.parity(step, uuid, found[3])
            path = self._folder(step, uuid) / f"parity-{found[3]}"
            _require_size(path, block.size)
            covers = tuple(m.rank for m in block.members)
            return Held(kind="parity", size=block.size, block=block.name, covers=covers, **at)
        image = self.image(step, uuid, int(found[2]))
        kind = self._where(image)[0]
        return Held(kind=kind, size=image.size, rank=image.rank, world=image.world, node=image.node, **at)

    def manifest(self, step: int, uuid: str) -> bytes | None:
        """The commit of a generation; None when it has none here."""
        folder = self._folder(step, uuid)
        return read_file(folder / MANIFEST) if self._is_committed(folder, step, uuid) else None

    def image(self, step: int, uuid: str, rank: int) -> Image:
        """Description of an image. Raises CheckpointError when it is torn, of another save or of another run."""
        path = self._folder(step, uuid) / f"rank-{rank}.json"
        image = Image.from_bytes(_read_present(path), where=str(path))
        self._check_own(path, image.run, image.step, image.uuid, step, uuid)
        if image.rank != rank:
            raise CheckpointError(f"{path} describes the image of rank {image.rank}", code="SR512")
        return image

    def parity(self, step: int, uuid: str, name: str) -> ParityBlock:
        """Description of a block of parity, with the same errors as `image`."""
        path = self._folder(step, uuid) / f"parity-{name}.json"
        block = ParityBlock.from_bytes(_read_present(path), where=str(path))
        self._check_own(path, block.run, block.step, block.uuid, step, uuid)
        if block.name != name:
            raise CheckpointError(f"{path} describes block {block.name}", code="SR512")
        return block

    def read(self, step: int, uuid: str, rank: int, buffers: Sequence[memoryview], position: int) -> None:
        """Fills the buffers from an image. The bytes are not checked: the caller has the hashes of the pieces.

        Raises CheckpointError when the image is not here, truncated or overwritten by another save.
        """
        self._read(self.image(step, uuid, rank), buffers, position)

    def read_parity(self, block: ParityBlock, chunk: int, buffer: memoryview) -> None:
        """Fills the buffer with one chunk of parity. Raises CheckpointError when its hash is wrong."""
        path = self._folder(block.step, block.uuid) / f"parity-{block.name}"
        _read_file_at(path, [buffer], chunk * CHUNK_BYTES)
        if xxhash.xxh3_128_digest(buffer) != block.hash(chunk):
            raise CheckpointError(
                f"block {block.name} of the parity of step {block.step} is damaged",
                code="SR550",
                where=str(path),
                why=f"bytes {chunk * CHUNK_BYTES} to {chunk * CHUNK_BYTES + len(buffer)} do not match their hash",
            )

    def bad_pieces(self, step: int, uuid: str, rank: int) -> list[int]:
        """Places (in the image's columns) of the pieces that do not match their hash; every byte is read."""
        image = self.image(step, uuid, rank)
        bad = []
        buffer = memoryview(bytearray(int(image.length.max(initial=0))))
        for n, (at, size) in enumerate(zip(image.position.tolist(), image.length.tolist(), strict=True)):
            self._read(image, [buffer[:size]], at)
            if xxhash.xxh3_128_digest(buffer[:size]) != image.hash(n):
                bad.append(n)
        return bad

    def _read(self, image: Image, buffers: Sequence[memoryview], position: int) -> None:
        kind, path = self._where(image)
        if position + sum(map(len, buffers)) > image.size:
            raise CheckpointError(
                f"{path} has {image.size} bytes of rank {image.rank}, bytes up to "
                f"{position + sum(map(len, buffers))} are asked",
                code="SR521",
            )
        _read_file_at(path, buffers, position + (BLOCK if kind == "arena" else 0))
        if kind == "arena":
            _require_arena(path, image)  # it may have been taken for the next save meanwhile

    def _where(self, image: Image) -> tuple[Kind, Path]:
        """The file that holds an image; an arena only while it holds this very save."""
        folder = self._folder(image.step, image.uuid)
        path = folder / f"image-{image.rank}"
        if path.exists():
            _require_size(path, image.size)
            return "image", path
        arena = Path(_read_present(folder / f"arena-{image.rank}").decode())
        _require_arena(arena, image)
        return "arena", arena

    def _check_own(self, path: Path, run: str, step: int, uuid: str, want_step: int, want_uuid: str) -> None:
        self._check_run(run, str(path))
        if (step, uuid) != (want_step, want_uuid):
            raise CheckpointError(f"{path} belongs to another save (step {step}, uuid {uuid})", code="SR512")

    def _check_run(self, run: str, what: str) -> None:
        if run != self.run:
            raise CheckpointError(f"{what} belongs to run {run!r}, this is run {self.run!r}", code="SR512")

    def _is_committed(self, folder: Path, step: int, uuid: str) -> bool:
        """True when the manifest of this very save is there, whole. A manifest never changes, so one look is enough."""
        path = folder / MANIFEST
        try:
            found = path.stat()
        except OSError:
            return False
        key = (str(path), found.st_size, found.st_mtime_ns)
        if key not in self._committed:
            try:
                m = parse_manifest(read_file(path), where=str(path))
                self._committed[key] = (m.step, m.uuid, m.run) == (step, uuid, self.run)
            except (CheckpointError, StorageError):
                self._committed[key] = False
        return self._committed[key]

    def _folder(self, step: int, uuid: str, *, make: bool = False) -> Path:
        folder = self.folder / f"gen-{step:09d}-{uuid}"
        if make and not folder.exists():
            self.disk.make_folder(folder)
            if self.durable:
                self.disk.sync_folder(self.folder)
        return folder

    def _generations(self) -> list[tuple[int, str, Path]]:
        """(step, uuid, folder) of each, newest first."""
        names = names_in(self.folder) if self.folder.exists() else set()
        matches = ((name, _FOLDER.fullmatch(name)) for name in names)
        found = [(int(match[1]), match[2], self.folder / name) for name, match in matches if match]
        return sorted(found, key=lambda g: (_attempt(g[1]), g[0]), reverse=True)


def _names(folder: Path) -> set[str]:
    """Names in a folder; none when it was dropped meanwhile."""
    try:
        return names_in(folder)
    except StorageError:
        if folder.exists():
            raise
        return set()


def _attempt(uuid: str) -> int:
    return int(uuid[:8], 16)


def _items(names: set[str]) -> dict[str, set[str]]:
    """The files of each thing that is kept: "image-7" (a file of its own), "arena-7" (a pointer), "parity-..."."""
    items: dict[str, set[str]] = {}
    for name in names:
        kind, _, rest = name.removesuffix(".part").removesuffix(".json").partition("-")
        if kind == "parity":
            items.setdefault(f"parity-{rest}", set()).add(name)
        elif kind in ("image", "arena", "rank") and rest.isdigit():
            copied = not names.isdisjoint({f"image-{rest}", f"image-{rest}.part"})
            items.setdefault(f"{'image' if copied else 'arena'}-{rest}", set()).add(name)
    return items


def _read_present(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as fault:
        raise CheckpointError(f"{path} is missing", code="SR521") from fault
    except OSError as fault:
        raise storage_error(fault, path) from fault


def _copy(source: memoryview, target: memoryview) -> None:
    # By numpy, which lets other threads run meanwhile; a slice of a memoryview does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _require_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as fault:
        raise CheckpointError(f"{path} is missing", code="SR521") from fault
    if found != size:
        raise CheckpointError(f"{path} has {found} bytes, {size} were written", code="SR521")


def _read_file_at(path: Path, buffers: Sequence[memoryview], position: int) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as fault:
        raise CheckpointError(f"{path} is missing", code="SR521") from fault
    except OSError as fault:
        raise storage_error(fault, path) from fault
    try:
        read_at(fd, path, [b for b in buffers if len(b)], position)
    finally:
        os.close(fd)


def _require_arena(path: Path, image: Image) -> None:
    """Raises CheckpointError unless the arena holds this very save, complete."""
    if not path.exists():
        raise CheckpointError(f"{path}, the arena of rank {image.rank}, is gone", code="SR521")
    head = arena_head(path)
    later = (_attempt(head.uuid), head.step) > (image.attempt, image.step) if head.uuid else False
    if head.state is ArenaState.EMPTY or later:
        now = f"is {'being ' if head.state is ArenaState.WRITING else ''}filled anew by step {head.step}"
        raise CheckpointError(
            f"{path} held rank {image.rank} of step {image.step} ({image.uuid}) and "
            + (now if later else "was emptied for the next save"),
            code=_REPLACED,
            why=f"its header says {head.state.name}, step {head.step}; arenas are used in turn",
        )
    if head.state is not ArenaState.READY or head.uuid != image.uuid or head.size < image.size:
        raise CheckpointError(
            f"{path} does not hold rank {image.rank} of step {image.step} ({image.uuid}) any more",
            code="SR551",
            why=f"its header says {head.state.name}, step {head.step}, uuid {head.uuid or 'none'}",
        )
