"""`sirara worker`: one training process; started by `run` and `resume`, by hand only to debug one."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import click

from sirara.config.load import Loaded, load
from sirara.config.run_folder import RunFolder, write_durably
from sirara.errors import ConfigError
from sirara.launch.crash import exit_code_of
from sirara.launch.signals import Requests
from sirara.launch.worker import Outcome, Result, Seat, work


@click.command(hidden=True)
@click.argument("run_path", metavar="RUN")
@click.option("--attempt", type=int, required=True)
@click.option("--agent", type=int, required=True, help="Process id of the agent; the worker ends with it.")
@click.option(
    "--resume/--fresh", required=True, help="Continue from the newest checkpoint, or start at step 0."
)
def worker(run_path: str, attempt: int, agent: int, resume: bool) -> None:
    """Train as one rank of an attempt; RANK and WORLD_SIZE say which."""
    run = RunFolder(run_path)
    launch = load(attempt_config(run, attempt)).config.launch
    seat = Seat(
        run=run,
        attempt=attempt,
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        agent=agent,
        supervised=True,
        hang_timeout_s=launch.hang_timeout,
        stop_grace_s=launch.stop_grace,
    )
    try:
        train_here(seat, resume=resume)
    except BaseException as error:  # noqa: BLE001 - the report is written; threads of a broken run must not hold the exit
        leave(exit_code_of(error))


def train_here(seat: Seat, *, resume: bool) -> Result:
    """Trains in this process, as the rank that `seat` says.

    Raises:  ConfigError for a start at step 0 in a run that has checkpoints.
    """
    steps = seat.run.committed_steps()
    if steps and not resume:
        raise ConfigError(
            f"{seat.run.id} has checkpoints, the newest of step {steps[-1]}: it is not started from 0",
            code="SR117",
            try_=[f"sirara resume {seat.run.id}", "sirara run CONFIG   (a new run)"],
        )

    def entry(requests: Requests) -> Outcome:
        import torch

        from sirara.train.loop import train

        torch.set_num_threads(int(seat.run.record()["threads"]))
        loaded = load(attempt_config(seat.run, seat.attempt))
        asked = _keeping(loaded, seat, requests)
        return train(
            loaded.config,
            seat.run,
            attempt=seat.attempt,
            resume=resume,
            requests=asked,
            alive=requests.alive,
            deadline=requests.deadline,
        )

    return work(seat, entry)


def _keeping(loaded: Loaded, seat: Seat, requests: Callable[[], str]) -> Callable[[], str]:
    """`requests`, which is first asked when all ranks have loaded: then this configuration is the run's."""
    kept = seat.rank != 0

    def asked() -> str:
        nonlocal kept
        if not kept:
            write_durably(seat.run.config, loaded.text)
            kept = True
        return requests()

    return asked


def attempt_config(run: RunFolder, attempt: int) -> str:
    """The configuration that every rank of an attempt reads, whatever a later resume makes of the run's."""
    return str(run.logs(attempt) / "config.yaml")


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads or destructors of a group that is broken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # they may be a log file on a full disk
            stream.flush()
    os._exit(code)
