"""Predicted and measured peak bytes and step times of a dozen layouts on this machine.

    python benchmarks/planner_error.py [--profile FILE] [--only NAME...] [--steps 6] [--json FILE]

Without --profile the machine is calibrated first, for the model that is trained (`sirara plan calibrate`).  Each layout
is assembled and stepped as a run does it (train/assemble.py, train/step.py), on processes of their own.

peak     the most bytes that were allocated above those before the model, on the rank that has most (Device.peak)
         beside the plan's allocated bytes of the busiest stage
step     lower quartile of the slowest rank's steps, after two that warm up, beside the plan's step time, which is made
         of lower quartiles too: what disturbs a machine lengthens both
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "src"))

CONFIG = """\
schema: 1
name: planner-error
model: {family: llama, layers: 8, hidden: 512, heads: 8, ffn: 1408, vocab: 8192, max_seq: 256}
data: {train: [{path: none}], seq_len: 256}
train: {steps: 1, global_batch: 8, micro_batch: 1, precision: fp32, optimizer: {name: adamw, lr: 1e-3}}
launch: {threads: 1}
"""
"""34M parameters: 0.5 GiB of weights, gradients and moments."""

LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, "mesh.dp=1 mesh.zero=0"),
    "one-full": (1, "mesh.dp=1 mesh.zero=0 train.recompute=full train.micro_batch=2"),
    "dp2-zero0": (2, "mesh.dp=2 mesh.zero=0"),
    "dp2-zero1-selective": (2, "mesh.dp=2 mesh.zero=1 train.recompute=selective train.micro_batch=2"),
    "dp2-zero2": (2, "mesh.dp=2 mesh.zero=2"),
    "dp2-zero3": (2, "mesh.dp=2 mesh.zero=3"),
    "tp2": (2, "mesh.tp=2 mesh.dp=1 mesh.zero=0 train.micro_batch=2"),
    "pp2-1f1b": (2, "mesh.pp=2 mesh.dp=1 mesh.zero=0"),
    "pp2-zb-h1-full": (2, "mesh.pp=2 mesh.dp=1 mesh.zero=0 mesh.schedule=zb-h1 train.recompute=full"),
    "dp4-zero1": (4, "mesh.dp=4 mesh.zero=1"),
    "pp2-dp2-zero1-gpipe": (4, "mesh.pp=2 mesh.dp=2 mesh.zero=1 mesh.schedule=gpipe"),
    "pp4-interleaved": (4, "mesh.pp=4 mesh.dp=1 mesh.zero=0 mesh.schedule=interleaved mesh.virtual_stages=2"),
    "tp2-dp2-zero3": (4, "mesh.tp=2 mesh.dp=2 mesh.zero=3 train.micro_batch=2"),
}
MICRO_BATCHES = (1, 2)


def work(spec):
    """One rank: assembles the layout and takes its steps."""
    import torch

    from sirara.cli.planned import shape_on_paper
    from sirara.comm.world import World, connect, connect_axes
    from sirara.config.load import load
    from sirara.device import open_device
    from sirara.mesh import build_mesh
    from sirara.parallel.stage import Inputs
    from sirara.pure.families import init_slice
    from sirara.train.assemble import assemble, specs_of

    torch.set_num_threads(1)
    world = World.from_environment()
    config = load(spec["config"], spec["words"], on_paper=True).config
    device = open_device(local_rank=world.local_rank, exact=True)
    connect(world, backend="nccl" if device.kind == "cuda" else "gloo", timeout_s=300)
    m = config.mesh
    mesh = build_mesh(world=world.size, rank=world.rank, pp=m.pp, dp=m.dp, tp=m.tp)
    comms = connect_axes(world, mesh.groups(), timeout_s=300)
    shape = shape_on_paper(config)
    train, length = config.train, config.data.seq_len
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab, (train.global_batch, length + 1), generator=generator)
    positions = torch.arange(length).expand(train.micro_batch, length)
    times = []
    warm = torch.zeros(64, 64)
    (warm @ warm).sum()

    def take(steps):
        for step in steps:
            comms.world.gather_rows("step", torch.zeros(1, device=device.torch_device))
            began = time.perf_counter()
            losses = stepper.accumulate(inputs, valid_targets=train.global_batch * length, keys=None)
            stepper.finish(
                losses, valid_targets=train.global_batch * length, lr=1e-4, update=step + 1, request=0
            )
            zero.wait_all()
            times.append(time.perf_counter() - began)

    with device.peak() as peak:
        built = assemble(
            config, shape, specs_of(config, shape), mesh=mesh, comms=comms, device=device.torch_device
        )
        stepper, zero = built.stepper, built.state.zero
        zero.initialise(lambda s, a, b: torch.from_numpy(init_slice(s, 0, a, b)))
        inputs = {}
        for i in built.deal.mine(mesh.coordinate("dp")):
            rows = ids[i * train.micro_batch : (i + 1) * train.micro_batch].to(device.torch_device)
            inputs[i] = Inputs(
                tokens_BL=rows[:, :-1].contiguous(),
                targets_BL=rows[:, 1:].contiguous(),
                positions_BL=positions.to(device.torch_device),
            )
        take(range(2))
    # Watching allocated bytes slows Python down: steps are timed without it.
    take(range(2, spec["steps"] + 2))
    held = {}
    for what, size in zero.bytes_held():
        held[what] = held.get(what, 0) + size
    answer = {"peak": peak.bytes, "times": times, "held": held, "pp": mesh.coordinate("pp")}
    Path(f"{spec['out']}.{world.rank}").write_text(json.dumps(answer))
    comms.world.gather_rows("leave", torch.zeros(1, device=device.torch_device))
    os._exit(0)


def measured(name, config, folder, steps):
    """Peak bytes and step seconds of a layout, and what each rank said."""
    ranks, words = LAYOUTS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / f"{name}.json"
    spec = {"config": str(config), "words": words.split(), "out": str(out), "steps": steps}
    env = {
        **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, __file__, "--worker", json.dumps(spec)]
    workers = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)
    ]
    try:
        if any(w.wait(timeout=600) for w in workers):
            raise SystemExit(f"a worker of {name} failed")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    answers = [json.loads(Path(f"{out}.{r}").read_text()) for r in range(ranks)]
    steps_s = [max(a["times"][n] for a in answers) for n in range(2, steps + 2)]
    return {
        "peak": max(a["peak"] for a in answers),
        "step_s": sorted(steps_s)[(steps - 1) // 4],
        "steps_s": steps_s,
        "ranks": answers,
    }


def predicted(name, config, profile):
    """The plan of a layout on this machine."""
    from sirara.cli.planned import shape_on_paper
    from sirara.config.load import load
    from sirara.plan.setting import setting_here
    from sirara.plan.verdict import plan

    ranks, words = LAYOUTS[name]
    loaded = load(config, words.split(), on_paper=True).config
    setting, known = setting_here("cpu", workers=ranks, env={**os.environ, "SIRARA_PROFILE": str(profile)})
    if known.how != "profile":
        raise SystemExit(f"{profile}: {known.why}")
    found = plan(loaded, shape_on_paper(loaded), setting, dp=loaded.mesh.dp)
    return {
        "peak": found.allocated_bytes,
        "step_s": found.step_s,
        "how": found.how,
        "stages": [
            {**{k: getattr(s, k) for k in ("weights", "masters", "optimizer", "gradients", "window", "activations",
                                           "loss", "transient", "step")}}
            for s in found.held.stages
        ],
        "terms": {k: float(v[0]) for k, v in found.times.exposed().items() if float(v[0])},
    }  # fmt: skip


def calibrate(config, target, micro):
    command = [sys.executable, "-m", "sirara", "plan", "calibrate", str(config), f"train.micro_batch={micro}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO / "src")}
    subprocess.run([*command, "--nproc", "4", "--out", str(target)], env=env, check=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="a profile of this machine; default: one is made")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    found = {}
    with tempfile.TemporaryDirectory(prefix="sirara-planner-error-") as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        profile = args.profile or folder / "profile.yaml"
        if args.profile is None:
            for micro in MICRO_BATCHES:
                calibrate(config, profile, micro)
        print(
            f"{'layout':24}{'MiB plan':>9}{'measured':>9}{'error':>8}{'s plan':>9}{'measured':>9}{'error':>8}"
        )
        for layout in args.only:
            plan, real = predicted(layout, config, profile), measured(layout, config, folder, args.steps)
            errors = {k: plan[k] / real[k] - 1 for k in ("peak", "step_s")}
            found[layout] = {"plan": plan, "measured": real, "errors": errors}
            mark = "" if plan["how"].startswith("times") else "   formula"
            print(
                f"{layout:24}{plan['peak'] / 2**20:9.0f}{real['peak'] / 2**20:9.0f}{errors['peak']:+8.1%}"
                f"{plan['step_s']:9.3f}{real['step_s']:9.3f}{errors['step_s']:+8.1%}{mark}",
                flush=True,
            )
    for key, limit in (("peak", 0.08), ("step_s", 0.15)):
        off = [abs(row["errors"][key]) for row in found.values()]
        good = sum(e <= limit for e in off)
        print(
            f"{key}: {good} of {len(off)} within {limit:.0%}, mean {statistics.mean(off):.1%}, worst {max(off):.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    sys.exit(main())
