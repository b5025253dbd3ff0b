"""`sirara plan calibrate [CONFIG]`: this machine measured, so that plans for it are plans of what it does."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from sirara.cli.options import WITH_OVERRIDES, json_option, overrides, say_json
from sirara.cli.planned import shape_on_paper
from sirara.config.load import Loaded, load
from sirara.config.run_folder import write_durably
from sirara.errors import CommError, ConfigError
from sirara.launch.local import count_gpus
from sirara.launch.signals import die_with_parent
from sirara.plan.calibrated import Measured, merged, profile_of
from sirara.plan.profile import (
    PROFILE,
    Move,
    Profile,
    Rate,
    UnitTime,
    default_path,
    here,
    is_profile,
    read,
    text_of,
    this_machine,
    understood,
)

CPU_S, GPU_S = 110.0, 540.0
"""Time budget on CPUs and with GPUs."""
START_S = 8.0
"""What starting the processes takes of the budget."""
LATE_S = 120.0
"""How much later the processes are ended than three times the budget: a busy machine takes long to start processes."""
DEFAULT = """\
schema: 1
name: calibrate
model: {family: llama, layers: 4, hidden: 512, heads: 8, vocab: 8192, max_seq: 256}
data: {train: [{path: none}], seq_len: 256}
train: {steps: 1, global_batch: 8, micro_batch: 4, precision: fp32, optimizer: {name: adamw, lr: 1e-3}}
"""


@click.command("calibrate", context_settings=WITH_OVERRIDES)
@click.argument("path", metavar="[CONFIG]", required=False)
@overrides
@click.option("--nproc", type=click.IntRange(1), help="The most processes at once. Default: GPUs, or cores.")
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Where the profile goes. Default: where plans look."
)
@click.option(
    "--seconds", type=click.FloatRange(1), help=f"Time budget. Default: {CPU_S:.0f}, {GPU_S:.0f} with GPUs."
)
@click.option("--worker", "spec", hidden=True, type=click.Path(exists=True, dir_okay=False))
@json_option()
def plan_calibrate(
    path: str | None,
    overrides: list[str],
    nproc: int | None,
    out: str | None,
    seconds: float | None,
    spec: str | None,
    as_json: bool,
) -> None:
    """Measure this machine; `plan --gpu here` and `mesh: auto` believe what was measured.

    With CONFIG its model's own block, embedding and head are measured, and plans of it are made of their times;
    without, a small llama's, whose rates scale the formulas.  The same command for another CONFIG adds to the profile.
    """
    if spec is not None:
        _work(Path(spec))
        return
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    target = _target(out)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sirara-calibrate-") as folder:
        loaded = _loaded(path, overrides, Path(folder))
        shape = shape_on_paper(loaded.config)
        gpus = count_gpus(os.environ)
        machine = replace(
            this_machine("cuda" if gpus else "cpu"), date=datetime.now().isoformat(timespec="seconds")
        )
        most = nproc or (gpus or max(2, machine.cores))
        budget_s = seconds or (GPU_S if gpus else CPU_S)
        measured = _measured(most, loaded, Path(folder), budget_s - (time.monotonic() - began))
    base = here(machine.device, env={**os.environ, "SIRARA_PROFILE": "none"}).accelerator  # pyright: ignore[reportArgumentType]
    found = profile_of(machine, base, measured, loaded.config, shape)
    found = _with_older(target, found)
    # What no plan could read must not replace what they can.
    understood(text_of(found), target)
    write_durably(target, text_of(found))
    took = time.monotonic() - began
    if as_json:
        say_json({"profile": str(target), "seconds": round(took, 1), **_summary(found)})
        return
    click.echo(f"{target}: {len(found.units)} unit times, {len(found.moves)} moves, {len(found.rates)} rates")
    for name, value in _summary(found).items():
        click.echo(f"  {name:<24}{value}")
    click.echo(f"measured in {took:.0f} s; `sirara plan CONFIG --gpu {out or 'here'}` uses it")


def _loaded(path: str | None, words: Sequence[str], folder: Path) -> Loaded:
    if path is None:
        path = str(folder / "default.yaml")
        Path(path).write_text(DEFAULT)
    return load(path, words, os.environ, on_paper=True)


def _target(out: str | None) -> Path:
    """Where the profile will go, tried before minutes are spent.

    Raises:  ConfigError SR216 for a place that is no profile's or cannot be written to.
    """
    said = os.environ.get(PROFILE)
    if out is None and said == "none":
        raise ConfigError(
            f"{PROFILE}=none says that plans use no profile", code="SR216", where="--out",
            try_=["--out FILE.yaml", f"leave {PROFILE} out"],
        )  # fmt: skip
    path = Path(out) if out else default_path()
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path} does not end in .yaml, as --gpu knows profiles", code="SR216", where="--out"
        )
    if path.exists() and path.stat().st_size and not is_profile(path):
        raise ConfigError(
            f"{path} is there and is no profile", code="SR216", where="--out", try_=["another --out"]
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", code="SR216", where="--out", try_=["another --out"]
        ) from error
    return path


def _with_older(target: Path, found: Profile) -> Profile:
    """What an older profile of this machine knows beside it is kept."""
    try:
        old = read(target)
    except ConfigError as error:
        if target.exists():
            click.echo(f"the older profile is not kept: {error.why}", err=True)
        return found
    other = old.machine.differs(found.machine)
    if other:
        click.echo(f"the older profile is not kept: it is of {other}", err=True)
    return found if other else merged(old, found)


def _summary(p: Profile) -> dict[str, Any]:
    a = p.accelerator
    return {
        "machine": f"{p.machine.cores} cores of {p.machine.cpu}; {p.machine.model}",
        "products_gflops": round(max(a.peak_flops_per_s.values()) / 1e9, 1),
        "achievable": round(a.achievable, 3),
        "memory_gb_per_s": round(a.hbm_bytes_per_s / 1e9, 2),
        "exchange_gb_per_s": round(a.up_bus_bytes_per_s / 1e9, 2),
        "crowd": {n: round(f, 2) for n, f in sorted(p.crowd.items())},
        "disk_write_gb_per_s": None if p.disk_write_per_s is None else round(p.disk_write_per_s / 1e9, 2),
        "disk_read_gb_per_s": None if p.disk_read_per_s is None else round(p.disk_read_per_s / 1e9, 2),
    }


# ---- a world of processes


def _measured(count: int, loaded: Loaded, folder: Path, budget_s: float) -> Measured:
    """What a world of `count` processes on this machine finds.

    Raises:  CommError when one of them fails.
    """
    click.echo(f"{count} {'processes' if count > 1 else 'process'}, {budget_s:.0f} s", err=True)
    config, result, spec = (folder / name for name in ("config.yaml", "result.json", "spec.json"))
    config.write_text(loaded.text)
    spec.write_text(
        json.dumps(
            {
                "config": str(config),
                "result": str(result),
                "parent": os.getpid(),
                "budget_s": max(1.0, budget_s - START_S),
            }
        )
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Threads are set for each measurement; those that have nothing to do leave the cores to others.
    env = {
        **os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    command = [sys.executable, "-m", "sirara", "plan", "calibrate", "--worker", str(spec)]
    workers = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(count)
    ]
    try:
        _wait(workers, time.monotonic() + LATE_S + 3 * budget_s)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL)
            worker.wait()
    data = json.loads(result.read_text())
    return Measured(
        units=tuple(UnitTime(**row) for row in data["units"]),
        moves=tuple(Move(**row) for row in data["moves"]),
        rates=tuple(Rate(**row) for row in data["rates"]),
        bandwidth=data["bandwidth"],
        doubts=data["doubts"],
    )


def _wait(workers: Sequence["subprocess.Popen[bytes]"], deadline: float) -> None:
    """Until all have ended well.

    Raises:  CommError when one failed, or at the deadline.
    """
    while any(worker.poll() is None for worker in workers):
        failed = [(n, w.returncode) for n, w in enumerate(workers) if w.returncode]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = [(n, w.returncode) for n, w in enumerate(workers) if w.returncode]
    if failed or any(worker.poll() is None for worker in workers):
        why = f"process {failed[0][0]} ended with {failed[0][1]}" if failed else "it took too long"
        raise CommError(
            f"a world of {len(workers)} processes could not be measured", why=why,
            try_=["--nproc with fewer", "a CONFIG with a smaller micro_batch"],
        )  # fmt: skip


def _work(spec: Path) -> None:
    """One process of the world: measures, and rank 0 writes what was found."""
    import torch

    from sirara.comm.world import World, connect, disconnect, world_comm
    from sirara.device import open_device
    from sirara.train.calibrate import measure

    asked = json.loads(spec.read_text())
    die_with_parent(asked["parent"])
    world = World.from_environment()
    config = load(asked["config"], on_paper=True).config
    device = open_device(local_rank=world.local_rank, exact=config.numerics == "exact")
    connect(world, backend="nccl" if device.kind == "cuda" else "gloo", timeout_s=120.0)
    comm = world_comm(world, timeout_s=120.0)
    tp = config.mesh.tp
    found = measure(
        config,
        shape_on_paper(config),
        world=world,
        comm=comm,
        device=device.torch_device,
        budget_s=asked["budget_s"],
        tps=sorted({2, tp} - {1}),
        say=lambda line: click.echo(f"  {line}", err=True) if world.rank == 0 else None,
    )
    if world.rank == 0:
        Path(asked["result"]).write_text(json.dumps(asdict(found)))
    comm.gather_rows("leave", torch.zeros(1, device=device.torch_device))
    disconnect()
