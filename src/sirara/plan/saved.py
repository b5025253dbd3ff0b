"""What a checkpoint of a planned run is: bytes, files, seconds in each tier, and the host memory of a node."""

from collections.abc import Mapping
from dataclasses import dataclass

from sirara.config.schema import RunConfig
from sirara.plan.points import Points
from sirara.plan.setting import Setting
from sirara.plan.utilisation import matrices_of
from sirara.pure.families import ModelShape, parameter_count

FILE_BYTES = 2 << 30
BYTES_OF = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "fp8": (1, 4)}
"""Of a saved weight, and of a master and each tensor of optimizer state."""
ARENAS = 2
"""Snapshots in host memory that a save beside training needs."""
GENERATIONS = 3
"""Of peers' images and of parity: the two newest and one that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What a checkpoint is and takes.  stall_s: of training; tiers: name -> seconds until it is durable there."""

    bytes: int
    files: int
    stall_s: float
    tiers: Mapping[str, float]
    host_bytes_per_node: float
    host: Mapping[str, float]
    """What that is: snapshots, images of other nodes, parity blocks; as checkpoint/space.py asks of a file system."""
    every_steps: int | None


def saves(config: RunConfig, shape: ModelShape, setting: Setting, point: Points) -> Saves:
    """Bytes, files and times of a checkpoint."""
    total = state_bytes(config, shape)
    gpus, per_node = int(point.gpus[0]), setting.cluster.per_node
    nodes = -(-gpus // per_node)
    r = setting.reliability
    rates = {
        "memory": r.memory_bytes_per_s_per_node,
        "peer": min(r.memory_bytes_per_s_per_node, float(setting.table.out_bytes_per_s[0]) * per_node),
        "parity": min(r.memory_bytes_per_s_per_node, float(setting.table.out_bytes_per_s[0]) * per_node) / 2,
        "disk": r.write_bytes_per_s_per_node,
        "object": r.object_bytes_per_s_per_node,
    }
    share = total / nodes
    tiers = {t.tier: share / rates[t.tier] for t in config.checkpoint.tiers}
    copy = max(share / rates["memory"], total / gpus / float(setting.table.host_bytes_per_s[0]))
    beside = config.checkpoint.async_
    host = host_bytes(config, share)
    return Saves(
        bytes=total,
        files=nodes * -(-max(total // nodes, 1) // FILE_BYTES) * 2 + 10,
        stall_s=copy if beside else max([t for n, t in tiers.items() if n != "object"] or [copy]),
        tiers=tiers,
        host_bytes_per_node=sum(host.values()),
        host=host,
        every_steps=config.checkpoint.every,
    )


def host_bytes(config: RunConfig, share: float) -> dict[str, float]:
    """Bytes of a node's memory that checkpoints take, of a node's `share` of one step."""
    c = config.checkpoint
    kept = {t.tier for t in c.tiers} & {"memory", "peer", "parity"}
    found = {"snapshots": share * ARENAS if c.async_ or kept else 0.0}
    for t in c.tiers:
        # Folders that a path names may be anything; without one they are in shared memory.
        if t.tier == "peer":
            found["images of other nodes"] = share * GENERATIONS * (t.copies - 1)
        if t.tier == "parity":
            found["parity"] = share * GENERATIONS * t.parity / t.data
    return {name: size for name, size in found.items() if size}


def state_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Of one saved step: weights, masters where weights are of lower precision, optimizer state."""
    own, sums = BYTES_OF[config.train.precision]
    states = {"adamw": 2, "lion": 1, "muon": 1}[config.train.optimizer.name]
    copies = (own != sums) + states
    total = parameter_count(shape) * (own + copies * sums)
    if config.train.optimizer.name == "muon":
        total += (parameter_count(shape) - matrices_of(shape)) * sums
    return total
