"""Validates the planner on published runs: figures for docs/planner.md, and the error bars that plans show.

    python -m benchmarks.plot_planner ROWS.csv [--write]

Step times are predicted by constants fitted without the run's own project; with --write the plots go to
docs/planner/ and the errors to src/sirara/plan/residuals.json.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.figure import Figure

from sirara.plan.constants import Constants, fitted
from sirara.plan.hardware import shipped_table
from sirara.plan.residuals import FILE, kinds_of
from sirara.plan.rows import read
from sirara.plan.validate import project, resolve, validate

ROOT = Path(__file__).resolve().parent.parent


def residuals(kinds, predicted, measured):
    """Per kind of run the number, the mean and the 90th percentile of absolute relative errors."""
    known = ~np.isnan(measured) & ~np.isnan(predicted)
    found = {}
    for kind in sorted(set(kinds[known])):
        error = np.abs(predicted / measured - 1)[known & (kinds == kind)]
        found[kind] = {
            "n": len(error), "mean": round(float(error.mean()), 4), "p90": round(float(np.quantile(error, 0.9)), 4),
        }  # fmt: skip
    return found


def plot(path, title, unit, sources, predicted, measured):
    """Predicted against measured, one colour per project, on logarithmic axes; returns errors per project."""
    known = ~np.isnan(measured) & ~np.isnan(predicted)
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(np.array(sources)[known]))
    lines = []
    for n, name in enumerate(names):
        at = known & (np.array(sources) == name)
        error = np.abs(predicted[at] / measured[at] - 1)
        lines.append(
            (
                name,
                int(at.sum()),
                float(error.mean()),
                float(np.median(error)),
                float(np.quantile(error, 0.9)),
            )
        )
        label = f"{name}, {at.sum()}: {error.mean():.1%}"
        ax.plot(measured[at], predicted[at], "o^sDvP*X"[n % 8], ms=4, alpha=0.7, label=label)
    low, high = measured[known].min() * 0.8, measured[known].max() * 1.25
    ax.plot([low, high], [low, high], "k-", lw=0.8)
    ax.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color="k", alpha=0.08)
    ax.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}", title=title)
    ax.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return lines


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("rows")
    arguments.add_argument("--write", action="store_true")
    given = arguments.parse_args()
    rows, hardware = read(given.rows), shipped_table()
    points = resolve(rows, hardware, fitted())
    found = validate(rows, hardware, fitted(), start=Constants(), leave_out=True)
    kinds = kinds_of(points)
    errors = {
        "time": residuals(kinds, found.predicted_s, rows.step_s),
        "memory": residuals(kinds, found.predicted_bytes, rows.memory_bytes),
    }
    folder = ROOT / "docs" / "planner" if given.write else Path("planner-plots")
    projects = [project(s) for s in rows.sources]
    title = "step time, each project left out of the fit"
    table = plot(folder / "step-time.png", title, "s", projects, found.predicted_s, rows.step_s)
    gib = 2.0**30
    memory = plot(
        folder / "memory.png",
        "memory per device",
        "GiB",
        projects,
        found.predicted_bytes / gib,
        rows.memory_bytes / gib,
    )
    for what, lines in (("step time", table), ("memory", memory)):
        print(f"| {what}: project | rows | mean | median | p90 |\n|---|---|---|---|---|")
        for name, n, mean, median, p90 in lines:
            print(f"| {name} | {n} | {mean:.1%} | {median:.1%} | {p90:.1%} |")
    print(json.dumps(errors, indent=1))
    if given.write:
        (ROOT / "src" / "sirara" / "plan" / FILE).write_text(json.dumps(errors, indent=1) + "\n")


if __name__ == "__main__":
    main()
