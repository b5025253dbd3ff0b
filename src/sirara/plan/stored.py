"""plan.json of a run folder: what was predicted for each of its attempts, to be held against what was measured.

    {"format": 1, "attempts": [
      {"attempt": 1, "time": 1767225600.0, "hardware": {...}, "plan": {...}, "search": {...}},
      {"attempt": 2, "time": 1767229200.0, "hardware": {...}, "reason": "..."}]}

    hardware   device: what computes;  accelerator: whose figures the plan stands on;  how: of HOW;  why: in words
    plan       `Plan.as_record`, as `sirara plan --json` prints it; each stage also has reserved_bytes and device_bytes
    reason     instead of a plan: why there is none
    search     with `mesh: auto`: what the layout was chosen from

Every attempt adds an entry; those of earlier attempts stay as they are.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sirara.config.run_folder import write_durably
from sirara.plan.verdict import Plan

FILE = "plan.json"
FORMAT = 1

How = Literal["profile", "shipped", "placeholder"]
"""profile: measured on this machine; shipped: of the table of accelerators; placeholder: the table's figures describe
something else than this device."""

BETWEEN = ("weights", "masters", "optimizer", "gradients", "window")
"""Terms of a stage that live on between steps; the others are held in a step alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExpected:
    """Bytes that one pipeline stage was predicted to hold on each of its devices.

    between, peak: of tensors; what libraries keep for themselves is left out, as it is of what is measured.
    """

    stage: int
    between_bytes: float
    peak_bytes: float
    reserved_bytes: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The plan of one attempt, as it was stored.

    step_s: None where no time was predicted.  exposed_s: the terms that add up to it.  reason: why there is no plan, ""
    if there is one.
    """

    attempt: int
    accelerator: str
    how: How
    why: str
    stages: tuple[StageExpected, ...]
    step_s: float | None
    exposed_s: Mapping[str, float]
    reason: str = ""


def add(folder: Path, attempt: int, **fields: object) -> None:
    """Adds fields to the entry of an attempt, which is made if there is none.

    Raises:  OSError when the file cannot be written.
    """
    entries = read_entries(folder)
    mine = next((e for e in entries if e.get("attempt") == attempt), None)
    if mine is None:
        mine = {"attempt": attempt, "time": round(time.time(), 3)}
        entries.append(mine)
    mine.update(fields)
    text = json.dumps(_finite({"format": FORMAT, "attempts": entries}), indent=1, allow_nan=False)
    write_durably(folder / FILE, text + "\n")


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """The entries of all attempts, oldest first; none where there is no file or it has another format."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return []
    return [e for e in data.get("attempts", []) if isinstance(e, dict)]


def read_expected(folder: Path, attempt: int) -> Expected | None:
    """What was predicted for an attempt; None where nothing was stored."""
    entry = next((e for e in read_entries(folder) if e.get("attempt") == attempt), None)
    return None if entry is None or not ("plan" in entry or "reason" in entry) else expected_of(entry)


def hardware_record(device: str, accelerator: str, how: How, why: str) -> dict[str, str]:
    """The field `hardware` of an entry."""
    return {"device": device, "accelerator": accelerator, "how": how, "why": why}


def plan_record(plan: Plan) -> dict[str, Any]:
    """The field `plan` of an entry."""
    record = plan.as_record()
    over = plan.reserved_bytes / max(1.0, plan.allocated_bytes)
    context = plan.device_bytes - plan.reserved_bytes
    for stage in record["memory"]["stages"]:
        stage["reserved_bytes"] = stage["step"] * over
        stage["device_bytes"] = stage["step"] * over + context
    return record


def expected_of(entry: Mapping[str, Any]) -> Expected:
    """An entry of the file in types; what it lacks is left empty."""
    hardware, plan = entry.get("hardware") or {}, entry.get("plan") or {}
    times = plan.get("time") or {}
    return Expected(
        attempt=int(entry["attempt"]),
        accelerator=str(hardware.get("accelerator", "")),
        how=cast("How", hardware.get("how", "placeholder")),
        why=str(hardware.get("why", "")),
        stages=tuple(
            StageExpected(
                stage=int(s["rank"]),
                between_bytes=float(sum(s[term] for term in BETWEEN)),
                peak_bytes=float(s["step"] - s.get("libraries", 0)),
                reserved_bytes=float(s["reserved_bytes"]),
                device_bytes=float(s["device_bytes"]),
            )
            for s in (plan.get("memory") or {}).get("stages", [])
        ),
        step_s=times.get("step_s"),
        exposed_s={k: float(v) for k, v in (times.get("exposed_s") or {}).items() if v is not None},
        reason=str(entry.get("reason", "")),
    )


def _finite(value: Any) -> Any:
    """The value as JSON has it: no nan, no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
