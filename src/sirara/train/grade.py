"""How equal a continued run is to the uninterrupted one: `exact` or `close`, and why.

exact   equal bits of loss, norm and digest: only dp, pp, ZeRO stage, schedule, offload or checkpointing changed
close   something that enters the arithmetic changed; every such thing is listed with both values
"""

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sirara.config.schema import RunConfig

CLOSE_AXES = ("tp", "cp", "ep")
"""Mesh axes that split the arithmetic of a microbatch itself."""

_SECTIONS = ("seed", "numerics", "model", "data", "train")
_OUTSIDE = (".path", ".tokenizer", "train.eval_every", "train.recompute")
"""Keys, by their ends, that change no bit of training; evaluation has no side effects."""


@dataclass(frozen=True, slots=True)
class Grade:
    """`name` is "exact" or "close"; `why` lists what changed, empty when exact."""

    name: str
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name if not self.why else f"{self.name} ({'; '.join(self.why)})"


def arithmetic(config: RunConfig, *, device: str, threads: int, layout: dict[str, int]) -> dict[str, Any]:
    """Everything that the bits of a run depend on, as flat JSON; stored in every manifest.

    Paths of data are not in it: moving a token store changes nothing, and another content has another data digest.
    device: the model of the accelerator, "cpu" without one.
    """
    sections = config.model_dump(mode="json", by_alias=True, include=set(_SECTIONS))
    flat = {
        key: value
        for key, value in _flatten(sections)
        if not key.endswith(_OUTSIDE) and not key.startswith("data.eval")
    }
    if config.train.lr_schedule.name == "constant":
        # A longer run is another one only where the learning rate looks at its end.
        del flat["train.steps"]
    flat |= {
        "launch.threads": threads,
        "device": device,
        "versions.torch": torch.__version__,
        "versions.numpy": np.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if config.mesh.sequence_parallel:
        # Which tokens a rank sums decides how gradients of norms are associated.
        flat["mesh.sequence_parallel"] = True
    return flat | {f"mesh.{axis}": layout.get(axis, 1) for axis in CLOSE_AXES}


def grade(before: dict[str, Any], now: dict[str, Any]) -> Grade:
    """Compares the stored arithmetic of a run with that of its continuation."""
    why = [
        f"{key} {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if now.get("numerics") == "fast" and not why:
        why = ["numerics: fast"]
    return Grade("close" if why else "exact", tuple(why))


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            pair
            for key, inner in value.items()
            for pair in _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return [pair for n, inner in enumerate(value) for pair in _flatten(inner, f"{prefix}.{n}")]
    return [(prefix, value)]
