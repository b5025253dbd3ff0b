"""A measured profile of one machine: what `sirara plan calibrate` found, and what the planner believes first.

    machine       whose numbers these are: host, device, cores, libraries, date
    accelerator   the same as a row of hardware.yaml, so that `--gpu PROFILE` takes the file
    units         seconds of one embedding, block and head, forward and backward, of a model's own shapes
    moves         exchanges, small gathers and letters between ranks: seconds by bytes, interpolated in log space
    rates         bytes per second of sums, copies and updates;   disk, host link
    crowd         how many times slower a process computes beside others on the same cores

A number of a profile wins over the shipped table; what it does not have is still a formula.  `here` says what the
present machine is known by; `setting.setting_here` makes of it what the planner takes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any, Literal

import yaml

from sirara.errors import ConfigError
from sirara.plan.hardware import Accelerator, find, one_accelerator
from sirara.pure.shape import ModelShape

FORMAT, _KEY = 2, "sirara_profile"
GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
UNKNOWN_GPU = "h100-sxm"
PROFILE = "SIRARA_PROFILE"
"""Environment variable with the file to use; "none" for no profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Whose numbers these are.  device: "cpu" or "cuda".  devices: accelerators, or cores, of a node."""

    device: str
    model: str
    cpu: str
    cores: int
    devices: int
    memory_bytes: int
    torch: str
    date: str

    def differs(self, other: "Machine") -> str:
        """What makes numbers of one worthless on the other, "" if nothing does."""
        for name in ("device", "model", "cpu", "cores"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return f"{name} {mine}, not {its}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Seconds of one unit of a model and one microbatch, while `processes` processes compute at once.

    unit: embed, block or head.  recompute: none or selective.  light_s: forward that keeps nothing.
    backward_s: gradients written to fresh sums; input_s, weight_s: the same in two halves.
    """

    signature: str
    unit: str
    micro_batch: int
    seq_len: int
    tp: int
    sequence: bool
    dtype: str
    threads: int
    processes: int
    recompute: str
    forward_s: float
    light_s: float
    backward_s: float
    input_s: float
    weight_s: float
    dropped: str = ""
    """What of it is dropped at random: "", "hidden", "scores" or both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Seconds of one exchange.  kind: exchange (each rank receives `bytes` in all from its peers), rows, letter.

    across: ranks on different nodes.
    """

    kind: str
    ranks: int
    across: bool
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Elements per second of one process, while `processes` do the same; FLOPs of products and attention.

    kind: what, and the dtype that it is done in: "add fp32", "update adamw fp32", "product bf16".
    """

    kind: str
    processes: int
    per_s: float


def wide_of(precision: str) -> str:
    """The dtype of sums, norms and updates, whatever weights are in."""
    return "fp64" if precision == "fp64" else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that was measured on one machine.  crowd: processes -> factor of time over a process alone."""

    machine: Machine
    accelerator: Accelerator
    units: tuple[UnitTime, ...] = ()
    moves: tuple[Move, ...] = ()
    rates: tuple[Rate, ...] = ()
    crowd: Mapping[int, float]
    disk_write_per_s: float | None = None
    disk_read_per_s: float | None = None
    doubts: str = ""
    """Why what was measured may not be what a run gets, "" if nothing speaks for that."""

    def unit(self, **wanted: Any) -> UnitTime | None:
        """The measurement whose fields are `wanted`; of several the last."""
        found = [u for u in self.units if all(getattr(u, k) == v for k, v in wanted.items())]
        return found[-1] if found else None

    def move_s(self, kind: str, *, ranks: int, nbytes: float, across: bool = False) -> float | None:
        """Seconds of a move of so many bytes, interpolated; None where none of its kind was measured."""
        kinds = [m for m in self.moves if m.kind == kind and m.across == across]
        if not kinds or ranks < 2:
            return 0.0 if ranks < 2 else None
        near = min({m.ranks for m in kinds}, key=lambda r: (abs(log(r / ranks)), r))
        return interpolated([(m.bytes, m.seconds) for m in kinds if m.ranks == near], nbytes)

    def rate(self, kind: str, *, processes: int) -> float | None:
        """Per second and process; between measured numbers of processes in proportion to their logarithm."""
        found = {r.processes: r.per_s for r in self.rates if r.kind == kind}
        if not found:
            return None
        return crowded(found, processes)

    def crowd_s(self, processes: float) -> float:
        """Factor of time where so many processes compute at once; beyond the measured ones as many times slower."""
        if not self.crowd:
            return max(1.0, processes / self.machine.cores)
        most = max(self.crowd)
        if processes > most:
            return self.crowd[most] * processes / most
        return crowded(self.crowd, processes)


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """y at `at`, straight between (x, y) on logarithmic axes; outside: the first y, or in proportion to x."""
    rows = sorted((max(x, 1.0), y) for x, y in points)
    at = max(at, 1.0)
    if at <= rows[0][0]:
        return rows[0][1]
    if at >= rows[-1][0]:
        return rows[-1][1] * at / rows[-1][0]
    for (x0, y0), (x1, y1) in pairwise(rows):
        if at <= x1:
            share = log(at / x0) / log(x1 / x0)
            return exp((1 - share) * log(y0) + share * log(y1))
    return rows[-1][1]


