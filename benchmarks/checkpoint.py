"""Checkpoints beside torch.distributed.checkpoint, safetensors, DeepSpeed, a raw write and memcpy.

    python benchmarks/checkpoint.py [--only write stall load plan] [--gib 1] [--rounds 5] [--folder DIR] [--json FILE]

All sides hold the same state, cut evenly over the ranks (DCP: DTensors with Shard(0)), live in the same processes and
take turns; medians of `rounds`.

write   until all ranks' bytes are on the disk.  ours: from `start` until the step is committed (hashed, fsynced,
        renamed); "in line" is the same without a keeper.  safetensors: one file per rank, fsync.  raw: one buffer per
        rank, fsync, through the page cache and past it.  DeepSpeed: `save_checkpoint`, not fsynced, where installed.
stall   (10 steps from a save on) - (10 steps without one), beside a memcpy of the rank's state by all ranks at once.
load    into place, warm page cache; ours compares every hash.  On 2, 1 and 4 ranks from what 2 have saved.
plan    no torch: one rank's plan for 10,000 tensors written by 1,000 ranks, a manifest of a million pieces.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sides import launch

ROWS, COLUMNS = 1024, 3200
KINDS = ("", "/exp_avg", "/exp_avg_sq")
STEPS = 10
REST_S = 0.5  # between two sides
RUN = "bench"


# ---- the state, and the sides that keep it


class State:
    """Layers of one matrix and one vector with two moments each, fp32; rank r has the r-th rows of each."""

    def __init__(self, gib, rank, world):
        import torch

        from sirara.checkpoint.ranges import NamedRange
        from sirara.pure.layout import Box
        from sirara.pure.saveplan import PlannedTensor

        self.rank, self.world = rank, world
        layers = max(1, round(gib * 2**30 / (len(KINDS) * 4 * ROWS * COLUMNS)))
        shapes = {}
        for i in range(layers):
            for kind in KINDS:
                shapes[f"layers.{i}.weight{kind}"] = (ROWS, COLUMNS)
                shapes[f"layers.{i}.bias{kind}"] = (ROWS,)
        self.local, self.ranges, self.plan = {}, [], []
        generator = torch.Generator().manual_seed(world + rank)  # loads on other ranks must change it
        for name, shape in shapes.items():
            rows = shape[0] // world
            boxes = {r: (Box((r * rows, *(0 for _ in shape[1:])), (rows, *shape[1:])),) for r in range(world)}
            data = torch.randn((rows, *shape[1:]), generator=generator)
            self.local[name] = data
            self.plan.append(PlannedTensor(name=name, dtype="F32", shape=shape, boxes=boxes))
            self.ranges.append(NamedRange(tensor=name, shape=shape, boxes=boxes[rank], data=data.view(-1)))
        self.rank_bytes = sum(t.numel() * 4 for t in self.local.values())
        self.total_bytes = self.rank_bytes * world

    def dtensors(self, mesh):
        from torch.distributed.tensor import DTensor, Shard

        return {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in self.local.items()}

    def update(self):
        """What an optimizer does to it, in place."""
        import torch

        weights = [t for name, t in self.local.items() if "/" not in name]
        moments = [t for name, t in self.local.items() if "/" in name]
        torch._foreach_mul_(moments, 0.999)
        torch._foreach_add_(weights, 1e-6)


class Ours:
    """The public manager, in a step folder per save."""

    def __init__(self, folder, state, *, asynchronous):
        from sirara.checkpoint.manager import CheckpointManager
        from sirara.checkpoint.manager import State as Saved

        self.folder, self.asynchronous, self.step = folder, asynchronous, 0
        self.saved = Saved(
            plan=state.plan,
            ranges=state.ranges,
            record={"tokens": 0},
            hf_files={"config.json": b"{}"},
            aliases={},
        )
        self.manager = CheckpointManager(
            folder,
            run=f"{RUN}-{os.getppid()}",
            rank=state.rank,
            world=state.world,
            node=0,
            attempt=1,
            keep_last=1,
            keep_every=None,
            asynchronous=asynchronous,
            agree=gathered,
        )
        self.manager.prepare(state.plan)

    def save(self):
        self.begin()
        while not (self.folder / f"step-{self.step:09d}" / "manifest.json").exists():
            time.sleep(0.0005)

    def begin(self):
        self.step += 1
        if not self.manager.start(self.step, self.saved, tiers=("disk",), patient=True):
            raise SystemExit("ours: the save did not begin")

    def fence(self):
        self.manager.fence()

    def settle(self):
        """The commit, reading back and what follows, out of the measured time."""
        last = self.manager.wait()
        if last is None or last.fault is not None:
            raise SystemExit(f"ours: {last}")
        return last

    def close(self):
        self.manager.close(clean=True)


def gathered(row):
    import torch
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [bytes(r.numpy()) for r in rows]


# ---- inside a worker


class Bench:
    def __init__(self, spec):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.world = int(os.environ["RANK"]), spec["ranks"]
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{spec['store']}", rank=self.rank, world_size=self.world
        )
        self.folder = Path(spec["folder"])
        self.rounds = spec["rounds"]
        self.state = State(spec["gib"], self.rank, self.world)
        self.dtensors = self.state.dtensors(init_device_mesh("cpu", (self.world,)))
        self.times = {}
        self.barrier = dist.barrier

    def rest(self):
        """No side pays for the one before: what it deleted is committed, and discarded by the disk, when this ends."""
        self.barrier()
        if self.rank == 0:
            os.sync()
            time.sleep(REST_S)
        self.barrier()

    def time(self, name, fn):
        """Seconds until the last rank is done."""
        self.rest()
        began = time.perf_counter()
        fn()
        self.barrier()
        self.times.setdefault(name, []).append(time.perf_counter() - began)

    def remove(self, path):
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.barrier()

    # ---- write

    def write(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        here, state = self.folder, self.state
        ours = Ours(here / "ours", state, asynchronous=True)
        line = Ours(here / "line", state, asynchronous=False)
        buffer, places = page_aligned(state)
        files = dict.fromkeys(state.local, 1)

        def dcp_async():
            dcp.async_save(self.dtensors, checkpoint_id=here / "dcp").result()

        def hf():
            writer = HuggingFaceStorageWriter(
                str(here / "hf"), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True
            )
            dcp.save(self.dtensors, storage_writer=writer)

        peers = {
            "dcp save": lambda: dcp.save(self.dtensors, checkpoint_id=here / "dcp"),
            "dcp async_save": dcp_async,
            "dcp hf writer": hf,
            "safetensors + fsync": lambda: safetensors_per_rank(here / "st", state),
            "raw write + fsync": lambda: raw_write(here / "raw", self.rank, buffer, direct=False),
            "raw direct write + fsync": lambda: raw_write(here / "raw", self.rank, buffer, direct=True),
        }
        if (deepspeed := deepspeed_engine(state)) is not None:
            peers["deepspeed"] = lambda: deepspeed.save_checkpoint(str(here / "ds"), tag="s")
        phases = {}
        for n in range(self.rounds + 1):
            self.time("ours", ours.save)
            noted = {"ours": ours.settle().seconds}
            self.rest()
            line.begin()
            noted["ours in line"] = seconds = line.settle().seconds
            # It returns when all is read back as well, which the others do not do; known on rank 0 alone.
            times = self.times.setdefault("ours in line", [])
            times.append(seconds.get("write", 0.0) + seconds.get("commit", 0.0))
            for name, laps in noted.items():
                for phase, took in laps.items():
                    phases.setdefault(f"{name}: {phase}", []).append(took)
            for name, save in peers.items():
                self.time(name, save)
                for folder in ("dcp", "hf", "st", "raw", "ds"):
                    self.remove(here / folder)
            self.time("memcpy", lambda: memcpy(state, places))
            if n == 0:  # arenas, files and pages are there now
                self.times.clear()
                phases.clear()
        ours.close()
        line.close()
        return {"bytes": state.total_bytes, "phases": {k: statistics.median(v) for k, v in phases.items()}}

    # ---- stall

    def stall(self):
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        ours = Ours(self.folder / "ours", self.state, asynchronous=True)
        _, places = page_aligned(self.state)
        stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))
        # Its collectives run beside those of the steps and would meet them on the same group.
        own = {"process_group": dist.new_group(backend="gloo")}
        options = {
            "dcp thread": own,
            "dcp thread, staged": own | {"async_stager": stager},
            "dcp process": own | {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
        }
        x, w = torch.randn(256, 1024), torch.randn(1024, 1024)

        def steps(begin, fence):
            began = time.perf_counter()
            begin()
            for n in range(STEPS):
                for _ in range(12):
                    x @ w
                dist.all_reduce(torch.zeros(1))
                if n == 0:
                    fence()
                self.state.update()
            self.barrier()
            return time.perf_counter() - began

        def sample(name, begin, fence, settle):
            self.barrier()
            plain = steps(lambda: None, lambda: None)
            self.barrier()
            with_save = steps(begin, fence)
            settle()
            self.barrier()
            self.times.setdefault(name, []).append(with_save - plain)

        def of_dcp(more):
            handle = []

            def begin():
                handle[:] = [dcp.async_save(self.dtensors, checkpoint_id=self.folder / "dcp", **more)]

            def fence():
                if hasattr(handle[0], "staging_completion"):
                    handle[0].staging_completion.result()

            def settle():
                getattr(handle[0], "upload_completion", handle[0]).result()
                self.remove(self.folder / "dcp")

            return begin, fence, settle

        for n in range(self.rounds + 1):
            sample("ours", ours.begin, ours.fence, ours.settle)
            for name, more in options.items():
                sample(name, *of_dcp(more))
            self.time("memcpy", lambda: memcpy(self.state, places))
            if n == 0:
                self.times.clear()
        ours.close()
        return {"bytes": self.state.total_bytes}

    # ---- load

    def prepare(self):
        """What the loads read: saved by two ranks."""
        import torch.distributed.checkpoint as dcp

        ours = Ours(self.folder / "ours", self.state, asynchronous=False)
        ours.save()
        ours.settle()
        dcp.save(self.dtensors, checkpoint_id=self.folder / "dcp")
        return {}

    def load(self):
        import torch
        import torch.distributed.checkpoint as dcp

        from sirara.checkpoint.reader import Snapshot
        from sirara.checkpoint.share import read_together
        from sirara.comm.world import World, world_comm

        rank, size = self.rank, self.world
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
        comm = world_comm(world, timeout_s=60)

        def first_fault(fault):
            rows = gathered(fault.encode()[:400].ljust(400, b"\0"))
            return next((text for row in rows if (text := row.rstrip(b"\0").decode())), "")

        def ours():
            snapshot = Snapshot(self.folder / "ours" / f"step-{1:09d}")
            read_together(snapshot, self.state.plan, self.state.ranges, comm=comm, agree=first_fault)

        for n in range(self.rounds + 1):
            self.time("ours", ours)
            loaded = [t.clone() for t in self.state.local.values()] if n == 0 else []
            self.time("dcp load", lambda: dcp.load(self.dtensors, checkpoint_id=self.folder / "dcp"))
            if n == 0:
                self.times.clear()
                if not all(map(torch.equal, loaded, self.state.local.values())):
                    raise SystemExit("the sides did not load the same state")
        return {"bytes": self.state.total_bytes}


def page_aligned(state):
    """A buffer as large as the rank's state, its pages touched, and one place in it per tensor."""
    import mmap

    import torch

    memory = mmap.mmap(-1, -(-state.rank_bytes // 4096) * 4096)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.fill_(1)
    places, at = [], 0
    for t in state.local.values():
        size = t.numel() * 4
        places.append(whole[at : at + size].view(torch.float32).view(t.shape))
        at += size
    return memoryview(memory), places


def memcpy(state, places):
    import ctypes

    for place, t in zip(places, state.local.values(), strict=True):
        ctypes.memmove(place.data_ptr(), t.data_ptr(), t.numel() * 4)


def safetensors_per_rank(folder, state):
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    path = folder / f"{state.rank}.safetensors"
    save_file(state.local, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw_write(folder, rank, buffer, *, direct):
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o644)
    at = 0
    while at < len(buffer):
        at += os.pwrite(fd, buffer[at : at + (1 << 30)], at)
    os.fsync(fd)
    os.close(fd)


def deepspeed_engine(state):
    """DeepSpeed with ZeRO 1 over weights and moments of about the same bytes; None where it is not installed."""
    try:
        import deepspeed
    except ImportError:
        return None
    import torch
    from benchmarks.peers_deepspeed import config

    layers = sum(1 for name in state.local if name.endswith("weight"))
    model = torch.nn.Sequential(*(torch.nn.Linear(COLUMNS, ROWS) for _ in range(layers)))
    settings = config("fp32", micro=1, accumulation=1, zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(sum(p.sum() for p in model.parameters()))
    engine.step()
    return engine


def work(spec):
    import torch.distributed as dist

    bench = Bench(spec)
    answer = getattr(bench, spec["part"])()
    slowest = [None] * bench.world
    dist.all_gather_object(slowest, bench.times)
    if bench.rank == 0:
        times = {
            name: [max(rows) for rows in zip(*(s[name] for s in slowest), strict=True)]
            for name in bench.times
        }
        print("RESULT " + json.dumps(answer | {"times": times}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


# ---- without torch


def plan_times():
    """Seconds: one rank's plan for 10,000 tensors written by 1,000 ranks; a manifest of a million pieces opened."""
    import numpy as np

    from sirara.checkpoint.image import image_plan
    from sirara.pure.layout import range_boxes
    from sirara.pure.manifest import parse_manifest
    from sirara.pure.saveplan import PlannedTensor, SavePlan, plan_save
    from tests.manifests import grid_manifest

    found = {}
    for spread in (2, 16, 64):
        n, world, shape = 10_000, 1000, (4096, 1024)
        tensors = []
        for i in range(n):
            low = i * world // n
            high = min(world, low + spread)
            ends = np.linspace(0, shape[0] * shape[1], high - low + 1).astype(int).tolist()
            boxes = {low + k: range_boxes(shape, ends[k], ends[k + 1]) for k in range(high - low)}
            name = f"layers.{i}.weight" + ("/exp_avg" if i % 3 else "")
            tensors.append(PlannedTensor(name=name, dtype="F32", shape=shape, boxes=boxes))
        began = time.process_time()
        plan = plan_save(tensors, node_of=lambda r: r // 8, assemble=True)
        image_plan(plan, world // 2)
        found[f"plan, {len(plan.columns)} pieces"] = time.process_time() - began
    began = time.process_time()
    again = SavePlan.from_bytes(plan.to_bytes())
    found[f"plan to bytes and back, {len(again.columns)} pieces"] = time.process_time() - began
    n = 1_000_000
    manifest = grid_manifest(n, tensors=1000)
    began = time.process_time()
    raw = manifest.to_bytes()
    found[f"manifest of {n} pieces written, {len(raw) / 1e6:.0f} MB"] = time.process_time() - began
    began = time.process_time()
    parse_manifest(raw, where="bench")
    found["the same opened"] = time.process_time() - began
    return found


# ---- outside


def table(title, answer, ratios):
    """Medians in seconds and GB/s, and the ratios that are wanted."""
    print(f"\n{title}")
    medians = {name: statistics.median(times) for name, times in answer["times"].items()}
    for name, median in medians.items():
        low, high = min(answer["times"][name]), max(answer["times"][name])
        speed = f"{answer['bytes'] / median / 1e9:6.2f} GB/s" if median > 0 else ""
        print(f"  {name:28} {median:8.3f} s  ({low:.3f} - {high:.3f}) {speed}")
    for phase, seconds in answer.get("phases", {}).items():
        print(f"    {phase:26} {seconds:8.3f} s")
    for text, value in ratios(medians).items():
        print(f"  {text}: {value:.2f}", flush=True)
    answer["medians"], answer["ratios"] = medians, ratios(medians)


def write_ratios(m):
    """Of speeds."""
    return {
        "ours / safetensors + fsync (wanted >= 0.9)": m["safetensors + fsync"] / m["ours"],
        "ours / dcp save (wanted >= 1.8)": m["dcp save"] / m["ours"],
        "in line / safetensors + fsync": m["safetensors + fsync"] / m["ours in line"],
        "in line / dcp save": m["dcp save"] / m["ours in line"],
    }


def stall_ratios(m):
    """Of times."""
    best = min(seconds for name, seconds in m.items() if name.startswith("dcp"))
    return {
        "stall / memcpy (wanted <= 1.5)": m["ours"] / m["memcpy"],
        "stall / dcp's best (wanted <= 0.75)": m["ours"] / best,
    }


def load_ratios(m):
    return {"ours / dcp load (wanted >= 1.5)": m["dcp load"] / m["ours"]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("write", "stall", "load", "plan")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    # A timeout ends it with SIGTERM; ranks and files must go then as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=args.folder))
    spec = {"ranks": 2, "threads": 1, "gib": args.gib, "rounds": args.rounds, "folder": str(folder)}
    found = {}
    try:
        if "write" in args.only:
            found["write"] = launch(__file__, spec | {"part": "write"})
            table("durable write, 2 ranks", found["write"], write_ratios)
            if "deepspeed" not in found["write"]["times"]:
                print("  deepspeed is not installed here: not measured")
        if "stall" in args.only:
            found["stall"] = launch(__file__, spec | {"part": "stall"})
            table(f"stall of {STEPS} steps, 2 ranks", found["stall"], stall_ratios)
        if "load" in args.only:
            shutil.rmtree(folder)
            folder.mkdir()
            launch(__file__, spec | {"part": "prepare"})
            for ranks in (2, 1, 4):
                answer = found[f"load 2 -> {ranks}"] = launch(
                    __file__, spec | {"part": "load", "ranks": ranks}
                )
                table(f"load, 2 -> {ranks} ranks", answer, load_ratios)
        if "plan" in args.only:
            found["plan"] = plan_times()
            print("\nplans and manifests, CPU seconds")
            for name, seconds in found["plan"].items():
                print(f"  {name:48} {seconds:6.2f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    sys.exit(main())
