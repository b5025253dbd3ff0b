"""Published runs as configurations: rows of a CSV become `Points`, measured columns, and refusals with their reason."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.errors import ConfigError
from sirara.plan.conventions import Refused, columns_of, number
from sirara.plan.hardware import find
from sirara.plan.points import Points, points

Floats = NDArray[np.float64]
GIB, GB = float(1 << 30), 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    id: str
    source: str
    model: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that can be predicted.  step_s, memory_bytes: NaN where not measured; fits: 1, 0 or NaN.

    memory_level: "allocated", "reserved" or "device".  assumed: what a row does not say and was taken instead.
    """

    points: Points
    ids: tuple[str, ...]
    sources: tuple[str, ...]
    models: tuple[str, ...]
    gpu_types: tuple[str, ...]
    step_s: Floats
    memory_bytes: Floats
    memory_level: tuple[str, ...]
    fits: Floats
    assumed: tuple[tuple[str, ...], ...]
    open_micro_batch: NDArray[np.bool_]
    """Rows that do not state micro_batch: theirs is the fastest that fits."""
    open_recompute: NDArray[np.bool_]
    """Rows that do not state recompute, of frameworks that choose it per model: none, or what makes it fit."""
    refused: tuple[Refusal, ...]

    def __len__(self) -> int:
        return len(self.ids)


def read(path: str | Path) -> Rows:
    """The rows of a CSV with the columns of planner_rows.csv.

    Raises:  ConfigError SR213 for a file without them, or without rows.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file} is not a file", code="SR213", where="plan validate")
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            table = csv.DictReader(stream)
            rows, columns = list(table), set(table.fieldnames or ())
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} is no CSV", code="SR213", where="plan validate", why=str(error)) from error
    missing = sorted({"layers", "hidden", "gpus", "gpu_type", "step_time_s"} - columns)
    if missing:
        raise ConfigError(f"{file} has no column {', '.join(missing)}", code="SR213", where="plan validate")
    if not rows:
        raise ConfigError(f"{file} has no rows", code="SR213", where="plan validate")
    return from_records(rows)


def from_records(records: Sequence[Mapping[str, str]]) -> Rows:
    """The same from rows in memory."""
    found: list[tuple[Mapping[str, str], dict[str, Any], list[str]]] = []
    refused = []
    for n, row in enumerate(records):
        assumed: list[str] = []
        try:
            found.append((row, columns_of(row, assumed), assumed))
        except Refused as reason:
            name = row.get("core_id") or str(n + 1)
            refused.append(
                Refusal(id=name, source=row.get("source", ""), model=row.get("model", ""), reason=str(reason))
            )
    names = sorted({k for _, c, _ in found for k in c})
    table = points({k: [c[k] for _, c, _ in found] for k in names}) if found else points({}).take(slice(0, 0))
    return Rows(
        points=table,
        ids=tuple(r.get("core_id") or "" for r, _, _ in found),
        sources=tuple(r.get("source") or "" for r, _, _ in found),
        models=tuple(r.get("model") or "" for r, _, _ in found),
        gpu_types=tuple(find(r["gpu_type"]).name for r, _, _ in found),
        step_s=np.array([number(r.get("step_time_s")) for r, _, _ in found]),
        memory_bytes=np.array([_memory(r) for r, _, _ in found]),
        memory_level=tuple(_level(r) for r, _, _ in found),
        fits=np.array([_fits(r) for r, _, _ in found]),
        assumed=tuple(tuple(a) for _, _, a in found),
        open_micro_batch=np.array(
            [any(a.startswith("micro_batch") for a in s) for _, _, s in found], dtype=bool
        ),
        open_recompute=np.array([any(a.startswith("recompute") for a in s) for _, _, s in found], dtype=bool),
        refused=tuple(refused),
    )


def _fits(row: Mapping[str, str]) -> float:
    stated = number(row.get("fits"))
    if np.isnan(stated) and not np.isnan(number(row.get("step_time_s"))):
        return 1.0
    return stated


def _memory(row: Mapping[str, str]) -> float:
    unit = (row.get("memory_unit") or "").lower()
    return number(row.get("memory")) * (GIB if "gib" in unit else GB)


def _level(row: Mapping[str, str]) -> str:
    unit = (row.get("memory_unit") or "").lower()
    if "smi" in unit:
        return "device"
    return (
        "reserved" if "reserved" in unit or "torchtitan" in (row.get("source") or "").lower() else "allocated"
    )
