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

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from sirara.plan import constants as c
from sirara.plan.collectives import cp_s, ep_s, gather_s, per_domain, pp_s, tp_s, tp_waits_s
from sirara.plan.constants import Constants
from sirara.plan.hardware import Table
from sirara.plan.kernels import Block, Rates, dense_block, head, mixture_block, rates
from sirara.plan.points import (
    PIECES,
    Kind,
    Points,
    Recompute,
    Schedule,
    Sizes,
    Stages,
    dx_first,
    sizes,
    stages,
)

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

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

    def scaled(self, factor: float) -> "Times":
        """Everything `factor` times as long."""
        if factor == 1.0:
            return self
        return replace(self, **{f.name: getattr(self, f.name) * factor for f in fields(self)})

    def exposed(self) -> dict[str, Floats]:
        """The terms that add up to `step_s`."""
        skip = {"step_s", "forward_s", "backward_s"}
        names = [f.name for f in fields(self) if f.name not in skip and not f.name.startswith("hidden_")]
        return {n: getattr(self, n) for n in names}


def step_time(p: Points, hardware: Table, constants: Constants) -> Times:
    """The step of each configuration, split into its terms."""
    r = rates(p, hardware, constants)
    s, z = stages(p), sizes(p)
    plain, mixed = dense_block(p, r, constants), mixture_block(p, r, constants)
    ends = head(p, r, constants)
    return _step(p, r, s, z, plain, mixed, ends, constants)


def _smooth_max(a: Floats, b: Floats) -> Floats:
    """The larger of two times, a little more where they are equal: neither overlaps the other perfectly."""
    return (a**3 + b**3) ** (1 / 3)


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


def _paced(p: Points, r: Rates, k: Constants, b: Block, *, mixture: bool) -> _Paced:
    full = (p.recompute & _FULL) > 0
    passes = 2 + full * p.recompute_share
    tp_pass = tp_s(p, r, k)
    ep_pass = ep_s(p, r, k) if mixture else np.zeros(len(p))
    cp = cp_s(p, r, k) * (1 + passes)
    hidden_tp = tp_pass * passes * k.tp_hidden * p.tp_overlap
    # A ring passes keys on while scores of the last ones are computed.
    hidden_cp = np.minimum(cp, 0.8 * (b.attention[0] + b.attention[1]))
    hidden_ep = np.minimum(ep_pass * 0.8, 0.3 * (b.work(0) + b.work(1))) * passes * p.ep_overlap
    tp, ep = tp_pass * passes, ep_pass * passes
    # The device waits for the host or the host for the device, whichever has more to do; traffic is the device's.
    sent = (tp - hidden_tp + ep - hidden_ep) / passes
    waits = tp_waits_s(p, k)
    forward = _smooth_max(b.work(0) + sent, b.host[0] + waits) - sent
    backward = _smooth_max(b.work(1) + sent, b.host[1] + waits) - sent
    # torch's non-reentrant checkpoint stops when the last saved tensor is there: the block's last matmul is not redone.
    early = np.isin(p.kind, (Kind.FSDP, Kind.FSDP2, Kind.FSDP2_TE)) * b.last
    again = p.recompute_share * np.where(full, forward - early, _partly(p, b))
    return _Paced(
        forward=forward, again=again, backward=backward, tp=tp - hidden_tp, cp=cp - hidden_cp, ep=ep - hidden_ep,
        hidden_tp=hidden_tp, hidden_cp=hidden_cp, hidden_ep=hidden_ep,
    )  # fmt: skip


def again_s(p: Points, hardware: Table, constants: Constants) -> Floats:
    """Seconds [n, piece] in which a block makes each piece of `PIECES` again, one microbatch."""
    r = rates(p, hardware, constants)
    plain, mixed = dense_block(p, r, constants), mixture_block(p, r, constants)
    block = plain if mixed is None else mixed
    return _each_again(p, block, _paced(p, r, constants, block, mixture=mixed is not None))


def _pieces_again(p: Points, b: Block, paced: _Paced, blocks: Floats) -> Floats:
    """Seconds [n, 3] that a stage's blocks spend on pieces that they make again, one microbatch."""
    if not p.again.any():
        return np.zeros(blocks.shape)
    return blocks * (p.again * _each_again(p, b, paced)[:, None, :]).sum(axis=2)


