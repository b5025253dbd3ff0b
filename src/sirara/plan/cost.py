"""How long a step takes: closed forms over columns of configurations.

    matmul         tiles in waves over the device's units, or its memory's rate, whichever is slower
    attention      scores written to memory, or kept on the chip
    memory-bound   what element-wise operations move
    launch         a block takes at least the time in which the host launches it
    tp, cp, ep     collectives per block: latency + bytes / bandwidth(bytes), over links or network by group
    stage          the slowest stage sets the pace; filling and draining add the other stages once
    dp             gradients and parameters, per step or (ZeRO-3) per microbatch, less what runs beside computation

Every time is split into what is exposed and what is hidden behind computation.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sirara.plan import constants as c
from sirara.plan.constants import Constants
from sirara.plan.hardware import DTYPES, Table
from sirara.plan.points import (
    Attention,
    Kind,
    Launch,
    Loss,
    Points,
    Recompute,
    Schedule,
    Sizes,
    Stages,
    sizes,
    stages,
)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Rows and columns of the output that one unit computes at a time, and the share of the rate that such a tile reaches.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.65))
_BACKWARD_HOST = 1.7
"""Host time of a block's backward over its forward's: gradient functions and twice the matmuls."""
_FLASH_BACKWARD = 2.5
_FULL = int(Recompute.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds [n] of one optimizer step on the critical path.  `hidden_*` run beside computation and add nothing."""

    matmul: Floats
    attention: Floats
    memory_bound: Floats
    launch: Floats
    recompute: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    pp: Floats
    bubble: Floats
    dp: Floats
    optimizer: Floats
    offload: Floats
    slowed: Floats
    """Computation slowed by traffic beside it, and the slowest of many nodes."""
    hidden_tp: Floats
    hidden_cp: Floats
    hidden_ep: Floats
    hidden_pp: Floats
    hidden_dp: Floats
    step_s: Floats
    forward_s: Floats
    """One microbatch's forward on the slowest stage."""
    backward_s: Floats

    def exposed(self) -> dict[str, Floats]:
        """The terms that add up to `step_s`."""
        skip = {"step_s", "forward_s", "backward_s"}
        names = [f.name for f in fields(self) if f.name not in skip and not f.name.startswith("hidden_")]
        return {n: getattr(self, n) for n in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
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
    domain: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
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


def step_time(p: Points, hardware: Table, constants: Constants) -> Times:
    """The step of each configuration, split into its terms."""
    r = _rates(p, hardware, constants)
    s, z = stages(p), sizes(p)
    plain, mixed = _dense_block(p, r, constants), _mixture_block(p, r, constants)
    ends = _head(p, r, constants)
    return _step(p, r, s, z, plain, mixed, ends, constants)


def _rates(p: Points, hw: Table, k: Constants) -> _Rates:
    factor = k.factors(hw.names)
    at = p.accelerator
    peak = hw.peak[at, p.dtype] * hw.share[at, p.dtype]
    bf16 = DTYPES.index("bf16")
    low = DTYPES.index("fp32")
    out = np.where(p.out_bytes_per_s > 0, p.out_bytes_per_s, hw.out_bytes_per_s[at])
    share = hw.attention[at, np.where(p.attention == Attention.TUNED, 1, 0)]
    f = factor[at, 0] * k.matmul
    low_f = factor[at, 1] * k.matmul
    return _Rates(
        matmul=peak * np.where(p.dtype >= DTYPES.index("fp8"), low_f, f),
        plain=hw.peak[at, bf16] * hw.share[at, bf16] * f,
        grouped=hw.grouped[at] * k.grouped,
        scalar=hw.peak[at, low] * hw.share[at, low] * f,
        flash=hw.peak[at, bf16] * share * k.attention * np.where(p.attention8 > 0, 1.5, 1.0),
        hbm=hw.hbm_bytes_per_s[at],
        units=hw.units[at],
        up=hw.up_bus_bytes_per_s[at],
        out=out,
        domain=np.maximum(hw.domain[at], p.per_node),
    )


def _matmul(
    r: _Rates, k: Constants, m: Floats, n: Floats, depth: Floats, *, batch: Floats | float = 1.0,
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
    p: Points, r: _Rates, k: Constants, tokens: Floats, columns: Floats, depth: Floats, *,
    batch: Floats | float = 1.0, scale: Floats | float = 1.0,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """(forward, gradient of the input, gradient of the weight) of a linear layer; `scale`: share of the rate."""
    rate = r.matmul * scale
    wide = np.where(p.dtype >= DTYPES.index("fp8"), 1.0, 2.0)
    forward = _matmul(r, k, tokens, columns, depth, batch=batch, rate=rate, element=wide)
    back = _matmul(r, k, tokens, depth, columns, batch=batch, rate=rate, element=wide)
    # Weight gradients are added to fp32 sums, which are read and written.
    weight = _matmul(r, k, depth, columns, tokens, batch=batch, rate=rate, element=wide, out=8.0)
    return forward, back, np.where(p.lora > 0, 0.0, weight)


def _attention_linears(p: Points, r: _Rates, k: Constants) -> tuple[Floats, Floats, Floats]:
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


def _scores(p: Points, r: _Rates, k: Constants) -> tuple[Floats, Floats]:
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
    one = _matmul(r, k, rows, p.seq, p.head_dim, batch=here, rate=aligned)
    two = _matmul(r, k, rows, p.head_dim, p.seq, batch=here, rate=aligned)
    elements = here * rows * p.seq
    moved = elements / r.hbm
    plain_f = one + two + (4 + 5 * p.dropout) * moved
    plain_b = 2 * (one + two) + (6 + 5 * p.dropout) * moved
    on_chip = p.attention > 0
    return np.where(on_chip, flash, plain_f), np.where(on_chip, _FLASH_BACKWARD * flash, plain_b)


def _moved(p: Points, r: _Rates, k: Constants, ffn: Floats, *, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of norms, residual sums, rotations, activations and casts."""
    serial = p.tokens / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    ag, kg = p.heads * p.head_dim, p.kv_heads * p.head_dim
    h = p.hidden
    around = serial * h * (8 + 12 + 2 * p.dropout)
    # Rotated queries and keys; without flash, heads that are put side by side again.
    turned = np.where((p.learned > 0) | (p.gated == 0), 0.0, 4 * (ag + kg))
    heads = p.tokens / p.tp * (turned + np.where(p.attention == Attention.PLAIN, 4 * ag, 0.0))
    apart = np.where(p.fused_experts > 0, 0.4, 1.0)
    active = tokens / p.tp * ffn * (4 + 2 * p.gated) * apart
    low = p.dtype >= DTYPES.index("fp8")
    cast = low * (4 * (2 * h * serial + (ag / p.tp) * p.tokens) + 4 * tokens * ffn / p.tp * apart)
    # Adapters beside the four linear layers: dropout of the input, the sum with the output; graphs have them fused.
    adapters = (
        p.lora
        * (p.launch != Launch.GRAPHS)
        * (serial * 8 * h + p.tokens / p.tp * (10 * ag + 12 * kg + (10 + 6 * p.gated) * ffn))
    )
    forward = (around + heads + active + cast + adapters) * k.traffic / r.hbm
    return forward, 1.5 * forward


def _host(p: Points, k: Constants, *, kernels: float) -> tuple[Floats, Floats]:
    share = np.select([p.launch == Launch.EAGER, p.launch == Launch.FUSED], [1.0, 0.6], 0.15)
    forward = k.host_s * share * kernels
    return forward, _BACKWARD_HOST * forward


def _dense_block(p: Points, r: _Rates, k: Constants) -> _Block:
    t, h = p.tokens, p.hidden
    ffn = np.where(p.dense_ffn > 0, p.dense_ffn, p.ffn)
    att = _attention_linears(p, r, k)
    up = _linear(p, r, k, t, (1 + p.gated) * ffn / p.tp, h)
    down = _linear(p, r, k, t, h, ffn / p.tp)
    weights = att[2] + up[2] + down[2]
    return _Block(
        matmul=(att[0] + up[0] + down[0], att[1] + up[1] + down[1] + weights),
        attention=_scores(p, r, k),
        moved=_moved(p, r, k, ffn, tokens=t),
        host=_host(p, k, kernels=1.0),
        weights=weights,
        last=down[0],
    )


def _mixture_block(p: Points, r: _Rates, k: Constants) -> _Block | None:
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
    return _Block(
        matmul=(parts[0], parts[1] + weights),
        attention=_scores(p, r, k),
        moved=(forward + permuted, backward + 1.2 * permuted),
        host=_host(p, k, kernels=7.0),
        weights=weights,
        last=np.zeros(len(p)),
    )


def _head(p: Points, r: _Rates, k: Constants) -> tuple[Floats, Floats]:
    """(forward, backward) of head and loss on the last stage."""
    linear = _linear(p, r, k, p.tokens, p.vocab / p.tp, p.hidden)
    logits = p.tokens * p.vocab / p.tp
    per = np.select([p.loss == Loss.TORCH, p.loss == Loss.PARALLEL], [34.0, 24.0], 8.0)
    moved = per * logits * k.traffic / r.hbm
    return linear[0] + moved / 2, linear[1] + linear[2] + moved / 2


# Collectives


def _bandwidth(r: _Rates, k: Constants, ranks: Floats, per_domain: Floats, size: Floats) -> Floats:
    """Bytes per second of a ring over `ranks`, `per_domain` of them on one set of links, for messages of `size`."""
    inside = r.up * size / (size + c.UP_HALF_BYTES * np.minimum(ranks, per_domain))
    # Each of its members in a domain brings one network port.
    ports = np.minimum(r.up, per_domain * r.out * k.network)
    # Trees and rings of nodes take over in larger groups.
    across = ports * size / (size + c.OUT_HALF_BYTES * np.minimum(ranks, 32.0))
    return np.where(ranks > per_domain, np.minimum(inside, across), inside)


def _gather_s(r: _Rates, k: Constants, size: Floats, ranks: Floats, per_domain: Floats) -> Floats:
    """An all-gather or reduce-scatter whose whole tensor has `size` bytes."""
    steps = c.UP_LATENCY_S * np.log2(np.maximum(1.0, np.minimum(ranks, per_domain)))
    nodes = np.maximum(1.0, ranks / per_domain)
    steps = steps + c.OUT_LATENCY_S * np.log2(nodes)
    rate = _bandwidth(r, k, ranks, per_domain, np.maximum(size, 1.0))
    return np.where(ranks > 1, steps + (ranks - 1) / ranks * size / rate, 0.0)


def _per_domain(domain: Floats, stride: Floats, ranks: Floats) -> Floats:
    """How many members of a group whose neighbours are `stride` ranks apart share a domain."""
    return np.clip(np.floor(domain / stride), 1.0, ranks)


def _tp_s(p: Points, r: _Rates, k: Constants) -> Floats:
    """Tensor-parallel traffic of one block's forward (and, once more, of its backward): two all-reduces."""
    size = 2 * p.tokens * p.hidden
    within = _per_domain(r.domain, np.ones(len(p)), p.tp)
    waits = k.sync_s * (p.tp - 1) * np.where(p.launch == Launch.GRAPHS, 0.2, 1.0)
    return 4 * _gather_s(r, k, size, p.tp, within) + 2 * waits


def _cp_s(p: Points, r: _Rates, k: Constants) -> Floats:
    """Keys and values of the other context-parallel ranks, forward; backward takes twice that."""
    size = 4 * p.micro_batch * p.seq * p.kv_heads * p.head_dim / p.tp
    within = _per_domain(r.domain, p.tp, p.cp)
    return _gather_s(r, k, size, p.cp, within)


def _ep_s(p: Points, r: _Rates, k: Constants) -> Floats:
    """Dispatch and combine of one block's forward (and, once more, of its backward)."""
    within = _per_domain(r.domain, np.ones(len(p)), p.ep)
    nodes = np.maximum(1.0, p.ep / within)
    tokens = p.tokens / p.tp
    # A token for several experts of one rank is sent there once, and crosses the network once for each node.
    ranks = p.ep * (1 - (1 - 1 / p.ep) ** p.topk)
    size = tokens * np.where(p.dedup > 0, np.minimum(ranks, p.topk), p.topk) * p.hidden * 2
    met = nodes * (1 - (1 - 1 / nodes) ** p.topk)
    met = np.where(p.node_limit > 0, np.minimum(met, p.node_limit), met)
    copies = np.where(p.dedup > 0, np.minimum(met, p.topk), p.topk)
    away = tokens * copies * p.hidden * 2 * (nodes - 1) / nodes
    links = size * (within - 1) / np.maximum(within, 1) / (r.up * k.all_to_all)
    network = away / (r.out * k.all_to_all)
    latency = c.UP_LATENCY_S * 2 + c.OUT_LATENCY_S * np.log2(nodes)
    return np.where((p.ep > 1) & (p.experts > 0), 2 * (np.maximum(links, network) + latency), 0.0)


def _pp_s(p: Points, r: _Rates, k: Constants) -> Floats:
    """One boundary tensor to the next stage."""
    cut = (p.sequence_parallel > 0) | (p.scatter_gather > 0)
    size = 2 * p.tokens * p.hidden / np.where(cut, p.tp, 1.0)
    inside = p.tp * p.cp * p.dp * p.pp <= r.domain
    rate = np.where(inside, r.up * size / (size + 2 * c.UP_HALF_BYTES), r.out * k.network)
    again = np.where(cut & (p.tp > 1), 2 * p.tokens * p.hidden / r.up, 0.0)
    return np.where(p.pp > 1, c.OUT_LATENCY_S + size / rate + again, 0.0)


# The step


def _smooth_max(a: Floats, b: Floats) -> Floats:
    """The larger of two times, a little more where they are equal: neither overlaps the other perfectly."""
    return (a**4 + b**4) ** 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paced:
    """A block of one kind as a stage meets it: seconds [n] forward, recomputed, backward, and traffic."""

    forward: Floats
    again: Floats
    backward: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    hidden_tp: Floats
    hidden_cp: Floats
    hidden_ep: Floats

    @property
    def total(self) -> Floats:
        return self.forward + self.again + self.backward + self.tp + self.cp + self.ep


def _paced(p: Points, r: _Rates, k: Constants, b: _Block, *, mixture: bool) -> _Paced:
    full = (p.recompute & _FULL) > 0
    passes = 2 + full * p.recompute_share
    tp_pass = _tp_s(p, r, k)
    ep_pass = _ep_s(p, r, k) if mixture else np.zeros(len(p))
    cp = _cp_s(p, r, k) * (1 + passes)
    hidden_tp = tp_pass * passes * k.tp_hidden * p.tp_overlap
    # A ring passes keys on while scores of the last ones are computed.
    hidden_cp = np.minimum(cp, 0.8 * (b.attention[0] + b.attention[1]))
    hidden_ep = np.minimum(ep_pass * 0.8, 0.3 * (b.work(0) + b.work(1))) * passes * p.ep_overlap
    tp, ep = tp_pass * passes, ep_pass * passes
    # The device waits for the host or the host for the device, whichever has more to do; traffic is the device's.
    sent = (tp - hidden_tp + ep - hidden_ep) / passes
    forward = _smooth_max(b.work(0) + sent, b.host[0]) - sent
    backward = _smooth_max(b.work(1) + sent, b.host[1]) - sent
    # torch's non-reentrant checkpoint stops when the last saved tensor is there: the block's last matmul is not redone.
    early = ((p.kind == Kind.FSDP) | (p.kind == Kind.FSDP2)) * b.last
    again = p.recompute_share * np.where(full, forward - early, _partly(p, b))
    return _Paced(
        forward=forward, again=again, backward=backward, tp=tp - hidden_tp, cp=cp - hidden_cp, ep=ep - hidden_ep,
        hidden_tp=hidden_tp, hidden_cp=hidden_cp, hidden_ep=hidden_ep,
    )  # fmt: skip


def _partly(p: Points, b: _Block) -> Floats:
    """What partial recompute does again, by module."""

    def has(flag: Recompute) -> Bools:
        return (p.recompute & int(flag)) > 0

    core = has(Recompute.CORE) * b.attention[0]
    light = has(Recompute.NORM) * 0.3 * b.moved[0] + has(Recompute.ACT) * 0.3 * b.moved[0]
    mlp = has(Recompute.MLP) * 0.6 * b.matmul[0]
    up = has(Recompute.UP) * np.where(p.kv_rank > 0, 0.12 * b.matmul[0], 0.0)
    ops = has(Recompute.OPS) * (0.45 * b.matmul[0] + b.moved[0])
    return core + light + mlp + up + ops


def _step(
    p: Points, r: _Rates, s: Stages, z: Sizes, plain: _Block, mixed: _Block | None, ends: tuple[Floats, Floats],
    k: Constants,
) -> Times:  # fmt: skip
    m, v, pp = p.microbatches, p.vpp, p.pp
    a = _paced(p, r, k, plain, mixture=False)
    e = a if mixed is None else _paced(p, r, k, mixed, mixture=True)
    ahead = s.last * p.predict_ahead[:, None]
    n_mixed = s.mixtures + ahead * (p.experts > 0)[:, None]
    n_plain = s.blocks - s.mixtures + ahead * (p.experts <= 0)[:, None]
    heads = s.last * (1 + p.predict_ahead)[:, None]

    def stage(name: str) -> Floats:
        return n_plain * getattr(a, name)[:, None] + n_mixed * getattr(e, name)[:, None]

    shard_s, shard_hidden = _sharded(p, r, z, k, a, e)
    per_stage = stage("total") + heads * (ends[0] + ends[1])[:, None]
    per_stage = per_stage + (n_plain + n_mixed) * shard_s[:, None]
    summed_s = _summed(p, r, s, z)
    per_stage = per_stage + summed_s[:, None]
    per_stage = np.where(s.count > 0, per_stage, 0.0)
    at = per_stage.argmax(axis=1)

    def pick(x: Floats) -> Floats:
        return np.take_along_axis(x, at[:, None], axis=1)[:, 0]

    slowest = pick(per_stage)
    others = (per_stage * s.count).sum(axis=1) - slowest
    back_share = np.where(slowest > 0, pick(stage("backward")) / np.maximum(slowest, 1e-12), 0.0)
    bubble = others / v * _filling(p, plain, back_share)
    boundary = _pp_s(p, r, k)
    traffic = np.where(pp > 1, 2 * boundary * v, 0.0)
    hidden_pp = traffic * 0.8 * p.pp_overlap
    pipe = m * (traffic - hidden_pp) + np.where(pp > 1, 2 * (pp - 1) * boundary, 0.0)
    work = pick(stage("forward") + stage("backward")) * m + pick(heads * (ends[0] + ends[1])[:, None]) * m
    dp_s, dp_hidden = _reduced(p, r, s, z, k, per_stage[:, 0])
    dp_s, dp_hidden = dp_s + m * pick(s.blocks) * shard_s, dp_hidden + m * pick(s.blocks) * shard_hidden
    optimizer, offload = _updated(p, r, s, z)
    beside = np.minimum(work, dp_hidden + m * (pick(stage("hidden_tp") + stage("hidden_ep"))))
    terms = m * slowest + bubble + pipe + dp_s - m * pick(s.blocks) * shard_s + optimizer + offload
    nodes = np.maximum(1.0, p.gpus / p.per_node)
    slowed = k.slowed * beside + k.jitter * np.log2(nodes) * terms
    kinds = _by_kind(
        p, plain, mixed, n_plain, n_mixed, heads, ends, pick, pick(stage("forward") + stage("backward"))
    )
    return Times(
        matmul=m * kinds[0],
        attention=m * kinds[1],
        memory_bound=m * (kinds[2] + summed_s),
        launch=m * kinds[3],
        recompute=m * pick(stage("again")),
        tp=m * pick(stage("tp")),
        cp=m * pick(stage("cp")),
        ep=m * pick(stage("ep")),
        pp=pipe,
        bubble=bubble,
        dp=dp_s,
        optimizer=optimizer,
        offload=offload,
        slowed=slowed,
        hidden_tp=m * pick(stage("hidden_tp")),
        hidden_cp=m * pick(stage("hidden_cp")),
        hidden_ep=m * pick(stage("hidden_ep")),
        hidden_pp=m * hidden_pp,
        hidden_dp=dp_hidden,
        step_s=terms + slowed,
        forward_s=pick(stage("forward") + heads * ends[0][:, None]),
        backward_s=pick(stage("backward") + stage("again") + heads * ends[1][:, None]),
    )


def _by_kind(p, plain, mixed, n_plain, n_mixed, heads, ends, pick, work):  # type: ignore[no-untyped-def]
    e = plain if mixed is None else mixed

    def both(name: str) -> Floats:
        a, b = getattr(plain, name), getattr(e, name)
        return pick(n_plain * (a[0] + a[1])[:, None] + n_mixed * (b[0] + b[1])[:, None])

    matmul = both("matmul")
    attention, moved = both("attention"), both("moved")
    launch = work - matmul - attention - moved
    return matmul + pick(heads * (ends[0] + ends[1])[:, None]), attention, moved, launch


def _filling(p: Points, b: _Block, back_share: Floats) -> Floats:
    """Share of a plain pipeline's filling and draining that a schedule leaves: what weight gradients do not fill."""
    weights = b.weights / np.maximum(b.work(0) + b.work(1), 1e-12)
    h1, h2 = np.maximum(0.0, 1 - weights), np.maximum(0.0, 1 - 3 * weights)
    zb = p.schedule
    return np.select(
        [zb == Schedule.ZB_H1, zb == Schedule.ZB_H2, zb == Schedule.ZB_V], [h1, h2, h2 * 0.5], 1.0
    )


def _sharded(p: Points, r: _Rates, z: Sizes, k: Constants, a: _Paced, e: _Paced) -> tuple[Floats, Floats]:
    """(exposed, hidden) seconds per block and microbatch of gathering and reducing a ZeRO-3 block."""
    on = p.zero >= 2
    three = p.zero >= 3
    moe = z.moe > 0
    block = (z.attention + z.norms + np.where(moe, z.shared + z.router, z.dense_mlp)) / p.tp
    within = _per_domain(r.domain, p.tp, p.shards)
    gather = _gather_s(r, k, block * p.gather_bytes, p.shards, within)
    reduce = _gather_s(r, k, block * p.reduce_bytes, p.shards, within)
    experts = z.experts / p.ep
    within_e = _per_domain(r.domain, p.ep, p.expert_shards)
    gather = gather + np.where(moe, _gather_s(r, k, experts * p.gather_bytes, p.expert_shards, within_e), 0.0)
    reduce = reduce + np.where(moe, _gather_s(r, k, experts * p.reduce_bytes, p.expert_shards, within_e), 0.0)
    reduce = reduce * (p.lora == 0)
    forward = np.where(moe, e.forward, a.forward)
    backward = np.where(moe, e.backward + e.again, a.backward + a.again)
    front = three * np.maximum(0.0, gather - forward)
    rear = np.maximum(0.0, three * gather + reduce - backward)
    exposed = on * (front + rear)
    return exposed, on * (2 * three * gather + reduce) - exposed


def _reduced(
    p: Points, r: _Rates, s: Stages, z: Sizes, k: Constants, beside: Floats
) -> tuple[Floats, Floats]:
    """(exposed, hidden) seconds of a step's gradient reduction and parameter gathering, ZeRO 0 to 2.

    Where they overlap, gradients go beside the last backward and parameters beside the next forward: `beside` seconds.
    """
    blocks = s.blocks.max(axis=1)
    mixtures = s.mixtures.max(axis=1)
    dense = (
        blocks * (z.attention + z.norms)
        + (blocks - mixtures) * z.dense_mlp
        + mixtures * z.shared
        + np.where(p.pp > 1, z.embedding, z.embedding + z.head)
    ) / p.tp
    expert = mixtures * z.experts / p.ep
    within = _per_domain(r.domain, p.tp, p.shards)
    within_e = _per_domain(r.domain, p.ep, p.expert_shards)
    trained = np.where(p.lora > 0, 0.01, 1.0)

    def both(per: Floats) -> Floats:
        return _gather_s(r, k, dense * per * trained, p.shards, within) + _gather_s(
            r, k, expert * per * trained, p.expert_shards, within_e
        )

    reduce = both(p.reduce_bytes)
    # DeepSpeed's optimizers of that time all-reduced whole gradients before they cut them.
    reduce = reduce * np.where((p.kind == Kind.DEEPSPEED) & (p.zero >= 1), 2.0, 1.0)
    back = np.where(p.zero >= 1, both(p.gather_bytes), reduce)
    per_step = (p.zero < 2) | ((p.zero < 3) & (p.microbatches <= 1) & (p.dp_overlap > 0))
    total = np.where(p.zero < 2, reduce + back, np.where(p.zero < 3, back, 0.0))
    # A tied table is on the first and the last stage, whose gradients are added.
    table = p.vocab * p.hidden / p.tp * p.reduce_bytes * trained
    near = np.where(p.gpus <= r.domain, 2.0, 1.0)
    tie = np.where((p.tied > 0) & (p.pp > 1), 2 * _gather_s(r, k, table, 2.0 * np.ones(len(p)), near), 0.0)
    hidden = np.where(per_step, np.minimum(total * 0.9, beside * p.pp) * p.dp_overlap, 0.0)
    return total - hidden + tie, hidden


def _summed(p: Points, r: _Rates, s: Stages, z: Sizes) -> Floats:
    """Seconds per microbatch of adding a microbatch's gradients to the sum, where the matmul does not do it."""
    apart = (p.kind == Kind.MEGATRON_2021) | (p.kind == Kind.DEEPSPEED)
    # The sum is read and written, the new gradient read.
    per = np.where(p.grad_bytes > 4, 10.0, 6.0) * (p.microbatches > 1) * apart
    return per * s.blocks.max(axis=1) * (z.attention + z.dense_mlp) / p.tp / r.hbm


def _updated(p: Points, r: _Rates, s: Stages, z: Sizes) -> tuple[Floats, Floats]:
    """(seconds of the update on the device, seconds of host links and host updates)."""
    blocks, mixtures = s.blocks.max(axis=1), s.mixtures.max(axis=1)
    dense = (
        blocks * (z.attention + z.norms)
        + (blocks - mixtures) * z.dense_mlp
        + mixtures * z.shared
        + z.embedding
        + np.where(p.pp > 1, 0.0, z.head)
    ) / p.tp
    expert = mixtures * z.experts / p.ep
    cut = p.zero >= 1
    held = dense / np.where(cut, p.shards, 1.0) + expert / np.where(cut, p.expert_shards, 1.0)
    whole = np.where(p.zero >= 2, held, dense + expert)
    trained = np.where(p.lora > 0, 0.01, 1.0)
    on_host = p.offload_optimizer > 0
    device = (30 * held * ~on_host + 8 * whole) * trained / r.hbm + 2e-3
    share = np.minimum(p.per_node, p.gpus)
    host = np.where(on_host, held * share / c.CPU_ADAM_PER_S + 4 * held / 12e9, 0.0) * trained
    return device, host
