"""Accelerators and clusters as data: what the shipped table, a user's YAML or a calibration says of one device.

Everything here is in SI units: bytes, bytes per second, FLOPs per second.  `hardware.yaml` carries the named sources.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import yaml
from numpy.typing import NDArray

from sirara.errors import ConfigError

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
Floats = NDArray[np.float64]
_FIELDS = {
    "names", "like", "peak", "achievable", "achievable8", "grouped", "hbm", "hbm_per_s", "up", "up_bus", "domain",
    "out", "host", "disk", "node_memory", "units", "attention", "sources", "hbm_achievable", "overhead",
}  # fmt: skip


def _at_least(dtype: str) -> tuple[str, ...]:
    return DTYPES[DTYPES.index(dtype) :: -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device.  `peak_flops_per_s` by dtype; `achievable`: share of it that a large matmul reaches."""

    name: str
    names: tuple[str, ...]
    kin: str
    """The one whose fitted factors are right for it: itself, or the shipped one that a user's own leans on, as long
    as it does not say itself what a large matmul reaches."""
    on_cpu: bool
    """Whether it is a CPU, whose memory is the host's."""
    peak_flops_per_s: Mapping[str, float]
    achievable: float
    achievable8: float
    grouped: float
    """Rate of the grouped matmuls of experts over that of a single one."""
    attention_plain: float
    attention_tuned: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    hbm_achievable: float
    up_bytes_per_s: float
    up_bus_bytes_per_s: float
    domain: int
    out_bytes_per_s: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    """Of all disks of a node together."""
    node_bytes: float
    """Memory of the host of a node, which offloaded state may take."""
    units: int
    """Streaming multiprocessors, or what a tile of a matmul is given to."""
    overhead_bytes: float
    """What the driver's context and libraries take before the first tensor."""
    sources: str

    def computes(self, dtype: str) -> bool:
        return any(d in self.peak_flops_per_s for d in _at_least(dtype))

    def peak(self, dtype: str) -> float:
        """FLOPs per second for the dtype; a dtype without units of its own runs on the next wider one's."""
        for at in _at_least(dtype):
            if at in self.peak_flops_per_s:
                return self.peak_flops_per_s[at]
        raise ConfigError(
            f"{self.name} has no peak for {dtype}",
            code="SR210",
            why=f"it has {sorted(self.peak_flops_per_s)}",
        )

    def as_row(self) -> dict[str, dict[str, Any]]:
        """The accelerator as a table of one, in the units of hardware.yaml."""
        return {self.name: _row_of(self)}

    def share(self, dtype: str) -> float:
        return (
            self.achievable8
            if dtype in ("fp8", "fp4") and "fp8" in self.peak_flops_per_s
            else self.achievable
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` nodes of `per_node` devices; the scale-up domain is the accelerator's, at least a node."""

    accelerator: Accelerator
    per_node: int
    nodes: int

    @property
    def gpus(self) -> int:
        return self.per_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of several accelerators, [A] or [A, dtype], to be indexed by `Points.accelerator`."""

    names: tuple[str, ...]
    kin: tuple[str, ...]
    on_cpu: tuple[bool, ...]
    peak: Floats
    share: Floats
    grouped: Floats
    attention: Floats
    """[A, 2]: kernels as written for Ampere, tuned for the device."""
    hbm_bytes: Floats
    hbm_bytes_per_s: Floats
    up_bus_bytes_per_s: Floats
    domain: Floats
    out_bytes_per_s: Floats
    host_bytes_per_s: Floats
    disk_bytes_per_s: Floats
    node_bytes: Floats
    units: Floats
    overhead_bytes: Floats


def table(accelerators: Sequence[Accelerator]) -> Table:
    """The columns of `accelerators`, in their order."""

    def column(name: str) -> Floats:
        return np.array([getattr(a, name) for a in accelerators], dtype=np.float64)

    return Table(
        names=tuple(a.name for a in accelerators),
        kin=tuple(a.kin for a in accelerators),
        on_cpu=tuple(a.on_cpu for a in accelerators),
        peak=np.array([[a.peak(d) if a.computes(d) else np.nan for d in DTYPES] for a in accelerators]),
        share=np.array([[a.share(d) for d in DTYPES] for a in accelerators]),
        attention=np.array([[a.attention_plain, a.attention_tuned] for a in accelerators]),
        grouped=column("grouped"),
        hbm_bytes=column("hbm_bytes"),
        hbm_bytes_per_s=column("hbm_bytes_per_s") * column("hbm_achievable"),
        up_bus_bytes_per_s=column("up_bus_bytes_per_s"),
        domain=column("domain"),
        out_bytes_per_s=column("out_bytes_per_s"),
        host_bytes_per_s=column("host_bytes_per_s"),
        disk_bytes_per_s=column("disk_bytes_per_s"),
        node_bytes=column("node_bytes"),
        units=column("units"),
        overhead_bytes=column("overhead_bytes"),
    )


@cache
def shipped() -> dict[str, Accelerator]:
    """The accelerators of hardware.yaml by name, in its order."""
    text = files("sirara.plan").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return _parse(yaml.safe_load(text), {}, "hardware.yaml")


@cache
def shipped_table() -> Table:
    return table(tuple(shipped().values()))


def index_of(name: str) -> int:
    """The row of an accelerator in `shipped_table()`, by any of its names."""
    return list(shipped()).index(find(name).name)


def find(name: str) -> Accelerator:
    """A shipped accelerator by its name or an alias; what stands in parentheses is a remark.

    Raises: ConfigError SR210 with the known names.
    """
    wanted = " ".join(name.lower().split())
    plain = wanted.split("(")[0].strip()
    for candidate in (wanted, plain):
        for accelerator in shipped().values():
            if candidate == accelerator.name or candidate in accelerator.names:
                return accelerator
    # The longest alias that begins the name: "h100-sxm-80gb hbm3" is an h100-sxm-80gb.
    begun = [(len(n), a) for a in shipped().values() for n in (a.name, *a.names) if plain.startswith(n + " ")]
    if begun:
        return max(begun, key=lambda pair: pair[0])[1]
    raise ConfigError(
        f"no accelerator is called {name!r}",
        code="SR210",
        try_=[f"one of {', '.join(shipped())}", "a YAML file with your own: see hardware.yaml"],
    )


def load(name: str | Path) -> Accelerator:
    """A shipped accelerator by name, or the one of a user's YAML file (the same keys; `like:` names a shipped one).

    Raises: ConfigError SR210 for an unknown name, SR211 for a file that says something else.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return find(str(name))
    if not path.is_file():
        raise ConfigError(f"{path} is not a file", code="SR211", where="hardware")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no YAML", code="SR211", where="hardware", why=str(error).splitlines()[0]
        ) from error
    if isinstance(data, dict) and "sirara_profile" in data:
        # A measured profile (profile.py) has an accelerator in it.
        data = data.get("accelerator")
    return one_accelerator(data, str(path))


def one_accelerator(data: Any, where: str) -> Accelerator:
    """The only accelerator of a parsed table.

    Raises:  ConfigError SR211 for a table with none or several.
    """
    found = _parse(data, shipped(), where)
    if len(found) != 1:
        raise ConfigError(
            f"{where} describes {len(found)} accelerators, not one", code="SR211", why=", ".join(found)
        )
    return next(iter(found.values()))


def _parse(data: Any, known: Mapping[str, Accelerator], where: str) -> dict[str, Accelerator]:
    if not isinstance(data, dict):
        raise ConfigError("a table of accelerators was expected", code="SR211", where=where)
    rows: dict[str, dict[str, Any]] = {}
    found: dict[str, Accelerator] = {}
    for key, row in data.items():
        name = str(key)
        if not isinstance(row, dict):
            raise ConfigError(
                f"{name}: keys and values were expected, not {row!r}", code="SR211", where=where
            )
        strange = sorted(set(map(str, row)) - _FIELDS)
        if strange:
            raise ConfigError(
                f"{name}: unknown keys {', '.join(strange)}", code="SR211", where=where, try_=sorted(_FIELDS)
            )
        base, kin, on_cpu = row.get("like"), name, name == "cpu"
        if base is not None and not isinstance(base, str):
            raise ConfigError(f"{name}: like is {base!r}, not the name of one", code="SR211", where=where)
        if base is not None and base in rows:
            row = _like(rows[base], row)
        elif base is not None and (shipped_one := _known(base, known)) is not None:
            kin = name if "achievable" in row else shipped_one.kin
            on_cpu = shipped_one.on_cpu
            row = _like(_row_of(shipped_one), row)
        elif base is not None:
            raise ConfigError(
                f"{name} is like {base}, which is not known", code="SR211", where=where,
                try_=[f"one of {', '.join(known)}"] if known else [],
            )  # fmt: skip
        rows[name] = row
        found[name] = _accelerator(name, row, where, kin=kin, on_cpu=on_cpu)
    return found


def _like(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A row that leans on another; what a link carries of collectives follows from its own rate."""
    left_out = {"up_bus"} if "up" in own else set()
    return {**{k: v for k, v in base.items() if k not in left_out}, **own}


def _known(name: str, known: Mapping[str, Accelerator]) -> Accelerator | None:
    """By its name or an alias; None where there is none."""
    if not known:
        return None
    try:
        return find(name)
    except ConfigError:
        return None


def _row_of(a: Accelerator) -> dict[str, Any]:
    return {
        "names": list(a.names),
        "peak": {d: p / 1e12 for d, p in a.peak_flops_per_s.items()},
        "achievable": a.achievable,
        "achievable8": a.achievable8,
        "grouped": a.grouped,
        "attention": [a.attention_plain, a.attention_tuned],
        "hbm": a.hbm_bytes / 1e9,
        "hbm_per_s": a.hbm_bytes_per_s / 1e9,
        "hbm_achievable": a.hbm_achievable,
        "up": a.up_bytes_per_s / 1e9,
        "up_bus": a.up_bus_bytes_per_s / 1e9,
        "domain": a.domain,
        "out": a.out_bytes_per_s / 1e9,
        "host": a.host_bytes_per_s / 1e9,
        "disk": a.disk_bytes_per_s / 1e9,
        "node_memory": a.node_bytes / 1e9,
        "units": a.units,
        "overhead": a.overhead_bytes / 1e9,
        "sources": a.sources,
    }


DISK = 28.0
"""GB/s of a node's disks, where a row says nothing: the NVMe disks of a DGX-2, ZeRO-Infinity (arXiv:2104.07857)."""
NODE_MEMORY = 2000.0
"""GB of a node's host, where a row says nothing: a DGX H100 has two TB."""
_SHARES = {"achievable", "achievable8", "grouped", "attention", "hbm_achievable"}
MOST_SHARE = 2.0
"""Shares that were measured pass 1 a little, percentages by far."""
_COUNTS = {"domain", "units"}
_MAY_BE_NONE = {"overhead"}


def _check(name: str, row: Mapping[str, Any], where: str) -> None:
    """Raises:  ConfigError SR211 for a value that is no quantity of its kind."""

    def say(key: str, value: Any, wanted: str) -> NoReturn:
        raise ConfigError(f"{name}: {key} is {value!r}, not {wanted}", code="SR211", where=where)

    peak = row["peak"]
    if not isinstance(peak, dict) or not peak or set(peak) - set(DTYPES):
        say("peak", peak, f"TFLOP/s by dtype, of {', '.join(DTYPES)}")
    if "names" in row and not (
        isinstance(row["names"], list) and all(isinstance(n, str) for n in row["names"])
    ):
        say("names", row["names"], "a list of names")
    if "attention" in row and not (isinstance(row["attention"], list) and len(row["attention"]) == 2):
        say("attention", row["attention"], "two shares")
    numbers = {key: [row[key]] for key in row.keys() - {"names", "like", "sources", "peak", "attention"}}
    for key, values in {**numbers, "peak": peak.values(), "attention": row.get("attention", ())}.items():
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                say(key, value, "a number")
            if value < 0 or (value == 0 and key not in _MAY_BE_NONE):
                say(key, value, "more than 0")
            if key in _SHARES and value > MOST_SHARE:
                say(key, value, "a share, such as 0.8")
            if key in _COUNTS and value != int(value):
                say(key, value, "a whole number")


def _accelerator(name: str, row: Mapping[str, Any], where: str, *, kin: str, on_cpu: bool) -> Accelerator:
    needed = {"peak", "achievable", "hbm", "hbm_per_s", "up", "domain", "out", "host", "units"}
    missing = sorted(needed - set(row))
    if missing:
        raise ConfigError(f"{name} does not say {', '.join(missing)}", code="SR211", where=where)
    _check(name, row, where)
    plain, tuned = row.get("attention", [0.35, 0.35])
    return Accelerator(
        name=name,
        names=tuple(row.get("names", ())),
        kin=kin,
        on_cpu=on_cpu,
        peak_flops_per_s={d: float(p) * 1e12 for d, p in row["peak"].items()},
        achievable=float(row["achievable"]),
        achievable8=float(row.get("achievable8", row["achievable"])),
        grouped=float(row.get("grouped", 0.75)),
        attention_plain=float(plain),
        attention_tuned=float(tuned),
        hbm_bytes=float(row["hbm"]) * 1e9,
        hbm_bytes_per_s=float(row["hbm_per_s"]) * 1e9,
        hbm_achievable=float(row.get("hbm_achievable", 0.85)),
        up_bytes_per_s=float(row["up"]) * 1e9,
        up_bus_bytes_per_s=float(row.get("up_bus", 0.8 * row["up"])) * 1e9,
        domain=int(row["domain"]),
        out_bytes_per_s=float(row["out"]) * 1e9,
        host_bytes_per_s=float(row["host"]) * 1e9,
        disk_bytes_per_s=float(row.get("disk", DISK)) * 1e9,
        node_bytes=float(row.get("node_memory", NODE_MEMORY)) * 1e9,
        units=int(row["units"]),
        overhead_bytes=float(row.get("overhead", 1.0)) * 1e9,
        sources=str(row.get("sources", "")),
    )