def _each_again(p: Points, b: Block, paced: _Paced) -> Floats:
    # A whole forward has its traffic; a norm's output is gathered over tp anyway, that of a repeated product once more.
    traffic = (paced.tp + paced.ep) / (2 + ((p.recompute & _FULL) > 0) * p.recompute_share)
    gathered = p.sequence_parallel * paced.tp / 4
    light = 0.15 * b.moved[0]
    seconds = {
        "norm1": light,
        "norm2": light,
        "act": 2 * light,
        "wide": first_products(p) * b.matmul[0] + gathered,
        "attention": b.attention[0] + light,
        "block": paced.forward + traffic,
    }
    return np.stack([np.broadcast_to(seconds[piece], (len(p),)) for piece in PIECES], axis=1)


def first_products(p: Points) -> Floats:
    """Share of a block's matmul FLOPs in the products that the activation function reads."""
    f = np.where(p.experts > 0, p.topk * p.expert_ffn + p.shared_ffn, p.ffn)
    first = (1 + p.gated) * p.hidden * f
    attention = 2 * p.hidden * (p.heads + p.kv_heads) * p.head_dim
    return first / (attention + first + p.hidden * f)


def _partly(p: Points, b: Block) -> Floats:
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
    p: Points, r: Rates, s: Stages, z: Sizes, plain: Block, mixed: Block | None, ends: tuple[Floats, Floats],
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
    blocks = n_plain + n_mixed
    pieces = _pieces_again(p, plain, a, n_plain) + _pieces_again(p, mixed or plain, e, n_mixed)
    per_stage = stage("total") + pieces + heads * (ends[0] + ends[1])[:, None]
    per_stage = per_stage + blocks * shard_s[:, None]
    summed_s = _summed(p, r, s, z)
    per_stage = per_stage + summed_s[:, None]
    per_stage = np.where(s.count > 0, per_stage, 0.0)
    boundary = pp_s(p, r, k)
    # A stage sends to and receives from a neighbour at once; the ends of a plain pipeline have only one.
    sides = np.where(v[:, None] > 1, 2.0, 2.0 - s.first - s.last)
    sent = np.where(pp > 1, boundary * v, 0.0)[:, None] * np.maximum(sides, 0.0)
    sent_hidden = sent * 0.8 * p.pp_overlap[:, None]
    at = np.where(s.count > 0, per_stage + sent - sent_hidden, 0.0).argmax(axis=1)

    def pick(x: Floats) -> Floats:
        return np.take_along_axis(x, at[:, None], axis=1)[:, 0]

    slowest = pick(per_stage)
    others = (per_stage * s.count).sum(axis=1) - slowest
    bubble = others / v * _filling(p, plain)
    pipe = m * pick(sent - sent_hidden) + np.where(pp > 1, 2 * (pp - 1) * boundary, 0.0)
    work = pick(stage("forward") + stage("backward")) * m + pick(heads * (ends[0] + ends[1])[:, None]) * m
    dp_s, dp_hidden = _reduced(p, r, s, z, k, per_stage[:, 0])
    dp_s, dp_hidden = dp_s + m * pick(blocks) * shard_s, dp_hidden + m * pick(blocks) * shard_hidden
    optimizer, offload = _updated(p, r, s, z)
    beside = np.minimum(work, dp_hidden + m * (pick(stage("hidden_tp") + stage("hidden_ep"))))
    terms = m * slowest + bubble + pipe + dp_s - m * pick(blocks) * shard_s + optimizer + offload
    nodes = np.maximum(1.0, p.gpus / p.per_node)
    # The slowest node sets the pace; filling and draining pass through all of them once.
    slowed = k.slowed * beside + k.jitter * np.log2(nodes) * (terms - bubble)
    other = plain if mixed is None else mixed

    def kind(of: Callable[[Block], tuple[Floats, Floats]]) -> Floats:
        (f, b), (f_e, b_e) = of(plain), of(other)
        return pick(n_plain * (f + b)[:, None] + n_mixed * (f_e + b_e)[:, None])

    matmul, attention, moved = kind(lambda b: b.matmul), kind(lambda b: b.attention), kind(lambda b: b.moved)
    launch = pick(stage("forward") + stage("backward")) - matmul - attention - moved
    return Times(
        matmul=m * (matmul + pick(heads * (ends[0] + ends[1])[:, None])),
        attention=m * attention,
        memory_bound=m * (moved + summed_s),
        launch=m * launch,
        recompute=m * pick(stage("again") + pieces),
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
        hidden_pp=m * pick(sent_hidden),
        hidden_dp=dp_hidden,
        step_s=terms + slowed,
        forward_s=pick(stage("forward") + heads * ends[0][:, None]),
        backward_s=pick(stage("backward") + stage("again") + pieces + heads * ends[1][:, None]),
    )


