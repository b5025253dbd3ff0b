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
MARGIN = 0.03
"""Error of predicted memory that is reckoned with where no published run is like a plan."""
ELSEWHERE = "published runs are of GPUs, and this is a CPU"
MEASURED = "this step stands on what was measured, and published runs do not"
_NAMES = (
    "mixtures of experts",
    "one node",
    "fully sharded",
    "pipelines and tensor parallelism",
    "data parallel",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Errors as fractions.  n: runs."""

    n: int
    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Of one plan; None where no run is like it.  why_none: what none is known of and why, "" where both are."""

    alike: str
    time: Residual | None
    memory: Residual | None
    why_none: str = ""


def kinds_of(p: Points) -> NDArray[np.str_]:
    """Which runs are alike: by experts, one node, full sharding, pipelines and tensor parallelism."""
    return np.array(_NAMES)[_kinds(p)]


def _kinds(p: Points) -> NDArray[np.int64]:
    """[n]: places in _NAMES."""
    tests = [p.experts > 0, p.gpus <= 8, (p.zero >= 3) & (p.pp == 1), (p.pp > 1) | (p.tp > 1)]
    return np.select(tests, list(range(4)), 4)


@cache
def shipped() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """{"time" | "memory": {kind: {n, mean, p90}}}; empty where none were computed."""
    file = files("sirara.plan").joinpath(FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def memory_margins(p: Points) -> NDArray[np.float64]:
    """[n]: mean error of the memory of runs that are alike, MARGIN where there are none."""
    known = shipped().get("memory", {})
    means = [float(known[name]["mean"]) if name in known else MARGIN for name in _NAMES]
    return np.array(means)[_kinds(p)]


def bars(p: Points, *, time: bool = True, memory: bool = True) -> Bars:
    """The error bars of one point.

    Args:  time, memory: whether published runs say anything about it: not of a CPU, nor of measured times.
    """
    kind = str(kinds_of(p)[0])

    def of(what: str, applies: bool) -> Residual | None:
        if not applies:
            return None
        found = shipped().get(what, {}).get(kind)
        if found is None:
            return None
        return Residual(n=int(found["n"]), mean=float(found["mean"]), p90=float(found["p90"]))

    found = {"step times": of("time", time), "memory": of("memory", memory)}
    missing = [what for what, residual in found.items() if residual is None]
    why = f"no published run is like it ({kind})"
    if not (time and memory):
        why = ELSEWHERE if not memory else MEASURED
    return Bars(
        alike=kind,
        time=found["step times"],
        memory=found["memory"],
        why_none=f"none known for {' and '.join(missing)}: {why}" if missing else "",
    )
