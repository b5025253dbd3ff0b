"""`sirara plan validate ROWS.csv`: the planner's predictions beside published measurements."""

import math
from dataclasses import asdict
from typing import Any

import click

from sirara.cli.options import json_option, say_json
from sirara.plan.constants import fitted
from sirara.plan.hardware import shipped_table
from sirara.plan.rows import read
from sirara.plan.validate import SourceReport, Validation, validate


@click.command("validate")
@click.argument("rows_csv", metavar="ROWS.csv")
@click.option(
    "--leave-source-out",
    "leave_out",
    is_flag=True,
    help="Predict each source by constants that are fitted, now, without all rows of its project.",
)
@json_option()
def plan_validate(rows_csv: str, leave_out: bool, as_json: bool) -> None:
    """Errors of predicted step times and memory per source, ranking and regret, and the rows that are refused."""
    rows = read(rows_csv)
    found = validate(rows, shipped_table(), fitted(), leave_out=leave_out)
    if as_json:
        say_json(_record(found))
        return
    for line in _text(found):
        click.echo(line)


def _record(v: Validation) -> dict[str, Any]:
    return _known(
        {
            "left_out": v.left_out,
            "sources": [asdict(r) for r in v.reports],
            "labels": v.labels,
            "wrong_labels": list(v.wrong_labels),
            "regret": v.regret,
            "tau": v.tau,
            "refused": [asdict(r) for r in v.refused],
            "rows": [asdict(r) for r in v.rows],
        }
    )


def _known(value: Any) -> Any:
    """The same with null for what is not a number, which JSON does not have."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {k: _known(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_known(v) for v in value]
    return value


def _text(v: Validation) -> list[str]:
    how = "fitted without the source's project" if v.left_out else "as shipped"
    lines = [
        f"constants {how}; errors are |predicted / measured - 1|, bias is the mean of predicted / measured - 1",
        "",
        f"{'':44} {'time':>30} {'sweeps':>24} {'memory':>21}",
        f"{'source':44} {'n':>4}{'mean':>6}{'median':>7}{'p90':>6}{'bias':>7} {'n':>7}{'tau':>7}{'regret':>10}"
        f" {'n':>6}{'mean':>8}{'max':>7}",
    ]
    lines += [_line(r) for r in v.reports]
    swept = any(r.sweeps for r in v.reports)
    ranked = f"tau {v.tau:.2f}, regret of the first choice {v.regret:.1%}" if swept else "none"
    lines += ["", f"all sweeps: {ranked}"]
    wrong = f"{len(v.wrong_labels)} (rows {', '.join(v.wrong_labels)})" if v.wrong_labels else "none"
    lines.append(f"fits or not: {v.labels} rows say, wrong: {wrong}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in v.refused:
        reasons.setdefault((r.source, r.reason), []).append(r.id)
    if reasons:
        lines += ["", "refused"]
    for (source, reason), ids in reasons.items():
        lines.append(
            f"  {source[:44]:44} {len(ids):>4}  {reason}  ({', '.join(ids[:6])}{', ...' * (len(ids) > 6)})"
        )
    return lines


def _line(r: SourceReport) -> str:
    t, m = r.time, r.memory
    line = f"{r.source[:44]:44} "
    line += (
        f"{t.n:>4}{t.mean:>6.0%}{t.median:>7.0%}{t.p90:>6.0%}{t.bias:>+7.0%} " if t is not None else " " * 31
    )
    line += f"{r.sweeps:>7}{r.tau:>7.2f}{r.regret:>10.1%}" if r.sweeps else " " * 24
    return line + (f" {m.n:>6}{m.mean:>8.1%}{m.largest:>7.1%}" if m is not None else "")
