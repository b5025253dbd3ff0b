"""ZeRO, pipelines and tensor parallelism beside DeepSpeed, FSDP2, torch.distributed.pipelining and DTensor.

    python benchmarks/parallel.py [--only NAME...] [--pairs 7] [--json FILE] [--list]

Needs the `bench` extra.  The 28M llama of benchmarks/peers.py starts from the same weights on both sides; both live in
the same processes and take turns (ours, peer, ours, peer, ...), so that a noisy machine slows both.  A ratio is the
median over pairs of peer's time / ours, with quartiles.  Names may be prefixes: `--only zero 1f1b-bf16`.

    zero, fsdp2      2 data-parallel ranks, one microbatch of 4 sequences each
    1f1b ... ds-pipe 2 stages, 8 microbatches of 1 sequence, the same blocks per stage on both sides
    tp, sp           2 ranks, 2 microbatches of 4 sequences; sp: with sequence parallelism
    exact            ours with the fixed tree of sums beside ours with `numerics: fast`, 8 microbatches of 1 per rank
    rss              peak resident memory and state at rest, per rank, in processes of one side each
    host             host time per block under tensor parallelism on a fake process group (benchmarks/host.py)
    bubble           measured bubble beside the simulator's (benchmarks/bubble.py)
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bubble, host
from benchmarks.sides import launch, quartiles, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.  needed: the least ratio of tokens per second."""

    ours: dict
    peer: dict
    precision: str
    needed: float | None = None
    micro: int = 4
    microbatches: int = 1
    same_data: bool = False
    size: dict = field(default_factory=dict)

    def spec(self, sides, *, pairs, warm):
        return {
            "ranks": 2,
            "threads": 1,
            "micro": self.micro,
            "microbatches": self.microbatches,
            "precision": self.precision,
            "same_data": self.same_data,
            "size": self.size,
            "sides": sides,
            "pairs": pairs,
            "warm": warm,
        }


SPLITS = {"1f1b": [4, 2], "interleaved": [2, 1, 2, 1], "zb-v": [1, 2, 2, 1], "gpipe": [4, 2]}
"""Blocks per stage; the head is as dear as 1.3 blocks."""


def cases():
    """name -> Case"""
    found = {}
    for precision in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            found[f"zero{stage}-{precision}"] = Case(
                ours={"kind": "ours", "zero": stage},
                peer={"kind": "deepspeed-zero", "stage": stage},
                precision=precision,
                needed=1.15,
            )
        found[f"fsdp2-{precision}"] = Case(
            ours={"kind": "ours", "zero": 3}, peer={"kind": "fsdp2"}, precision=precision, needed=1.12
        )
        pipe = {"precision": precision, "micro": 1, "microbatches": 8, "same_data": True}
        for name in ("1f1b", "interleaved", "zb-v"):
            found[f"{name}-{precision}"] = Case(
                ours={"kind": "ours", "pp": 2, "name": name, "split": SPLITS[name]},
                peer={"kind": "torch-pipe", "schedule": name, "split": SPLITS[name]},
                needed=None if name == "interleaved" else 1.05,
                **pipe,
            )
        found[f"ds-pipe-{precision}"] = Case(
            ours={"kind": "ours", "pp": 2, "name": "1f1b", "split": SPLITS["1f1b"]},
            peer={"kind": "deepspeed-pipe", "split": SPLITS["1f1b"]},
            **pipe,
        )
        for name, sequence in (("tp", False), ("sp", True)):
            found[f"{name}-{precision}"] = Case(
                ours={"kind": "ours", "tp": 2, "sequence": sequence},
                peer={"kind": "dtensor", "sequence": sequence},
                precision=precision,
                microbatches=2,
                same_data=True,
                needed=1.2 if precision == "fp32" else 1.3,
            )
        for stage in (0, 1, 2, 3):
            found[f"exact{stage}-{precision}"] = Case(
                ours={"kind": "ours", "zero": stage},
                peer={"kind": "ours", "zero": stage, "fast": True},
                precision=precision,
                micro=1,
                microbatches=8,
                # "At most 5 % of time": fast may take no less than 1 / 1.05 of it.
                needed=1 / 1.05,
            )
    return found


