"""`sirara run`, `resume`, `stop`, `save`.

run CONFIG   new folder  ─┐                     ┌ launch.nproc=1: in this process
                          ├─ begin an attempt ──┼ more: an agent and its workers (launch/supervise)
resume RUN   found folder ┘                     └ under torchrun or srun: this process is one rank of theirs
"""

import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from sirara.checkpoint.space import Seats
from sirara.cli.options import WITH_OVERRIDES, json_option, overrides, say_json
from sirara.cli.preflight import check_checkpoints, check_continues, preflight
from sirara.cli.worker import attempt_config, leave, train_here
from sirara.config.load import Loaded, load, split_overrides
from sirara.config.run_folder import RunFolder, write_durably
from sirara.errors import CommError, ConfigError, Exit, SiraraError
from sirara.launch.crash import AttemptFailed, exit_code_of
from sirara.launch.external import Agreement, Launcher, agree, detect
from sirara.launch.local import Workers, count_cores, count_gpus, plan_workers
from sirara.launch.signals import request
from sirara.launch.worker import Result, Seat
from sirara.plan.stored import add

# An owner that is just ending (its agent was killed, or it is writing its last record) is waited for.
WAIT_FOR_OWNER_S = 10.0

dry_run_option = click.option("--dry-run", is_flag=True, help="Check everything and say what would be done.")


@click.command(context_settings=WITH_OVERRIDES)
@click.argument("config", metavar="CONFIG")
@overrides
@json_option("Last line on stdout: {run, step, loss, loss_hex, digest, tokens, grade, ...}.")
@dry_run_option
def run(config: str, overrides: list[str], as_json: bool, dry_run: bool) -> None:
    """Start a run: make its folder, start its workers, train to the last step.

    Under torchrun, srun or Kubernetes this process is one of their workers and starts none.
    """
    overrides = _under_launcher(overrides)
    loaded = load(config, overrides, os.environ)
    _go(_decided(config, overrides, _Job(loaded=loaded, run=None, as_json=as_json)), dry_run=dry_run)


@click.command(context_settings=WITH_OVERRIDES)
@click.argument("run_name", metavar="RUN")
@overrides
@json_option("Last line on stdout: {run, step, loss, loss_hex, digest, tokens, grade, ...}.")
@dry_run_option
def resume(run_name: str, overrides: list[str], as_json: bool, dry_run: bool) -> None:
    """Continue RUN (its path, name, beginning of its name, or "latest") from its newest checkpoint.

    Overrides change its configuration from here on: `resume RUN mesh.dp=8 launch.nproc=8`.
    """
    found = RunFolder.find(run_name)
    overrides = _under_launcher(overrides)
    loaded = load(found.config, overrides, os.environ)
    job = _decided(found.config, overrides, _Job(loaded=loaded, run=found, as_json=as_json))
    if found.committed_steps():
        check_continues(load(found.config).config, job.loaded.config)
    _go(job, dry_run=dry_run)


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
@json_option()
@dry_run_option
def stop(run_name: str, wait: bool, as_json: bool, dry_run: bool) -> None:
    """Ask RUN to save and end at its next step; its command then ends with 75."""
    found = _ask(run_name, "stop", as_json=as_json, dry_run=dry_run)
    owner = found.owner()
    while wait and not dry_run and owner is not None and owner.alive:
        time.sleep(0.2)


