"""`sirara status`, `metrics`, `logs`, `report`: look at runs; nothing here changes one."""

import os
import shutil
import sys
import time
from pathlib import Path

import click

from sirara.cli.options import json_option, say_json
from sirara.config.run_folder import RunFolder, list_runs
from sirara.errors import ConfigError, StorageError
from sirara.launch.logs import log_file
from sirara.monitor.curve import terminal_curve, write_png
from sirara.monitor.report import report as make_report
from sirara.monitor.report import report_lines
from sirara.monitor.state import RunState, curves, duration, follow, live_metrics, look, step_row

REFRESH_S = 0.5
POLL_S = 0.2
SHOWN_ROWS = 20

run_argument = click.argument("run_name", metavar="[RUN]", default="latest")


@click.command()
@run_argument
@click.option("--all", "every", is_flag=True, help="One line for each run.")
@click.option("--watch", is_flag=True, help="Go on showing it until it ends.")
@json_option("Print JSON: {run, state, attempt, step, loss, eta_s, checkpoint, ...}.")
def status(run_name: str, every: bool, watch: bool, as_json: bool) -> None:
    """What RUN does (its path, name, beginning of its name; default: the newest)."""
    if every:
        _say_all(as_json)
        return
    run = RunFolder.find(run_name)
    while True:
        state = look(run)
        if watch and not as_json and sys.stdout.isatty():
            _watch(run)
            return
        if as_json:
            say_json(state.as_record())
        else:
            from sirara.monitor.view import status_lines

            for line in status_lines(state, _losses(run)[1]):
                click.echo(line)
        if not watch or state.state != "running":
            return
        time.sleep(REFRESH_S)


@click.command()
@run_argument
@json_option(
    "Print JSON: {run, losses, evals, wall_s, goodput, lost_steps, attempts: [{layout, steps, plan, ...}]}."
)
def report(run_name: str, as_json: bool) -> None:
    """What became of RUN, attempt by attempt: steps, times, saves, and how right its plan was."""
    found = make_report(RunFolder.find(run_name))
    if as_json:
        say_json(found.as_record())
        return
    for line in report_lines(found):
        click.echo(line)


@click.command()
@run_argument
@click.option("--last", type=click.IntRange(min=1), help="Only the last N steps.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the loss curve into this PNG file.")
@json_option("Print JSON: {run, steps: [{step, loss, loss_hex, grad_norm, lr, tokens, seconds, ...}]}.")
def metrics(run_name: str, last: int | None, plot: str | None, as_json: bool) -> None:
    """Loss, gradient norm, rate and times of every step that counts (not what a resume has replaced)."""
    run = RunFolder.find(run_name)
    records = live_metrics(run)
    if plot is not None:
        _plot(run, Path(plot))
    rows = [step_row(record) for record in records]
    if as_json:
        say_json({"run": run.id, "path": str(run.path), "steps": rows[-last:] if last else rows})
        return
    if not rows:
        click.echo(f"{run.id} has no steps yet", err=True)
        return
    from sirara.monitor.view import metrics_table

    on_terminal = sys.stdout.isatty()
    shown = rows[-(last or (SHOWN_ROWS if on_terminal else len(rows))) :]
    for line in metrics_table(shown):
        click.echo(line)
    if on_terminal:
        steps, losses = _losses(run)
        for line in terminal_curve(
            steps, losses, width=min(100, shutil.get_terminal_size().columns), height=12
        ):
            click.echo(line)


@click.command()
@run_argument
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--attempt", type=click.IntRange(min=1), help="Default: the newest.")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on until the run ends.")
@json_option("Print the records of the log, one JSON object a line.")
def logs(run_name: str, rank: int, attempt: int | None, following: bool, as_json: bool) -> None:
    """What one rank wrote: its log lines, prints, and last words."""
    run = RunFolder.find(run_name)
    number = attempt or max(1, run.attempt())

    def file_of(attempt: int) -> Path:
        file = log_file(run, attempt, rank)
        return file.with_suffix(".jsonl") if as_json else file

    if not file_of(number).exists() and not (following and look(run).state == "running"):
        there = sorted(run.logs(number).glob("rank-*.log"))
        raise ConfigError(
            f"rank {rank} has no log in attempt {number} of {run.id}",
            code="SR114",
            where=str(run.logs(number)),
            why=f"{len(there)} ranks have one; the newest attempt is {run.attempt()}",
        )
    if following:
        for line in follow(run, file_of, attempt=number, pause=lambda: time.sleep(POLL_S)):
            click.echo(line)
        return
    with open(file_of(number), errors="replace") as file:
        for line in file:
            click.echo(line, nl=False)


def _say_all(as_json: bool) -> None:
    states = [look(run) for run in list_runs(Path(os.environ.get("SIRARA_RUN_DIR") or "runs"))]
    if as_json:
        say_json([state.as_record() for state in states])
        return
    width = max((len(state.run) for state in states), default=0)
    for state in states:
        click.echo(f"{state.run:<{width}}  {state.state:<8}  {_short(state)}")


def _short(state: RunState) -> str:
    step = f"step {state.step}/{state.steps}" if state.steps else f"step {state.step}"
    loss = "" if state.loss is None else f"  loss {state.loss:.4f}"
    left = "" if state.eta_s is None else f"  {duration(state.eta_s)} left"
    return f"{step}{loss}{left}"


def _watch(run: RunFolder) -> None:
    from rich.console import Console
    from rich.live import Live

    from sirara.monitor.view import run_panel

    console = Console()
    with Live(console=console, refresh_per_second=4) as screen:
        while True:
            state = look(run)
            steps, losses = _losses(run)
            screen.update(run_panel(state, steps, losses, width=min(100, console.width)))
            if state.state != "running":
                return
            time.sleep(REFRESH_S)


def _losses(run: RunFolder) -> tuple[list[int], list[float]]:
    return curves(live_metrics(run)).get("train", ([], []))


def _plot(run: RunFolder, path: Path) -> None:
    found = curves(live_metrics(run))
    if not found:
        raise ConfigError(f"{run.id} has no steps to draw yet", code="SR115", where=str(run.metrics))
    try:
        write_png(path, found, title=run.id)
    except ImportError as error:
        raise ConfigError(
            "drawing a PNG needs matplotlib",
            code="SR116",
            why=str(error),
            try_=["pip install 'sirara[plot]'"],
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"drawn: {path}", err=True)
