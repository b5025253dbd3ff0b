"""Every place on this machine, and every store it can reach, where saves of a run may lie; for tools, not for a run.

A resume asks the keepers' servers of all nodes; a tool has no servers and reads folders:

    <run>/checkpoints                         step folders
    <path of a tier>/<run>/gen-N-<uuid>       images and parity; with {node} in the path, those of every node seen here
    <url of the object tier>/<run>/step-N     objects

Nothing is changed here. What cannot be asked is said in `unasked`, and is not the same as empty.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sirara.checkpoint.copies import Copy
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Held, ParityBlock
from sirara.checkpoint.image import Image
from sirara.checkpoint.isal import Bytes, decode
from sirara.checkpoint.object import ObjectTier, StoredStep
from sirara.checkpoint.space import memory_folder
from sirara.config.load import load
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import CheckpointError, ConfigError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest

PATIENCE_S = 15.0
"""How long a tool waits for an object store that does not answer."""

_NODE = "{node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStore:
    """Images and parity of one node, as people call the place: "memory of node 2"."""

    name: str
    store: GenerationStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where saves of one run may lie besides its step folders.

    run: its id, as manifests have it.  unasked: places that could not be asked, with the reason.
    """

    run: str
    stores: tuple[NodeStore, ...] = ()
    objects: tuple[ObjectTier, ...] = ()
    unasked: tuple[str, ...] = ()


def places_of(run: RunFolder) -> Places:
    """The places that the run's configuration names; shared memory also without one."""
    unasked: list[str] = []
    tiers: list[TierConfig] = []
    if run.config.is_file():
        try:
            tiers = load(run.config).config.checkpoint.tiers
        except ConfigError as fault:
            unasked.append(f"the tiers that {run.config} names: {fault.what}")
    name = str(run.record().get("run", run.id))
    roots = (
        {(memory_folder(tiers, node=-1), False)}
        if not any(t.tier == "memory" and t.path for t in tiers)
        else set()
    )
    roots |= {(t.path, t.tier == "disk") for t in tiers if t.path is not None}
    stores = [
        NodeStore(name=_named(durable, node), store=GenerationStore(root, name, durable=durable))
        for path, durable in sorted(roots, key=lambda pair: (pair[1], str(pair[0])))
        for node, root in _nodes(path)
    ]
    objects = []
    for tier in tiers:
        if tier.tier == "object" and tier.url is not None:
            try:
                objects.append(ObjectTier(tier.url, tier.options, name, attempt=0, patience_s=PATIENCE_S))
            except ConfigError as fault:
                unasked.append(f"{tier.url}: {fault.what}")
    return Places(run=name, stores=tuple(stores), objects=tuple(objects), unasked=tuple(unasked))


def run_of(folder: Path) -> RunFolder | None:
    """The run whose checkpoints folder this is; None when it stands alone."""
    return RunFolder(folder.parent) if (folder.parent / "run.json").is_file() else None


def copies_of(places: Places, manifest: Manifest) -> tuple[list[Copy], list[str]]:
    """The copies of one save in these places, best first: images, parity, objects; and what could not be asked."""
    copies: list[Copy] = []
    unasked: list[str] = []
    sources: dict[int, tuple[GenerationStore, Image]] = {}
    blocks: list[tuple[GenerationStore, ParityBlock]] = []
    for at in places.stores:
        images = []
        for held in _held(at.store, manifest.uuid):
            try:
                if held.kind == "parity":
                    blocks.append((at.store, at.store.parity(held.step, held.uuid, held.block)))
                else:
                    images.append(at.store.image(held.step, held.uuid, held.rank))
            except (CheckpointError, StorageError) as fault:
                unasked.append(f"{at.name}: {fault.what}")
        for image in images:
            sources.setdefault(image.rank, (at.store, image))
        if images:
            copies.append(ImagesCopy(at.store, manifest, images, name=at.name))
    if blocks:
        copies.append(ParityCopy(manifest, sources, blocks))
    for tier in places.objects:
        try:
            saved = [s for s in tier.steps() if (s.step, s.uuid) == (manifest.step, manifest.uuid)]
            copies += [tier.open(s)[1] for s in saved]
        except (CheckpointError, StorageError) as fault:
            unasked.append(f"{tier.bucket.url}: {fault.what}")
    return copies, unasked


def manifests_of(places: Places, step: int | None = None) -> tuple[list[tuple[Manifest, str]], list[str]]:
    """The commits that these places have, of one step or of all, each with its place; and what could not be asked."""
    found: list[tuple[Manifest, str]] = []
    unasked: list[str] = []
    for at in places.stores:
        saves = {(h.step, h.uuid) for h in at.store.inventory() if h.committed and step in (None, h.step)}
        for saved in sorted(saves, reverse=True):
            raw = at.store.manifest(*saved)
            if raw is not None:
                found.append((parse_manifest(raw, where=f"{at.name}: {MANIFEST}"), at.name))
    for tier in places.objects:
        try:
            for saved in tier.steps():
                if step in (None, saved.step):
                    found.append((_object_manifest(tier, saved), tier.bucket.url))
        except (CheckpointError, StorageError) as fault:
            unasked.append(f"{tier.bucket.url}: {fault.what}")
    return found, unasked


def _object_manifest(tier: ObjectTier, saved: StoredStep) -> Manifest:
    return tier.open(saved)[0]


def _held(store: GenerationStore, uuid: str) -> Iterator[Held]:
    return (held for held in store.inventory() if held.uuid == uuid)


def _named(durable: bool, node: int | None) -> str:
    kind = "disk" if durable else "memory"
    return f"{kind} of this node" if node is None else f"{kind} of node {node}"


