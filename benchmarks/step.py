"""Tokens per second of the same 28M llama here and in plain PyTorch, DDP and FSDP2, side by side in one run.

    python benchmarks/step.py [--only NAME...] [--pairs 7] [--json FILE]

Both sides live in the same processes and take turns (ours, peer, ours, peer, ...), so that a noisy machine slows both.
A ratio is the median over pairs of ours / peer, with quartiles.  "limit" is the rate that the matmuls alone would
allow, from their shapes timed in the same run.  Peak memory is measured in processes of one side each.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
MICRO = 4

# name: ranks, threads per rank, microbatches per rank, precision, peer, compile, what ours is compared with
CASES = {
    "one-fp32": (1, 2, 1, "fp32", "eager", False),
    "one-fp32-8": (1, 2, 8, "fp32", "eager", False),
    "one-bf16": (1, 2, 1, "bf16", "eager", False),
    "one-bf16-8": (1, 2, 8, "bf16", "eager", False),
    "one-autocast": (1, 2, 1, "autocast", "eager", False),
    "one-fp32-compiled": (1, 2, 1, "fp32", "eager", True),
    "one-bf16-compiled": (1, 2, 1, "bf16", "eager", True),
    "ddp-fp32": (2, 1, 1, "fp32", "ddp", False),
    "ddp-fp32-8": (2, 1, 8, "fp32", "ddp", False),
    "ddp-bf16": (2, 1, 1, "bf16", "ddp", False),
    "ddp-bf16-8": (2, 1, 8, "bf16", "ddp", False),
    "ddp-autocast": (2, 1, 1, "autocast", "ddp", False),
    "fsdp2-fp32": (2, 1, 1, "fp32", "fsdp2", False),
    "fsdp2-fp32-8": (2, 1, 8, "fp32", "fsdp2", False),
    "fsdp2-bf16": (2, 1, 1, "bf16", "fsdp2", False),
    "fsdp2-bf16-8": (2, 1, 8, "bf16", "fsdp2", False),
    "exact-fp32": (2, 1, 8, "fp32", "fast", False),
    "exact-bf16": (2, 1, 8, "bf16", "fast", False),
}
NEEDED = {
    "one-fp32": 1.0,
    "one-fp32-8": 1.0,
    "one-bf16": 1.05,
    "one-bf16-8": 1.05,
    "ddp-fp32": 1.0,
    "ddp-fp32-8": 1.0,
    "ddp-bf16": 1.1,
    "ddp-bf16-8": 1.1,
    "fsdp2-fp32": 1.12,
    "fsdp2-fp32-8": 1.12,
    "fsdp2-bf16": 1.1,
    "fsdp2-bf16-8": 1.1,
    "exact-fp32": 0.95,
    "exact-bf16": 0.95,
}
MEMORY = {
    "ours-zero1-fp32": ("ours", "fp32"),
    "ddp-fp32": ("ddp", "fp32"),
    "fsdp2-fp32": ("fsdp2", "fp32"),
    "ours-zero1-bf16": ("ours", "bf16"),
    "ddp-bf16": ("ddp", "bf16"),
    "fsdp2-bf16": ("fsdp2", "bf16"),
}


# ---- inside a worker


def make_side(side, microbatches, precision, compile):
    from benchmarks.peers import SMALL, Peer

    if side in ("ours", "fast"):
        from benchmarks.ours import Ours

        return Ours(
            precision,
            microbatches=microbatches,
            micro=MICRO,
            size=SMALL,
            compile=compile,
            fast=side == "fast",
        )
    return Peer(side, precision, compile=compile)


def worker(spec):
    import torch
    import torch.distributed as dist
    from benchmarks.peers import SEQ, VOCAB

    ranks, threads, microbatches, precision, compile = (
        spec[k] for k in ("ranks", "threads", "microbatches", "precision", "compile")
    )
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{spec['store']}", rank=int(os.environ["RANK"]), world_size=ranks
        )
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))

    def fresh():
        tokens = torch.randint(VOCAB, (MICRO, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    batches = [fresh() for _ in range(microbatches)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sides = [make_side(side, microbatches, precision, compile) for side in spec["sides"]]
    times = [[] for _ in sides]
    for n in range(spec["warm"] + spec["pairs"]):
        for k, side in enumerate(sides):
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            side.step(batches)
            if ranks > 1:
                dist.barrier()
            if n >= spec["warm"]:
                times[k].append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if int(os.environ.get("RANK", 0)) == 0:
        tokens = ranks * microbatches * MICRO * SEQ
        print(
            "RESULT "
            + json.dumps(
                {"tokens": tokens, "times": times, "rss_mib": peak / 1024, "rss_start_mib": before / 1024}
            )
        )
    if ranks > 1:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def matmul_limit():
    """Tokens per second if a step were its matmuls alone, timed one by one here: one process of 1 and 2 threads."""
    import torch
    from benchmarks.peers import FFN, HIDDEN, LAYERS, SEQ, VOCAB

    tokens, out = MICRO * SEQ, {}
    shapes = [
        (3 * HIDDEN, HIDDEN, LAYERS),
        (HIDDEN, HIDDEN, LAYERS),
        (2 * FFN, HIDDEN, LAYERS),
        (HIDDEN, FFN, LAYERS),
        (VOCAB, HIDDEN, 1),
    ]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            total = 0.0
            for n, k, times in shapes:
                x, w, dy = (torch.randn(*s).to(dtype) for s in ((tokens, k), (n, k), (tokens, n)))
                for f in (lambda x=x, w=w: x @ w.T, lambda dy=dy, w=w: dy @ w, lambda dy=dy, x=x: dy.T @ x):
                    took = []
                    for _ in range(7):
                        began = time.perf_counter()
                        f()
                        took.append(time.perf_counter() - began)
                    total += times * statistics.median(took)
            out[f"{name}-{threads}"] = tokens / total
    print("RESULT " + json.dumps(out))


# ---- outside


def launch(spec, threads):
    ranks = spec.get("ranks", 1)
    store = Path(f"/tmp/sirara-bench-{os.getpid()}-{time.monotonic_ns()}")
    text = json.dumps(spec | {"store": str(store)})
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{REPO}:{REPO / 'src'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", text],
            env=env | {"RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]
    outputs = [p.communicate()[0] for p in processes]
    store.unlink(missing_ok=True)
    for line in outputs[0].splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(f"a benchmark worker failed: {spec}")


def quartiles(values):
    q = statistics.quantiles(values, n=4)
    return q[0], statistics.median(values), q[2]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        spec = json.loads(args.worker)
        return matmul_limit() if spec.get("limit") else worker(spec)
    limit = launch({"limit": True}, 2)
    report = {"limit_tokens_per_s": limit, "cases": {}, "memory_mib": {}}
    print("matmul limit, tokens/s: " + "  ".join(f"{k} thread(s) {v:.0f}" for k, v in limit.items()))
    print(
        f"{'case':20} {'ours tok/s':>10} {'peer tok/s':>10} {'ratio':>6} {'quartiles':>14} {'needed':>7}"
        f" {'of limit':>9}"
    )
    for name, (ranks, threads, microbatches, precision, peer, compile) in CASES.items():
        if args.only is not None and name not in args.only:
            continue
        spec = {
            "ranks": ranks,
            "threads": threads,
            "microbatches": microbatches,
            "precision": precision,
            "compile": compile,
            "sides": ["ours", peer],
            "pairs": args.pairs,
            "warm": 2,
        }
        got = launch(spec, threads)
        ours, theirs = got["times"]
        lower, middle, upper = quartiles([b / a for a, b in zip(ours, theirs, strict=True)])
        rate, peer_rate = (got["tokens"] / statistics.median(t) for t in (ours, theirs))
        share = rate / (limit[f"{'fp32' if precision == 'fp32' else 'bf16'}-{threads}"] * ranks)
        needed = NEEDED.get(name)
        report["cases"][name] = {
            "ours": rate,
            "peer": peer_rate,
            "ratio": middle,
            "lower": lower,
            "upper": upper,
            "needed": needed,
            "share_of_limit": share,
            "peer_name": peer,
        }
        verdict = "" if needed is None else f"{needed:.2f} {'ok' if lower >= needed else 'NO'}"
        print(
            f"{name:20} {rate:10.0f} {peer_rate:10.0f} {middle:6.3f} {lower:6.3f}-{upper:6.3f} {verdict:>8}"
            f" {share:8.0%}",
            flush=True,
        )
    if args.only is None or "memory" in args.only:
        for name, (side, precision) in MEMORY.items():
            spec = {
                "ranks": 2,
                "threads": 1,
                "microbatches": 1,
                "precision": precision,
                "compile": False,
                "sides": [side],
                "pairs": 4,
                "warm": 1,
            }
            got = launch(spec, 1)
            report["memory_mib"][name] = got["rss_mib"]
            print(
                f"peak RSS {name:18} {got['rss_mib']:7.0f} MiB  ({got['rss_start_mib']:.0f} before the model)",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return None


if __name__ == "__main__":
    main()