def _filling(p: Points, b: Block) -> Floats:
    """Share of a plain pipeline's filling and draining that a schedule leaves: what weight gradients do not fill."""
    weights = b.weights / np.maximum(b.work(0) + b.work(1), 1e-12)
    # (p - 1) (F + I - W) and (p - 1) (F + I - 2 W); of zb-v, whose stages are half as long, as much of a stage as of
    # zb-h1, which is what the simulator leaves.
    h1, h2 = np.maximum(0.0, 1 - 2 * weights), np.maximum(0.0, 1 - 3 * weights)
    zb = p.schedule
    plain = 1 - dx_first(p) * weights
    return np.select([zb == Schedule.ZB_H1, zb == Schedule.ZB_H2, zb == Schedule.ZB_V], [h1, h2, h1], plain)


def _sharded(p: Points, r: Rates, z: Sizes, k: Constants, a: _Paced, e: _Paced) -> tuple[Floats, Floats]:
    """(exposed, hidden) seconds per block and microbatch of gathering and reducing a ZeRO-3 block."""
    on = p.zero >= 2
    three = p.zero >= 3
    moe = z.moe > 0
    block = (z.attention + z.norms + np.where(moe, z.shared + z.router, z.dense_mlp)) / p.tp
    # ZeRO-3 of 2021 gathers at the rate of one port, not of all of a node's: so a 175B model at a fixed batch falls
    # from 144 TFLOP/s on 384 devices to 44 on 1,536 (arXiv:2104.04473, table 2); all ports would keep it above 180.
    early = (p.kind == Kind.DEEPSPEED) | (p.kind == Kind.MEGATRON_2021)
    within = np.where(early, 1.0, per_domain(r.domain, p.tp, p.shards))
    gather = gather_s(r, k, block * p.gather_bytes, p.shards, within)
    reduce = gather_s(r, k, block * p.reduce_bytes, p.shards, within)
    experts = z.experts / p.ep
    within_e = per_domain(r.domain, p.ep, p.expert_shards)
    gather = gather + np.where(moe, gather_s(r, k, experts * p.gather_bytes, p.expert_shards, within_e), 0.0)
    reduce = reduce + np.where(moe, gather_s(r, k, experts * p.reduce_bytes, p.expert_shards, within_e), 0.0)
    reduce = reduce * (p.lora == 0)
    forward = np.where(moe, e.forward, a.forward)
    backward = np.where(moe, e.backward + e.again, a.backward + a.again)
    front = three * np.maximum(0.0, gather - forward)
    rear = np.maximum(0.0, three * gather + reduce - backward)
    exposed = on * (front + rear)
    return exposed, on * (2 * three * gather + reduce) - exposed


def _reduced(p: Points, r: Rates, s: Stages, z: Sizes, k: Constants, beside: Floats) -> tuple[Floats, Floats]:
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
    within = per_domain(r.domain, p.tp, p.shards)
    within_e = per_domain(r.domain, p.ep, p.expert_shards)
    trained = np.where(p.lora > 0, 0.01, 1.0)

    def both(per: Floats) -> Floats:
        return gather_s(r, k, dense * per * trained, p.shards, within) + gather_s(
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
    tie = np.where((p.tied > 0) & (p.pp > 1), 2 * gather_s(r, k, table, 2.0 * np.ones(len(p)), near), 0.0)
    hidden = np.where(per_step, np.minimum(total * 0.9, beside * p.pp) * p.dp_overlap, 0.0)
    return total - hidden + tie, hidden


def _summed(p: Points, r: Rates, s: Stages, z: Sizes) -> Floats:
    """Seconds per microbatch of adding a microbatch's gradients to the sum, where the matmul does not do it."""
    apart = (p.kind == Kind.MEGATRON_2021) | (p.kind == Kind.DEEPSPEED)
    # The sum is read and written, the new gradient read.
    per = np.where(p.grad_bytes > 4, 10.0, 6.0) * (p.microbatches > 1) * apart
    return per * s.blocks.max(axis=1) * (z.attention + z.dense_mlp) / p.tp / r.hbm


def _updated(p: Points, r: Rates, s: Stages, z: Sizes) -> tuple[Floats, Floats]:
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
    device = (30 * held * ~on_host + 8 * whole) * trained / r.hbm + c.UPDATE_S
    share = np.minimum(p.per_node, p.gpus)
    host = np.where(on_host, held * share / c.CPU_ADAM_PER_S + 4 * held / r.host, 0.0) * trained
    return device, host
