"""Fits the planner's constants to published runs and writes src/sirara/plan/constants.json.

    python -m benchmarks.fit_planner ROWS.csv [--write] [--leave-source-out]

Prints the errors per source of all rows' fit, and on demand those of fits without the source's project.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from sirara.plan import constants as c
from sirara.plan.fit import fit
from sirara.plan.hardware import shipped_table
from sirara.plan.rows import read
from sirara.plan.validate import resolve, validate

TARGET = Path(__file__).resolve().parent.parent / "src" / "sirara" / "plan" / "constants.json"


def fitted_to(rows, hardware, start):
    """The fit to all measured rows; what rows leave open is decided with the constants found so far."""
    found = start
    measured = ~np.isnan(rows.step_s)
    groups = [rows.sources[i] for i in np.flatnonzero(measured)]
    for _ in range(3):
        p = resolve(rows, hardware, found).take(measured)
        last = fit(p, rows.step_s[measured], groups, hardware, start)
        found = last.constants
    return last


def print_table(validation):
    for r in validation.reports:
        t, m = r.time, r.memory
        line = f"{r.source[:46]:46}"
        if t:
            line += (
                f" n={t.n:3d} mean {t.mean:6.1%} median {t.median:6.1%} p90 {t.p90:6.1%} bias {t.bias:+6.1%}"
            )
        if r.sweeps:
            line += f"  {r.sweeps} sweeps, tau {r.tau:.2f}, regret {r.regret:.1%}"
        if m:
            line += f"  memory n={m.n} mean {m.mean:.1%} max {m.largest:.1%}"
        print(line)
    print(f"{validation.labels} labels, wrong: {', '.join(validation.wrong_labels) or 'none'}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("rows")
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--leave-source-out", action="store_true")
    given = arguments.parse_args()
    rows, hardware = read(given.rows), shipped_table()
    found = fitted_to(rows, hardware, c.Constants())
    k = found.constants
    count = f"{found.rows} steps of {len(set(rows.sources))} sources"
    data = {
        "about": "Written by benchmarks/fit_planner.py; what each number means stands in constants.py.",
        "global": {
            **{n: {"value": float(f"{getattr(k, n):.4g}"), "fitted_to": count} for n in c.TIME},
            "fragmentation": {"value": k.fragmentation, "fitted_to": "torchtitan, reserved memory, 7 rows"},
            "flat_buffer_bytes": {"value": k.flat_buffer_bytes, "fitted_to": "BLOOM, nvidia-smi, 49 rows"},
        },
        "by_accelerator": {
            n: [float(f"{a:.4g}"), float(f"{b:.4g}")] for n, (a, b) in sorted(k.by_accelerator.items())
        },
    }
    if given.write:
        TARGET.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(data, indent=1))
    print("\nin sample")
    print_table(validate(rows, hardware, k))
    if given.leave_source_out:
        print("\nits project left out")
        print_table(validate(rows, hardware, k, leave_out=True))


if __name__ == "__main__":
    main()