def crowded(by_processes: Mapping[int, float], processes: float) -> float:
    """A value by number of processes, straight in their logarithm, constant outside what was measured."""
    known = sorted(by_processes)
    if processes <= known[0]:
        return by_processes[known[0]]
    for low, high in pairwise(known):
        if processes <= high:
            share = log(processes / low) / log(high / low)
            return by_processes[low] * (1 - share) + by_processes[high] * share
    return by_processes[known[-1]]


def signature_of(shape: ModelShape) -> str:
    """What two models have in common whose blocks, embedding and head take the same time."""
    t = shape.traits
    return (
        f"{shape.family} h{shape.hidden} f{shape.ffn} a{shape.heads}/{shape.kv_heads}x{shape.head_dim} v{shape.vocab} "
        f"{t.norm} {t.mlp} {t.positions} {'tied' if shape.tie_embeddings else 'untied'} w{shape.sliding_window or 0}"
    )


# ---- files


def default_path(env: Mapping[str, str] | None = None) -> Path:
    """$SIRARA_PROFILE, else $XDG_CONFIG_HOME/sirara/profile.yaml, else ~/.config/sirara/profile.yaml."""
    env = os.environ if env is None else env
    if env.get(PROFILE):
        return Path(env[PROFILE])
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sirara" / "profile.yaml"


def text_of(profile: Profile) -> str:
    """The file's text; `read` understands it."""
    from_row = {k: v for k, v in asdict(profile).items() if k not in ("accelerator", "machine", "crowd")}
    data = {
        _KEY: FORMAT,
        "machine": asdict(profile.machine),
        "accelerator": profile.accelerator.as_row(),
        "crowd": dict(profile.crowd),
        **{k: [dict(row) for row in v] if isinstance(v, tuple) else v for k, v in from_row.items()},
    }
    return yaml.safe_dump(data, sort_keys=False, width=200, default_flow_style=None)


