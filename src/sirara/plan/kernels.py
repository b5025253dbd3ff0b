"""What one device does: matmuls in tiles and waves, attention, what moves through memory, what the host launches.

matmul      tiles of the output are dealt to the device's units in waves; a last wave that is not full costs a whole
            one, and each wave costs its first loads and last stores; or its operands' way through memory, if longer
attention   plain: scores go to memory and back.  flash: they stay on the chip
moved       norms, residual sums, rotations, activations, casts: bytes over the memory's rate
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.plan import constants as c
from sirara.plan.constants import Constants
from sirara.plan.hardware import DTYPES, Table
from sirara.plan.points import Attention, Kind, Launch, Loss, Points

Floats = NDArray[np.float64]

# Rows and columns of the output that one unit computes at a time, and the share of the rate that such a tile reaches.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.65))
_BACKWARD_HOST = 1.7
"""Host time of a block's backward over its forward's: gradient functions and twice the matmuls."""
_FLASH_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does per second, [n]."""

    matmul: Floats
    plain: Floats
    """16-bit matmuls, where attention and the router are computed."""
    grouped: Floats
    """Factor of grouped matmuls."""
    scalar: Floats
    """Matmuls whose rows do not meet the alignment of matrix units."""
    flash: Floats
    hbm: Floats
    units: Floats
    up: Floats
    out: Floats
    host: Floats
    domain: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Seconds [n] of one block and microbatch, forward and backward, by what they are spent on."""

    matmul: tuple[Floats, Floats]
    attention: tuple[Floats, Floats]
    moved: tuple[Floats, Floats]
    host: tuple[Floats, Floats]
    weights: Floats
    """The part of backward that makes weight gradients."""
    last: Floats
    """The forward of its last matmul, whose result nothing in the block reads."""

    def work(self, way: int) -> Floats:
        return self.matmul[way] + self.attention[way] + self.moved[way]


def rates(p: Points, hw: Table, k: Constants) -> Rates:
    factor = k.factors(hw.kin)
    at = p.accelerator
    peak = hw.peak[at, p.dtype] * hw.share[at, p.dtype]
    bf16 = DTYPES.index("bf16")
    low = DTYPES.index("fp32")
    out = np.where(p.out_bytes_per_s > 0, p.out_bytes_per_s, hw.out_bytes_per_s[at])
    share = hw.attention[at, np.where(p.attention == Attention.TUNED, 1, 0)]
    f = factor[at, 0] * k.matmul
    low_f = factor[at, 1] * k.matmul
    return Rates(
        matmul=peak * np.where(p.dtype >= DTYPES.index("fp8"), low_f, f),
        plain=hw.peak[at, bf16] * hw.share[at, bf16] * f,
        grouped=hw.grouped[at] * k.grouped,
        scalar=hw.peak[at, low] * hw.share[at, low] * f,
        flash=hw.peak[at, bf16] * share * k.attention,
        hbm=hw.hbm_bytes_per_s[at],
        units=hw.units[at],
        up=hw.up_bus_bytes_per_s[at],
        out=out,
        host=hw.host_bytes_per_s[at],
        domain=np.maximum(hw.domain[at], p.per_node),
    )


def matmul(
    r: Rates, k: Constants, m: Floats, n: Floats, depth: Floats, *, batch: Floats | float = 1.0,
    rate: Floats | None = None, element: Floats | float = 2.0, out: float = 2.0,
) -> Floats:  # fmt: skip
    """Seconds of `batch` products [m, depth] x [depth, n]; 0 where one of them is empty."""
    rate = r.matmul if rate is None else rate
    best = np.zeros(np.broadcast(m, n, depth).shape)
    for rows, columns, share in _TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        waves = np.ceil(tiles / r.units)
        filled = m * n * batch / np.maximum(1.0, waves * r.units * (rows * columns))
        np.maximum(best, share * filled, out=best)
    best = np.minimum(1.0, np.maximum(best, 1e-3)) ** k.quantised
    flops = 2 * m * n * depth * batch
    # The first loads and the last stores of a tile cost as much as this many more of its inner dimension.
    extra = c.WAVE_S * rate / r.units / (2 * 256 * 128)
    compute = flops / (rate * best) * ((depth + extra) / np.maximum(depth, 1.0))
    moved = (element * (m * depth + depth * n) + out * m * n) * batch / r.hbm
    return np.where(flops > 0, np.maximum(compute, moved) + c.KERNEL_S, 0.0)


def _linear(
    p: Points, r: Rates, k: Constants, tokens: Floats, columns: Floats, depth: Floats, *,
    batch: Floats | float = 1.0, scale: Floats | float = 1.0,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """(forward, gradient of the input, gradient of the weight) of a linear layer; `scale`: share of the rate."""
    rate = r.matmul * scale
    wide = np.where(p.dtype >= DTYPES.index("fp8"), 1.0, 2.0)
    forward = matmul(r, k, tokens, columns, depth, batch=batch, rate=rate, element=wide)
    back = matmul(r, k, tokens, depth, columns, batch=batch, rate=rate, element=wide)
    # Weight gradients are added to fp32 sums, which are read and written.
    weight = matmul(r, k, depth, columns, tokens, batch=batch, rate=rate, element=wide, out=8.0)
    return forward, back, np.where(p.lora > 0, 0.0, weight)


def _attention_linears(p: Points, r: Rates, k: Constants) -> tuple[Floats, Floats, Floats]:
    t, h = p.tokens, p.hidden
    width, kv = p.heads * p.head_dim, p.kv_heads * p.head_dim
    kv_here = np.maximum(p.kv_heads / p.tp, 1.0) * p.head_dim
    out = _linear(p, r, k, t, h, width / p.tp)
    plain = _linear(p, r, k, t, width / p.tp + 2 * np.where(p.kv_heads > 0, kv_here, kv / p.tp), h)
    if not (p.kv_rank > 0).any():
        return plain[0] + out[0], plain[1] + out[1], plain[2] + out[2]
    key = p.heads * (p.head_dim + p.rope_dim) / p.tp
    down = _linear(p, r, k, t, p.q_rank + p.kv_rank + p.rope_dim, h)
    up_q = _linear(p, r, k, t, key, np.where(p.q_rank > 0, p.q_rank, h))
    up_kv = _linear(p, r, k, t, 2 * width / p.tp, p.kv_rank)
    latent = p.kv_rank > 0
    found = [
        np.where(latent, a + b + d, e) + o
        for a, b, d, e, o in zip(down, up_q, up_kv, plain, out, strict=True)
    ]
    return found[0], found[1], found[2]


def _scores(p: Points, r: Rates, k: Constants) -> tuple[Floats, Floats]:
    """(forward, backward) of scores, softmax and their product with the values."""
    here = p.micro_batch * p.heads / p.tp
    rows = p.seq / p.cp
    seen = np.where(
        p.window > 0,
        p.window_share * np.minimum(p.window, p.seq / 2) + (1 - p.window_share) * p.seq / 2,
        p.seq / 2,
    )
    value = p.head_dim
    key = p.head_dim + p.rope_dim * (p.kv_rank > 0)
    # A tile of queries meets whole tiles of keys, so the diagonal costs half a tile more than half of the square.
    flops = 2 * here * rows * (seen + 64) * (key + value)
    # Exponentials take as long whatever the head's width.
    narrow = 1.25 * value / (value + 32)
    flash = flops / (r.flash * np.minimum(1.15, narrow))
    aligned = np.where(p.head_dim % 8 == 0, r.plain, r.scalar)
    one = matmul(r, k, rows, p.seq, p.head_dim, batch=here, rate=aligned)
    two = matmul(r, k, rows, p.head_dim, p.seq, batch=here, rate=aligned)
    elements = here * rows * p.seq
    moved = elements / r.hbm
    plain_f = one + two + (4 + 5 * p.dropout) * moved
    plain_b = 2 * (one + two) + (6 + 5 * p.dropout) * moved
    on_chip = p.attention > 0
    return np.where(on_chip, flash, plain_f), np.where(on_chip, _FLASH_BACKWARD * flash, plain_b)


def _moved(p: Points, r: Rates, k: Constants, ffn: Floats, *, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of norms, residual sums, rotations, activations and casts."""
    serial = p.tokens / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    ag, kg = p.heads * p.head_dim, p.kv_heads * p.head_dim
    h = p.hidden
    around = serial * h * (8 + 12 + 2 * p.dropout)
    # Rotated queries and keys; without flash, heads that are put side by side again.
    turned = np.where((p.learned > 0) | (p.gated == 0), 0.0, 4 * (ag + kg))
    heads = p.tokens / p.tp * (turned + np.where(p.attention == Attention.PLAIN, 4 * ag, 0.0))
    active = tokens / p.tp * ffn * (4 + 2 * p.gated)
    low = p.dtype >= DTYPES.index("fp8")
    cast = low * (4 * (2 * h * serial + (ag / p.tp) * p.tokens) + 4 * tokens * ffn / p.tp)
    # Adapters beside the four linear layers: dropout of the input, the sum with the output; graphs have them fused.
    adapters = (
        p.lora
        * (p.launch != Launch.GRAPHS)
        * (serial * 8 * h + p.tokens / p.tp * (10 * ag + 12 * kg + (10 + 6 * p.gated) * ffn))
    )
    # Hand-fused kernels move what they must and some more; one operation after the other, twice that excess.
    by_hand = np.isin(p.kind, (Kind.MEGATRON, Kind.MEGATRON_2021, Kind.DEEPSPEED, Kind.FSDP2_TE))
    excess = np.where(by_hand, k.traffic**0.5, k.traffic)
    forward = (around + heads + active + cast + adapters) * excess / r.hbm
    return forward, 1.5 * forward