@click.command()
@click.argument("run_name", metavar="RUN")
@json_option()
@dry_run_option
def save(run_name: str, as_json: bool, dry_run: bool) -> None:
    """Ask RUN for a checkpoint at its next step."""
    _ask(run_name, "save", as_json=as_json, dry_run=dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What was asked for; `run` is None until a new run has its folder.

    search: what the layout was chosen from, where the configuration left it open; kept in plan.json.
    """

    loaded: Loaded
    run: RunFolder | None
    as_json: bool
    search: Mapping[str, Any] | None = None

    def begin(self, run: RunFolder, threads: int) -> int:
        """Owns the run under a new attempt, whose configuration is this one.

        It becomes the run's when the first step begins: a resume that cannot load must not spoil
        the next one.
        """
        attempt = run.begin_attempt(wait_s=WAIT_FOR_OWNER_S)
        run.logs(attempt).mkdir(parents=True, exist_ok=True)
        write_durably(Path(attempt_config(run, attempt)), self.loaded.text)
        run.keep(threads=threads)
        if self.search is not None:
            add(run.path, attempt, search=self.search)
        return attempt

    def folder(self, identity: str = "") -> RunFolder:
        return self.run or RunFolder.create(self.loaded.config, self.loaded.text, identity=identity)

    def workers(self) -> Workers:
        config = self.loaded.config
        kept = self.run.record().get("threads") if self.run else None
        return plan_workers(
            config.launch,
            config.mesh,
            kept_threads=kept,
            env=os.environ,
            cores=count_cores(),
            gpus=count_gpus(os.environ),
        )


def _decided(path: str | Path, overrides: list[str], job: _Job) -> _Job:
    """The job with a layout, where the configuration leaves it to the planner."""
    if not job.loaded.auto:
        return job
    from sirara.cli.auto import decide

    decision = decide(path, overrides, job.loaded, detect(os.environ), os.environ)
    click.echo(decision.said, err=True)
    return replace(job, loaded=decision.loaded, search=decision.search)


def _go(job: _Job, *, dry_run: bool) -> None:
    shape = preflight(job.loaded.config, starts=job.run is None or not job.run.committed_steps())
    launcher = detect(os.environ)
    if launcher is None or not launcher.restart:  # a restart goes on with what was checked at the start
        check_checkpoints(job.loaded.config, shape, run=job.run, seats=_seats(job, launcher))
    if dry_run:
        _say_plan(job, launcher)
        return
    if launcher is not None:
        _work_for(launcher, job)
    workers = job.workers()
    if workers.note:
        click.echo(f"note: {workers.note}", err=True)
    run = job.folder()
    click.echo(f"run {run.id}: {workers.nproc} x {workers.threads} threads, in {run.path}", err=True)
    try:
        result = _alone(job, run, workers) if workers.nproc == 1 else _with_agent(job, run, workers)
    except AttemptFailed as error:
        _say_failure(run, error, job.as_json)
        click.echo(str(error), err=True)
        sys.exit(error.exit_status)
    except Exception as error:
        _say_failure(run, error, job.as_json)
        raise
    _say_result(run, result, job.as_json)
    sys.exit(_exit_code(result))


def _under_launcher(overrides: list[str]) -> list[str]:
    """The overrides; where another launcher has started the processes, their number is not the configuration's to say.

    Raises:  ConfigError SR150 for a command line that says another number.
    """
    launcher = detect(os.environ)
    if launcher is None:
        return overrides
    asked = dict(split_overrides(overrides)).get("launch.nproc", "auto")
    if asked not in ("auto", str(launcher.local_world), str(launcher.world)):
        raise ConfigError(
            f"launch.nproc={asked}, and {launcher.kind} has started {launcher.world} processes",
            code="SR150",
            where="launch.nproc (command line)",
            try_=["leave launch.nproc out", f"{asked} processes by {launcher.kind}"],
        )
    return [*overrides, "launch.nproc=auto"]


def _seats(job: _Job, launcher: Launcher | None) -> Seats:
    if launcher is None:
        nproc = job.workers().nproc
        return Seats(world=nproc, local=nproc)
    local = max(1, launcher.local_world)
    return Seats(world=launcher.world, local=local, nodes=-(-launcher.world // local), node=launcher.node)


def _alone(job: _Job, run: RunFolder, workers: Workers) -> Result:
    # Before torch is imported; a launcher's batch script may have left other values here.
    os.environ.update({**workers.environment(), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    attempt = job.begin(run, workers.threads)
    launch = job.loaded.config.launch
    seat = Seat(run=run, attempt=attempt, hang_timeout_s=launch.hang_timeout, stop_grace_s=launch.stop_grace)
    return train_here(seat, resume=run.resumes())


def _with_agent(job: _Job, run: RunFolder, workers: Workers) -> Result:
    from sirara.launch.supervise import Crew, supervise

    def command(attempt: int, resume: bool) -> list[str]:
        verb = [sys.executable, "-m", "sirara", "worker", str(run.path)]
        return [
            *verb,
            "--attempt",
            str(attempt),
            "--agent",
            str(os.getpid()),
            "--resume" if resume else "--fresh",
        ]

    launch = job.loaded.config.launch
    env = workers.environment()
    if launch.nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    crew = Crew(
        nproc=workers.nproc,
        command=command,
        env=env,
        max_restarts=launch.max_restarts,
        stop_grace_s=launch.stop_grace,
    )
    advice = [f"sirara resume {run.name_to_type}"]
    return supervise(run, crew, begin=lambda: job.begin(run, workers.threads), advice=advice)


def _work_for(launcher: Launcher, job: _Job) -> None:
    """This process as one rank of somebody else's launch; does not return."""
    from torch.distributed import TCPStore

    os.environ.update(launcher.environment())
    timeout = timedelta(minutes=10)
    store = TCPStore(
        launcher.host,
        launcher.port,
        is_master=launcher.serves,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timeout,
    )
    group_store = store
    if launcher.rank == 0 and not launcher.serves:
        # The store of torchrun's agent outlives a restart: the addresses of dead ranks would be found there.
        group_store = TCPStore(
            launcher.host, 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout
        )

    def lead(earlier: RunFolder | None) -> Agreement:
        run = earlier or job.folder(launcher.identity)
        kept = run.record().get("threads")
        attempt = replace(job, run=run).begin(run, kept or _threads_of_launcher(job))
        resume = run.resumes()
        return Agreement(path=run.path, attempt=attempt, resume=resume, port=group_store.port)

    try:
        agreed = agree(launcher, store, lead, run_dir=Path(job.loaded.config.run_dir))
        os.environ.update({"MASTER_PORT": str(agreed.port), "TORCHELASTIC_USE_AGENT_STORE": "False"})
        seat = Seat(
            run=RunFolder(agreed.path),
            attempt=agreed.attempt,
            rank=launcher.rank,
            world=launcher.world,
            agent=os.getppid(),
            hang_timeout_s=job.loaded.config.launch.hang_timeout,
            stop_grace_s=job.loaded.config.launch.stop_grace,
        )
        result = train_here(seat, resume=agreed.resume)
    except Exception as error:  # noqa: BLE001 - told here, because the process ends here
        # The rank that failed first tells everything; those that lost it say so in a line.
        whole = str(error) if isinstance(error, SiraraError) else traceback.format_exc()
        click.echo(whole.splitlines()[0] if isinstance(error, CommError) else whole, err=True)
        leave(exit_code_of(error))
    if launcher.rank == 0:
        _say_result(seat.run, result, job.as_json)
    # torchrun restarts every worker that does not end with 0.
    sys.exit(Exit.DONE if launcher.kind == "torchrun" else _exit_code(result))


def _threads_of_launcher(job: _Job) -> int:
    """torchrun and srun decide about cores; torch has seen what they say."""
    import torch

    asked = job.loaded.config.launch.threads
    return torch.get_num_threads() if asked == "auto" else asked


def _ask(run_name: str, what: str, *, as_json: bool, dry_run: bool) -> RunFolder:
    found = RunFolder.find(run_name)
    owner = found.owner()
    if owner is None or (owner.here and not owner.alive):
        raise ConfigError(
            f"{found.id} is not running",
            code="SR113",
            where=str(found.path),
            try_=[f"sirara status {found.id}", f"sirara resume {found.id}"],
        )
    if not dry_run:
        request(found, what)
    if as_json:
        say_json({"run": found.id, "requested": what, "dry_run": dry_run})
    else:
        click.echo(f"{found.id}: {what} requested{' (dry run: not sent)' if dry_run else ''}")
    return found


def _say_plan(job: _Job, launcher: Launcher | None) -> None:
    config = job.loaded.config
    where = str(job.run.path) if job.run else f"{config.run_dir}/{config.name}-????????"
    plan: dict[str, Any] = {"dry_run": True, "folder": where, "steps": config.train.steps}
    if job.run is not None:
        plan["resume_from"] = max(job.run.committed_steps(), default=0)
    if launcher is None:
        workers = job.workers()
        plan |= {"nproc": workers.nproc, "threads": workers.threads}
        world = workers.nproc
    else:
        plan |= {"launcher": launcher.kind, "rank": launcher.rank, "world": launcher.world}
        world = launcher.world
    m = config.mesh
    dp = world // (m.pp * m.cp * m.tp) if m.dp == "auto" else m.dp
    plan["layout"] = f"pp {m.pp} dp {dp} tp {m.tp} zero {m.zero} {m.schedule}"
    if m.chunks > 1:
        plan["layout"] += f" x {m.chunks}"
    if job.as_json:
        say_json(plan)
    else:
        for name, value in plan.items():
            click.echo(f"{name:<12} {value}")


def _say_result(run: RunFolder, result: Result, as_json: bool) -> None:
    if as_json:
        say_json({**result.as_record(), "exit_code": int(_exit_code(result))})
        return
    loss = "-" if result.loss is None else f"{result.loss:.4f}"
    click.echo(
        f"{result.reason} at step {result.step}: loss {loss} ({result.loss_hex}), {result.tokens} tokens"
    )
    click.echo(f"digest {result.digest}, grade {result.grade}, checkpoint {result.checkpoint or 'none'}")
    if result.reason == "stopped":
        click.echo(f"continue with: sirara resume {run.name_to_type}")


def _exit_code(result: Result) -> Exit:
    return Exit.STOPPED if result.reason == "stopped" else Exit.DONE


def _say_failure(run: RunFolder, error: BaseException, as_json: bool) -> None:
    """With --json a failure is one JSON object on stdout as well; the text of it goes to stderr."""
    if as_json:
        text = str(error) or type(error).__name__
        code = exit_code_of(error)
        say_json({"run": run.id, "path": str(run.path), "error": text.splitlines()[0], "exit_code": code})
