"""A run on a terminal: a panel to watch, or plain lines for a pipe.  Both say the same."""

from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from sirara.events import Record
from sirara.monitor.curve import sparkline, terminal_curve
from sirara.monitor.state import RunState, age, duration
from sirara.plan.grading import grade_lines

COLOURS = {"running": "green", "done": "cyan", "stopped": "yellow", "failed": "red", "new": "white"}
SPARK_WIDTH = 40
TABLE = ("step", "loss", "grad_norm", "lr", "tokens", "seconds")


def status_lines(state: RunState, losses: Sequence[float]) -> list[str]:
    """A few plain lines about a run."""
    why = f" ({state.why})" if state.why else ""
    lines = [
        f"{state.run}  {state.state}{why}",
        f"  attempt     {state.attempt}",
        f"  step        {_progress(state)}",
    ]
    if state.loss is not None:
        lines.append(f"  loss        {state.loss:.4f}  {sparkline(losses, SPARK_WIDTH)}".rstrip())
    if state.tokens:
        speed = (
            f"  {state.tokens_per_s:,.0f} tokens/s" if state.tokens_per_s and state.state == "running" else ""
        )
        lines.append(f"  tokens      {state.tokens:,}{speed}")
    if state.eta_s is not None:
        lines.append(f"  left        {duration(state.eta_s)}")
    lines.append(f"  checkpoint  {'none' if state.checkpoint is None else f'step {state.checkpoint}'}")
    if state.grade:
        lines.append(f"  grade       {state.grade}")
    if state.updated is not None:
        lines.append(f"  last step   {age(state.updated)}")
    lines.append(f"  folder      {state.path}")
    if state.plan is not None:
        lines += [f"  {'plan' if n == 0 else '':<12}{line}" for n, line in enumerate(grade_lines(state.plan))]
    elif state.plan_note:
        lines.append(f"  plan        {state.plan_note}")
    return lines


def run_panel(state: RunState, steps: Sequence[int], losses: Sequence[float], *, width: int) -> Panel:
    """The same as a panel with a progress bar and the loss curve."""
    colour = COLOURS.get(state.state, "white")
    parts: list[Text | ProgressBar] = [Text(line) for line in status_lines(state, [])[1:]]
    if state.steps:
        parts.insert(0, ProgressBar(total=state.steps, completed=state.step, width=max(10, width - 4)))
    curve = terminal_curve(steps, losses, width=max(20, width - 4), height=8)
    title = Text(f"{state.run}  {state.state}", style=f"bold {colour}")
    return Panel(Group(*parts, *(Text(line) for line in curve)), title=title, width=width)


def metrics_table(rows: Sequence[Record]) -> list[str]:
    """Aligned columns, a header first."""
    cells = [list(TABLE), *([_cell(name, row.get(name)) for name in TABLE] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(TABLE))]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]


def _progress(state: RunState) -> str:
    return (
        f"{state.step}/{state.steps}  {100 * state.step // state.steps} %" if state.steps else str(state.step)
    )


def _cell(name: str, value: object) -> str:
    if value is None:
        return "nan" if name in ("loss", "grad_norm") else "-"
    if isinstance(value, float):
        return f"{value:.2e}" if name == "lr" else f"{value:.3f}" if name == "seconds" else f"{value:.6f}"
    return f"{value}"
