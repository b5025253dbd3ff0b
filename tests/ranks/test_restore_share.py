"""Ranks load together: every byte is read once, passed on, and a rank that cannot read its part stops all of them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.share import OtherRankFailed, read_together
from sirara.comm.group import Comm
from sirara.comm.world import World, world_comm
from sirara.errors import CheckpointError
from sirara.pure.layout import Box, whole
from tests.checkpoints import (
    Boxes,
    State,
    equal_bits,
    even,
    flat_cuts,
    flip_bit,
    plan_of,
    ranges_of,
    replicated,
    save,
    small_state,
)
from tests.harness import run_ranks

FAULT = 300


def columns(state: State, world: int) -> Boxes:
    """Matrices cut by columns, as a row-parallel weight is; the rest replicated."""
    boxes: Boxes = {}
    for name, t in state.items():
        ends = [round(t.shape[1] * r / world) for r in range(world + 1)] if t.dim() == 2 else []
        boxes[name] = {
            r: (Box((0, ends[r]), (t.shape[0], ends[r + 1] - ends[r])),) if ends else (whole(t.shape),)
            for r in range(world)
        }
    return boxes


def mixed(state: State, world: int) -> Boxes:
    """Every rank wants random boxes, some the same, some that overlap, some nothing."""
    rng = random.Random(world)
    cuts = [
        columns(state, world),
        replicated(state, world),
        even(state, world),
        flat_cuts(state, [0.1] * (world - 1)),
    ]
    return {
        name: {r: rng.choice([*(c[name].get(r, ()) for c in cuts), ()]) for r in range(world)}
        for name in state
    }


LAYOUTS = {"even": even, "replicas": replicated, "columns": columns, "mixed": mixed}


def open_comm(direct: bool) -> Comm:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return world_comm(world, timeout_s=20, direct=direct)


def first_of(comm: Comm, fault: str) -> str:
    row = torch.zeros(FAULT, dtype=torch.uint8)
    raw = fault.encode()[:FAULT]
    row[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    texts = [bytes(r.tolist()).rstrip(b"\0").decode() for r in comm.gather_rows("agree", row)]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")


class Counted(FolderCopy):
    bytes_read = 0

    def read(self, key: str, buffers: Any, position: int) -> None:
        self.bytes_read += sum(map(len, buffers))
        super().read(key, buffers, position)


def load_together(path: str, layout: str, direct: bool) -> tuple[list[str], int, set[str]]:
    """Names of the tensors that this rank did not get right, the bytes that it read, and how parts were passed on."""
    state, comm = small_state(), open_comm(direct)
    boxes = LAYOUTS[layout](state, comm.size)
    manifest = Snapshot(Path(path)).manifest
    copy = Counted(Path(path), manifest)
    ranges = ranges_of(state, boxes, comm.rank, filled=False)
    read_together(
        Snapshot.over(manifest, [copy]),
        plan_of(state, boxes),
        ranges,
        comm=comm,
        agree=lambda f: first_of(comm, f),
    )
    wanted = ranges_of(state, boxes, comm.rank)
    bad = [a.tensor for a, b in zip(ranges, wanted, strict=True) if not equal_bits(a.data, b.data)]
    ways = {what for _, what in comm.trace if "a checkpoint" in what}
    return bad, copy.bytes_read, ways


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_all_ranks_get_what_they_want_and_each_byte_is_read_once(tmp_path, layout, world, direct):
    state = small_state()
    path = save(tmp_path, 5, state, flat_cuts(state, [0.3]))
    answers = run_ranks(world, load_together, str(path), layout, direct)
    assert [bad for bad, _, _ in answers] == [[]] * world
    total = sum(t.numel() * t.element_size() for t in state.values())
    read = sum(size for _, size, _ in answers)
    assert read == total if layout != "mixed" else read <= total
    way = "put parts of a checkpoint" if direct else "pass on a checkpoint"
    assert set.union(*(ways for _, _, ways in answers)) == {way}


def fail_on_one(path: str, layout: str) -> tuple[str, str]:
    state, comm = small_state(), open_comm(True)
    boxes = LAYOUTS[layout](state, comm.size)
    ranges = ranges_of(state, boxes, comm.rank, filled=False)
    try:
        read_together(
            Snapshot(Path(path)), plan_of(state, boxes), ranges, comm=comm, agree=lambda f: first_of(comm, f)
        )
    except CheckpointError as error:
        comm.gather_rows("still together", torch.zeros(1))
        return type(error).__name__, error.what
    return "", ""


@pytest.mark.parametrize("layout", ["even", "replicas"])
def test_a_bad_piece_stops_every_rank_with_its_name(tmp_path, layout):
    state = small_state()
    path = save(tmp_path, 5, state)
    m = Snapshot(path).manifest
    piece = int(m.pieces_of(m.tensor_index["block.0.weight/exp_avg"])[0])
    flip_bit(path / m.files[int(m.pieces.file[piece])].name, int(m.pieces.position[piece]))
    answers = run_ranks(3, fail_on_one, str(path), layout)
    said = f"block.0.weight/exp_avg{m.box(piece)} in optim-0-0.safetensors: its bytes hash to"
    assert all(said in what for _, what in answers)
    own = [kind for kind, _ in answers if kind == "CheckpointError"]
    assert own and len(own) + sum(kind == OtherRankFailed.__name__ for kind, _ in answers) == 3


def test_a_tensor_that_is_missing_is_an_error_on_all_ranks_alike(tmp_path):
    state = small_state()
    del state["block.0.bias"]
    path = save(tmp_path, 5, state)
    answers = run_ranks(2, fail_on_one, str(path), "even")
    assert answers == [("CheckpointError", "step 5 has no tensor 'block.0.bias'")] * 2


MIB = 1 << 20
TENSORS, ROWS = 12, 4096  # 12 x 16 MiB


def big_state() -> State:
    return {f"t{i}": torch.full((ROWS, 1024), float(i)) for i in range(TENSORS)}


def peak_above(path: str) -> int:
    """Bytes of the peak of this process above what it held when the load began, its own shards included."""
    comm = open_comm(True)
    shape = (ROWS, 1024)
    plan = plan_of(
        {f"t{i}": torch.empty(shape, device="meta") for i in range(TENSORS)},
        {  # type: ignore[arg-type]
            f"t{i}": {r: (whole(shape),) for r in range(comm.size)} for i in range(TENSORS)
        },
    )
    ranges = [
        NamedRange(tensor=f"t{i}", shape=shape, boxes=(whole(shape),), data=torch.zeros(ROWS * 1024))
        for i in range(TENSORS)
    ]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    read_together(Snapshot(Path(path)), plan, ranges, comm=comm, agree=lambda f: first_of(comm, f))
    assert all(float(r.data.sum()) == i * ROWS * 1024 for i, r in enumerate(ranges))
    assert len(np.unique(ranges[3].data.numpy())) == 1
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_host_memory_is_the_shard_and_less_than_64_mib(tmp_path):
    path = save(tmp_path, 5, big_state(), even(big_state(), 2))
    for peak in run_ranks(3, peak_above, str(path)):
        assert peak < 64 * MIB, f"{peak / MIB:.0f} MiB above the shard"
