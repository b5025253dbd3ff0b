"""Rows whose columns lie with several ranks of a node: staged by each, put together by the one that writes them."""

import threading
from math import prod

import numpy as np
import pytest
import torch

from sirara.checkpoint.arena import Arena, arena_name
from sirara.checkpoint.assembly import Assembly
from sirara.checkpoint.image import image_plan
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.stage import Stager
from sirara.checkpoint.storage import Disk
from sirara.checkpoint.writer import write_image
from sirara.errors import CommTimeout, StorageError
from sirara.pure.layout import range_boxes
from sirara.pure.saveplan import PlannedTensor, plan_save

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class Node:
    """A state cut over tp columns and dp flat ranges, and one arena per rank."""

    def __init__(self, folder, tp, dp, *, piece_bytes):
        self.folder, self.world = folder, tp * dp
        g = torch.Generator().manual_seed(tp)
        self.state = {
            "a.weight": torch.randn(24, 8 * tp, generator=g),
            "b.weight": torch.randn(12, 4 * tp, generator=g).bfloat16(),
            "b.weight/exp_avg": torch.randn(12, 4 * tp, generator=g),
            "norm.weight": torch.randn(7, generator=g),
        }
        self.boxes = {name: self._cut(tuple(t.shape), tp, dp) for name, t in self.state.items()}
        self.plan = plan_save(
            [
                PlannedTensor(
                    name=name,
                    dtype="BF16" if t.dtype == torch.bfloat16 else "F32",
                    shape=tuple(t.shape),
                    boxes=self.boxes[name],
                )
                for name, t in self.state.items()
            ],
            node_of=lambda r: 0,
            piece_bytes=piece_bytes,
            assemble=True,
        )
        self.images = [image_plan(self.plan, r) for r in range(self.world)]
        self.arenas = [
            Arena.create(folder, arena_name(r, r % 2), self.images[r].total, run="run")
            for r in range(self.world)
        ]

    def _cut(self, shape, tp, dp):
        boxes = {}
        for rank in range(tp * dp):
            t, z = rank % tp, rank // tp
            columns = shape[-1] * (t + 1) // tp - shape[-1] * t // tp
            local = (*shape[:-1], columns)
            start, stop = prod(local) * z // dp, prod(local) * (z + 1) // dp
            corner = (*(0 for _ in shape[:-1]), shape[-1] * t // tp)
            boxes[rank] = tuple(b.moved(corner) for b in range_boxes(local, start, stop))
        return boxes

    def ranges(self, rank):
        out = []
        for name, t in self.state.items():
            parts = [t[b.slices].reshape(-1) for b in self.boxes[name][rank]]
            data = torch.cat(parts) if parts else t.new_empty(0)
            out.append(NamedRange(tensor=name, shape=tuple(t.shape), boxes=self.boxes[name][rank], data=data))
        return out

    def stage(self, rank, uuid="one"):
        arena = self.arenas[rank]
        arena.mark_writing(5, uuid)
        Stager(self.plan, self.images[rank], self.ranges(rank)).copy(arena.data)
        arena.mark_ready()

    def fill(self, rank, uuid="one", **options):
        assembly = Assembly(self.plan, self.images[rank], self.folder)
        assembly.fill(self.arenas[rank].data, uuid, **{"deadline_s": 20.0} | options)


@pytest.mark.parametrize("tp, dp", [(2, 1), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("piece_bytes", [128, 1 << 24])
def test_files_hold_whole_tensors_that_no_rank_holds(tmp_path, tp, dp, piece_bytes):
    node = Node(tmp_path / "memory", tp, dp, piece_bytes=piece_bytes)
    assert len(node.plan.assembled) > 0
    for rank in range(node.world):
        node.stage(rank)
    out = tmp_path / "step"
    out.mkdir()
    for rank in range(node.world):
        node.fill(rank)
        data = node.arenas[rank].data
        write_image(
            Disk(), out, plan=node.plan, rank=rank, data=data, image=node.images[rank], uuid="u" * 32, step=5
        )
    found = 0
    for file in node.plan.files:
        for entry in file.entries:
            raw = np.fromfile(
                out / file.name, "u1", entry.stop - entry.start, offset=file.header_bytes + entry.start
            )
            whole = torch.from_numpy(raw).view(DTYPES[entry.dtype]).reshape(entry.shape)
            if file.holds_weights:
                assert torch.equal(whole, node.state[entry.name])
                found += 1
    assert found == 3


def test_it_waits_for_the_snapshots_of_the_others(tmp_path):
    node = Node(tmp_path, 2, 1, piece_bytes=1 << 24)
    node.stage(0)
    node.stage(1, "former")
    waits = threading.Event()

    def waiting():
        waits.set()
        return False

    thread = threading.Thread(target=lambda: node.fill(0, orphaned=waiting))
    thread.start()
    assert waits.wait(10) and thread.is_alive()
    node.stage(1)
    thread.join(20)
    assert not thread.is_alive()
    piece = next(p for i, p in enumerate(node.plan.pieces) if p.rank == 0 and i in node.plan.assembled)
    at = int(node.images[0].position[node.plan.pieces_of[0].index(piece)])
    name = node.plan.tensors[piece.tensor].name
    expected = node.state[name][piece.box.slices].contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(node.arenas[0].data[at : at + piece.length]) == expected


@pytest.mark.parametrize("gone", [False, True], ids=["deadline", "the training has ended"])
def test_a_rank_whose_snapshot_does_not_come_is_named(tmp_path, gone):
    node = Node(tmp_path, 3, 1, piece_bytes=1 << 24)
    node.stage(0)
    node.stage(1)
    node.arenas[2].mark_writing(5, "one")
    wait = {"deadline_s": 20.0, "orphaned": lambda: True} if gone else {"deadline_s": 0.0}
    with pytest.raises(CommTimeout, match="rank 0 lacks the rows of 1 ranks of its node: 2"):
        node.fill(0, **wait)


def test_an_arena_that_is_filled_anew_meanwhile_is_noticed(tmp_path, monkeypatch):
    node = Node(tmp_path, 2, 1, piece_bytes=1 << 24)
    node.stage(0)
    node.stage(1)
    assembly = Assembly(node.plan, node.images[0], tmp_path)
    real = assembly._wait

    def late(*args):
        found = real(*args)
        node.arenas[1].mark_writing(6, "two")
        return found

    monkeypatch.setattr(assembly, "_wait", late)
    with pytest.raises(StorageError, match="rank 1 began another save"):
        assembly.fill(node.arenas[0].data, "one", deadline_s=5.0)


def test_a_plan_without_such_rows_waits_for_nobody(tmp_path):
    node = Node(tmp_path, 1, 2, piece_bytes=1 << 24)
    assert Assembly(node.plan, node.images[0], tmp_path).helpers == ()
    assert node.images[0].total == node.images[0].size
    node.fill(0, deadline_s=0.0)
