"""Any layout reads what any layout has saved: random models and meshes, assembled as a run assembles them.

    layout A, on paper: what each rank holds ─► saved by as many threads
    layout B, on paper: what each rank holds ─► read together by as many threads ─► every element is the true one

The ranks are threads, so that worlds of six are cheap; tests/ranks has them as processes.
"""

import ctypes
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from sirara.checkpoint import neighbours, share
from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.ranges import DTYPES, NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.share import read_together
from sirara.comm.stand_in import stand_in_axes
from sirara.config.load import model_shape
from sirara.errors import LayoutError
from sirara.mesh import Mesh
from sirara.pure import readplan
from sirara.pure.families import ModelShape
from sirara.pure.readplan import plan_reads
from sirara.pure.saveplan import PlannedTensor
from sirara.train.assemble import assemble, specs_of
from sirara.train.paper import META
from tests.checkpoints import in_ranks, manager
from tests.parity.layouts import FAMILIES, PLAIN, SMALL, VOCAB, config_of
from tests.parity.pairs import Row

WORLDS = (1, 2, 3, 4, 6)
CASES = 15


@dataclass
class Room:
    """Where threads that play ranks meet."""

    size: int
    barrier: threading.Barrier = field(init=False)
    texts: list[str] = field(init=False)
    tables: dict[int, np.ndarray] = field(default_factory=dict)
    ways: dict[tuple[int, int], "Queue[tuple[int, torch.Tensor]]"] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.texts = [""] * self.size
        self.ways = {(a, b): Queue() for a in range(self.size) for b in range(self.size)}

    def agree(self, rank: int, text: str) -> str:
        self.texts[rank] = text
        self.barrier.wait(60)
        found = next((f"rank {r}: {t}" for r, t in enumerate(self.texts) if t), "")
        self.barrier.wait(60)
        return found


class ThreadComm:
    """As much of Comm as loading together needs."""

    link = None

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size, self.ranks = room, rank, room.size, list(range(room.size))
        self.put_bytes = 0

    def note(self, what: str, sent_bytes: int) -> None:
        self.put_bytes += sent_bytes

    def exchange(self, what: str, sends: Any, receives: Any, *, tag: int) -> "Coming":
        for peer, tensor in sends:
            self.room.ways[self.rank, peer].put((tag, tensor.clone()))
        return Coming(self, receives, tag)


@dataclass
class Coming:
    comm: ThreadComm
    receives: Sequence[tuple[int, torch.Tensor]]
    tag: int

    def wait(self) -> None:
        for peer, tensor in self.receives:
            tag, came = self.comm.room.ways[peer, self.comm.rank].get(timeout=60)
            assert (tag, came.shape) == (self.tag, tensor.shape)
            tensor.copy_(came)


class ThreadWindow:
    """As much of Window as neighbours need: an address means the same to all threads."""

    def __init__(self, comm: ThreadComm, table: np.ndarray) -> None:
        self.comm = comm
        comm.room.tables[comm.rank] = table
        comm.room.barrier.wait(60)

    def table(self, peer: int) -> np.ndarray:
        return self.comm.room.tables[peer]

    def put(self, peer: int, own_N: np.ndarray, theirs_N: np.ndarray, run_bytes: int) -> None:
        assert peer != self.comm.rank
        for own, theirs in zip(own_N.tolist(), theirs_N.tolist(), strict=True):
            ctypes.memmove(theirs, own, run_bytes)


@contextmanager
def among_threads(
    comm: ThreadComm, memory: neighbours.Memory, *, dims: int
) -> Iterator[neighbours.Neighbours]:
    window: Any = ThreadWindow(comm, neighbours._table(memory, dims))
    yield neighbours.Neighbours(window, dims)


class Counted(FolderCopy):
    bytes_read = 0

    def read(self, key: str, buffers: Any, position: int) -> None:
        self.bytes_read += sum(map(len, buffers))
        super().read(key, buffers, position)


