"""`mesh: auto`: the layout of a run is searched for the machines that it starts on, and the decision is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sirara.cli.planned import shape_on_paper
from sirara.config.load import Loaded, load
from sirara.errors import ConfigError
from sirara.launch.external import Launcher
from sirara.launch.local import count_gpus
from sirara.plan.explain_search import left_free, search_record
from sirara.plan.layouts import runnable_space
from sirara.plan.search import search
from sirara.plan.setting import setting_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen; `search`: from what, for plan.json.  said: one line for people."""

    loaded: Loaded
    search: Mapping[str, Any]
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
    setting, here = setting_here(
        "cuda" if count_gpus(env) else "cpu", workers=workers, per_node=per_node, env=env
    )
    accelerator = here.accelerator
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
        "machine": {
            "accelerator": accelerator.name,
            "devices": workers,
            "per_node": per_node,
            "note": here.why,
        },
        "chosen": mesh,
        **search_record(found),
    }
    words = {k: v for k, v in found.now_words.items() if k in ("pp", "dp", "tp", "zero", "schedule")}
    said = " ".join(f"{k} {v}" for k, v in words.items())
    return Decision(
        loaded=chosen,
        search=record,
        said=f"mesh auto: {said}, of {found.fitting:,} layouts that fit {workers} x {accelerator.name}; "
        f"memory left free: {left_free(found)}; see plan.json",
    )


def _workers(
    nproc: int | str, nodes: int, launcher: Launcher | None, env: Mapping[str, str]
) -> tuple[int, int]:
    """(workers of the job, workers of a node)."""
    if launcher is not None:
        return launcher.world, max(1, launcher.local_world)
    here = int(nproc) if nproc != "auto" else max(1, count_gpus(env))
    return here * nodes, here
