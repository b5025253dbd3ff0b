"""One layout judged: memory by stage and phase, time by term, checkpoints, money, and whether it fits."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sirara.config.check import runs_now
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError
from sirara.plan.cost import Times
from sirara.plan.from_config import as_points, layout_columns, model_columns
from sirara.plan.goodput import Goodput, goodput
from sirara.plan.held import Held, held
from sirara.plan.measured import measured_times
from sirara.plan.memory import Memory, memory
from sirara.plan.offload import slowest
from sirara.plan.points import Points
from sirara.plan.residuals import Bars, Residual, bars
from sirara.plan.saved import Saves, saves
from sirara.plan.setting import Setting
from sirara.plan.utilisation import utilisation
from sirara.pure.families import ModelShape, parameter_count

GIB = float(1 << 30)
MIB = float(1 << 20)
FORMULA = "formulas, with rates of the shipped table"
RATES = "formulas, with rates measured on this machine"
UNITS = (
    "times of the model's own units, measured on this machine, and the executor's phases (plan/measured.py)"
)
FOREVER_S = 1000 * 365.25 * 86_400


def tokens_of(config: RunConfig) -> int:
    """Tokens of one step."""
    return config.train.global_batch * config.data.seq_len


def in_words(size: float) -> str:
    """Bytes in the unit that a person would say."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= 0.1 * GIB else f"{size / MIB:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is said about one layout.  Money is None without a price."""

    config: RunConfig
    shape: ModelShape
    setting: Setting
    point: Points
    memory: Memory
    times: Times
    held: Held
    step_s: float
    tokens_per_s: float
    mfu: float
    mfu_whole: float
    hfu: float
    saves: Saves
    goodput: Goodput
    not_run: str
    """What of it this version does not run, "" if all."""
    bars: Bars
    margin: float = 0.0
    """Share that predicted memory of such layouts is off on average; 0 with a ceiling."""
    how: str = ""
    """How the step's time is known: FORMULA, RATES or UNITS."""

    @property
    def gpus(self) -> int:
        return int(self.point.gpus[0])

    @property
    def block(self) -> int:
        """Microbatches to a block of exact sums."""
        return 1 << self.held.deal.k

    @property
    def allocated_bytes(self) -> float:
        return self.held.busiest.step

    @property
    def reserved_bytes(self) -> float:
        return self.allocated_bytes * float(self.memory.reserved[0] / max(1.0, self.memory.allocated[0]))

    @property
    def device_bytes(self) -> float:
        return self.reserved_bytes + float(self.memory.device[0] - self.memory.reserved[0])

    @property
    def offloaded_bytes(self) -> float:
        """What is offloaded to a node's memory."""
        return float(self.memory.host[0]) * min(self.gpus, self.setting.cluster.per_node)

    @property
    def on_disk_bytes(self) -> float:
        """What is offloaded to a node's disks."""
        return float(self.memory.disk[0]) * min(self.gpus, self.setting.cluster.per_node)

    @property
    def over_budget(self) -> bool:
        """Whether a node's memory has to hold more of it than `offload.host_budget` allows."""
        return over_budget(self.config, self.setting, float(self.memory.host[0]))

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.setting.capacity_bytes and not self.over_budget

    @property
    def room_bytes(self) -> float:
        """Up to which it fits even where memory was predicted too low by the mean error."""
        return self.setting.capacity_bytes / (1 + self.margin)

    @property
    def limit_bytes(self) -> float:
        """Up to which a search chooses it."""
        return self.room_bytes if self.setting.keep_free else self.setting.capacity_bytes

    @property
    def chosen(self) -> bool:
        """Whether a search may choose it."""
        return self.device_bytes <= self.limit_bytes and not self.over_budget

    @property
    def within_error(self) -> bool:
        """Whether it fits by less than its error bar."""
        return self.room_bytes < self.device_bytes <= self.setting.capacity_bytes

    @property
    def margin_why(self) -> str:
        """Where the margin is from."""
        bar = self.bars.memory
        if self.setting.ceiling_bytes is not None:
            return "a ceiling is taken as it is"
        if bar is None:
            return (
                f"{self.margin:.1%} for the error of predicted memory, assumed: no published run is like it"
            )
        return f"memory of {bar.n} published runs ({self.bars.alike}) was {bar.mean:.1%} off on average"

    @property
    def run_s(self) -> float:
        """Wall time of the whole run, failures included."""
        return self.step_s * self.config.train.steps / max(self.goodput.ratio, 1e-9)

    @property
    def ends(self) -> bool:
        """False where failures let it get nowhere, or not within a thousand years."""
        return self.goodput.ratio > 0 and self.run_s <= FOREVER_S

    @property
    def gpu_hours(self) -> float:
        return self.run_s / 3600 * self.gpus

    @property
    def money(self) -> float | None:
        price = self.setting.price_per_hour
        return None if price is None else self.gpu_hours * price

    def as_record(self) -> dict[str, Any]:
        """Plain data, for --json and plan.json."""
        exposed = {k: float(v[0]) for k, v in self.times.exposed().items()}
        hidden = {
            name: float(getattr(self.times, f"hidden_{name}")[0]) for name in ("tp", "cp", "ep", "pp", "dp")
        }
        m, t = self.config.mesh, self.config.train
        return {
            "model": {"parameters": parameter_count(self.shape), "family": self.shape.family},
            "gpu": self.setting.table.names[0],
            "gpus": self.gpus,
            "machines": self.setting.machines,
            "layout": {
                "pp": m.pp, "dp": int(self.point.dp[0]), "cp": m.cp, "tp": m.tp, "ep": m.ep, "zero": m.zero,
                "schedule": m.schedule, "virtual_stages": m.chunks, "block": self.block,
                "sequence_parallel": m.sequence_parallel, "micro_batch": t.micro_batch,
                "global_batch": t.global_batch, "recompute": t.recompute, "precision": t.precision,
                "numerics": self.config.numerics,
            },
            "fits": self.fits,
            "runs_now": not self.not_run,
            "not_run": self.not_run,
            "memory": {
                "allocated_bytes": self.allocated_bytes,
                "reserved_bytes": self.reserved_bytes,
                "device_bytes": self.device_bytes,
                "capacity_bytes": self.setting.capacity_bytes,
                "error": error_of(self.bars.memory),
                "host_bytes_per_node": self.offloaded_bytes, "disk_bytes_per_node": self.on_disk_bytes,
                "free_bytes": self.setting.capacity_bytes - self.device_bytes,
                "margin": {
                    "share": self.margin, "bytes": self.setting.capacity_bytes - self.room_bytes,
                    "why": self.margin_why, "within_error": self.within_error,
                },
                "stages": [
                    {**{k: v for k, v in asdict(s).items() if k != "units"}, "step": s.step, "phases": s.phases()}
                    for s in self.held.stages
                ],
            },
            "time": {
                "step_s": self.step_s, "how": self.how, "error": error_of(self.bars.time),
                "no_error": self.bars.why_none, "exposed_s": exposed,
                "hidden_s": hidden,
                "tokens_per_s": self.tokens_per_s, "mfu": self.mfu, "mfu_whole_square": self.mfu_whole,
                "hfu": self.hfu,
            },
            "checkpoint": asdict(self.saves),
            "goodput": asdict(self.goodput),
            "run": {
                "ends": self.ends, "wall_s": self.run_s if self.ends else None,
                "gpu_hours": self.gpu_hours if self.ends else None, "money": self.money if self.ends else None,
            },
        }  # fmt: skip


def plan(
    config: RunConfig,
    shape: ModelShape,
    setting: Setting,
    *,
    dp: int,
    lower: bool = True,
) -> Plan:
    """The plan of a configuration as it stands, `mesh.block: auto` chosen so that it fits, if it can.

    Args:  lower: whether auto may be chosen lower than the executor would.
    """
    columns = {**model_columns(config, shape), **layout_columns(config, shape, dp=dp)}
    found = _judged(config, shape, setting, columns)
    depths = range(int(found.point.block[0]) - 1, -1, -1)
    if lower and config.mesh.block == "auto" and not found.fits:
        for k in depths:
            other = _judged(config, shape, setting, {**columns, "block": k})
            if other.device_bytes < found.device_bytes:
                found = other
            if found.fits:
                break
    return found


def _judged(
    config: RunConfig,
    shape: ModelShape,
    setting: Setting,
    columns: Mapping[str, Any],
) -> Plan:
    point = as_points(columns, setting.cluster)
    used = memory(point, setting.table, setting.constants)
    times = slowest(point, setting.table, setting.constants)
    ranks = held(config, shape, point, setting.table, setting.constants)
    how = FORMULA
    if setting.profile is not None and not setting.counts:
        how = RATES
        there = {"ranks": int(point.gpus[0]), "per_node": setting.cluster.per_node}
        measured = measured_times(config, shape, setting.profile, ranks, times, **there)
        times, how = (measured, UNITS) if measured is not None else (times.scaled(setting.formulas_off), how)
    step_s = float(times.step_s[0])
    mfu, whole, hfu = utilisation(config, shape, setting, point, step_s)
    saved = saves(config, shape, setting, point)
    every = saved.every_steps
    durable = max([t for name, t in saved.tiers.items() if name != "object"] or [saved.stall_s])
    return Plan(
        config=config,
        shape=shape,
        setting=setting,
        point=point,
        memory=used,
        times=times,
        held=ranks,
        step_s=step_s,
        tokens_per_s=tokens_of(config) / step_s,
        mfu=mfu,
        mfu_whole=whole,
        hfu=hfu,
        saves=saved,
        goodput=goodput(
            gpus=int(point.gpus[0]),
            stall_s=saved.stall_s,
            durable_s=durable,
            every_s=None if every is None else every * step_s,
            reliability=setting.reliability,
        ),
        not_run=what_does_not_run(config),
        bars=bars(point, time=how == FORMULA and not setting.on_cpu, memory=not setting.on_cpu),
        margin=float(setting.margins(point)[0]),
        how=how,
    )


def error_of(residual: Residual | None) -> float | None:
    """The mean error of runs that are alike."""
    return None if residual is None else residual.mean


def what_does_not_run(config: RunConfig) -> str:
    """The first thing of a configuration that this version does not run, "" if there is none."""
    try:
        runs_now(config)
    except ConfigError as error:
        return error.what
    return ""


def over_budget(config: RunConfig, setting: Setting, host_bytes: float) -> bool:
    """Whether that much per device is more of a node's memory than it has, or `offload.host_budget` allows."""
    return host_bytes * min(setting.cluster.gpus, setting.cluster.per_node) > budget_of(config, setting)


def budget_of(config: RunConfig, setting: Setting) -> float:
    """Bytes of a node's memory that offloading may take: `offload.host_budget`, else all of the smallest node's."""
    given = config.offload.host_budget
    return float(setting.table.node_bytes.min()) if given is None else float(given)