def random_model(rng: random.Random) -> Row:
    return {
        "family": rng.choice(list(FAMILIES)),
        "tied": rng.random() < 0.5,
        "optimizer": rng.choice(["adamw", "lion", "muon"]),
        "precision": rng.choice(["fp32", "bf16"]),
        "vocab": rng.choice([VOCAB, SMALL]),
        "microbatches": 4,
    }


def random_layout(rng: random.Random, model: Row, world: int) -> tuple[Row, list["Rank"]]:
    """A mesh of so many ranks that the model allows, and these on paper."""
    while True:
        pp, tp = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 4])
        if world % (pp * tp):
            continue
        schedule = rng.choice(["1f1b", "gpipe", "interleaved", "zb-v"]) if pp > 1 else "1f1b"
        layout = {
            "pp": pp,
            "tp": tp,
            "dp": world // (pp * tp),
            "zero": rng.randrange(4),
            "schedule": schedule,
        }
        try:
            return layout, [on_paper(model | layout, rank) for rank in range(world)]
        except LayoutError:
            continue


@dataclass
class Rank:
    """What a rank of a layout holds, and what it believes that all hold."""

    plan: list[PlannedTensor]
    ranges: list[NamedRange]  # without memory


def on_paper(case: Row, rank: int) -> Rank:
    case = PLAIN | case
    config = config_of(case, Path("none"), 4)
    shape: ModelShape = model_shape(config, case["vocab"])
    mesh = Mesh(pp=case["pp"], dp=case["dp"], cp=1, tp=case["tp"], rank=rank)
    size = mesh.world // mesh.pp
    first = mesh.coordinate("pp") * size
    peers = {axis: mesh.peers(axis) for axis in ("pp", "dp", "tp")} | {
        "plane": list(range(first, first + size))
    }
    built = assemble(
        config,
        shape,
        specs_of(config, shape),
        mesh=mesh,
        comms=stand_in_axes(rank, mesh.world, peers),
        device=META,
    )
    return Rank(plan=built.state.plan(), ranges=built.state.ranges())


def truth_of(t: PlannedTensor) -> torch.Tensor:
    """Bits that are a function of name and place alone."""
    size = DTYPES[t.dtype].itemsize * int(np.prod(t.shape))
    seed = sum(ord(c) * 31**i for i, c in enumerate(t.name)) % (1 << 32)
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(raw).view(DTYPES[t.dtype]).view(t.shape)


def held(rank: Rank, truth: dict[str, torch.Tensor] | None) -> list[NamedRange]:
    """The rank's ranges in memory, with the true values or with none."""
    out = []
    for r in rank.ranges:
        if truth is None:
            data = torch.zeros(r.data.numel(), dtype=r.data.dtype)
        else:
            parts = [truth[r.tensor][box.slices].reshape(-1) for box in r.boxes]
            data = torch.cat(parts) if parts else torch.zeros(0, dtype=r.data.dtype)
        out.append(NamedRange(tensor=r.tensor, shape=tuple(r.shape), boxes=r.boxes, data=data))
    return out


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""


RECORD = {"step": 7, "tokens": 512, "loss_scale": 1024.0, "data": {"cursors": [3, 1], "epoch": 2}, "lr": 1e-3}


