"""Images and parity of a step folder, as the node tiers keep them, for tests of what reads them."""

from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Member, ParityBlock
from sirara.checkpoint.image import Image, image_plan
from sirara.checkpoint.parity import block_range
from sirara.checkpoint.reader import Snapshot
from sirara.pure.copies import Stripes
from sirara.pure.erasure import encode
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import SavePlan, plan_save
from tests.checkpoints import plan_of


def plan_like(state, boxes) -> SavePlan:
    """The plan by which `tests.checkpoints.save` has saved."""
    return plan_save(plan_of(state, boxes), node_of=lambda rank: 0)


def image_of(step: Path, plan: SavePlan, rank: int, *, world: int) -> tuple[Image, bytearray]:
    """The image that rank `rank` would have staged for the save in the folder `step`."""
    m = Snapshot(step).manifest
    layout, folder = image_plan(plan, rank), FolderCopy(step, m)
    data = bytearray(layout.size)
    for i, at, n in zip(layout.index.tolist(), layout.position.tolist(), layout.length.tolist(), strict=True):
        folder.read(*_place(folder, i, memoryview(data)[at : at + n]))
    image = Image(
        uuid=m.uuid, run=m.run, attempt=m.attempt, step=m.step, rank=rank, world=world, node=rank, size=layout.size,
        index=layout.index, position=layout.position, length=layout.length,
        hashes=b"".join(m.pieces.hash(i) for i in layout.index.tolist()),
    )  # fmt: skip
    return image, data


def keep_images(
    root: Path, step: Path, plan: SavePlan, world: int, *, nodes=None, commit=True, durable=False
):
    """Every rank's image on the node of its number, <root>/node-<rank>; returns the stores by node."""
    stores = {}
    for rank in range(world) if nodes is None else nodes:
        image, data = image_of(step, plan, rank, world=world)
        store = stores[rank] = GenerationStore(root / f"node-{rank}", image.run, durable=durable)
        store.put_image(image, memoryview(data))
    for store in stores.values():
        if commit:
            store.put_manifest(image.step, image.uuid, (step / MANIFEST).read_bytes())
    return stores


def keep_parity(root: Path, step: Path, plan: SavePlan, world: int, m: int) -> None:
    """m blocks of parity per stripe over `world` nodes, one rank each."""
    stripes, images = Stripes(world, m), [image_of(step, plan, r, world=world) for r in range(world)]
    k = stripes.k
    for s in range(world):
        members = stripes.members(s)
        parts = [
            images[p][1][a : a + n]
            for c, p in enumerate(members)
            for a, n in [block_range(images[p][0].size, k, c)]
        ]
        size = max(map(len, parts))
        data = np.zeros((k, size), np.uint8)
        for column, raw in enumerate(parts):
            data[column, : len(raw)] = np.frombuffer(raw, np.uint8)
        for row, (place, parity) in enumerate(zip(stripes.holders(s), encode(list(data), m), strict=True)):
            image = images[0][0]
            store = GenerationStore(root / f"node-{place}", image.run)
            slot = store.new_parity(image.step, image.uuid, f"0-{s}-{row}", size)
            slot.data[:] = parity.tobytes()
            raw = parity.tobytes()
            block = ParityBlock(
                uuid=image.uuid, run=image.run, attempt=image.attempt, step=image.step, group="0", stripe=s, row=row,
                k=k, m=m, size=size,
                members=tuple(Member(rank=p, block=c, image=images[p][0]) for c, p in enumerate(members)),
                hashes=b"".join(
                    xxhash.xxh3_128_digest(raw[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)
                ),
            )  # fmt: skip
            store.keep_parity(block, slot)
            store.put_manifest(image.step, image.uuid, (step / MANIFEST).read_bytes())


def _place(folder: FolderCopy, piece: int, target: memoryview):
    key, position = folder.locate(piece)
    return key, [target], position
