"""How many workers this node gets, and how many threads each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sirara.config.schema import LaunchConfig, MeshConfig
from sirara.errors import LayoutError

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The local workers of one attempt.

    crowded: there are more threads than cores.    note: what a person may want to change, "" if nothing.
    """

    nproc: int
    threads: int
    crowded: bool = False
    note: str = ""

    def environment(self) -> dict[str, str]:
        """What the OpenMP library of a worker is told before torch is imported."""
        told = {"OMP_NUM_THREADS": str(self.threads)}
        # Threads that wait by spinning keep the others from the core that they wait for.
        return {**told, "OMP_WAIT_POLICY": "PASSIVE"} if self.crowded else told


def plan_workers(
    launch: LaunchConfig,
    mesh: MeshConfig,
    *,
    kept_threads: int | None,
    env: Mapping[str, str],
    cores: int,
    gpus: int,
) -> Workers:
    """Numbers for `auto`.

    nproc:   what the mesh asks for; with mesh.dp=auto one worker per GPU, or as few as the other axes need on
    a CPU. threads: what the run began with (equal bits need it), else OMP_NUM_THREADS, else cores / nproc.
    Raises:  LayoutError when launch.nproc contradicts the mesh.
    """
    others = mesh.pp * mesh.cp * mesh.tp
    asked = others * mesh.dp if isinstance(mesh.dp, int) else None
    if launch.nproc == "auto":
        nproc = asked or max(1, gpus // others) * others
    else:
        nproc = launch.nproc
        if (asked is not None and asked != nproc * launch.nodes) or nproc * launch.nodes % others:
            wanted = asked or others * max(1, nproc * launch.nodes // others)
            raise LayoutError(
                f"launch.nproc={nproc} does not fit the mesh",
                where="launch.nproc, mesh",
                why=f"pp={mesh.pp} dp={mesh.dp} cp={mesh.cp} tp={mesh.tp} is "
                + (f"{asked} processes" if asked else f"a multiple of {others} processes"),
                try_=["launch.nproc=auto", f"launch.nproc={wanted}", "mesh.dp=auto"],
            )
    fair = max(1, cores // nproc)
    threads = _threads(launch, kept_threads, env, fair)
    note = ""
    if launch.threads == "auto" and kept_threads is not None and threads != fair:
        much = "more than there are" if threads > fair else "not all"
        note = (
            f"{nproc} x {threads} threads on {cores} cores are {much}, kept as the run began with {threads}; "
            f"launch.threads={fair} is faster, and changes bits"
        )
    return Workers(nproc=nproc, threads=threads, crowded=nproc * threads > cores, note=note)


def count_cores() -> int:
    """Cores that this process may use: its affinity, capped by a container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def count_gpus(env: Mapping[str, str]) -> int:
    """NVIDIA GPUs of this node, without torch; CUDA_VISIBLE_DEVICES and SIRARA_DEVICE=cpu are obeyed."""
    if env.get("SIRARA_DEVICE") == "cpu":
        return 0
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(
            [name for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
        )
    try:
        return len(os.listdir(NVIDIA_GPUS))
    except OSError:
        return 0


def _threads(launch: LaunchConfig, kept: int | None, env: Mapping[str, str], fair: int) -> int:
    if launch.threads != "auto":
        return launch.threads
    if kept is not None:
        return kept
    given = env.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else fair
