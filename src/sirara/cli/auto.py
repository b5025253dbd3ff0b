"""`mesh: auto`: the layout of a run is searched for the machines that it starts on, and the decision is kept."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sirara.cli.planned import shape_on_paper
from sirara.config.load import Loaded, load
from sirara.errors import ConfigError
from sirara.launch.external import Launcher
from sirara.launch.local import count_gpus
from sirara.plan.constants import fitted
from sirara.plan.explain_search import search_record
from sirara.plan.from_config import cluster_of
from sirara.plan.hardware import Accelerator, find, table
from sirara.plan.layouts import runnable_space
from sirara.plan.search import search
from sirara.plan.verdict import Setting

GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
UNKNOWN_GPU = "h100-sxm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen; `text`: of plan.json.  said: one line for people."""

    loaded: Loaded
    text: str
    said: str


def decide(
    path: str | Path,
    overrides: Sequence[str],
    loaded: Loaded,
    launcher: Launcher | None,
    env: Mapping[str, str],
) -> Decision:
    """The configuration with the best mesh that this version runs.  Only keys of the mesh are chosen.

    All ranks of a launcher decide alike: the search draws nothing and asks no clock.
    Raises:  PlanError when nothing fits.
    """
    config = loaded.config
    workers, per_node = _workers(config.launch.nproc, config.launch.nodes, launcher, env)
    accelerator, note = this_accelerator(env, per_node)
    setting = Setting(
        cluster=cluster_of(accelerator, gpus=workers, per_node=per_node),
        table=table([accelerator]),
        constants=fitted(),
    )
    shape = shape_on_paper(config)
    found = search(config, shape, setting, runnable_space(config, shape, accelerator, workers))
    best = found.best_now or found.best
    if found.numerics != config.numerics:
        raise ConfigError(
            "no layout fits with numerics=exact",
            code="SR215",
            where="mesh",
            why=f"with numerics=fast it takes {best.device_bytes / 2**30:.1f} GiB of "
            f"{setting.capacity_bytes / 2**30:.1f}",
            try_=["numerics=fast", "train.recompute=full", "train.micro_batch=1"],
        )
    mesh = next(word for word in found.now_overrides if word.startswith("mesh="))
    chosen = load(path, [*overrides, mesh], env)
    record: dict[str, Any] = {
        "asked": "mesh: auto",
        "machine": {"accelerator": accelerator.name, "devices": workers, "per_node": per_node, "note": note},
        "chosen": mesh,
        **search_record(found),
    }
    words = {k: v for k, v in found.now_words.items() if k in ("pp", "dp", "tp", "zero", "schedule")}
    said = " ".join(f"{k} {v}" for k, v in words.items())
    return Decision(
        loaded=chosen,
        text=json.dumps(record, indent=1) + "\n",
        said=f"mesh auto: {said}, of {found.fitting:,} layouts that fit {workers} x {accelerator.name}; see plan.json",
    )


def _workers(
    nproc: int | str, nodes: int, launcher: Launcher | None, env: Mapping[str, str]
) -> tuple[int, int]:
    """(workers of the job, workers of a node)."""
    if launcher is not None:
        return launcher.world, max(1, launcher.local_world)
    here = int(nproc) if nproc != "auto" else max(1, count_gpus(env))
    return here * nodes, here


def this_accelerator(env: Mapping[str, str], workers: int) -> tuple[Accelerator, str]:
    """(what this node computes on, how that is known).  A CPU's memory is shared by the node's workers."""
    if not count_gpus(env):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(
            find("cpu"), hbm_bytes=total / workers
        ), "rates of the shipped table; memory of this machine"
    name = _model_name()
    for known in (name, name.removeprefix("nvidia "), *reversed(name.split())):
        try:
            return find(known), f"the driver says {name}"
        except ConfigError:
            continue
    return find(UNKNOWN_GPU), f"{name or 'the device'} is not in the table: taken for {UNKNOWN_GPU}"


def _model_name() -> str:
    for file in sorted(GPU_FOLDERS.glob("*/information")):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip().lower()
    return ""
