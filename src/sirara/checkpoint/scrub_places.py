"""Reads what nodes and object stores keep of a run from end to end, and names what is not as it was written."""

from collections.abc import Iterator
from dataclasses import dataclass

from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Held
from sirara.checkpoint.places import NodeStore, Places
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """One thing that was read: an image, a block of parity, or a save in an object store."""

    place: str
    what: str
    step: int
    uuid: str
    committed: bool
    bytes: int
    faults: tuple[str, ...]


def scrub_places(places: Places, step: int | None = None) -> Iterator[Scrubbed]:
    """Everything in these places, or what they have of one step. Raises StorageError when a store cannot be asked."""
    for at in places.stores:
        yield from _scrub_store(at, step)
    for tier in places.objects:
        for saved in tier.steps():
            if step in (None, saved.step):
                try:
                    faults = tuple(map(str, tier.scrub(saved)))
                except CheckpointError as fault:
                    faults = (_text(fault),)
                yield Scrubbed(
                    place=tier.bucket.url,
                    what="save",
                    step=saved.step,
                    uuid=saved.uuid,
                    committed=True,
                    bytes=saved.bytes,
                    faults=faults,
                )


def torn(places: Places) -> list[str]:
    """Sentences about what nodes hold and nobody can use: saves in progress, torn or overwritten ones."""
    return [f"{at.name}: {fault}" for at in places.stores for fault in at.store.faults()]


def _scrub_store(at: NodeStore, step: int | None) -> Iterator[Scrubbed]:
    manifests: dict[tuple[int, str], Manifest | None] = {}
    for held in at.store.inventory():
        if step not in (None, held.step):
            continue
        saved = (held.step, held.uuid)
        try:
            if saved not in manifests:
                raw = at.store.manifest(*saved)
                manifests[saved] = parse_manifest(raw, where=f"{at.name}: {MANIFEST}") if raw else None
            faults = tuple(_faults(at.store, held, manifests[saved]))
        except (CheckpointError, StorageError) as fault:
            if held not in at.store.inventory():
                continue  # a newer save has taken its place meanwhile
            faults = (_text(fault),)
        yield Scrubbed(
            place=at.name,
            what=f"parity {held.block}" if held.kind == "parity" else f"image of rank {held.rank}",
            step=held.step,
            uuid=held.uuid,
            committed=held.committed,
            bytes=held.size,
            faults=faults,
        )


def _faults(store: GenerationStore, held: Held, manifest: Manifest | None) -> Iterator[str]:
    if held.kind == "parity":
        block = store.parity(held.step, held.uuid, held.block)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, block.size)))
        for chunk in range(-(-block.size // CHUNK_BYTES)):
            try:
                store.read_parity(block, chunk, buffer[: min(CHUNK_BYTES, block.size - chunk * CHUNK_BYTES)])
            except CheckpointError as fault:
                yield _text(fault)
        return
    image = store.image(held.step, held.uuid, held.rank)
    bad = store.bad_pieces(held.step, held.uuid, held.rank)
    if manifest is None:
        yield from (f"piece {image.index[n]} does not match its hash" for n in bad)
        return
    known = len(manifest.pieces)
    stale = [
        n
        for n, i in enumerate(image.index.tolist())
        if i >= known or image.hash(n) != manifest.pieces.hash(i)
    ]
    for n in sorted({*bad, *stale}):
        i = int(image.index[n])
        if i >= known:
            yield f"piece {i} is not in the manifest of this save"
            continue
        name = f"{manifest.tensors[int(manifest.pieces.tensor[i])].name}{manifest.box(i)}"
        yield f"{name} does not match its hash" if n in bad else f"{name} is not what the manifest says"


def _text(fault: CheckpointError | StorageError) -> str:
    return fault.what + (f" ({fault.why})" if fault.why else "")
