"""Under somebody else's launcher (torchrun, srun, Kubernetes) `sirara run` is the worker itself.

All ranks must agree on the run folder and the attempt before there is a process group.  Rank 0 decides (it
makes the folder, or finds the run again after a restart) and tells the others through the launcher's store, a
key-value server that lives exactly as long as the launch, so no answer of an earlier launch can be read.

    torchrun   the agent serves MASTER_ADDR:MASTER_PORT       Kubernetes, srun   rank 0 serves it
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from sirara.config.processes import ProcessId
from sirara.config.run_folder import RunFolder, list_runs
from sirara.errors import ConfigError, Exit, SiraraError

RUN_KEY = "sirara/run"
FIRST_PORT, PORTS = 20_000, 10_000  # below the range from which kernels hand out ports


class Store(Protocol):
    """What of torch's stores is needed; `get` waits for the key."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Who has started this process, and as which rank.

    identity: the same for all restarts of one launch, different for every launch; "" if that cannot be told.
    """

    kind: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    host: str
    port: int
    serves: bool
    restart: int
    identity: str

    def environment(self) -> dict[str, str]:
        """The variables by which torch knows a rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks of one start work on.

    port: where rank 0 serves the store of the process group on MASTER_ADDR.
    """

    path: Path
    attempt: int
    resume: bool
    port: int


class Refused(SiraraError):
    """Rank 0 could not begin; the others leave with its exit code."""

    def __init__(self, what: str, *, exit_code: int) -> None:
        super().__init__(what, code="SR704")
        self.exit_code = Exit(exit_code)


def detect(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, None if a person did.

    Raises:  ConfigError for an environment that contradicts itself.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torch_environment(env)
    # A batch script of Slurm has SLURM_PROCID, but no step of several tasks.
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _srun(env)
    return None


def agree(
    launcher: Launcher, store: Store, lead: Callable[[RunFolder | None], Agreement], *, run_dir: Path | None
) -> Agreement:
    """The same agreement on every rank; rank 0 makes it by `lead`.

    Args:    lead: gets the run that an earlier start of this launch has made, None at the first start.
             run_dir: where a run is looked for that the store does not know.
    Raises:  what `lead` raises on rank 0, Refused on the others.
    """
    key = f"sirara/agreement/{launcher.restart}"
    if launcher.rank == 0:
        try:
            made = lead(_earlier_run(launcher, store, run_dir) if launcher.restart else None)
        except BaseException as error:
            code = int(error.exit_code) if isinstance(error, SiraraError) else int(Exit.USER_CODE)
            store.set(key, json.dumps({"refused": f"{error}".partition("\n")[0], "exit_code": code}))
            raise
        store.set(RUN_KEY, str(made.path))
        store.set(key, json.dumps({**asdict(made), "path": str(made.path)}))
        return made
    heard = json.loads(store.get(key))
    if "refused" in heard:
        raise Refused(f"rank 0 could not begin: {heard['refused']}", exit_code=heard["exit_code"])
    return Agreement(**{**heard, "path": Path(heard["path"])})


def _earlier_run(launcher: Launcher, store: Store, run_dir: Path | None) -> RunFolder | None:
    if store.check([RUN_KEY]):
        return RunFolder(store.get(RUN_KEY).decode())
    if not launcher.identity or run_dir is None:
        return None
    mine = [run for run in list_runs(run_dir) if run.record().get("identity") == launcher.identity]
    return mine[-1] if mine else None


def _torch_environment(env: Mapping[str, str]) -> Launcher | None:
    rank, world = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    if world == 1 and "TORCHELASTIC_RUN_ID" not in env:
        return None  # left over in the environment; there is nobody to agree with
    if not 0 <= rank < world:
        raise ConfigError(
            f"RANK={rank} is not in a world of WORLD_SIZE={world}", code="SR120", where="environment"
        )
    if world > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise ConfigError(
            f"WORLD_SIZE={world}, but MASTER_ADDR or MASTER_PORT is missing",
            code="SR121",
            where="environment",
            try_=["start with torchrun or srun", "unset RANK WORLD_SIZE   (sirara starts its own workers)"],
        )
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    # A user may reuse the id of a torchrun launch; its agent, by pid and start time, is this launch.
    agent = ProcessId.of(os.getppid())
    identity = f"torchrun {elastic} {agent.host} {agent.pid} {agent.started}" if elastic else ""
    return Launcher(
        kind="torchrun" if elastic else "environment",
        rank=rank,
        world=world,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world=_number(env, "LOCAL_WORLD_SIZE", world),
        node=_number(env, "GROUP_RANK", 0),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", 0),
        serves=rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        restart=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        identity=identity,
    )


def _srun(env: Mapping[str, str]) -> Launcher:
    rank = _number(env, "SLURM_PROCID", 0)
    job, step = env.get("SLURM_JOB_ID", "0"), env["SLURM_STEP_ID"]
    port = FIRST_PORT + (_digits(job) * 31 + _digits(step)) % PORTS
    nodes = _number(env, "SLURM_STEP_NUM_NODES", 1)
    world = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    return Launcher(
        kind="srun",
        rank=rank,
        world=world,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_world=_local_tasks(env, world // nodes),
        node=_number(env, "SLURM_NODEID", 0),
        host=env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        port=_number(env, "MASTER_PORT", port),
        serves=rank == 0,
        restart=_number(env, "SLURM_RESTART_COUNT", 0),
        identity=f"slurm {job}.{step}",
    )


def _local_tasks(env: Mapping[str, str], default: int) -> int:
    """Tasks of this node from `4(x2),3`: two nodes with four tasks, then one with three."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(times or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else default


def _first_host(nodes: str) -> str:
    """`gpu[003-005,9],cpu1` -> gpu003"""
    first = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodes)
    if first is None:
        return "127.0.0.1"
    inside = re.split(r"[-,]", first[2])[0] if first[2] else ""
    return first[1] + inside


def _digits(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r} is no number", code="SR120") from error
