"""From a run's configuration to the columns that the planner works on, by the rules that the executor runs by.

    model_columns     sizes of the model and what its kernels keep             pure/shape.py
    layout_columns    degrees, microbatches, recompute, offload                config/schema.py
    as_points         what one parameter costs on such a layout: weights, gradient sums, optimizer, bytes sent

Gradient sums of `numerics: exact` are buffers of the reduction tree (`pure/tree.py`): a rank adds a block of 2^k
microbatches in max(1, k) full buffers, holds the last block's sum and what has arrived of its peers' while the next
block is added, and adds shards on a binary counter: `buffers.py` plays it.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.errors import ConfigError
from sirara.plan.buffers import buffers_of
from sirara.plan.hardware import DTYPES, Accelerator, Cluster
from sirara.plan.points import (
    PIECES,
    Attention,
    Kind,
    Launch,
    Loss,
    Points,
    Recompute,
    Schedule,
    pieces_of,
    points,
)
from sirara.pure.families import unit_specs
from sirara.pure.recompute import Setting, keeps_little, kinds_of_blocks
from sirara.pure.schedule import rank_of, sends_early
from sirara.pure.shape import ModelShape
from sirara.pure.split import blocks_per_stage, split_units, unit_costs
from sirara.pure.tree import Deal, most_places

Floats = NDArray[np.float64]
Columns = dict[str, Any]

SCHEDULE_CODES = {
    "gpipe": Schedule.GPIPE,
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved": Schedule.INTERLEAVED,
    "zb-h1": Schedule.ZB_H1,
    "zb-v": Schedule.ZB_V,
}
SELECTIVE = int(Recompute.NORM | Recompute.ACT)
"""What `train.recompute: selective` makes again: outputs of norms and of the activation function."""
_CODES = {"none": 0, "selective": SELECTIVE, "full": int(Recompute.FULL)}
OFFLOAD_CODES = {"none": 0, "host": 1, "disk": 2}
STATES = {"adamw": 2, "lion": 1, "muon": 2}
"""Tensors of optimizer state per parameter; muon's matrices have one, all others two."""
WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Of the weights that a rank holds; 8-bit products are made from 16-bit weights."""
AUTO_DEPTH = 3
"""The deepest local tree that `mesh.block: auto` takes below ZeRO 2."""


def cluster_of(
    accelerator: Accelerator,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    per_node: int | None = None,
) -> Cluster:
    """The machines that were asked for; what is left out follows from the accelerator.

    Devices that leave a node of the usual size part empty are shared out over equal, smaller nodes: 12 are 2 x 6.

    Raises:  ConfigError for devices that do not fill whole nodes.
    """
    most = per_node or {72: 4, 8960: 4}.get(accelerator.domain, min(16, accelerator.domain))
    if gpus is None:
        return Cluster(accelerator=accelerator, per_node=most, nodes=nodes or 1)
    if nodes is not None:
        if gpus % nodes:
            raise ConfigError(
                f"{gpus} devices do not fill {nodes} nodes", code="SR216", where="--gpus, --nodes",
                try_=[f"--gpus {gpus // nodes * nodes or nodes}", "leave --nodes out"],
            )  # fmt: skip
        return Cluster(accelerator=accelerator, per_node=gpus // nodes, nodes=nodes)
    each = most if per_node and gpus >= per_node else even_nodes(gpus, most)
    if each * 2 < min(gpus, most):
        raise ConfigError(
            f"{gpus} devices do not fill equal nodes of at most {most}", code="SR216", where="--gpus",
            try_=[f"--gpus {-(-gpus // most) * most}", f"--nodes {gpus // each}"],
        )  # fmt: skip
    return Cluster(accelerator=accelerator, per_node=each, nodes=-(-gpus // each))


def even_nodes(gpus: int, most: int) -> int:
    """Devices of a node, at most so many, where all nodes have as many."""
    return next(n for n in range(min(gpus, most), 0, -1) if gpus % n == 0)


def degree_of_dp(config: RunConfig, gpus: int | None) -> int:
    """The data-parallel degree of a configuration on so many devices.

    Raises:  ConfigError when devices and mesh contradict each other.
    """
    m, launch = config.mesh, config.launch
    others = m.pp * m.cp * m.tp
    if gpus is None:
        if m.dp != "auto":
            return m.dp
        if launch.nproc != "auto":
            return max(1, launch.nproc * launch.nodes // others)
        return 1
    if m.dp != "auto" and m.dp * others != gpus:
        raise ConfigError(
            f"--gpus {gpus} does not fit mesh.pp={m.pp} * mesh.dp={m.dp} * mesh.cp={m.cp} * mesh.tp={m.tp}",
            code="SR216",
            where="--gpus",
            why=f"the mesh asks for {m.dp * others}",
            try_=["mesh.dp=auto", f"--gpus {m.dp * others}", "--search"],
        )
    if gpus % others:
        raise ConfigError(
            f"--gpus {gpus} is no multiple of mesh.pp={m.pp} * mesh.cp={m.cp} * mesh.tp={m.tp}",
            code="SR216",
            where="--gpus",
            try_=[f"--gpus {-(-gpus // others) * others}", "--search"],
        )
    return gpus // others


def model_columns(config: RunConfig, shape: ModelShape) -> Columns:
    """What does not hang on the layout; scalars."""
    traits, model, train = shape.traits, config.model, config.train
    window = shape.sliding_window or 0
    return {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab": shape.vocab,
        "seq": config.data.seq_len,
        "gated": traits.mlp == "swiglu",
        "tied": bool(shape.tie_embeddings),
        "learned": traits.positions == "learned",
        "rotary": traits.positions == "rope",
        "qk_norm": traits.qk_norm,
        "layer_norm": traits.norm == "layer",
        "bias": shape.ffn_bias,
        "dropout": model.dropout > 0,
        "window": window,
        "window_share": float(0 < window < config.data.seq_len),
        "attention": int(Attention.PLAIN if model.attention_dropout > 0 else Attention.FLASH),
        "launch": int(Launch.FUSED if train.compile else Launch.EAGER),
        "loss": int(Loss.FUSED),
        "kind": int(Kind.SIRARA),
        "dp_overlap": 1.0,
        "pp_overlap": 1.0,
        "global_batch": train.global_batch,
        "states": STATES[train.optimizer.name],
        "exact": config.numerics == "exact",
    }


def layout_columns(config: RunConfig, shape: ModelShape, *, dp: int) -> Columns:
    """The layout of a configuration; scalars.  `block`: -1 for auto."""
    m, train, offload = config.mesh, config.train, config.offload
    blocks = _blocks(config, shape)
    code, share = recompute_code(train.recompute, max(blocks))
    return {
        "tp": m.tp,
        "pp": m.pp,
        "vpp": m.chunks,
        "cp": m.cp,
        "ep": m.ep,
        "dp": dp,
        "zero": m.zero,
        "micro_batch": train.micro_batch,
        "schedule": int(SCHEDULE_CODES[m.schedule]),
        "sequence_parallel": m.sequence_parallel,
        "split_counts_ends": m.pp > 1 and blocks[0] + blocks[-1] < 2 * max(blocks[1:-1], default=blocks[0]),
        "recompute": code,
        "recompute_share": share,
        "again": shares_again(config, blocks),
        "precision": train.precision,
        "block": -1 if m.block == "auto" else int(m.block).bit_length() - 1,
        "offload_optimizer": OFFLOAD_CODES[offload.optimizer],
        "offload_params": OFFLOAD_CODES[offload.params],
        "offload_activations": OFFLOAD_CODES[offload.activations],
    }


def recompute_code(recompute: Setting, blocks: int) -> tuple[int, float]:
    """(what is computed again, in which share of the blocks) of `train.recompute`; of a recipe see `shares_again`."""
    if isinstance(recompute, int):
        return int(Recompute.FULL), min(1.0, recompute / max(1, blocks))
    return _CODES.get(recompute, 0) if isinstance(recompute, str) else 0, 1.0


def shares_again(config: RunConfig, blocks: Sequence[int]) -> Floats:
    """[3, piece]: `Points.again` of a recipe; of ranks between the ends the most that one makes again."""
    m, setting = config.mesh, config.train.recompute
    if isinstance(setting, int) or (isinstance(setting, str) and setting in _CODES):
        return np.zeros((3, len(PIECES)))
    of_rank = [np.zeros((0, len(PIECES)))] * m.pp
    for stage, count in enumerate(blocks):
        rank = rank_of(m.schedule, m.pp, stage)
        dealt = [pieces_of(k) for k in kinds_of_blocks(setting, stage=stage, blocks=count)]
        of_rank[rank] = np.concatenate([of_rank[rank], np.reshape(dealt, (count, len(PIECES)))])
    share = np.array([pieces.mean(axis=0) if len(pieces) else np.zeros(len(PIECES)) for pieces in of_rank])
    return np.stack([share[0], share[1:-1].max(axis=0) if m.pp > 2 else share[0], share[-1]])


def plays_early(config: RunConfig) -> bool:
    """Whether the ranks send dx before they make weight gradients."""
    train = config.train
    little = keeps_little(train.recompute) or config.offload.activations != "none"
    return sends_early(tp=config.mesh.tp, compiled=train.compile, keeps_little=little)


def _blocks(config: RunConfig, shape: ModelShape) -> list[int]:
    return blocks_per_stage(stage_units(config, shape))


def stage_units(config: RunConfig, shape: ModelShape) -> tuple[range, ...]:
    """The units of each (virtual) stage, as the executor splits them."""
    m = config.mesh
    again = float(config.train.recompute == "full")
    explicit = None if m.split == "auto" else tuple(m.split)
    return _split(shape, again, m.schedule, m.pp, m.stages, explicit)


@cache
def _split(
    shape: ModelShape, again: float, name: str, pp: int, stages: int, explicit: tuple[int, ...] | None
) -> tuple[range, ...]:
    costs = unit_costs(unit_specs(shape), shape.hidden, recomputed=again)
    owners = [rank_of(name, pp, stage) for stage in range(stages)]
    return split_units(costs, stages, explicit, owners=owners)


def as_points(columns: Mapping[str, Any], cluster: Cluster, *, accelerator: Any = 0) -> Points:
    """Points of model and layout columns (scalars and arrays); see the module's docstring.

    Args:    accelerator: row of the hardware table.
    """
    c = dict(columns)
    states, exact = np.asarray(c.pop("states"), float), np.asarray(c.pop("exact")) > 0
    precision = np.asarray(c.pop("precision"))
    weight = _lookup(precision, WEIGHT_BYTES)
    sums = np.where(precision == "fp64", 8.0, 4.0)
    c["dtype"] = _lookup(precision, {name: float(i) for i, name in enumerate(DTYPES)}).astype(np.int64)
    tp = np.asarray(c["tp"])
    c["vocab"] = np.ceil(np.asarray(c["vocab"]) / tp) * tp
    k = block_depth(c)
    grad, turn, rounds = gradient_bytes(c, k, weight, sums, exact)
    zero, ranks = np.asarray(c["zero"]), _leaves(c)[1]
    leaf = np.where((k == 0) & (ranks > 1) & exact, weight, sums)
    per_node = np.minimum(cluster.per_node, ranks * np.asarray(c["pp"]) * tp)
    return points(
        {
            **c,
            "block": k,
            # The buffers of the tree are in grad_bytes.
            "exact": 0.0,
            "weight_bytes": weight,
            "gather_bytes": np.where((zero == 0) & (ranks > 1), sums, weight),
            "grad_bytes": grad,
            "turn_bytes": turn,
            "optim_bytes": states * sums + np.where(weight < sums, sums, 0.0),
            "reduce_bytes": leaf * np.where(zero >= 2, 1.0, rounds),
            "per_node": per_node,
            "accelerator": accelerator,
        }
    )


def _lookup(names: NDArray[Any], table: Mapping[str, float]) -> Floats:
    found = np.zeros(names.shape)
    for name, value in table.items():
        found = np.where(names == name, float(value), found)
    return found


def _leaves(c: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(gradients that a step adds, ranks that make them): of each part of a sequence one."""
    cp = np.asarray(c.get("cp", 1)).astype(np.int64)
    microbatches = np.asarray(c["global_batch"]) // np.asarray(c["micro_batch"])
    return microbatches * cp, np.asarray(c["dp"]).astype(np.int64) * cp


