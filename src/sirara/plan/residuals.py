"""How far predictions were from published runs that are like a plan: its error bars.

`residuals.json` is written by `benchmarks/plot_planner.py`: mean absolute relative errors of step times that were
predicted by constants fitted without the run's own project, and of memory, by how a run is split.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from sirara.plan.points import Points

FILE = "residuals.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Errors as fractions.  n: runs."""

    n: int
    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Of one plan; None where no run is like it."""

    alike: str
    time: Residual | None
    memory: Residual | None


def kinds_of(p: Points) -> NDArray[np.str_]:
    """Which runs are alike: by experts, one node, full sharding, pipelines and tensor parallelism."""
    names = [
        "mixtures of experts",
        "one node",
        "fully sharded",
        "pipelines and tensor parallelism",
        "data parallel",
    ]
    tests = [p.experts > 0, p.gpus <= 8, (p.zero >= 3) & (p.pp == 1), (p.pp > 1) | (p.tp > 1)]
    return np.select(tests, names[:4], names[4])


@cache
def shipped() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """{"time" | "memory": {kind: {n, mean, p90}}}; empty where none were computed."""
    file = files("sirara.plan").joinpath(FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def bars(p: Points) -> Bars:
    """The error bars of one point."""
    kind = str(kinds_of(p)[0])

    def of(what: str) -> Residual | None:
        found = shipped().get(what, {}).get(kind)
        if found is None:
            return None
        return Residual(n=int(found["n"]), mean=float(found["mean"]), p90=float(found["p90"]))

    return Bars(alike=kind, time=of("time"), memory=of("memory"))