def _nodes(path: Path) -> list[tuple[int | None, Path]]:
    """(node, folder) of every node whose folder is seen here; node None where the path does not tell."""
    text = str(path)
    if _NODE not in text:
        return [(None, path)]
    pattern = re.compile(
        re.escape(text).replace(re.escape(_NODE), r"(\d+)", 1).replace(re.escape(_NODE), r"\1")
    )
    found = Path(path.anchor or ".").glob(text.replace(_NODE, "*").removeprefix(path.anchor))
    matches = [(match, folder) for folder in found if (match := pattern.fullmatch(str(folder)))]
    return sorted((int(match[1]), folder) for match, folder in matches)


class ImagesCopy(Copy):
    """The images of one save that one node keeps."""

    def __init__(
        self, store: GenerationStore, manifest: Manifest, images: Sequence[Image], *, name: str
    ) -> None:
        self.name, self._store = name, store
        self._step, self._uuid = manifest.step, manifest.uuid
        self._rank, self._position = _index(len(manifest.pieces), images)

    def locate(self, piece: int) -> tuple[str, int] | None:
        rank = int(self._rank[piece])
        return None if rank < 0 else (f"image of rank {rank}", int(self._position[piece]))

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        self._store.read(self._step, self._uuid, int(key.rpartition(" ")[2]), buffers, position)


class ParityCopy(Copy):
    """Images that no node has any more, decoded from the parity and the other images of their groups."""

    name = "parity"

    def __init__(
        self,
        manifest: Manifest,
        sources: dict[int, tuple[GenerationStore, Image]],
        blocks: Sequence[tuple[GenerationStore, ParityBlock]],
    ) -> None:
        self._sources = sources
        self._rows: dict[tuple[str, int], dict[int, tuple[GenerationStore, ParityBlock]]] = {}
        for store, block in blocks:
            self._rows.setdefault((block.group, block.stripe), {})[block.row] = (store, block)
        self._images: dict[int, Image] = {}
        self._stripe: dict[tuple[int, int], ParityBlock] = {}  # (rank, its block) -> any row of the stripe
        for rows in self._rows.values():
            block = next(iter(rows.values()))[1]
            for column, member in enumerate(block.members):
                self._stripe[member.rank, column] = block
                self._images[member.rank] = member.image
        whole = [image for rank, image in self._images.items() if self._decodable(rank)]
        self._rank, self._position = _index(len(manifest.pieces), whole)

    def locate(self, piece: int) -> tuple[str, int] | None:
        rank = int(self._rank[piece])
        return None if rank < 0 else (f"image of rank {rank}", int(self._position[piece]))

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        rank = int(key.rpartition(" ")[2])
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                at += self._decode(rank, position + at, buffer[at:])
            position += len(buffer)

    def _decodable(self, rank: int) -> bool:
        """Whether every block of a rank's image has k others of its stripe."""
        image = self._images[rank]
        stripes = [self._stripe.get((rank, c)) for c in range(-(-image.size // self._block_bytes(rank)))]
        return all(s is not None and len(self._others(rank, s)) >= s.k for s in stripes)

    def _block_bytes(self, rank: int) -> int:
        members = (m for (r, _), stripe in self._stripe.items() if r == rank for m in stripe.members)
        return max(1, next(m.block for m in members if m.rank == rank))

    def _others(self, rank: int, stripe: ParityBlock) -> list[int]:
        """Numbers of the blocks of a stripe that are here: columns of data, then k + row of parity."""
        data = [j for j, m in enumerate(stripe.members) if m.rank != rank and m.rank in self._sources]
        return data + [stripe.k + row for row in sorted(self._rows[stripe.group, stripe.stripe])]

    def _decode(self, rank: int, position: int, target: memoryview) -> int:
        """Fills the beginning of the target, as far as one block and one chunk of parity reach; returns its bytes."""
        column, at = divmod(position, self._block_bytes(rank))
        stripe = self._stripe.get((rank, column))
        if stripe is None or position >= self._images[rank].size:
            raise CheckpointError(f"the image of rank {rank} ends before byte {position}", code="SR521")
        length = min(len(target), self._block_bytes(rank) - at, CHUNK_BYTES - at % CHUNK_BYTES)
        chosen = self._others(rank, stripe)[: stripe.k]
        blocks: dict[int, Bytes] = {n: self._block(stripe, n, at, length) for n in chosen}
        decode(blocks, stripe.k, stripe.m, want=[column], targets=[np.frombuffer(target[:length], np.uint8)])
        return length

    def _block(self, stripe: ParityBlock, number: int, at: int, length: int) -> np.ndarray:
        """Bytes [at, at + length) of one block of a stripe; beyond its end it is zero."""
        out = np.zeros(length, np.uint8)
        if number >= stripe.k:
            store, block = self._rows[stripe.group, stripe.stripe][number - stripe.k]
            chunk = at // CHUNK_BYTES
            raw = bytearray(min(CHUNK_BYTES, block.size - chunk * CHUNK_BYTES))
            store.read_parity(block, chunk, memoryview(raw))
            part = raw[at - chunk * CHUNK_BYTES :][:length]
            out[: len(part)] = np.frombuffer(part, np.uint8)
            return out
        member = stripe.members[number]
        store, image = self._sources[member.rank]
        start = number * member.block + at
        have = max(0, min(length, member.block - at, image.size - start))
        if have:
            store.read(image.step, image.uuid, image.rank, [out[:have].data], start)
        return out


def _index(pieces: int, images: Sequence[Image]) -> tuple[np.ndarray, np.ndarray]:
    """Of every piece: the rank whose image holds it (-1: none) and its place there."""
    rank, position = np.full(pieces, -1, np.int64), np.zeros(pieces, np.int64)
    for image in images:
        rank[image.index], position[image.index] = image.rank, image.position
    return rank, position