def compare(name, case, pairs):
    """One row of the table, printed and returned."""
    got = launch(__file__, case.spec([case.ours, case.peer], pairs=pairs, warm=2))
    ours, theirs = got["ranks"][0]["times"]
    lower, middle, upper = quartiles([b / a for a, b in zip(ours, theirs, strict=True)])
    rate, peer_rate = (got["tokens"] / statistics.median(t) for t in (ours, theirs))
    verdict = "" if case.needed is None else f"{case.needed:.2f} {'ok' if middle >= case.needed else 'NO'}"
    first, second = got["losses"]
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    print(
        f"{name:18} {rate:10.0f} {peer_rate:10.0f} {middle:6.3f} {lower:6.3f}-{upper:6.3f} {verdict:>8} {apart:10.1e}",
        flush=True,
    )
    row = {
        "ours": rate,
        "peer": peer_rate,
        "ratio": middle,
        "lower": lower,
        "upper": upper,
        "needed": case.needed,
        "losses_apart": apart,
        "ours_sent_per_step": got["ranks"][0]["sent"],
        "seconds": {"ours": ours, "peer": theirs},
    }
    if case.peer["kind"] == "ours":
        exact, fast = (sent["dp"] for sent in got["ranks"][0]["sent"])
        formula = got["ranks"][0]["expected_dp_bytes"][0]
        row["dp_bytes_per_step"] = {"exact": exact, "formula": formula, "fast": fast}
        print(
            f"{'':18} sent over dp per rank and step: {exact / 2**20:.1f} MiB, by formula {formula / 2**20:.1f},"
            f" fast {fast / 2**20:.1f}",
            flush=True,
        )
    return row


def memory(found, only):
    """Peak resident memory and bytes at rest of each side of ZeRO and pipelines."""
    report, seen = {}, set()
    print(f"\n{'side, per rank in MiB':44} {'peak RSS':>9} {'beyond imports':>15} {'tensors at rest':>16}")
    for name, case in found.items():
        if name.startswith("exact"):
            continue
        for side in (case.ours, case.peer):
            label = (
                " ".join(str(v) if k == "kind" else f"{k}={v}" for k, v in side.items() if k != "split")
                + f" {case.precision}"
            )
            if label in seen or (only is not None and not chosen(name, only)):
                continue
            seen.add(label)
            got = launch(__file__, case.spec([side], pairs=2, warm=1))
            mib = [
                [round(rank[key] / 2**20) for rank in got["ranks"]]
                for key in ("peak_rss", "imported_rss", "at_rest")
            ]
            beyond = [a - b for a, b in zip(mib[0], mib[1], strict=True)]
            report[label] = {"peak_rss": mib[0], "beyond_imports": beyond, "at_rest": mib[2]}
            columns = ["/".join(map(str, values)) for values in (mib[0], beyond, mib[2])]
            print(f"{label:44} {columns[0]:>9} {columns[1]:>15} {columns[2]:>16}", flush=True)
    return report


def chosen(name, only):
    return any(name.startswith(prefix) for prefix in only)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=None, help="names or their beginnings")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        spec = json.loads(args.worker)
        return {"bubble": bubble.work, "host": host.work}.get(spec.get("task"), work)(spec)
    found = cases()
    if args.list:
        print("\n".join([*found, "rss", "host", "bubble"]))
        return None
    only = args.only
    report = {"cases": {}}
    wanted = {name: case for name, case in found.items() if only is None or chosen(name, only)}
    if wanted and only != ["rss"]:
        print(
            f"{'case':18} {'ours tok/s':>10} {'peer tok/s':>10} {'ratio':>6} {'quartiles':>13} {'needed':>8}"
            f" {'loss apart':>10}"
        )
        for name, case in wanted.items():
            report["cases"][name] = compare(name, case, args.pairs)
    if only is None or "rss" in only:
        names = [name for name in only or [] if name != "rss"] or None
        report["memory_mib"] = memory(found, names)
    if only is None or "host" in only:
        report["host_us"] = host.report(__file__)
    if only is None or "bubble" in only:
        report["bubble"] = bubble.report(__file__)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return None


if __name__ == "__main__":
    sys.exit(main())
