"""A search in words, beside the text of its best plan (explain.py), and as plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isnan
from typing import Any

from sirara.plan.explain import duration
from sirara.plan.search import Found
from sirara.plan.verdict import Plan, in_words


def search_text(found: Found) -> str:
    """The best layout, its neighbours, each knob, and what was left out."""
    best = min(found.best.step_s, *(a.step_s for a in found.alternatives), found.best.step_s)
    lines = [
        f"searched {found.layouts:,} layouts, {found.legal:,} legal, {found.fitting:,} fit: {found.seconds:.1f} s, "
        f"{found.legal / max(found.seconds, 1e-9):,.0f} legal layouts a second; objective {found.objective}",
        f"best          {_described(found.best_words)}",
        f"              step {duration(found.best.step_s)}, {_takes(found.best)}",
    ]
    lines.append(f"left free     {left_free(found)}")
    if found.best.not_run:
        lines[-2] += f"; predicted only: {found.best.not_run}"
    if found.best_now is None:
        lines.append("runs now      nothing that fits")
    elif found.now_overrides != found.best_overrides:
        now = found.best_now
        lines += [
            f"best that runs {_described(found.now_words)}",
            f"              step {duration(now.step_s)} ({found.best.step_s / now.step_s - 1:+.1%} tokens/s), "
            f"device {in_words(now.device_bytes)}",
        ]
    if found.numerics == "fast":
        lines.append("numerics      nothing fits with numerics=exact; all of this is numerics=fast")
    keys = found.now_overrides or found.best_overrides
    lines += [
        "to use it     "
        + (f"--gpus {found.best.gpus} " if found.objective == "cost" else "")
        + " ".join(f"'{w}'" if " " in w else w for w in keys),
        "",
        "nearest alternatives",
    ]
    for a in found.alternatives:
        later = ("" if a.runs else ", predicted only") + (
            ", by formulas" if found.best.setting.profile is not None and not a.measured else ""
        )
        lines.append(
            f"  {duration(a.step_s):>9} {found.best.step_s / a.step_s - 1:>+7.1%}  {in_words(a.device_bytes):>10}  "
            f"{_difference(found.best_words, a.words)}{later}"
        )
    lines += [
        "",
        "each knob at each value: the best step that it allows, memory counted by the executor's rules",
    ]
    lines += list(_knobs(found, best))
    lines += ["", "left out"]
    lines += [f"  {count:>10,}  {why}" for why, count in found.reasons.items()]
    return "\n".join(lines)


def _takes(plan: Plan) -> str:
    """Memory of a device, and of a node where something is offloaded."""
    away = f", offloaded {in_words(plan.offloaded_bytes)} of a node" if plan.offloaded_bytes else ""
    return f"device {in_words(plan.device_bytes)}{away}"


def left_free(found: Found) -> str:
    """How much memory of a device the layout that is used leaves free, and why."""
    used = found.best_now or found.best
    capacity = used.setting.capacity_bytes
    said = f"{in_words(capacity - used.device_bytes)} of {in_words(capacity)}"
    if used.setting.ceiling_bytes is not None:
        return f"{said}; {used.margin_why}"
    kept = in_words(capacity - used.room_bytes)
    if found.tight:
        return f"{said}: less than its error bar of {kept}, because nothing else fits ({used.margin_why})"
    return f"{said}, at least {kept} by choice: {used.margin_why}"


def _described(words: Mapping[str, str]) -> str:
    quiet = {"cp": "1", "ep": "1", "offload": "none", "block": "auto", "sequence_parallel": "no"}
    return "  ".join(f"{k} {v}" for k, v in words.items() if quiet.get(k) != v)


def _difference(best: Mapping[str, str], other: Mapping[str, str]) -> str:
    return ", ".join(f"{k} {best[k]} -> {v}" for k, v in other.items() if best[k] != v)


def _knobs(found: Found, best: float) -> Iterator[str]:
    name = ""
    for s in found.sensitivity:
        label = s.knob if s.knob != name else ""
        name = s.knob
        mark = "*" if s.chosen else " "
        if s.reason:
            yield f"  {label:<18}{s.value:>16} {mark} {s.reason}"
        else:
            yield f"  {label:<18}{s.value:>16} {mark}{duration(s.step_s):>10}{best / s.step_s - 1:>+8.1%}"


def search_record(found: Found) -> dict[str, Any]:
    """Plain data, for --json and plan.json; null where a value of a knob allows nothing, as JSON has no NaN."""

    def known(row: dict[str, Any]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and isnan(v) else v for k, v in row.items()}

    return {
        "objective": found.objective,
        "gpus": found.best.gpus,
        "numerics": found.numerics,
        "left_free": left_free(found),
        "layouts": found.layouts,
        "legal": found.legal,
        "fitting": found.fitting,
        "seconds": found.seconds,
        "best": {
            "words": dict(found.best_words),
            "overrides": list(found.best_overrides),
            "plan": found.best.as_record(),
        },
        "best_now": None
        if found.best_now is None
        else {
            "words": dict(found.now_words),
            "overrides": list(found.now_overrides),
            "plan": found.best_now.as_record(),
        },
        "alternatives": [asdict(a) for a in found.alternatives],
        "sensitivity": [known(asdict(s)) for s in found.sensitivity],
        "left_out": dict(found.reasons),
    }
