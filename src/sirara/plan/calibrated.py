"""From what a calibration measured to a profile: crowding, and an accelerator for the formulas.

The accelerator is what configurations are planned by whose own blocks were not measured: measured rates of products,
attention, memory and exchanges, and `achievable` such that the formula's block takes as long as the measured one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sirara.config.schema import RunConfig
from sirara.plan.constants import Constants, fitted
from sirara.plan.from_config import as_points, cluster_of, layout_columns, model_columns
from sirara.plan.hardware import MOST_SHARE, Accelerator, table
from sirara.plan.kernels import dense_block, rates
from sirara.plan.profile import Machine, Move, Profile, Rate, UnitTime, wide_of
from sirara.pure.shape import ModelShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What train/calibrate.py found.

    bandwidth: bytes per second to and from "disk write" and "disk read", "host link" where there is one.
    """

    units: tuple[UnitTime, ...]
    moves: tuple[Move, ...]
    rates: tuple[Rate, ...]
    bandwidth: dict[str, float]
    doubts: str = ""


def profile_of(
    machine: Machine, base: Accelerator, measured: Measured, config: RunConfig, shape: ModelShape
) -> Profile:
    """The profile of one machine.

    Args:  base: the shipped accelerator that is nearest, for what was not measured.  config, shape: as measured.
    """
    found = Profile(
        machine=machine,
        accelerator=base,
        units=measured.units,
        moves=measured.moves,
        rates=measured.rates,
        crowd=crowd_of(measured.units) if machine.device == "cpu" else {1: 1.0},
        disk_write_per_s=measured.bandwidth.get("disk write"),
        disk_read_per_s=measured.bandwidth.get("disk read"),
        doubts=measured.doubts,
    )
    return replace(found, accelerator=_accelerator(found, measured.bandwidth, config, shape))


def crowd_of(units: Sequence[UnitTime]) -> dict[int, float]:
    """Processes -> factor of a block's time over that of a process alone with as many threads."""
    blocks = [u for u in units if u.unit == "block" and u.tp == 1 and u.recompute == "none"]
    took = {(u.processes, u.threads): u.forward_s + u.backward_s for u in blocks}
    crowded = {n: s / took[1, t] for (n, t), s in took.items() if n > 1 and (1, t) in took}
    return {1: 1.0} | {n: max(1.0, factor) for n, factor in crowded.items()}


def merged(old: Profile, new: Profile) -> Profile:
    """The new measurements, and those of the old profile that were not made again."""

    def unit(u: UnitTime) -> tuple[object, ...]:
        return (u.signature, u.unit, u.micro_batch, u.seq_len, u.tp, u.sequence, u.dtype, u.threads, u.processes,
                u.recompute, u.dropped)  # fmt: skip

    def kept(before: Sequence[T], now: Sequence[T], key: Callable[[T], object]) -> tuple[T, ...]:
        known = {key(row) for row in now}
        return (*(row for row in before if key(row) not in known), *now)

    return replace(
        new,
        units=kept(old.units, new.units, unit),
        moves=kept(old.moves, new.moves, lambda m: (m.kind, m.ranks, m.across, m.bytes)),
        rates=kept(old.rates, new.rates, lambda r: (r.kind, r.processes)),
        crowd={**old.crowd, **new.crowd},
        disk_write_per_s=new.disk_write_per_s or old.disk_write_per_s,
        disk_read_per_s=new.disk_read_per_s or old.disk_read_per_s,
    )


def _accelerator(
    p: Profile, bandwidth: dict[str, float], config: RunConfig, shape: ModelShape
) -> Accelerator:
    base, dtype, device = p.accelerator, config.train.precision, p.machine.device
    blocks = [u for u in p.units if u.unit == "block" and u.tp == 1 and u.recompute == "none"]
    near = [u for u in blocks if u.processes <= p.machine.devices] or blocks
    # Rates and the block are those of as many processes.
    block = max(near, key=lambda u: u.processes) if near else None
    busiest = 1 if block is None else block.processes

    def rate(kind: str) -> float | None:
        return p.rate(kind, processes=busiest)

    product, attention = rate(f"product {dtype}"), rate(f"attention {dtype}")
    copy = rate(f"copy {wide_of(dtype)}")
    k = fitted()
    factor = (product or base.peak(dtype)) / base.peak(dtype)
    peak = {d: v * factor for d, v in base.peak_flops_per_s.items()}
    sums = 8.0 if dtype == "fp64" else 4.0
    flash = base.attention_plain if attention is None else attention / (peak["bf16"] * k.attention)
    flash = min(MOST_SHARE, flash)
    moved = base.hbm_bytes_per_s if copy is None else 2 * sums * copy
    exchanges = sorted((m for m in p.moves if m.kind == "exchange" and not m.across), key=lambda m: m.bytes)
    link = exchanges[-1].bytes / exchanges[-1].seconds if exchanges else base.up_bus_bytes_per_s
    found = replace(
        base,
        peak_flops_per_s=peak,
        attention_plain=flash,
        attention_tuned=flash,
        hbm_bytes=p.machine.memory_bytes / p.machine.devices if device == "cpu" else base.hbm_bytes,
        hbm_bytes_per_s=moved,
        hbm_achievable=1.0,
        up_bytes_per_s=link,
        up_bus_bytes_per_s=link,
        domain=max(2, p.machine.devices) if device == "cpu" else base.domain,
        disk_bytes_per_s=min(
            bandwidth.get("disk read", base.disk_bytes_per_s),
            bandwidth.get("disk write", base.disk_bytes_per_s),
        ),
        node_bytes=float(p.machine.memory_bytes),
        host_bytes_per_s=bandwidth.get("host link", moved if device == "cpu" else base.host_bytes_per_s),
        sources=f"measured by `sirara plan calibrate` on {p.machine.date}; all else as {base.name}",
    )
    if block is None:
        return found
    return _fitted(found, block.forward_s + block.backward_s, k, config, shape)


def _fitted(
    accelerator: Accelerator, block_s: float, k: Constants, config: RunConfig, shape: ModelShape
) -> Accelerator:
    """The accelerator with the share of its peak at which the formula's block takes `block_s`."""

    def formula_s(share: float) -> float:
        tried = replace(accelerator, achievable=share)
        cluster = cluster_of(tried, gpus=1)
        alone = config.model_copy(
            update={"mesh": config.mesh.model_copy(update={"pp": 1, "dp": 1, "tp": 1, "cp": 1, "ep": 1})}
        )
        p = as_points({**model_columns(alone, shape), **layout_columns(alone, shape, dp=1)}, cluster)
        block = dense_block(p, rates(p, table([tried]), k), k)
        return float(sum(max(block.work(way)[0], block.host[way][0]) for way in (0, 1)))

    low, high = 0.01, MOST_SHARE
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if formula_s(middle) > block_s else (low, middle)
    return replace(accelerator, achievable=high)