def block_depth(c: Mapping[str, Any]) -> NDArray[np.int64]:
    """k of blocks of 2^k microbatches: what `block` says, or where it is -1 what `pure.tree.deal` takes for auto."""
    (total, dp), asked = _leaves(c), np.asarray(c.get("block", -1))
    deepest = np.where(np.asarray(c["zero"]) >= 2, 0, AUTO_DEPTH)
    best = most_places(total, dp, 0)
    k = np.zeros(np.broadcast(total, dp, deepest).shape, dtype=np.int64)
    for depth in range(1, AUTO_DEPTH + 1):
        k = np.where((depth <= deepest) & (most_places(total, dp, depth) <= best), depth, k)
    alone = np.ceil(np.log2(np.maximum(1, total)))
    return np.where(asked >= 0, asked, np.where(dp == 1, alone, k)).astype(np.int64)


def gradient_bytes(
    c: Mapping[str, Any], k: NDArray[np.int64], weight: Floats, sums: Floats, exact: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """(bytes of gradient sums per parameter that a rank holds, `Points.turn_bytes`, rounds of exchange in a step).

    The first per parameter of the rank below ZeRO 2, of its shard from ZeRO 2 on.
    """
    (total, dp), zero = _leaves(c), np.asarray(c["zero"])
    parts = np.broadcast_arrays(total, dp, k, zero >= 2, ~exact, weight >= sums)
    key = np.zeros(parts[0].shape, dtype=np.int64)
    for part, size in zip(parts, _SIZES, strict=True):
        key = key * size + part
    cases, at = np.unique(key, return_inverse=True)
    counts = np.array([_counted(*_parted(int(case))) for case in cases], dtype=np.float64)[at.ravel()]
    full_leaf, full_sum, shard_leaf, shard_sum, *once, rounds = (n.reshape(key.shape) for n in counts.T)
    turn = once[0] * weight + once[1] * sums + (once[2] * weight + once[3] * sums) / dp
    cut = (zero >= 2) & (dp > 1)
    # ZeRO 0 gathers the summed shards again: in a buffer that sums were made in, where there is one.
    again = np.where((zero == 0) & (dp > 1) & (full_sum == 0), sums, 0.0)
    shards = shard_leaf * weight + shard_sum * sums
    whole = full_leaf * weight + full_sum * sums + shards / dp + again
    return np.where(cut, shards, whole), turn, np.asarray(rounds)


_SIZES = (1 << 24, 1 << 20, 1 << 5, 2, 2, 2)
"""Most microbatches, ranks, depth and flags: a case as one number."""


def _parted(case: int) -> list[int]:
    found: list[int] = []
    for size in reversed(_SIZES):
        case, value = divmod(case, size)
        found.append(value)
    return found[::-1]


@cache
def _counted(total: int, dp: int, k: int, lean: int, fast: int, same: int) -> tuple[int, ...]:
    dealt = Deal(microbatches=total, dp=dp, k=k)
    b = buffers_of(dealt, lean=bool(lean), fast=bool(fast), same=bool(same))
    each = b.full_leaf, b.full_sum, b.shard_leaf, b.shard_sum
    once = b.once_leaf, b.once_sum, b.once_shard_leaf, b.once_shard_sum
    return *each, *once, 1 if fast else dealt.rounds
