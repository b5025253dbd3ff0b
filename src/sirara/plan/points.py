"""Configurations as columns: one numpy array per property, one entry per configuration.

All of `plan` works on these columns, so one layout and a hundred thousand take the same code.  Lengths are in
elements and tokens, sizes in bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.errors import ConfigError
from sirara.plan.hardware import DTYPES

Floats = NDArray[np.float64]


class Kind(IntEnum):
    """Whose conventions hold: which copies of a parameter there are, and what its kernels keep."""

    SIRARA = 0
    MEGATRON = 1
    """Megatron-LM and its heirs with Transformer Engine: fp32 main gradients, fused kernels."""
    MEGATRON_2021 = 2
    """Megatron-LM and Megatron-DeepSpeed of 2020 to 2022: GPT with dropout, softmax of its own."""
    FSDP = 3
    """FSDP1 with fp32 shards."""
    FSDP2 = 4
    DEEPSPEED = 5
    """Megatron-DeepSpeed of 2022: as MEGATRON_2021 with ZeRO's flat buffers."""
    FSDP2_TE = 6
    """FSDP2 around Transformer Engine's fused modules."""


class Recompute(IntFlag):
    """What a block computes again in backward; FULL keeps the block's input alone."""

    NONE = 0
    CORE = 1
    """Scores, softmax and their dropout: what Megatron calls selective."""
    NORM = 2
    ACT = 4
    """The activation function of the MLP or of the experts."""
    MLP = 8
    """The whole MLP from its normed input."""
    UP = 16
    """Up-projections of latent attention."""
    OPS = 32
    """Every second matmul and all element-wise operations: torchtitan's selective."""
    FULL = 64


PIECES = ("norm1", "norm2", "act", "wide", "attention", "block")
"""What blocks of ours can let go and make again, each by itself: outputs of both norms, of the activation function,
what goes into it, all between the products of attention; and everything but the block's input."""
_OF_KINDS = {
    "norm": ("norm1", "norm2"),
    "act": ("act",),
    "attention": ("attention",),
    "mlp": ("norm2", "act", "wide"),
    "full": ("block",),
}


def pieces_of(kinds: Iterable[str]) -> Floats:
    """[piece]: 1 for what a block lets go that makes `kinds` (of `pure.recompute`) again."""
    gone = {piece for kind in kinds for piece in _OF_KINDS[kind]}
    return np.array([float(piece in gone) for piece in PIECES])


class Schedule(IntEnum):
    GPIPE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    ZB_H1 = 3
    ZB_H2 = 4
    ZB_V = 5


class Attention(IntEnum):
    PLAIN = 0
    """Scores are written to memory."""
    FLASH = 1
    """Scores stay on the chip; kernels as written for Ampere."""
    TUNED = 2
    """The same, kernels written for the device."""


class Launch(IntEnum):
    EAGER = 0
    """One kernel per operation."""
    FUSED = 1
    """Hand-fused kernels or compiled blocks."""
    GRAPHS = 2
    """Kernels replayed from a graph: the host is out of the way."""


class Loss(IntEnum):
    """What the loss holds per logit."""

    TORCH = 0
    """16-bit logits, their fp32 copy, log-probabilities and the gradient."""
    PARALLEL = 1
    """Vocabulary-parallel: 16-bit logits, fp32 exponentials, 16-bit gradient."""
    FUSED = 2
    """One kernel, in place."""


