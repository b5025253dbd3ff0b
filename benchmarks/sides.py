"""Both sides of a comparison in the same processes, taking turns; and what a process of one side holds.

launch(spec)        starts the ranks, returns rank 0's answer
work(spec)          inside a rank: ours, peer, ours, peer, ...
"""

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


# ---- inside a worker


def make_side(kind, *, precision, microbatches, micro, size, **options):
    """One training side with step(batches), grad_norm(); kinds beside "ours" are peers."""
    if kind == "ours":
        from benchmarks.ours import Ours

        return Ours(precision, microbatches=microbatches, micro=micro, size=size, **options)
    if kind in ("eager", "ddp", "fsdp2"):
        from benchmarks.peers import Peer

        return Peer(kind, precision, size=size, **options)
    if kind == "deepspeed-zero":
        from benchmarks.peers_deepspeed import Zero

        return Zero(precision=precision, micro=micro, microbatches=microbatches, size=size, **options)
    if kind == "deepspeed-pipe":
        from benchmarks.peers_deepspeed import Pipe

        return Pipe(precision, micro=micro, microbatches=microbatches, size=size, **options)
    if kind == "torch-pipe":
        from benchmarks.peers_torch import Pipe

        return Pipe(precision=precision, microbatches=microbatches, size=size, **options)
    if kind == "dtensor":
        from benchmarks.peers_torch import Tensor

        return Tensor(precision, size=size, **options)
    raise SystemExit(f"no side is called {kind}")


def work(spec):
    """A rank: makes the sides, lets them take turns, prints rank 0's RESULT line."""
    import torch
    import torch.distributed as dist
    from benchmarks.peers import Size

    rank, ranks = int(os.environ["RANK"]), spec["ranks"]
    torch.set_num_threads(spec["threads"])
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=ranks)
    size, micro, microbatches = Size(**spec["size"]), spec["micro"], spec["microbatches"]
    # Ranks of a pipeline or of tensor parallelism see the same microbatches, data-parallel ranks their own.
    generator = torch.Generator().manual_seed(0 if spec["same_data"] else rank)
    batches = []
    for _ in range(microbatches):
        tokens = torch.randint(size.vocab, (micro, size.seq + 1), generator=generator)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    common = {"precision": spec["precision"], "microbatches": microbatches, "micro": micro, "size": size}
    warm_imports(spec["sides"])
    imported = resident_bytes()
    sides = [make_side(**side, **common) for side in spec["sides"]]
    times, sums, norms = ([[] for _ in sides] for _ in range(3))
    for n in range(spec["warm"] + spec["pairs"]):
        for k, side in enumerate(sides):
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            loss = side.step(batches)
            if ranks > 1:
                dist.barrier()
            if n >= spec["warm"]:
                times[k].append(time.perf_counter() - began)
            sums[k].append(loss)
            norms[k].append(side.grad_norm())
    answer = {
        "times": times,
        "losses": sums,
        "norms": norms,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "imported_rss": imported,
        "at_rest": tensor_bytes(),
        "sent": [getattr(side, "bytes_sent", None) for side in sides],
        "expected_dp_bytes": [getattr(side, "expected_dp_bytes", lambda: None)() for side in sides],
    }
    answers = [answer] * ranks
    if ranks > 1:
        dist.all_gather_object(answers, answer)
    if rank == 0:
        # A data-parallel rank knows the loss of its own microbatches; others know all of it, or nothing.
        both = [[a["losses"][k] for a in answers] for k in range(len(sides))]
        tokens = microbatches * micro * size.seq * (1 if spec["same_data"] else ranks)
        join = max if spec["same_data"] else sum
        losses = [[join(step) / tokens for step in zip(*side, strict=True)] for side in both]
        print("RESULT " + json.dumps({"tokens": tokens, "losses": losses, "ranks": answers}))
    sys.stdout.flush()
    # Threads of libraries may outlive their interpreter and abort it.
    os._exit(0)


def warm_imports(sides):
    """Imports what the sides will, so that resident memory after it is that of libraries alone."""
    import importlib

    modules = {
        "ours": "benchmarks.ours",
        "deepspeed-zero": "benchmarks.peers_deepspeed",
        "deepspeed-pipe": "benchmarks.peers_deepspeed",
        "torch-pipe": "benchmarks.peers_torch",
        "dtensor": "benchmarks.peers_torch",
    }
    for side in sides:
        importlib.import_module(modules.get(side["kind"], "benchmarks.peers"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes():
    """Bytes of all storages that live tensors of this process use, each once: the state of a side between steps."""
    import torch

    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # isinstance would ask lazy modules for their class.
        if issubclass(type(thing), torch.Tensor):
            grad = thing.grad if thing.is_leaf else None
            for tensor in (thing, grad):
                local = getattr(tensor, "_local_tensor", tensor)
                if local is not None and local.device.type == "cpu":
                    storage = local.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# ---- outside


def launch(script, spec):
    """Runs `script --worker SPEC` on spec["ranks"] processes; returns rank 0's answer."""
    store = Path(tempfile.mkdtemp(prefix="sirara-bench-"))
    text = json.dumps(spec | {"store": str(store / "store")})
    env = os.environ | {
        "OMP_NUM_THREADS": str(spec["threads"]),
        "PYTHONPATH": f"{REPO}:{REPO / 'src'}",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "WORLD_SIZE": str(spec["ranks"]),
        # Where a library insists on an address although the group exists.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    }
    errors = [open(store / f"rank-{r}.err", "w+") for r in range(spec["ranks"])]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, "--worker", text],
            env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=errors[r],
            text=True,
        )
        for r in range(spec["ranks"])
    ]
    answer = None
    try:
        while answer is None and (line := processes[0].stdout.readline()):
            if line.startswith("RESULT "):
                answer = json.loads(line[7:])
        if answer is None:
            for r, file in enumerate(errors):
                file.seek(0)
                print(f"--- rank {r}\n" + file.read()[-3000:], file=sys.stderr)
            raise SystemExit(f"a benchmark worker failed: {spec}")
    finally:
        for p in processes:
            if answer is None:
                p.kill()
            p.communicate()
        for file in errors:
            Path(file.name).unlink()
            file.close()
        (store / "store").unlink(missing_ok=True)
        store.rmdir()
    return answer


def quartiles(values):
    if len(values) < 2:
        return values[0], values[0], values[0]
    q = statistics.quantiles(values, n=4)
    return q[0], statistics.median(values), q[2]
