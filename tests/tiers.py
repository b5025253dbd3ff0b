"""Generations made of a step folder: what the nodes of a run would hold of it."""

from pathlib import Path

from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.image import Image, image_plan
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.serve import LocalNode
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import plan_save
from tests.checkpoints import Boxes, State, plan_of

RUN = "run-1"


def store_of(root: Path, node: int, *, durable: bool = False) -> GenerationStore:
    return GenerationStore(root / f"node-{node}", RUN, durable=durable)


def images_of(path: Path, state: State, boxes: Boxes) -> list[tuple[Image, bytearray]]:
    """The image of each rank that saved the step folder `path`, one rank per node."""
    m = Snapshot(path).manifest
    world = 1 + max(r for held in boxes.values() for r in held)
    plan = plan_save(plan_of(state, boxes), node_of=lambda rank: rank // world)
    made = []
    for rank in range(world):
        where = image_plan(plan, rank)
        data = bytearray(where.size)
        for i, at, size in zip(
            where.index.tolist(), where.position.tolist(), where.length.tolist(), strict=True
        ):
            with (path / m.files[int(m.pieces.file[i])].name).open("rb") as file:
                file.seek(int(m.pieces.position[i]))
                data[at : at + size] = file.read(size)
        image = Image(
            uuid=m.uuid,
            run=m.run,
            attempt=m.attempt,
            step=m.step,
            rank=rank,
            world=world,
            node=rank,
            size=where.size,
            index=where.index,
            position=where.position,
            length=where.length,
            hashes=b"".join(m.pieces.hash(i) for i in where.index.tolist()),
        )
        made.append((image, data))
    return made


def keep(
    root: Path,
    path: Path,
    state: State,
    boxes: Boxes,
    holders: dict[int, tuple[int, ...]],
    *,
    commit: bool = True,
    durable: bool = False,
) -> None:
    """holders: node -> the ranks whose images it keeps."""
    images = images_of(path, state, boxes)
    for node, ranks in holders.items():
        store = store_of(root, node, durable=durable)
        for rank in ranks:
            store.put_image(images[rank][0], memoryview(images[rank][1]))
        if commit:
            store.put_manifest(images[0][0].step, images[0][0].uuid, (path / MANIFEST).read_bytes())


def views_of(root: Path, nodes: int) -> dict[int, LocalNode]:
    return {node: LocalNode([store_of(root, node)], name=f"node {node}") for node in range(nodes)}
