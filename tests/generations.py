"""Images and manifests for the tests of the node tiers: one tensor, cut evenly over the ranks."""

from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.arena import Arena
from sirara.checkpoint.image import Image, image_plan
from sirara.checkpoint.report import Report, assemble
from sirara.checkpoint.steps import save_uuid
from sirara.pure.layout import range_boxes
from sirara.pure.saveplan import PlannedTensor, SavePlan, plan_save

RUN = "run-1"


def save_plan(sizes: list[int], *, local_size: int = 1) -> SavePlan:
    """Rank r holds sizes[r] elements (of one byte) of tensor "w/master"."""
    ends = np.cumsum([0, *sizes]).tolist()
    shape = (ends[-1],)
    boxes = {r: range_boxes(shape, ends[r], ends[r + 1]) for r in range(len(sizes))}
    tensor = PlannedTensor(name="w/master", dtype="U8", shape=shape, boxes=boxes)
    return plan_save([tensor], node_of=lambda rank: rank // local_size, piece_bytes=4096)


def image_of(
    plan: SavePlan, rank: int, step: int, *, world: int, local_size: int = 1, attempt: int = 1, run: str = RUN
) -> tuple[Image, bytearray]:
    """A rank's image and its bytes, different for every rank, step and attempt."""
    layout = image_plan(plan, rank)
    seed = [rank, step, attempt]
    data = bytearray(np.random.default_rng(seed).integers(0, 256, layout.size, np.uint8).tobytes())
    hashes = b"".join(
        xxhash.xxh3_128_digest(data[at : at + n])
        for at, n in zip(layout.position, layout.length, strict=True)
    )
    image = Image(
        uuid=save_uuid(run, attempt, step, 0),
        run=run,
        attempt=attempt,
        step=step,
        rank=rank,
        world=world,
        node=rank // local_size,
        size=layout.size,
        index=layout.index,
        position=layout.position,
        length=layout.length,
        hashes=hashes,
    )
    return image, data


def manifest_of(plan: SavePlan, images: list[Image]) -> bytes:
    first = images[0]
    reports = {
        i.rank: Report(
            uuid=i.uuid,
            attempt=i.attempt,
            step=i.step,
            rank=i.rank,
            plan=plan.digest,
            lengths=tuple(i.length.tolist()),
            hashes=i.hashes,
        )
        for i in images
    }
    return assemble(
        plan,
        reports,
        [],
        uuid=first.uuid,
        run=first.run,
        attempt=first.attempt,
        step=first.step,
        record={"tokens": first.step},
        aliases={},
    ).to_bytes()


def arena_of(folder: Path, name: str, image: Image, data: bytes | bytearray) -> Path:
    """A READY arena with the image."""
    arena = Arena.create(folder, name, max(image.size, 1), run=image.run)
    arena.mark_writing(image.step, image.uuid)
    arena.data[: image.size] = data[: image.size]
    arena.mark_ready()
    arena.close()
    return folder / name


def read_image(store, image: Image) -> bytes:
    out = bytearray(image.size)
    store.read(image.step, image.uuid, image.rank, [memoryview(out)], 0)
    return bytes(out)
