"""Validates the planner on published runs: figures for docs/planner.md, and the error bars that plans show.

    python -m benchmarks.plot_planner ROWS.csv [--write]

With --write the page's tables are made anew too, that of the recipes included.

Step times are predicted by constants fitted without the run's own project; with --write the plots go to
docs/planner/ and the errors to src/sirara/plan/residuals.json.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from click.testing import CliRunner

matplotlib.use("Agg")

from matplotlib.figure import Figure

from sirara.cli.main import cli
from sirara.plan.constants import Constants, fitted
from sirara.plan.hardware import shipped_table
from sirara.plan.residuals import FILE, kinds_of
from sirara.plan.rows import read
from sirara.plan.validate import project, resolve, validate

# recipe, accelerator, overrides, what was published, the row of it where there is one, where
RECIPES = (
    ("bloom-176b", "a100-80gb", "", "105.9 s; 60 GB (nvidia-smi)", "142", "BLOOM's chronicles (bigscience-workshop)"),
    ("mt-nlg-530b", "a100-80gb", "", "44.4 s", "", "arXiv:2201.11990, section 2.4, as in cli99/llm-analysis"),
    ("mt-nlg-530b", "a100-80gb", "mesh.dp=10", "50.2 s", "", "the same"),
    ("mt-nlg-530b", "a100-80gb", "mesh.dp=8", "60.1 s", "", "the same"),
    ("gpt-1t", "a100-80gb", "", "102.6 s", "10", "arXiv:2104.04473, table 1"),
    ("llama3-8b", "h100-96gb", "", "2.92 s; 67 GiB reserved", "881", "torchtitan, December 2024, table 3"),
    ("llama3-70b", "h100-sxm", "train.precision=fp8", "20.1 s, 8-bit, other recompute", "506",
     "Megatron-Bridge 26.04"),
    ("llama3-405b", "h100-sxm", "", "400 TFLOP/s per device", "", "arXiv:2407.21783"),
    ("finetune-13b", "a100-80gb", "", "none of this layout", "", ""),
    ("laptop", "cpu", "", "none", "", ""),
)  # fmt: skip
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


def recipe_table(predicted_s):
    """Predicted beside published, as the page shows it; `predicted_s`: of a published row, by its id."""
    lines = [
        "| recipe | devices | step, exact | step, fast | MFU, fast | device GiB, exact / fast | published "
        "| that run predicted | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, gpu, words, published, row, source in RECIPES:
        found = []
        for numerics in ("exact", "fast"):
            path = str(ROOT / "examples" / "recipes" / f"{name}.yaml")
            said = CliRunner().invoke(
                cli, ["plan", path, "--gpu", gpu, "--json", f"numerics={numerics}", *words.split()]
            )
            found.append(json.loads(said.stdout.splitlines()[0]))
        exact, fast = found
        sizes = " / ".join(f"{f['memory']['device_bytes'] / 2**30:.1f}" for f in found)
        own = f"{predicted_s[row]:.1f} s" if row in predicted_s else ""
        lines.append(
            f"| `{name}` {f'`{words}`' if words else ''} | {fast['gpus']:,} {gpu} | {exact['time']['step_s']:.2f} s "
            f"| {fast['time']['step_s']:.2f} s | {fast['time']['mfu']:.1%} | {sizes} | {published} "
            f"| {own} | {source} |"
        )
    return lines


def put(page, name, lines):
    """The page with other lines between its two marks of this name."""
    head, _, rest = page.partition(f"<!-- {name} -->\n")
    _, _, tail = rest.partition(f"<!-- end of {name} -->\n")
    return f"{head}<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end of {name} -->\n{tail}"


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
    lines = []
    for what, rows_of in (("step time", table), ("memory", memory)):
        lines += [f"| {what}: project | runs | mean | median | worst tenth |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {n} | {mean:.1%} | {mid:.1%} | {p90:.1%} |" for name, n, mean, mid, p90 in rows_of
        ]
        lines.append("")
    print("\n".join(lines))
    print(json.dumps(errors, indent=1))
    if given.write:
        (ROOT / "src" / "sirara" / "plan" / FILE).write_text(json.dumps(errors, indent=1) + "\n")
        page = ROOT / "docs" / "planner.md"
        predicted = dict(zip(rows.ids, found.predicted_s, strict=True))
        page.write_text(put(put(page.read_text(), "errors", lines[:-1]), "recipes", recipe_table(predicted)))


if __name__ == "__main__":
    main()
