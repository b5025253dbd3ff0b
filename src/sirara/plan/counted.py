"""The layouts of a table as plans: each is counted by the executor's rules once, and the table learns what came out."""

from dataclasses import dataclass, field

import numpy as np

from sirara.config.schema import RunConfig
from sirara.errors import SiraraError
from sirara.plan.exact import counted
from sirara.plan.layouts import NEEDED, Reason, overrides_of, words_of
from sirara.plan.setting import Setting
from sirara.plan.table import Table
from sirara.plan.verdict import Plan
from sirara.pure.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Plans of layouts of a table, each made once.  What does not fit, or cannot be, is taken out of the table."""

    config: RunConfig
    shape: ModelShape
    setting: Setting
    table: Table
    plans: dict[int, Plan] = field(default_factory=dict)
    """Flat index -> what fits."""

    def plan(self, at: int) -> Plan | None:
        """The plan of a layout that fits, the recompute that it needs noted; else None."""
        table = self.table
        if at in self.plans or not np.isfinite(table.step.flat[at]):
            return self.plans.get(at)
        dp, needed = table.outers[at // len(table.inside)].dp, as_needed(table, at)
        closed = float(table.device.flat[at])
        try:
            keys = keys_at(table, at, self.shape)
            found, words = counted(self.config, self.shape, self.setting, keys, dp=dp, needed=needed)
        except SiraraError:
            # A split or a share that the closed rules let pass.
            found, words = None, ()
        if found is not None:
            table.device.flat[at] = found.device_bytes
        if found is None or not found.chosen:
            table.step.flat[at], table.reason.flat[at] = np.nan, Reason.MEMORY
            table.off.flat[at] = 1.0 if found is None or needed else found.device_bytes / closed
            return None
        if needed:
            table.recipes[at] = next(w for w in words if w.startswith("train.recompute="))
        table.step.flat[at], self.plans[at] = found.step_s, found
        return found

    def fastest(self, at: int, *, now: bool = False) -> int:
        """Of what was counted; `at`: one of them."""
        able = [n for n, p in self.plans.items() if not now or (runs_now(self.table, n) and not p.not_run)]
        return min((at, *able), key=lambda n: (self.plans[n].step_s, self.plans[n].device_bytes))


def as_needed(table: Table, at: int) -> bool:
    inside = table.inside
    return table.space.recompute[inside.at["recompute"][at % len(inside)]][0] == NEEDED


def runs_now(table: Table, at: int) -> bool:
    """Whether this version runs a layout."""
    o, i = divmod(at, len(table.inside))
    outer, words = table.outers[o], words_of(table.space, table.outers[o], table.inside, i)
    runs = outer.cp == 1 and outer.ep == 1 and words["offload"] == "none"
    return runs and words["precision"] in ("bf16", "fp32", "fp64")


def words_at(table: Table, at: int) -> dict[str, str]:
    o, i = divmod(at, len(table.inside))
    words = words_of(table.space, table.outers[o], table.inside, i)
    if at in table.recipes:
        words["recompute"] = _short(table.recipes[at].partition("=")[2])
    return {**words, "block": "1" if table.one[o, i] else "auto"}


def _short(recipe: str) -> str:
    """Long lists by their ends."""
    stages = recipe.strip("[]").split(", ")
    return recipe if len(stages) <= 4 else f"[{stages[0]}, {stages[1]}, ..., {stages[-1]}]"


def keys_at(table: Table, at: int, shape: ModelShape) -> tuple[str, ...]:
    o, i = divmod(at, len(table.inside))
    block = 1 if table.one[o, i] else None
    words = overrides_of(table.space, table.outers[o], table.inside, i, layers=shape.layers, block=block)
    found = table.recipes.get(at)
    return tuple(found if found and w.startswith("train.recompute=") else w for w in words)
