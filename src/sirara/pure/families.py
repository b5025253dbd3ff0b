"""The tensors of a model: names, shapes, placements, initial values and FLOPs, computed from a `ModelShape`.

    unit 0   embed       token embedding (+ learned positions, + norm)
    unit i   block.<i>   norm, attention, norm, MLP
    unit n   head        norm, projection to the vocabulary

A tensor is the Hugging Face tensor: its name, shape and element order. Within a unit the order here is the
order in memory: q, k, v and gate, up are neighbours, so that they multiply as one matrix.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from sirara.pure.placement import REPLICATE, Placement, Replicate, Shard
from sirara.pure.presets import PRESETS
from sirara.pure.rng import normal_slice
from sirara.pure.shape import FAMILIES, Family, ModelShape, RopeScaling

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Family",
    "Init",
    "ModelShape",
    "RopeScaling",
    "TensorSpec",
    "UnitSpec",
    "init_slice",
    "parameter_count",
    "unit_specs",
    "with_frozen",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """How a tensor starts."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One logical tensor. `local` is its attribute path inside its unit's module.

    A second use of another tensor (an output projection tied to the embedding) names the owner in `tied_to`.
    dtype: of its weights ("F32", "BF16", ...) where it is not the model's.
    """

    name: str
    local: str
    shape: tuple[int, ...]
    placement: Placement
    decay: bool
    init: Init
    tied_to: str | None = None
    trainable: bool = True
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One unit: "embed", "block.<i>" or "head".

    flops_per_token: forward FLOPs of matmuls for one token, 2 per multiply-add, attention over the
    (max_seq + 1) / 2 keys that a token of a full causal sequence sees on average (within the window).
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    flops_per_token: int


@lru_cache(maxsize=64)
def unit_specs(shape: ModelShape) -> tuple[UnitSpec, ...]:
    """[embed, block.0 .. block.n-1, head]."""
    flops = _block_flops(shape)
    blocks = (
        UnitSpec(name=f"block.{i}", tensors=tuple(_block_tensors(shape, i)), flops_per_token=flops)
        for i in range(shape.layers)
    )
    head_flops = 2 * shape.vocab * shape.hidden
    return (
        UnitSpec(name="embed", tensors=tuple(_embed_tensors(shape)), flops_per_token=0),
        *blocks,
        UnitSpec(name="head", tensors=tuple(_head_tensors(shape)), flops_per_token=head_flops),
    )


@lru_cache(maxsize=64)
def parameter_count(shape: ModelShape) -> int:
    """Parameters, a tied tensor counted once."""
    return sum(_numel(t.shape) for u in unit_specs(shape) for t in u.tensors if t.tied_to is None)


def with_frozen(units: Sequence[UnitSpec], names: Collection[str]) -> tuple[UnitSpec, ...]:
    """The same units where the tensors of these names are not trained."""
    return tuple(
        replace(u, tensors=tuple(replace(t, trainable=t.name not in names) for t in u.tensors)) for u in units
    )


def init_slice(spec: TensorSpec, seed: int, start: int, stop: int) -> np.ndarray:
    """Initial float32 values of elements [start, stop), in C order: a function of (seed, name, element)."""
    if spec.init.kind == "zeros":
        return np.zeros(stop - start, dtype=np.float32)
    if spec.init.kind == "ones":
        return np.ones(stop - start, dtype=np.float32)
    return normal_slice(seed, spec.tied_to or spec.name, start, stop) * np.float32(spec.init.std)


def _base_std(shape: ModelShape) -> float:
    # GPT-2's 0.02, but no more than sqrt(1 / (3 hidden)), which kept BLOOM-176B and MT-NLG-530B stable.
    return min(0.02, (3 * shape.hidden) ** -0.5)


def _embed_tensors(shape: ModelShape) -> Iterator[TensorSpec]:
    normal = Init(kind="normal", std=_base_std(shape))
    yield _tensor(shape, "embed.tokens", "weight", (shape.vocab, shape.hidden), Shard(dim=0), normal)
    if shape.traits.positions == "learned":
        yield _tensor(shape, "embed.positions", "weight", (shape.max_seq, shape.hidden), REPLICATE, normal)
    if shape.traits.embed_norm:
        yield from _norm(shape, "embed.norm")


def _block_tensors(shape: ModelShape, i: int) -> Iterator[TensorSpec]:
    traits, hidden = shape.traits, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    per_kv_head = Shard(dim=0, parts=shape.kv_heads)

    yield from _norm(shape, "block.norm1", i)
    if traits.qkv == "separate":
        outs = [("q_proj", q, Shard(dim=0)), ("k_proj", kv, per_kv_head), ("v_proj", kv, per_kv_head)]
    else:
        outs = [("qkv_proj", 3 * q, Shard(dim=0, packs=3 if traits.qkv == "packed" else 1))]
    yield from _columns(shape, "block.attn", outs, hidden, shape.qkv_bias, i)
    if traits.qk_norm:
        for name in ("q_norm", "k_norm"):
            ones = Init(kind="ones")
            yield _tensor(
                shape, f"block.attn.{name}", "weight", (shape.head_dim,), Replicate(over="heads"), ones, i
            )
    yield from _row(shape, "block.attn.o_proj", q, hidden, shape.o_bias, i)

    yield from _norm(shape, "block.norm2", i)
    names = ("gate_proj", "up_proj") if traits.mlp == "swiglu" else ("up_proj",)
    outs = [(name, shape.ffn, Shard(dim=0)) for name in names]
    yield from _columns(shape, "block.mlp", outs, hidden, shape.ffn_bias, i)
    yield from _row(shape, "block.mlp.down_proj", shape.ffn, hidden, shape.ffn_bias, i)


def _head_tensors(shape: ModelShape) -> Iterator[TensorSpec]:
    yield from _norm(shape, "head.norm")
    owner = shape.traits.names["embed.tokens"] + ".weight" if shape.tie_embeddings else None
    normal = Init(kind="normal", std=_base_std(shape))
    dims = (shape.vocab, shape.hidden)
    yield _tensor(shape, "head.proj", "weight", dims, Shard(dim=0), normal, tied_to=owner)


def _norm(shape: ModelShape, module: str, i: int | None = None) -> Iterator[TensorSpec]:
    yield _tensor(shape, module, "weight", (shape.hidden,), REPLICATE, Init(kind="ones"), i)
    if shape.traits.norm == "layer":
        yield _tensor(shape, module, "bias", (shape.hidden,), REPLICATE, Init(kind="zeros"), i)


def _columns(
    shape: ModelShape, parent: str, outs: list[tuple[str, int, Shard]], fan_in: int, bias: bool, i: int
) -> Iterator[TensorSpec]:
    """Linear layers that share an input, split by output: their weights side by side, then their biases."""
    normal = Init(kind="normal", std=_base_std(shape))
    for name, out, split in outs:
        dims, placement = (out, fan_in), split
        if shape.traits.conv1d:
            dims, placement = (fan_in, out), Shard(dim=1, parts=split.parts, packs=split.packs)
        yield _tensor(shape, f"{parent}.{name}", "weight", dims, placement, normal, i)
    if bias:
        for name, out, split in outs:
            yield _tensor(shape, f"{parent}.{name}", "bias", (out,), split, Init(kind="zeros"), i)


def _row(shape: ModelShape, module: str, fan_in: int, out: int, bias: bool, i: int) -> Iterator[TensorSpec]:
    """A linear layer that writes to the residual stream, split by input."""
    normal = Init(kind="normal", std=_base_std(shape) / (2 * shape.layers) ** 0.5)
    dims, split = ((fan_in, out), Shard(dim=0)) if shape.traits.conv1d else ((out, fan_in), Shard(dim=1))
    yield _tensor(shape, module, "weight", dims, split, normal, i)
    if bias:
        yield _tensor(shape, module, "bias", (out,), REPLICATE, Init(kind="zeros"), i)


def _tensor(
    shape: ModelShape,
    module: str,
    kind: str,
    dims: tuple[int, ...],
    placement: Placement,
    init: Init,
    i: int | None = None,
    tied_to: str | None = None,
) -> TensorSpec:
    return TensorSpec(
        name=f"{shape.traits.names[module].format(i=i)}.{kind}",
        local=f"{module.split('.', 1)[1]}.{kind}",
        shape=dims,
        placement=placement,
        decay=len(dims) > 1,
        init=init,
        tied_to=tied_to,
    )


def _block_flops(shape: ModelShape) -> int:
    matrices = sum(_numel(t.shape) for t in _block_tensors(shape, 0) if len(t.shape) > 1)
    window = min(shape.sliding_window or shape.max_seq, shape.max_seq)
    # Token t (from 0) sees min(t + 1, window) keys; the sum over a sequence, scores and values, 2 FLOPs each.
    keys = window * (window + 1) // 2 + (shape.max_seq - window) * window
    attention = 4 * shape.heads * shape.head_dim * keys // shape.max_seq
    return 2 * matrices + attention


def _numel(dims: tuple[int, ...]) -> int:
    return math.prod(dims)
