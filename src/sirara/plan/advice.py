"""A plan's neighbours, and what is said of a plan that does not fit: what binds, and the nearest changes that fit.

Each neighbour is a column of one more evaluation, so a dozen cost as much as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sirara.config.schema import RunConfig
from sirara.errors import PlanError
from sirara.plan.from_config import as_points, layout_columns, model_columns
from sirara.plan.memory import memory
from sirara.plan.offload import slowest
from sirara.plan.setting import Setting
from sirara.plan.verdict import Plan, budget_of, in_words, over_budget, tokens_of, what_does_not_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A neighbour of the plan: keys to set, and what it would be."""

    keys: str
    step_s: float
    tokens_per_s: float
    device_bytes: float
    fits: bool
    runs: bool
    """Whether this version runs it; else it is a prediction."""
    measured: bool = False
    """Whether its step is made of times that were measured for its units."""
    formulas_off: float = 1.0
    """Measured times over those of formulas, where both are known."""
    block: int = 0
    """Microbatches to a block of sums that it would be planned with, 0 where it is not planned by itself."""
    error: str = ""


def nearest(
    plan: Plan, neighbours: Sequence[tuple[str, RunConfig | str, int]], *, setting: Setting | None = None
) -> list[Change]:
    """Each neighbour (keys, configuration or why there is none, dp) evaluated."""
    setting = setting or plan.setting
    changes, columns, which = [], [], []
    for keys, config, dp in neighbours:
        if isinstance(config, str):
            changes.append(_impossible(keys, config))
            continue
        changes.append(None)
        which.append((len(changes) - 1, keys, config))
        columns.append({**model_columns(config, plan.shape), **layout_columns(config, plan.shape, dp=dp)})
    if columns:
        joined = {k: np.array([c[k] for c in columns]) for k in columns[0]}
        points = as_points(joined, setting.cluster)
        used = memory(points, setting.table, setting.constants)
        times = slowest(points, setting.table, setting.constants)
        # What this plan's ranks were counted to hold, over the closed form: the same error, nearly, beside it.
        exactly = plan.device_bytes / float(plan.memory.device[0])
        for n, (at, keys, config) in enumerate(which):
            size = float(used.device[n]) * exactly
            changes[at] = Change(
                keys=keys,
                step_s=float(times.step_s[n]),
                tokens_per_s=tokens_of(config) / float(times.step_s[n]),
                device_bytes=size,
                fits=size <= setting.capacity_bytes and not over_budget(config, setting, float(used.host[n])),
                runs=not what_does_not_run(config),
            )
    return [c for c in changes if c is not None]


def _impossible(keys: str, why: str) -> Change:
    return Change(
        keys=keys,
        step_s=float("nan"),
        tokens_per_s=float("nan"),
        device_bytes=float("nan"),
        fits=False,
        runs=False,
        error=why,
    )


def refusal(plan: Plan, changes: Sequence[Change]) -> PlanError:
    """The error of a plan that does not fit, with the changes that do, cheapest first."""
    if plan.over_budget:
        return _too_much_on_the_host(plan)
    stage = plan.held.busiest
    mesh = plan.config.mesh
    fitting = sorted((c for c in changes if c.fits), key=lambda c: (not c.runs, c.step_s))
    advice = [_advice(plan, c) for c in fitting[:5]] or [
        "--search, which looks at all layouts: no single change of this one fits",
        "devices with more memory (--gpu)",
    ]
    terms = {
        "activations": stage.activations,
        "gradients and exchange": stage.gradients,
        "weights": stage.weights,
        "optimizer state and masters": stage.optimizer + stage.masters,
        "loss or one block's work": max(stage.loss, stage.transient),
        "gathered weights": stage.window,
        "allocator, context and libraries": plan.device_bytes - plan.allocated_bytes + stage.libraries,
    }
    first, *others = sorted(terms.items(), key=lambda kv: -kv[1])
    worth = 0.01 * plan.device_bytes
    listed = " + ".join(f"{name} {in_words(size)}" for name, size in (first, *others) if size >= worth)
    both = [c for c in changes if c.keys == "numerics=fast" and c.fits]
    sizes = f"exact needs {in_words(plan.device_bytes)}, numerics=fast "
    exact = f"; numerics={sizes}{in_words(both[0].device_bytes)}" if both else ""
    return PlanError(
        f"this layout does not fit: stage {stage.rank} needs {in_words(plan.device_bytes)}, "
        f"the device has {in_words(plan.setting.capacity_bytes)}",
        code="SR214",
        where=f'plan, phase "step", mesh pp={mesh.pp} dp={int(plan.point.dp[0])} cp={mesh.cp} tp={mesh.tp} '
        f"block={plan.block}, micro_batch={plan.config.train.micro_batch}, numerics={plan.config.numerics}",
        why=listed + exact,
        try_=advice,
    )


def _too_much_on_the_host(plan: Plan) -> PlanError:
    each, budget = float(plan.memory.host[0]), budget_of(plan.config, plan.setting)
    devices = round(plan.offloaded_bytes / each)
    return PlanError(
        f"this layout does not fit: a node has to hold {in_words(plan.offloaded_bytes)} of what is offloaded, "
        f"{'a node is taken to have' if plan.config.offload.host_budget is None else 'offload.host_budget is'} "
        f"{in_words(budget)}",
        code="SR214",
        where="offload.host_budget",
        why=f"{in_words(each)} for each of {devices} devices",
        try_=[
            "a larger offload.host_budget, or node_memory in a YAML of --gpu",
            "offload.optimizer=disk",
            "more nodes, with mesh.zero of 1 and more",
        ],
    )


def _advice(plan: Plan, change: Change) -> str:
    faster = change.tokens_per_s / plan.tokens_per_s - 1
    later = "" if change.runs else "; does not run yet"
    # Auto goes as low as it must: larger blocks exchange less, so part of the difference may be theirs.
    block = f", block {change.block}" if change.block not in (0, plan.block) else ""
    keys = change.keys
    if keys.startswith("gpus="):
        keys = f"--gpus {keys.removeprefix('gpus=')} mesh.dp=auto"
    return f"{keys:<34} (device {in_words(change.device_bytes)}, {faster:+.0%} tokens/s{block}{later})"