def is_profile(path: Path) -> bool:
    """Whether a file says that it is a profile, not a table of accelerators."""
    try:
        return any(line.startswith(f"{_KEY}:") for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return False


def read(path: Path) -> Profile:
    """A profile from its file.

    Raises:  ConfigError SR218 for a file that is not there, is damaged or has another format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, str(error).splitlines()[0]) from error
    return understood(text, path)


def understood(text: str, path: Path) -> Profile:
    """A profile from the text that is, or will be, in a file.

    Raises:  as `read`.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _bad(path, str(error).splitlines()[0]) from error
    if not isinstance(data, dict) or _KEY not in data:
        raise _bad(path, f"it has no key {_KEY}")
    if data[_KEY] != FORMAT:
        raise _bad(path, f"its format is {data[_KEY]!r}, this version reads {FORMAT}")
    try:
        return _parsed(data, str(path))
    except ConfigError as error:
        raise _bad(path, error.what) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _bad(path, f"{type(error).__name__}: {error}") from error


def _parsed(data: Mapping[str, Any], where: str) -> Profile:
    crowd = {int(n): float(f) for n, f in data["crowd"].items()}
    units = tuple(UnitTime(**row) for row in data["units"])
    moves = tuple(Move(**row) for row in data["moves"])
    rates = tuple(Rate(**row) for row in data["rates"])
    seconds = [s for u in units for s in (u.forward_s, u.light_s, u.backward_s, u.input_s, u.weight_s)]
    numbers = [*seconds, *crowd.values(), *(m.seconds for m in moves), *(r.per_s for r in rates)]
    if not all(isinstance(n, int | float) and 0 < n < 1e18 for n in numbers):
        raise ValueError("a time or a rate is no positive number")
    return Profile(
        machine=Machine(**data["machine"]),
        accelerator=one_accelerator(data["accelerator"], where),
        units=units,
        moves=moves,
        rates=rates,
        crowd=crowd,
        disk_write_per_s=data["disk_write_per_s"],
        disk_read_per_s=data["disk_read_per_s"],
        doubts=str(data.get("doubts", "")),
    )


def _bad(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no profile that can be used",
        code="SR218",
        where=str(path),
        why=why,
        try_=["sirara plan calibrate", f"{PROFILE}=none, for the shipped tables"],
    )


# ---- the present machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What the present machine is known by.

    how: "profile" or "shipped".  why: in words, for people; a warning where a profile was there and refused.
    refused: the profile was damaged, of another machine, or not where it was said to be.
    stand_in: the table does not know this device, and the figures describe another one.
    """

    accelerator: Accelerator
    profile: Profile | None
    how: Literal["profile", "shipped"]
    why: str
    refused: bool = False
    stand_in: bool = False


def here(
    device_type: Literal["cpu", "cuda"], *, workers: int = 1, env: Mapping[str, str] | None = None
) -> Here:
    """The accelerator of this machine: by its profile, if there is one, else by the shipped table.

    Args:    workers: of this node, which share its memory on the CPU.
    Raises:  nothing: a profile that cannot be used is told in `why`.
    """
    env = os.environ if env is None else env
    path, mine = default_path(env), this_machine(device_type)
    warning, said = "", env.get(PROFILE)
    if said and said != "none" and not path.is_file():
        warning = f"; {PROFILE} says {path}, which is missing (`sirara plan calibrate` makes it)"
    if env.get(PROFILE) != "none" and path.is_file():
        try:
            found = read(path)
            differs = found.machine.differs(mine)
        except ConfigError as error:
            differs, found = error.why or error.what, None
        if found is not None and not differs:
            old = "" if found.machine.torch == mine.torch else f", with torch {found.machine.torch}"
            return Here(
                accelerator=_shared(found.accelerator, mine, workers),
                profile=found,
                how="profile",
                why=f"measured here on {found.machine.date[:10]}{old} ({path}){_doubtful(found)}",
            )
        other = "damaged" if found is None else "of another machine"
        warning = f"; {path} is {other}, and not used: {differs} (`sirara plan calibrate` makes a new one)"
    accelerator, known, stand_in = _shipped(mine)
    return Here(
        accelerator=_shared(accelerator, mine, workers),
        profile=None,
        how="shipped",
        why=known + warning,
        refused=bool(warning),
        stand_in=stand_in,
    )


def of_profile(profile: Profile, *, workers: int = 1) -> Here:
    """A machine that is known by its profile alone; `workers` as in `here`."""
    return Here(
        accelerator=_shared(profile.accelerator, profile.machine, workers),
        profile=profile,
        how="profile",
        why=f"measured on {profile.machine.date[:10]}{_doubtful(profile)}",
    )


def _doubtful(profile: Profile) -> str:
    return f"; in doubt: {profile.doubts}" if profile.doubts else ""


def _shared(accelerator: Accelerator, machine: Machine, workers: int) -> Accelerator:
    """A CPU's memory is shared by the node's workers."""
    if machine.device != "cpu":
        return accelerator
    return replace(accelerator, hbm_bytes=machine.memory_bytes / max(1, workers))


def _shipped(machine: Machine) -> tuple[Accelerator, str, bool]:
    if machine.device == "cpu":
        return find("cpu"), "rates of the shipped table; memory of this machine", True
    name = machine.model
    for known in (name, name.removeprefix("nvidia "), *reversed(name.split())):
        try:
            return find(known), f"the driver says {name}", False
        except ConfigError:
            continue
    return find(UNKNOWN_GPU), f"{name or 'the device'} is not in the table: taken for {UNKNOWN_GPU}", True


def this_machine(device_type: Literal["cpu", "cuda"]) -> Machine:
    """What this machine says of itself, without torch; `date` is empty."""
    cores = len(os.sched_getaffinity(0))
    gpus = _gpu_models() if device_type == "cuda" else []
    return Machine(
        device=device_type,
        model=gpus[0] if gpus else device_type,
        cpu=_cpu_model(),
        cores=cores,
        devices=max(1, len(gpus)) if device_type == "cuda" else cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        torch=_torch_version(),
        date="",
    )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    """Model name, family and model number: hypervisors give many processors one name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    first: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        first[key.strip()] = value.strip()
    parts = [first.get("model name", "unknown")]
    parts += [f"{key} {first[key]}" for key in ("cpu family", "model") if key in first]
    return ", ".join(parts)


def _gpu_models() -> list[str]:
    found: list[str] = []
    for file in sorted(GPU_FOLDERS.glob("*/information")):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                found.append(value.strip().lower())
    return found
