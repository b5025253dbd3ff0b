"""Nodes keep a save in memory; some are lost; those that are left restore it, or an older one, and say why."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.checkpoint.node_views import open_nodes
from sirara.checkpoint.nodes import NodeTiers
from sirara.checkpoint.restore import Restorer
from sirara.checkpoint.share import read_together
from sirara.comm.group import Comm
from sirara.comm.world import World, world_comm
from sirara.config.schema import TierConfig
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import equal_bits, even, flip_bit, plan_of, ranges_of, replicated, save, small_state
from tests.harness import run_ranks
from tests.tiers import RUN, images_of

ROW = 400


def open_comm() -> Comm:
    rank, size = dist.get_rank(), dist.get_world_size()
    return world_comm(World(rank=rank, size=size, local_rank=0, local_size=1, node=rank), timeout_s=20)


def texts_of(comm: Comm, text: str) -> list[str]:
    row = torch.zeros(ROW, dtype=torch.uint8)
    raw = text.encode()[:ROW]
    row[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    return [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in comm.gather_rows("texts", row)]


def first_of(comm: Comm, fault: str) -> str:
    return next((f"rank {r}: {t}" for r, t in enumerate(texts_of(comm, fault)) if t), "")


def tiers_of(root: str, kinds: str) -> list[TierConfig]:
    path = f"{root}/node-{{node}}"
    known = {
        "memory": {"tier": "memory"},
        "peer": {"tier": "peer", "copies": 2},
        "parity": {"tier": "parity", "data": 2, "parity": 1},
    }
    return [TierConfig.model_validate(known[kind] | {"path": path}) for kind in kinds.split("+")]


def keep(root: str, kinds: str, path: str) -> None:
    """One rank per node keeps its image in the tiers; rank 0 commits."""
    comm, rank, world = open_comm(), dist.get_rank(), dist.get_world_size()
    state = small_state(5)
    image, data = images_of(Path(path), state, even(state, world))[rank]
    nodes = NodeTiers(
        tiers_of(root, kinds),
        run=RUN,
        rank=rank,
        world=world,
        local_size=1,
        node=rank,
        attempt=1,
        token="secret",
        memory=Path(root) / f"node-{rank}",
    )
    nodes.meet(dict(enumerate(texts_of(comm, nodes.address))))
    results = nodes.keep(image, memoryview(data), tiers=kinds.split("+"), arena=None)
    assert all(r.ok for r in results.values()) and set(results) == set(kinds.split("+")), results
    first_of(comm, "")
    if rank == 0:
        assert nodes.commit(image.step, image.uuid, (Path(path) / MANIFEST).read_bytes()) == {}
    first_of(comm, "")
    nodes.close()


def restore(root: str, kinds: str, layout: str) -> dict[str, Any]:
    comm, rank, world = open_comm(), dist.get_rank(), dist.get_world_size()
    boxes = {"even": even, "replicas": replicated}[layout](small_state(), world)
    ranges: list[Any] = []

    def read(snapshot: Any) -> None:
        like = small_state()
        ranges[:] = ranges_of(like, boxes, rank, filled=False)
        read_together(snapshot, plan_of(like, boxes), ranges, comm=comm, agree=lambda f: first_of(comm, f))

    with open_nodes(
        tiers_of(root, kinds),
        run=RUN,
        rank=rank,
        world=world,
        local_size=1,
        node=rank,
        attempt=2,
        token="secret",
        memory=Path(root) / f"node-{rank}",
        texts=lambda text: texts_of(comm, text),
    ) as nodes:
        found = Restorer(
            checkpoints=Path(root) / "checkpoints",
            control=Path(root) / "control",
            run=RUN,
            attempt=2,
            rank=rank,
            node=rank,
            agree=lambda fault: first_of(comm, fault),
            texts=lambda text: texts_of(comm, text),
            views=nodes.views,
            decode=nodes.decode,
        ).restore(read, distrust=lambda step, fault: None)
    assert found is not None
    wanted = ranges_of(small_state(found[1].step), boxes, rank)
    return {
        "step": found[1].step,
        "bad": [a.tensor for a, b in zip(ranges, wanted, strict=True) if not equal_bits(a.data, b.data)],
        "taken": set(found[0].taken),
        "table": [str(row) for row in found[1].table],
    }


def lose(root: Path, *gone: int, world: int) -> None:
    """Nodes are lost; the rest are numbered anew, as a launcher does."""
    for node in gone:
        shutil.rmtree(root / f"node-{node}")
    for new, old in enumerate(n for n in range(world) if n not in gone):
        if new != old:
            (root / f"node-{old}").rename(root / f"node-{new}")


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """Step 4 in the run's folder; step 5 is for the nodes alone."""
    state = small_state(4)
    save(tmp_path / "checkpoints", 4, state, even(state, 3))
    state = small_state(5)
    return tmp_path, save(tmp_path / "elsewhere", 5, state, even(state, 3))


@pytest.mark.parametrize("layout", ["even", "replicas"])
def test_processes_that_died_find_their_images_and_reshard_them(begun, layout):
    root, path = begun
    run_ranks(3, keep, str(root), "memory", str(path))
    for answer in run_ranks(3, restore, str(root), "memory", layout):
        assert (answer["step"], answer["bad"]) == (5, [])
    if layout == "even":
        # The same layout needs nothing of another node.
        assert [a["taken"] for a in run_ranks(3, restore, str(root), "memory", layout)] == [{"memory"}] * 3


@pytest.mark.parametrize(("kinds", "layout"), [("memory+peer", "even"), ("memory+parity", "replicas")])
def test_after_the_loss_of_a_node_fewer_go_on_from_the_same_step(begun, kinds, layout):
    root, path = begun
    run_ranks(3, keep, str(root), kinds, str(path))
    lose(root, 1, world=3)
    for answer in run_ranks(2, restore, str(root), kinds, layout):
        assert (answer["step"], answer["bad"]) == (5, []), answer["table"]


def test_two_lost_nodes_of_2_plus_1_are_one_too_many_and_the_table_says_so(begun):
    root, path = begun
    run_ranks(3, keep, str(root), "memory+parity", str(path))
    lose(root, 0, 1, world=3)
    (answer,) = run_ranks(1, restore, str(root), "memory+parity", "even")
    assert (answer["step"], answer["bad"]) == (4, [])
    (said,) = [row for row in answer["table"] if "skipped" in row]
    assert "the image of rank 0 of step 5 cannot be rebuilt" in said and "the image of rank 1" in said, said


def test_a_flipped_bit_in_memory_is_repaired_from_parity(begun):
    root, path = begun
    run_ranks(3, keep, str(root), "memory+parity", str(path))
    (data,) = root.glob(f"node-2/{RUN}/gen-*/image-2")
    image = images_of(path, small_state(5), even(small_state(5), 3))[2][0]
    flip_bit(data, int(image.position[1]))
    answers = run_ranks(3, restore, str(root), "memory+parity", "even")
    assert [(a["step"], a["bad"]) for a in answers] == [(5, [])] * 3
    assert any("1 pieces were bad in one copy and good in another" in row for row in answers[0]["table"])
    assert any(name.startswith("parity") for name in answers[2]["taken"])