@pytest.mark.parametrize("seed", range(CASES))
def test_any_layout_reads_what_any_layout_saved(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(share, "_LARGE", rng.choice([64, 1024, share._LARGE]))
    put = seed % 3 != 0
    if put:
        monkeypatch.setattr(share, "open_neighbours", among_threads)
        monkeypatch.setattr(readplan, "RUN_BYTES", 64 if seed % 3 == 1 else 0)
    model = random_model(rng)
    before, savers = random_layout(rng, model, WORLDS[seed % 5])
    truth = {t.name: truth_of(t) for t in savers[0].plan}

    def save(rank: int) -> None:
        assert savers[rank].plan == savers[0].plan
        manager(tmp_path, rank=rank, world=len(savers)).save(
            7,
            plan=savers[rank].plan,
            ranges=held(savers[rank], truth),
            record=RECORD,
            hf_files={},
            aliases={},
        )

    in_ranks(len(savers), save)
    for n in range(2):
        after, readers = random_layout(rng, model, WORLDS[(seed + seed // 5 + 2 * n) % 5])
        where = f"{model}: {before} to {after}"
        room = Room(len(readers))
        manifest = Snapshot(tmp_path / "step-000000007", run="run-1", step=7).manifest
        copies = [Counted(tmp_path / "step-000000007", manifest) for _ in readers]

        def load(rank: int, readers: Any = readers, room: Any = room, copies: Any = copies) -> list[str]:
            snapshot = Snapshot.over(copies[rank]._manifest, [copies[rank]])
            assert snapshot.record == RECORD
            ranges = held(readers[rank], None)
            comm: Any = ThreadComm(room, rank)
            read_together(
                snapshot, readers[rank].plan, ranges, comm=comm, agree=lambda fault: room.agree(rank, fault)
            )
            return [
                a.tensor
                for a, b in zip(ranges, held(readers[rank], truth), strict=True)
                if bits(a.data) != bits(b.data)
            ]

        assert in_ranks(len(readers), load) == [[]] * len(readers), where
        assert {t.name: t.shape for t in readers[0].plan} == {t.name: t.shape for t in savers[0].plan}, where
        # Every byte once, whoever wants it.
        assert sum(c.bytes_read for c in copies) == int(manifest.pieces.length.sum()), where


@pytest.mark.parametrize("seed", range(8))
def test_readers_share_the_work_evenly_and_rounds_are_bounded(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    model = random_model(rng)
    _, savers = random_layout(rng, model, WORLDS[seed % 5])
    truth = {t.name: truth_of(t) for t in savers[0].plan}

    def save(rank: int) -> None:
        manager(tmp_path, rank=rank, world=len(savers)).save(
            7,
            plan=savers[rank].plan,
            ranges=held(savers[rank], truth),
            record=RECORD,
            hf_files={},
            aliases={},
        )

    in_ranks(len(savers), save)
    m = Snapshot(tmp_path / "step-000000007").manifest
    _, readers = random_layout(rng, model, WORLDS[1 + seed % 4])
    wanted = [(m.tensor_index[t.name], t.boxes) for t in readers[0].plan]
    most = 4096
    plan, holes = plan_reads(m, wanted, round_bytes=most)
    assert holes == []
    reads = [i for pieces in plan.alone.values() for i in pieces]
    reads += [i for one in plan.rounds for pieces in one.values() for i in pieces]
    assert sorted(reads) == list(range(len(m.pieces)))
    for one in plan.rounds:
        received: dict[int, int] = {}
        for reader, pieces in one.items():
            assert sum(int(m.pieces.length[i]) for i in pieces) <= most or len(pieces) == 1
            for i in pieces:
                item = int(m.pieces.length[i]) // m.box(i).volume
                for rank, box in plan.wants[i]:
                    if rank != reader:
                        received[rank] = received.get(rank, 0) + box.volume * item
        largest = max(int(m.pieces.length[i]) for pieces in one.values() for i in pieces)
        assert all(size <= most + largest for size in received.values())
    straight, _ = plan_reads(m, wanted, put=True)
    reads = [i for pieces in (*straight.alone.values(), *straight.put.values()) for i in pieces]
    reads += [i for one in straight.rounds for pieces in one.values() for i in pieces]
    assert sorted(reads) == list(range(len(m.pieces))) and straight.wants == plan.wants
    loads = [straight.bytes_read(m, rank) for rank in range(len(readers))]
    assert loads == [plan.bytes_read(m, rank) for rank in range(len(readers))]