def _host(p: Points, k: Constants, *, kernels: float) -> tuple[Floats, Floats]:
    share = np.select([p.launch == Launch.EAGER, p.launch == Launch.FUSED], [1.0, 0.6], 0.15)
    forward = k.host_s * share * kernels
    return forward, _BACKWARD_HOST * forward


def dense_block(p: Points, r: Rates, k: Constants) -> Block:
    t, h = p.tokens, p.hidden
    ffn = np.where(p.dense_ffn > 0, p.dense_ffn, p.ffn)
    att = _attention_linears(p, r, k)
    up = _linear(p, r, k, t, (1 + p.gated) * ffn / p.tp, h)
    down = _linear(p, r, k, t, h, ffn / p.tp)
    weights = att[2] + up[2] + down[2]
    return Block(
        matmul=(att[0] + up[0] + down[0], att[1] + up[1] + down[1] + weights),
        attention=_scores(p, r, k),
        moved=_moved(p, r, k, ffn, tokens=t),
        host=_host(p, k, kernels=1.0),
        weights=weights,
        last=down[0],
    )


def mixture_block(p: Points, r: Rates, k: Constants) -> Block | None:
    """A block of experts; None where no configuration has any."""
    if not (p.experts > 0).any():
        return None
    t, h, f = p.tokens, p.hidden, p.expert_ffn
    att = _attention_linears(p, r, k)
    local = np.maximum(1.0, p.experts / p.ep)
    # Experts are balanced; with tp their tokens are those that this rank keeps between tensor-parallel layers.
    routed = t * p.topk / p.tp
    each = routed / local
    up = _linear(p, r, k, each, (1 + p.gated) * f, h, batch=local, scale=r.grouped)
    down = _linear(p, r, k, each, h, f, batch=local, scale=r.grouped)
    shared = p.shared_ffn
    up_s = _linear(p, r, k, t, (1 + p.gated) * shared / p.tp, h)
    down_s = _linear(p, r, k, t, h, shared / p.tp)
    weights = att[2] + up[2] + down[2] + up_s[2] + down_s[2]
    parts = [att[i] + up[i] + down[i] + up_s[i] + down_s[i] for i in (0, 1)]
    forward, backward = _moved(p, r, k, shared + p.topk * f, tokens=t)
    # Tokens are copied to where their experts read them, and back; the router writes scores in fp32.
    permuted = routed * h * 2 * 4 + t * p.experts * 12 / p.tp
    # An expert's bias is added per expert: split, add, join, for both of its layers.
    permuted = permuted + p.bias * routed * (8 * (1 + p.gated) * f + 8 * h)
    permuted = permuted * k.traffic / r.hbm
    return Block(
        matmul=(parts[0], parts[1] + weights),
        attention=_scores(p, r, k),
        moved=(forward + permuted, backward + 1.2 * permuted),
        host=_host(p, k, kernels=8.0),
        weights=weights,
        last=np.zeros(len(p)),
    )


def head(p: Points, r: Rates, k: Constants) -> tuple[Floats, Floats]:
    """(forward, backward) of head and loss on the last stage."""
    linear = _linear(p, r, k, p.tokens, p.vocab / p.tp, p.hidden)
    logits = p.tokens * p.vocab / p.tp
    per = np.select([p.loss == Loss.TORCH, p.loss == Loss.PARALLEL], [34.0, 24.0], 8.0)
    moved = per * logits * k.traffic / r.hbm
    return linear[0] + moved / 2, linear[1] + linear[2] + moved / 2
