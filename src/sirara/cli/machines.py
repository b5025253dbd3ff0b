"""The machines that `sirara plan` plans for: what its options say of them, checked."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from sirara.config.load import Loaded
from sirara.config.units import parse_size_bytes
from sirara.errors import ConfigError
from sirara.launch.local import count_gpus
from sirara.plan.constants import fitted
from sirara.plan.from_config import cluster_of, degree_of_dp
from sirara.plan.goodput import Reliability
from sirara.plan.hardware import DTYPES, Table, shipped, table
from sirara.plan.hardware import load as load_accelerator
from sirara.plan.profile import Here, here, is_profile, of_profile, read
from sirara.plan.setting import Setting

DEFAULT_GPU, HERE = "h100-sxm", "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line says of machines and money; None: nothing."""

    gpus: int | None
    gpu: str | None
    nodes: int | None
    price: float | None
    mtbf: float | None
    ceiling: str | None


def setting_of(loaded: Loaded, wanted: Wanted) -> tuple[Setting, list[str]]:
    """What is planned for, and in words what was assumed of it.

    Raises:  ConfigError SR216 for options that contradict each other or are no quantities.
    """
    gpu, gpus, nodes = wanted.gpu, wanted.gpus, wanted.nodes
    names = [part.partition(":") for part in (gpu or DEFAULT_GPU).split("+")]
    profile, note = _profile(gpu, loaded) if gpu else _unasked(loaded)
    assumed = [note] if note else []
    kinds = [profile.accelerator if profile else load_accelerator(name) for name, _, _ in names]
    counts = tuple(int(n) for _, _, n in names if n.isdecimal() and int(n))
    if len(counts) != len(kinds) and (len(kinds) > 1 or names[0][1]):
        raise ConfigError(
            f"--gpu {gpu} does not say how many of each", code="SR216", where="--gpu",
            try_=["+".join(f"{k.name}:64" for k in kinds)],
        )  # fmt: skip
    if counts:
        # Nodes of one kind are not unlike.
        parts = list(zip(kinds, counts, strict=True))
        kinds = [k for at, k in enumerate(kinds) if k not in kinds[:at]]
        counts = tuple(sum(n for other, n in parts if other == k) for k in kinds)
        if gpus not in (None, sum(counts)):
            raise ConfigError(
                f"--gpu {gpu} is {sum(counts)} devices, not {gpus}", code="SR216", where="--gpu, --gpus",
                try_=["leave --gpus out"],
            )  # fmt: skip
        gpus = sum(counts)
    accelerator, m, config = kinds[0], loaded.config.mesh, loaded.config
    if gpus is None and nodes is not None and not accelerator.on_cpu:
        gpus = cluster_of(accelerator, nodes=nodes).gpus
    if gpus is None:
        gpus = degree_of_dp(config, None) * m.pp * m.cp * m.tp
        if m.dp == "auto" and config.launch.nproc == "auto":
            assumed.append(f"{gpus} devices (--gpus)")
    price, mtbf = _positive("--price", wanted.price, or_none=True), _positive("--mtbf", wanted.mtbf)
    if accelerator.on_cpu and nodes is None:
        # Processes share a machine's cores, however many there are; another machine is asked for.
        nodes = config.launch.nodes if gpus % config.launch.nodes == 0 else 1
    setting = Setting(
        cluster=cluster_of(accelerator, gpus=gpus, nodes=nodes),
        table=table(kinds),
        counts=counts if len(kinds) > 1 else (),
        constants=fitted(),
        price_per_hour=price,
        reliability=Reliability() if mtbf is None else Reliability(gpu_hours_per_failure=mtbf),
        ceiling_bytes=_ceiling(wanted.ceiling),
        profile=None if profile is None else profile.profile,
    )
    return setting, assumed


def stand_ins(kinds: Table, precision: str) -> list[str]:
    """In words, which accelerators have no units for a precision, and are predicted at another's rate.

    Raises:  ConfigError for one without any rate that would do.
    """
    at, said = DTYPES.index(precision), []
    for name, peak in zip(kinds.names, kinds.peak, strict=True):
        if math.isnan(peak[at]):
            able = [d for d, p in zip(DTYPES, peak, strict=True) if not math.isnan(p)]
            raise ConfigError(
                f"{name} cannot compute in {precision}", code="SR210", where="train.precision",
                try_=[f"one of {', '.join(able)}"],
            )  # fmt: skip
        own = next((a for a in shipped().values() if a.name == name), None)
        if own is not None and precision not in own.peak_flops_per_s:
            instead = next((d for d, p in own.peak_flops_per_s.items() if p == peak[at]), "another dtype")
            said.append(f"{name} has no units for {precision}: the rate of {instead}")
    return said


def _positive(option: str, value: float | None, *, or_none: bool = False) -> float | None:
    """The value of an option that is a quantity; or_none: 0 is one too."""
    if value is None or (math.isfinite(value) and (value > 0 or (or_none and value == 0))):
        return value
    raise ConfigError(f"{option} {value:g} is not a quantity", code="SR216", where=option)


def _ceiling(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        size = parse_size_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--ceiling {text} {error}", code="SR216", where="--ceiling") from error
    return _positive("--ceiling", float(size))


def _profile(gpu: str | None, loaded: Loaded) -> tuple[Here | None, str]:
    """(what is measured of the accelerator that was asked for, in words) for `here` and the file of a profile."""
    if gpu == HERE:
        found = here("cuda" if count_gpus(os.environ) else "cpu", workers=_workers_of_a_node(loaded))
        return found, f"this machine: {found.why}"
    path = Path(gpu or "")
    if path.suffix in (".yaml", ".yml") and path.is_file() and is_profile(path):
        known = of_profile(read(path), workers=_workers_of_a_node(loaded))
        return known, f"the machine of {path}: {known.why}"
    return None, ""


def _workers_of_a_node(loaded: Loaded) -> int:
    launch, mesh = loaded.config.launch, loaded.config.mesh
    workers = launch.nproc if isinstance(launch.nproc, int) else mesh.pp * mesh.cp * mesh.tp
    workers = max(workers, mesh.pp * mesh.cp * mesh.tp * (mesh.dp if isinstance(mesh.dp, int) else 1))
    return workers // launch.nodes


def _unasked(loaded: Loaded) -> tuple[Here | None, str]:
    """The same without --gpu: the CPU at hand where the configuration is for one and it was measured."""
    if not _of_one_cpu(loaded):
        return None, f"{DEFAULT_GPU} (--gpu)"
    found, nproc = here("cpu", workers=_workers_of_a_node(loaded)), loaded.config.launch.nproc
    if found.profile is not None:
        return found, f"this machine (--gpu), as launch.nproc={nproc} is of one: {found.why}"
    warning = f"; {found.why}" if found.refused else ""
    return None, (
        f"{DEFAULT_GPU} (--gpu), though launch.nproc={nproc} is of one machine; for the present one "
        f"`sirara plan calibrate CONFIG`, or --gpu cpu{warning}"
    )


def _of_one_cpu(loaded: Loaded) -> bool:
    """Whether a configuration starts its processes on one machine and computes as on a CPU, where there is no GPU."""
    launch, precision = loaded.config.launch, loaded.config.train.precision
    local = isinstance(launch.nproc, int) and launch.nodes == 1 and precision in ("fp32", "fp64")
    return local and not count_gpus(os.environ)
