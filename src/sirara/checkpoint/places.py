"""Every place on this machine, and every store it can reach, where saves of a run may lie; for tools, not for a run.

A resume asks the keepers' servers of all nodes; a tool has no servers and reads folders:

    <run>/checkpoints                         step folders
    <path of a tier>/<run>/gen-N-<uuid>       images and parity; with {node} in the path, those of every node seen here
    <url of the object tier>/<run>/step-N     objects

Nothing is changed here. What cannot be asked is said in `unasked`, and is not the same as empty.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.arena import memory_root
from sirara.checkpoint.copies import Copy, ImagesCopy, ParityCopy
from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.image import Image
from sirara.checkpoint.object import ObjectTier, StoredStep
from sirara.checkpoint.parity import block_range, rebuild
from sirara.checkpoint.parity_block import ParityBlock
from sirara.checkpoint.serve import LocalNode
from sirara.checkpoint.space import memory_path
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
    """Images and parity of one node, as people call the place: "memory of node 2".

    node: None when the path does not tell: of this machine, whatever number it has.
    """

    name: str
    store: GenerationStore
    node: int | None = None


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
    roots = {(memory_root(None, 0), False)} if memory_path(tiers) is None else set()
    roots |= {(Path(t.path), t.tier == "disk") for t in tiers if t.path is not None}
    stores = [
        NodeStore(name=_named(durable, node), store=GenerationStore(root, name, durable=durable), node=node)
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


def copies_of(
    places: Places, manifest: Manifest, *, scratch: Path | None = None
) -> tuple[list[Copy], list[str]]:
    """The copies of one save in these places, best first: images, parity, objects; and what could not be asked.

    scratch: folder for images that are decoded from parity; without it they are found and cannot be read.
    """
    copies: list[Copy] = []
    unasked: list[str] = []
    blocks: list[ParityBlock] = []
    present: set[int] = set()
    for at in places.stores:
        images = []
        for held in at.store.inventory():
            if held.uuid != manifest.uuid:
                continue
            try:
                if held.kind == "parity":
                    blocks.append(at.store.parity(held.step, held.uuid, held.block))
                else:
                    images.append(at.store.image(held.step, held.uuid, held.rank))
            except (CheckpointError, StorageError) as fault:
                unasked.append(f"{at.name}: {fault.what}")
        if images:
            copies.append(ImagesCopy(at.name, manifest, images, at.store, far=False))
        present |= {image.rank for image in images}
    if blocks:
        copies += [_decoded(places, manifest, blocks, present, scratch)]
    for tier in places.objects:
        try:
            saved = [s for s in tier.steps() if (s.step, s.uuid) == (manifest.step, manifest.uuid)]
            copies += [tier.open(s)[1] for s in saved]
        except (CheckpointError, StorageError) as fault:
            unasked.append(f"{tier.bucket.url}: {fault.what}")
    return copies, unasked


def _decoded(
    places: Places,
    manifest: Manifest,
    blocks: Sequence[ParityBlock],
    present: Collection[int],
    scratch: Path | None,
) -> ParityCopy:
    """Every image that parity can bring back: first those that are nowhere, then those that a place has, but bad."""
    store = GenerationStore(scratch or Path(os.devnull), places.run)
    nodes = [LocalNode([at.store], name=at.name) for at in places.stores]

    def decode(rank: int) -> None:
        if scratch is None:
            raise CheckpointError(f"the image of rank {rank} was not decoded", code="SR521")
        rebuild(manifest.step, manifest.uuid, rank, nodes=nodes, store=store)

    images = {image.rank: image for image in _decodable(blocks, present)}
    for block in blocks:
        for member in block.members:
            if member.rank in present:
                images.setdefault(member.rank, member.image)
    return ParityCopy("parity", manifest, images.values(), store, far=False, decode=decode)


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


def _decodable(blocks: Sequence[ParityBlock], present: Collection[int]) -> list[Image]:
    """The images that are in no place and that the parity can bring back, with all others of their stripes."""
    stripes: dict[tuple[str, int], dict[int, ParityBlock]] = {}
    for block in blocks:
        stripes.setdefault((block.group, block.stripe), {})[block.row] = block
    lost: dict[int, Image] = {}
    fine: dict[int, set[int]] = {}  # rank -> its blocks that can be decoded
    for rows in stripes.values():
        stripe = next(iter(rows.values()))
        have = len(rows) + sum(m.rank in present for m in stripe.members)
        for member in stripe.members:
            if member.rank not in present:
                lost[member.rank] = member.image
                if have >= stripe.k:
                    fine.setdefault(member.rank, set()).add(member.block)
    k = next((block.k for block in blocks), 0)

    def whole(rank: int, image: Image) -> bool:
        return all(not block_range(image.size, k, c)[1] or c in fine.get(rank, ()) for c in range(k))

    return [image for rank, image in sorted(lost.items()) if whole(rank, image)]