_DEFAULTS: dict[str, float] = {
    # the model
    "layers": 1, "hidden": 64, "ffn": 256, "heads": 1, "kv_heads": 0, "head_dim": 0, "vocab": 256, "seq": 128,
    "gated": 0, "tied": 0, "learned": 0, "rotary": 0, "qk_norm": 0, "layer_norm": 0, "bias": 0, "dropout": 0,
    "experts": 0, "topk": 0, "expert_ffn": 0, "shared_ffn": 0, "dense_layers": 0, "dense_ffn": 0,
    "q_rank": 0, "kv_rank": 0, "rope_dim": 0, "predict_ahead": 0, "node_limit": 0, "window": 0, "window_share": 0,
    # the layout
    "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "dp": 1, "zero": 0, "micro_batch": 1, "global_batch": 1,
    "recompute": 0, "recompute_share": 1, "again": 0, "schedule": 1, "sequence_parallel": 0, "split_counts_ends": 0,
    "head_blocks": 0,
    # how it is computed
    "dtype": DTYPES.index("bf16"), "attention": 0, "launch": 0, "loss": 0,
    "tp_overlap": 0, "dp_overlap": 0, "ep_overlap": 0, "pp_overlap": 0, "scatter_gather": 0, "dedup": 0,
    "lora": 0,
    # what a parameter holds, bytes
    "weight_bytes": 2, "gather_bytes": 2, "grad_bytes": 4, "optim_bytes": 12, "reduce_bytes": 4, "state_shard": 0,
    "turn_bytes": 0,
    "dummy_bytes": 0,
    # numerics: exact
    "exact": 0, "block": 0,
    # offload: 0 none, 1 host, 2 disk
    "offload_optimizer": 0, "offload_params": 0, "offload_activations": 0,
    # where
    "accelerator": 0, "per_node": 8, "out_bytes_per_s": 0, "kind": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Columns [n] of n configurations.  Codes are those of the enums above; flags are 0 or 1.

    ffn: width of the dense MLP.  kv_heads, head_dim: 0 means heads, hidden / heads.  learned: learned positions.
    rotary: rotary positions.  qk_norm: norms of q and k.
    experts, topk, expert_ffn, shared_ffn: routed experts, experts per token, width of one, total width of the shared.
    dense_layers, dense_ffn: how many first layers of a mixture have a dense MLP, and its width.
    q_rank, kv_rank, rope_dim: ranks of latent attention and its rotary part; kv_rank 0: plain attention.
    predict_ahead: blocks on the last stage that predict further tokens.  node_limit: how many nodes a token's experts
    may be on, 0: any.  window, window_share: tokens that windowed
    layers see, and their share.
    sequence_parallel: what lies between tensor-parallel layers is split over tp.  split_counts_ends: embedding and
    head count as one layer each in the split over stages.  head_blocks: the head counts as so many blocks in a split
    that fills a stage until its share is reached, 0: blocks are dealt evenly.  recompute_share: share of the blocks
    that recompute.
    again [n, 3, piece]: share of the blocks of the first, a middle and the last stage that make a piece of `PIECES`
    again, beside what `recompute` says.
    tp_overlap .. pp_overlap: whether that traffic runs beside computation.  scatter_gather: a boundary tensor crosses
    the network once, split over tp.  dedup: a token goes once to each node, whatever number of its experts is there.
    weight_bytes, grad_bytes, optim_bytes: per parameter held.  gather_bytes, reduce_bytes: on the wire.
    turn_bytes: per parameter of one block and of either end, of buffers for gradients that units use in turn.
    state_shard: 1 where optimizer state is cut over dp*cp whatever `zero` says.  dummy_bytes: per parameter of one
    block, kept as stand-ins for gradients that were added in place.
    block: k of the reduction tree.  lora: weights are frozen, adapters are small.
    out_bytes_per_s: scale-out rate per device, 0: the accelerator's.
    """

    layers: Floats
    hidden: Floats
    ffn: Floats
    heads: Floats
    kv_heads: Floats
    head_dim: Floats
    vocab: Floats
    seq: Floats
    gated: Floats
    tied: Floats
    learned: Floats
    rotary: Floats
    qk_norm: Floats
    layer_norm: Floats
    bias: Floats
    dropout: Floats
    experts: Floats
    topk: Floats
    expert_ffn: Floats
    shared_ffn: Floats
    dense_layers: Floats
    dense_ffn: Floats
    q_rank: Floats
    kv_rank: Floats
    rope_dim: Floats
    predict_ahead: Floats
    node_limit: Floats
    window: Floats
    window_share: Floats
    tp: Floats
    pp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    dp: Floats
    zero: Floats
    micro_batch: Floats
    global_batch: Floats
    recompute: NDArray[np.int64]
    recompute_share: Floats
    again: Floats
    schedule: NDArray[np.int64]
    sequence_parallel: Floats
    split_counts_ends: Floats
    head_blocks: Floats
    dtype: NDArray[np.int64]
    attention: NDArray[np.int64]
    launch: NDArray[np.int64]
    loss: NDArray[np.int64]
    tp_overlap: Floats
    dp_overlap: Floats
    ep_overlap: Floats
    pp_overlap: Floats
    scatter_gather: Floats
    dedup: Floats
    lora: Floats
    weight_bytes: Floats
    gather_bytes: Floats
    grad_bytes: Floats
    optim_bytes: Floats
    reduce_bytes: Floats
    state_shard: Floats
    turn_bytes: Floats
    dummy_bytes: Floats
    exact: Floats
    block: Floats
    offload_optimizer: Floats
    offload_params: Floats
    offload_activations: Floats
    accelerator: NDArray[np.int64]
    per_node: Floats
    out_bytes_per_s: Floats
    kind: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def gpus(self) -> Floats:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> Floats:
        """Tokens of one microbatch that one context-parallel rank holds."""
        return self.micro_batch * self.seq / self.cp

    @property
    def microbatches(self) -> Floats:
        """Microbatches of one data-parallel rank and step, the busiest one's."""
        return np.ceil(self.global_batch / (self.micro_batch * self.dp) - 1e-9)

    @property
    def shards(self) -> Floats:
        """Over how many ranks ZeRO cuts dense parameters."""
        return self.dp * self.cp

    @property
    def expert_shards(self) -> Floats:
        """Over how many ranks it cuts experts."""
        return np.maximum(1.0, self.dp * self.cp * self.tp / self.ep)

    def take(self, index: Any) -> "Points":
        """The entries that `index` (integers, a mask or a slice) picks."""
        return Points(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def with_(self, **columns: Any) -> "Points":
        """The same with other columns, broadcast to n."""
        n = len(self)
        made = {
            k: np.broadcast_to(np.asarray(v, dtype=_dtype(k)), (n, *_wide(k))) for k, v in columns.items()
        }
        return replace(self, **made)


_INTEGERS = {"recompute", "schedule", "dtype", "attention", "launch", "loss", "accelerator", "kind"}
_NAMES = tuple(f.name for f in fields(Points))


def _wide(name: str) -> tuple[int, ...]:
    """Dims of one entry."""
    return (3, len(PIECES)) if name == "again" else ()


def _dtype(name: str) -> type:
    return np.int64 if name in _INTEGERS else np.float64


def points(columns: Mapping[str, Any]) -> Points:
    """Points of columns and scalars, broadcast against each other; what is not given has its default.

    Raises: ConfigError for a name that is no column, columns of different lengths.
    """
    strange = sorted(set(columns) - set(_NAMES))
    if strange:
        raise ConfigError(f"{', '.join(strange)} are no columns of a configuration", code="SR212")
    given = {k: np.asarray(v, dtype=_dtype(k)) for k, v in columns.items()}
    lengths = {v.shape[0] for k, v in given.items() if v.ndim > len(_wide(k))}
    if len(lengths) > 1:
        raise ConfigError("columns differ in length", code="SR212", why=f"lengths {sorted(lengths)}")
    n = lengths.pop() if lengths else 1
    full = {
        name: np.broadcast_to(
            given.get(name, np.asarray(_DEFAULTS[name], dtype=_dtype(name))), (n, *_wide(name))
        )
        for name in _NAMES
    }
    full["kv_heads"] = np.where(full["kv_heads"] > 0, full["kv_heads"], full["heads"])
    full["head_dim"] = np.where(full["head_dim"] > 0, full["head_dim"], full["hidden"] / full["heads"])
    return Points(**full)


def concatenate(parts: list[Points]) -> Points:
    return Points(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in _NAMES})


def dx_first(p: Points) -> NDArray[np.bool_]:
    """[n]: whether ranks of ours send dx before they make weight gradients, as `pure.schedule.sends_early` has it."""
    cheap = [PIECES.index(piece) for piece in ("norm1", "norm2", "act")]
    dear = (np.delete(p.again, cheap, axis=2) > 0).any(axis=(1, 2))
    little = ((p.recompute & ~int(Recompute.NORM | Recompute.ACT)) > 0) | dear
    return (p.kind == Kind.SIRARA) & (p.launch != Launch.FUSED) & (p.tp == 1) & ~little


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters [n] of the parts of a model, on no layout.  `moe`: 1 where blocks are mixtures."""

    attention: Floats
    dense_mlp: Floats
    """Of a block that has one (a mixture's first layers); of every block, where there are no experts."""
    shared: Floats
    router: Floats
    experts: Floats
    """All routed experts of one block."""
    norms: Floats
    embedding: Floats
    head: Floats
    """0 where tied."""
    moe: Floats

    def total(self, p: Points) -> Floats:
        """Parameters of the whole model, further-token blocks included."""
        mixtures = self.moe * (p.layers - p.dense_layers) + self.moe * p.predict_ahead
        dense = p.layers + p.predict_ahead - mixtures
        each = self.attention + self.norms
        return (
            (p.layers + p.predict_ahead) * each
            + dense * self.dense_mlp
            + mixtures * (self.shared + self.router + self.experts)
            + self.embedding
            + self.head
            + p.hidden * (1 + p.layer_norm)
        )


def sizes(p: Points) -> Sizes:
    """Closed forms of the parameter counts; `pure/families` counts the same from tensors."""
    h, width = p.hidden, p.heads * p.head_dim
    latent = p.kv_rank > 0
    plain = h * width + 2 * h * p.kv_heads * p.head_dim + width * h
    plain = plain + p.bias * (width + 2 * p.kv_heads * p.head_dim + h)
    key = p.head_dim + p.rope_dim
    mla = (
        np.where(p.q_rank > 0, h * p.q_rank + p.q_rank * p.heads * key + p.q_rank, h * p.heads * key)
        + h * (p.kv_rank + p.rope_dim)
        + p.kv_rank * p.heads * 2 * p.head_dim
        + p.kv_rank
        + width * h
    )
    mats = 2 + p.gated
    moe = (p.experts > 0).astype(np.float64)
    dense_ffn = np.where(p.dense_ffn > 0, p.dense_ffn, p.ffn)
    return Sizes(
        attention=np.where(latent, mla, plain),
        dense_mlp=mats * h * dense_ffn + p.bias * (dense_ffn * (1 + p.gated) + h),
        shared=mats * h * p.shared_ffn,
        router=h * p.experts,
        experts=p.experts * mats * h * p.expert_ffn,
        norms=2 * h * (1 + p.layer_norm),
        embedding=p.vocab * h + p.learned * p.seq * h,
        head=np.where(p.tied > 0, 0.0, p.vocab * h),
        moe=moe,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Blocks [n, 3] of the first, a middle and the last stage, and how many stages of each kind there are."""

    blocks: Floats
    mixtures: Floats
    """Of these, how many are mixtures of experts."""
    count: Floats
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]
    index: Floats


def stages(p: Points) -> Stages:
    """How blocks are dealt to stages: evenly, what is over to middle stages; see `Points.split_counts_ends`."""
    n, pp, layers = len(p), p.pp, p.layers
    units = layers + 2 * p.split_counts_ends
    most = np.ceil(units / pp)
    ends = np.maximum(0.0, np.floor(units / pp) - p.split_counts_ends)
    # One more than the middle stages can take goes to the first, which has no head.
    over = (units - pp * np.floor(units / pp)) > pp - 2
    first = np.where(pp == 1, layers, ends + over)
    last = np.where(pp == 1, layers, ends)
    middle = np.where(pp > 2, np.minimum(most, np.maximum(0.0, layers - first - last)), 0.0)
    even = (layers % pp == 0) & (p.split_counts_ends == 0)
    first, last = np.where(even, layers / pp, first), np.where(even, layers / pp, last)
    middle = np.where(even, layers / pp, middle)
    # By cost: stage i ends with the block at which (i + 1) / pp of blocks and head are reached.
    by_cost = (p.head_blocks > 0) & (pp > 1)
    units = layers + p.head_blocks
    reached = np.minimum(layers, np.ceil(units / pp - 1e-9))
    rest = layers - np.minimum(layers, np.ceil((pp - 1) * units / pp - 1e-9))
    first, last = np.where(by_cost, reached, first), np.where(by_cost, rest, last)
    middle = np.where(by_cost & (pp > 2), np.minimum(reached, layers - first), middle)
    blocks = np.stack([first, middle, last], axis=1)
    moe = (p.experts > 0)[:, None]
    dense = np.stack([np.minimum(p.dense_layers, first), np.zeros(n), np.zeros(n)], axis=1)
    count = np.stack([np.ones(n), np.maximum(0.0, pp - 2), (pp > 1).astype(np.float64)], axis=1)
    one = pp == 1
    return Stages(
        blocks=blocks,
        mixtures=np.where(moe, np.maximum(0.0, blocks - dense), 0.0),
        count=count,
        first=np.stack([np.ones(n, bool), np.zeros(n, bool), np.zeros(n, bool)], axis=1),
        last=np.stack([one, np.zeros(n, bool), ~one], axis=1),
        index=np.stack([np.zeros(n), np.minimum(1.0, np.maximum(0.0, pp - 1)), pp - 1], axis=1),
    )
