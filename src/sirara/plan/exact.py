"""One candidate of a search as a configuration, counted by the executor's rules; the recompute that it needs, found."""

from typing import Any

from sirara.config.schema import ON_PAPER, RunConfig
from sirara.config.units import parse_size_bytes
from sirara.config.yaml_file import parse_yaml
from sirara.plan.layouts import spelt
from sirara.plan.needed import recipe
from sirara.plan.verdict import Plan, Setting, plan
from sirara.pure.shape import ModelShape

TRIES = 5
"""Recipes that are counted at most until one fits."""


def configured(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """The configuration with some keys set, checked."""
    tree: dict[str, Any] = config.model_dump(by_alias=True, mode="json")
    for word in overrides:
        key, _, text = word.partition("=")
        here, names = tree, key.split(".")
        for name in names[:-1]:
            here = here[name]
        here[names[-1]] = parse_yaml(text, word)[0]
    tree["launch"] = {**tree["launch"], "nproc": "auto", "nodes": 1}
    tree["model"] = {k: v for k, v in tree["model"].items() if v is not None}
    if isinstance(tree["offload"].get("host_budget"), str):
        tree["offload"]["host_budget"] = parse_size_bytes(tree["offload"]["host_budget"])
    return RunConfig.model_validate(tree, context=ON_PAPER)


def counted(
    config: RunConfig,
    shape: ModelShape,
    setting: Setting,
    overrides: tuple[str, ...],
    *,
    dp: int,
    needed: bool,
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a candidate, and the keys that make it.

    Args:    needed: its stages recompute as little as makes them fit; the keys say what, then.
    Raises:  SiraraError for keys that the closed rules let pass and the executor does not.
    """
    there = configured(config, overrides)
    if not needed:
        return plan(there, shape, setting, dp=dp), overrides
    # Smaller blocks are another layout, which the search has tried.
    found = plan(there, shape, setting, dp=dp, lower=False)
    # The plan's own share of the allocator, which is that of its busiest stage.
    room = (found.limit_bytes - found.device_bytes + found.reserved_bytes) * (
        found.allocated_bytes / found.reserved_bytes
    )
    more = [0.0] * len(found.held.stages)
    others = tuple(word for word in overrides if not word.startswith("train.recompute="))
    for _ in range(0 if found.chosen else TRIES):
        again = recipe(found.point, found.held, setting.table, setting.constants, room, more=more)
        if again is None:
            break
        words = (*others, f"train.recompute={spelt(again)}")
        other = plan(configured(config, words), shape, setting, dp=dp, lower=False)
        if other.chosen:
            return other, words
        # What a stage makes again at a time is only known when all stages' recipes are; a little may be less than a
        # block's worth, so each try takes off twice as much as the one before.
        more = [2 * m + max(0.0, s.step - room) for m, s in zip(more, other.held.stages, strict=True)]
    return found, overrides
