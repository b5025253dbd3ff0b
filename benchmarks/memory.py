"""Peak bytes per rank of ZeRO stages 0-3 beside the closed form, FSDP2 and DeepSpeed, on a model with > 1 GiB of state.

    python benchmarks/memory.py [--only NAME...] [--json FILE]

Two numbers per rank.  "allocated" is exact: torch's profiler reports every allocation and release of the CPU allocator,
from before the model is made until two steps are done; their running sum has a peak.  It counts what torch allocates,
temporaries inside operations included, and neither libraries' own scratch memory nor Python.  "resident" is the peak
resident set less what was resident after all imports, in a run without the profiler.
The closed form (`closed_form`) is that of ours; the sequence is short, so that activations are small beside it.
"""

import argparse
import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sides import launch, make_side, resident_bytes, warm_imports

SIZE = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 2048, "vocab": 16384, "seq": 64}
"""110M parameters: 1.64 GiB of state in fp32, 1.85 GiB in bf16."""
MICROBATCHES = 2

SIDES = {
    "zero0": {"kind": "ours", "zero": 0},
    "zero1": {"kind": "ours", "zero": 1},
    "zero2": {"kind": "ours", "zero": 2},
    "zero3": {"kind": "ours", "zero": 3},
    "fsdp2": {"kind": "fsdp2", "lean": True},
    "deepspeed1": {"kind": "deepspeed-zero", "stage": 1, "lean": True},
    "deepspeed2": {"kind": "deepspeed-zero", "stage": 2, "lean": True},
    "deepspeed3": {"kind": "deepspeed-zero", "stage": 3, "lean": True},
}


def work(spec):
    """One rank: the side is made and takes two steps, under the profiler's eye or not."""
    import torch
    import torch.distributed as dist
    from benchmarks.peers import Size
    from torch.profiler import ProfilerActivity, profile

    rank, ranks, size = int(os.environ["RANK"]), spec["ranks"], Size(**SIZE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=ranks)
    warm_imports([spec["side"]])
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(MICROBATCHES):
        tokens = torch.randint(size.vocab, (1, size.seq + 1), generator=generator)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    imported = resident_bytes()
    answer = {"parameters": size.parameters}

    def train():
        side = make_side(
            **spec["side"], precision=spec["precision"], microbatches=MICROBATCHES, micro=1, size=size
        )
        for _ in range(2):
            side.step(batches)
        return side

    if spec["counted"]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            side = train()
        answer |= peak_of(seen)
    else:
        side = train()
        answer["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported
    if spec["side"]["kind"] == "ours":
        answer["form"] = closed_form(side)
        held: dict[str, int] = {}
        for what, nbytes in side.stage.zero.bytes_held():
            held[what] = held.get(what, 0) + nbytes
        answer["held"] = held
    answers = [None] * ranks
    dist.all_gather_object(answers, answer)
    if rank == 0:
        print("RESULT " + json.dumps(answers), flush=True)
    os._exit(0)


def peak_of(seen):
    """The largest running sum of allocated bytes, and what is left at the end."""
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return {"allocated": peak, "at_rest": live, "events": len(events)}


def closed_form(side):
    """Bytes that a rank of ours holds at the peak, by what they are for, without activations.

    With P parameters, D ranks, w bytes per weight and 4 per sum:

        weights         w P, at stage 3 w P / D          masters     4 of the updated part, where w != 4
        moments         8 of the updated part (all of P at stage 0, P / D from stage 1 on)
        gradients       the reduced shards, 4 P / D; at stage 0 then widened to 4 P
        tree            stages 0 and 1: max(1, k) full-size sums of every group, until its block is complete;
                        stages 2 and 3: shards of half-done sums, as many as there are bits in the rounds before the
                        last one, of which one becomes the reduced gradient
        exchange        stages 0 and 1: the shards that arrive; stages 2 and 3: per size of group two full-size
                        partial sums and what arrives for them, and the widening of an arrived shard to fp32
        window          stage 3: two places, as large as the largest unit and the largest block
        autograd        the gradients of the largest unit as autograd hands them out
    """
    zero, layout, deal, ranks = side.stage.zero, side.layout, side.deal, side.mesh.dp
    leaf, sums = layout.weights.itemsize, layout.sums.itemsize
    padded = [flat.group.shard_numel(ranks) * ranks for flat in zero.groups]
    whole = sum(padded)
    shard = whole // ranks
    updated = shard if layout.zero else whole
    sent = leaf if deal.k == 0 and ranks > 1 else sums
    arriving = shard * (ranks - 1)
    form = {
        "weights": leaf * (shard if layout.zero == 3 else whole),
        "masters": sums * updated if leaf != sums else 0,
        "moments": 2 * sums * updated,
        "window": zero.window.bytes if zero.window is not None else 0,
        "autograd": leaf * max(padded),
    }
    if layout.zero < 2:
        form["tree"] = sent * whole * max(1, deal.k)
        form["exchange"] = sent * arriving + (sums * shard if sent != sums else 0)
    else:
        form["tree"] = sums * shard * max(1, (deal.rounds - 1).bit_length())
        form["exchange"] = 0
        for numel in set(padded):
            under_way = min(2, padded.count(numel))
            form["exchange"] += under_way * sent * (numel + numel // ranks * (ranks - 1))
            form["exchange"] += sums * numel // ranks if sent != sums else 0
    form["total"] = sum(form.values())
    return form


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=None, help="names or their beginnings, as zero3 or fsdp2-bf16"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    found = {}
    print(
        f"{'MiB per rank, 2 ranks':20} {'allocated':>10} {'closed form':>12} {'ratio':>6}"
        f" {'at rest':>8} {'resident':>9}"
    )
    for precision in ("fp32", "bf16"):
        for name, side in SIDES.items():
            label = f"{name}-{precision}"
            if args.only is not None and not any(label.startswith(prefix) for prefix in args.only):
                continue
            spec = {"ranks": 2, "threads": 1, "precision": precision, "side": side}
            counted, plain = (launch(__file__, spec | {"counted": counted}) for counted in (True, False))
            row = {key: max(a[key] for a in counted) for key in ("allocated", "at_rest", "events")}
            row["resident"] = max(a["resident"] for a in plain)
            row["form"] = form = counted[0].get("form")
            row["held"] = counted[0].get("held")
            found[label] = row
            known = (
                f"{form['total'] / 2**20:12.0f} {row['allocated'] / form['total']:6.3f}" if form else " " * 19
            )
            print(
                f"{label:20} {row['allocated'] / 2**20:10.0f} {known} {row['at_rest'] / 2**20:8.0f}"
                f" {row['resident'] / 2**20:9.0f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    sys.exit(main())
