"""What a device holds at the peak of a step: closed forms over columns of configurations.

    static      weights, gradients, optimizer state, buffers of `numerics: exact`, stand-ins for fused gradients
    in flight   activations of the microbatches between their forward and their backward
    transient   whichever is more: what the loss holds per logit, or what one block needs while it goes backward
    allocated   static + in flight + transient, on the stage that has most
    reserved    what a caching allocator takes for that         device = reserved + context and libraries

Activation terms: Korthikanti et al., arXiv:2205.05198, table 2, with a head's own width and grouped keys, and 16-bit
storage; schedules: Narayanan et al., arXiv:2104.04473, and Qi et al., arXiv:2401.10241, table 2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.plan.constants import Constants
from sirara.plan.hardware import DTYPES, Table
from sirara.plan.points import (
    PIECES,
    Kind,
    Launch,
    Loss,
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
LOGITS_BYTES, CHUNK_TOKENS = 24 << 20, 256
"""Of a chunk of logits: model/loss.py."""
ON_DEVICE = 0.1
"""Of offloaded activations, what is on its way: an assumption; none of it has been measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes [n] of the binding stage; `by_stage` [n, 3]: allocated on the first, a middle and the last stage."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    tree: Floats
    """Partial sums and exchange buffers of `numerics: exact`."""
    gathered: Floats
    stand_ins: Floats
    activations: Floats
    loss: Floats
    transient: Floats
    allocated: Floats
    reserved: Floats
    device: Floats
    stage: NDArray[np.int64]
    by_stage: Floats
    host: Floats
    """Bytes that what is offloaded takes per device in the host's memory, and on its disks."""
    disk: Floats

    def fits(self, capacity_bytes: Floats) -> NDArray[np.bool_]:
        return self.device <= capacity_bytes


def memory(p: Points, hardware: Table, constants: Constants) -> Memory:
    """The memory of each configuration on its busiest stage."""
    s, z = stages(p), sizes(p)
    dense, expert = _held(p, s, z)
    static = _static(p, s, dense, expert)
    gathered, grad_peak = _gathered(p, s, z)
    per_block = activations(p)
    kept = _kept(p, per_block)
    alive = in_flight(p, s)
    gone = p.again.any()
    each = kept_each(p, per_block)
    acts = alive * each * s.blocks + put_off(p, s, per_block, each)
    acts = acts + (s.first * alive * _embedding_kept(p)[:, None])
    away = np.where(p.offload_activations[:, None] > 0, acts * (1 - ON_DEVICE), 0.0)
    acts = acts - away
    acts = acts + s.last * np.maximum(0.0, alive - 1) * head_kept(p)[:, None]
    loss = s.last * (_loss(p) + _head_gradient(p))[:, None]
    work = _working(p, per_block)[:, None] + grad_peak[:, None]
    work = work + made_again(p, per_block) if gone else work
    transient = np.maximum(loss, work)
    ends = s.first * (p.vocab * p.hidden / p.tp * 2 - kept * s.blocks[:, 0] * (p.zero < 3))[:, None]
    transient = np.maximum(transient, ends)
    by_stage = sum(static.values()) + gathered + acts + transient
    by_stage = np.where(s.count > 0, by_stage, 0.0)
    at = by_stage.argmax(axis=1)

    def pick(a: Floats) -> Floats:
        return np.take_along_axis(np.broadcast_to(a, by_stage.shape), at[:, None], axis=1)[:, 0]

    allocated = pick(by_stage)
    # Compiled or hand-fused blocks ask for few large pieces, which leave no holes.
    reserved = allocated * (1 + constants.fragmentation * (p.launch == Launch.EAGER))
    old = p.kind == Kind.DEEPSPEED
    device = reserved + hardware.overhead_bytes[p.accelerator] + old * constants.flat_buffer_bytes
    offloaded = [
        (p.offload_optimizer, pick(_optimizer_bytes(p, dense, expert))),
        # Gradients are summed where the update reads them.
        (np.minimum(p.offload_optimizer, 1), pick(_gradient_bytes(p, dense, expert))),
        (p.offload_params, pick(_weight_bytes(p, dense, expert))),
        (p.offload_activations, pick(away)),
    ]
    return Memory(
        weights=pick(static["weights"]),
        gradients=pick(static["gradients"]),
        optimizer=pick(static["optimizer"]),
        tree=pick(static["tree"]),
        gathered=pick(gathered),
        stand_ins=pick(static["stand_ins"]),
        activations=pick(acts),
        loss=pick(loss),
        transient=pick(transient),
        allocated=allocated,
        reserved=reserved,
        device=device,
        stage=at,
        by_stage=by_stage,
        host=sum(((place == 1) * size for place, size in offloaded), np.zeros(len(p))),
        disk=sum(((place == 2) * size for place, size in offloaded), np.zeros(len(p))),
    )


def _held(p: Points, s: Stages, z: Sizes) -> tuple[Floats, Floats]:
    """(dense, expert) parameters [n, 3] of a stage on one tensor- and expert-parallel rank, before ZeRO."""
    plain = s.blocks - s.mixtures
    ahead = s.last * p.predict_ahead[:, None]
    mixtures = s.mixtures + ahead * z.moe[:, None]
    blocks = s.blocks + ahead
    dense = (
        blocks * z.attention[:, None]
        + plain * z.dense_mlp[:, None]
        + mixtures * z.shared[:, None]
        + s.first * z.embedding[:, None]
        + s.last * z.head[:, None]
        + s.last * ~s.first * ((p.tied > 0) * z.embedding)[:, None]
    ) / p.tp[:, None]
    whole = blocks * z.norms[:, None] + mixtures * z.router[:, None] + s.last * p.hidden[:, None]
    return dense + whole, mixtures * (z.experts / p.ep)[:, None]


def _optimizer_bytes(p: Points, dense: Floats, expert: Floats) -> Floats:
    cut = (p.zero >= 1) | (p.state_shard > 0)
    over, over_e = np.where(cut, p.shards, 1.0), np.where(cut, p.expert_shards, 1.0)
    return (dense / over[:, None] + expert / over_e[:, None]) * (p.optim_bytes * _trained(p))[:, None]


def _cut(p: Points, dense: Floats, expert: Floats, *, at: int) -> Floats:
    """Parameters [n, 3] of a stage that a rank holds of what ZeRO cuts from stage `at` on."""
    split = p.zero >= at
    return (
        dense / np.where(split, p.shards, 1.0)[:, None]
        + expert / np.where(split, p.expert_shards, 1.0)[:, None]
    )


def _trained(p: Points) -> Floats:
    return np.where(p.lora > 0, 0.01, 1.0)


def _weight_bytes(p: Points, dense: Floats, expert: Floats) -> Floats:
    return _cut(p, dense, expert, at=3) * p.weight_bytes[:, None]


def _gradient_bytes(p: Points, dense: Floats, expert: Floats) -> Floats:
    return _cut(p, dense, expert, at=2) * (p.grad_bytes * _trained(p))[:, None]


def _static(p: Points, s: Stages, dense: Floats, expert: Floats) -> dict[str, Floats]:
    optimizer = _optimizer_bytes(p, dense, expert)
    # Where the optimizer is on the host, gradients go there as they are made.
    here = (p.offload_optimizer == 0)[:, None]
    gradients = _gradient_bytes(p, dense, expert) * here
    # Blocks of 2^k leaves: max(1, k) whole fp32 buffers instead of one, and a binary counter of shards over all blocks.
    k = np.maximum(1.0, p.block)
    blocks = np.maximum(1.0, p.global_batch / p.micro_batch / 2**p.block)
    counter = np.ceil(np.log2(blocks)) + 1
    shard = dense / p.shards[:, None] + expert / p.expert_shards[:, None]
    whole = np.where(p.zero >= 2, 0.0, (k - 1) * 4)[:, None] * (dense + expert)
    tree = (p.exact > 0)[:, None] * (whole + (counter * 4)[:, None] * shard)
    # One stand-in per shape, so those of one block serve all.
    some = (np.maximum(dense[:, 1], dense[:, 0]) > 0)[:, None]
    z = sizes(p)
    block = (z.attention + np.where(z.moe > 0, z.shared, z.dense_mlp)) / p.tp
    # Of a block's sums and those of either end some buffers, which all blocks use in turn.
    ends = s.first * z.embedding[:, None] + s.last * (np.maximum(z.head, (p.tied > 0) * z.embedding))[:, None]
    turn = some * block[:, None] + ends / p.tp[:, None]
    gradients = gradients + (p.turn_bytes * _trained(p))[:, None] * here * turn
    # Two units' are on the device at a time, as two units' weights are.
    most = some * block[:, None] + np.maximum(some * block[:, None], ends / p.tp[:, None])
    gradients = gradients + ~here * most * (p.weight_bytes * _trained(p))[:, None]
    return {
        "weights": np.where(p.offload_params[:, None] > 0, 0.0, _weight_bytes(p, dense, expert)),
        "gradients": gradients,
        "optimizer": np.where(p.offload_optimizer[:, None] > 0, 0.0, optimizer),
        "tree": tree,
        "stand_ins": np.broadcast_to(some * (p.dummy_bytes * block)[:, None], dense.shape),
    }


def _gathered(p: Points, s: Stages, z: Sizes) -> tuple[Floats, Floats]:
    """(gathered units [n, 3], gradients of a unit before they are cut [n]) of ZeRO-3 or offloaded weights."""
    block = (z.attention + z.norms + np.where(z.moe > 0, z.shared + z.router, z.dense_mlp)) / p.tp
    block = block + z.experts / p.ep
    root = (z.embedding + z.head) / p.tp
    on = (p.zero >= 3) | (p.offload_params > 0)
    # The next block is gathered while this one computes; the root, which holds embedding and head, stays.
    whole = np.broadcast_to((2 * block + root)[:, None], s.blocks.shape)
    # Ours gathers embedding and head as any other unit, into one of two places.
    ours = p.kind == Kind.SIRARA
    ends = (
        s.first * z.embedding[:, None] + s.last * np.maximum(z.head, (p.tied > 0) * z.embedding)[:, None]
    ) / p.tp[:, None]
    whole = np.where(ours[:, None], block[:, None] + np.maximum(block[:, None], ends), whole)
    width = np.where(ours, p.weight_bytes, p.gather_bytes)
    return whole * (on * width)[:, None], on * block * p.reduce_bytes * ~ours


def activations(p: Points) -> dict[str, Floats]:
    """Bytes [n] that one block keeps of one microbatch, by what they belong to."""
    t = p.tokens
    serial = t / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    h, ag, kg = p.hidden, p.heads * p.head_dim, p.kv_heads * p.head_dim
    latent = p.kv_rank > 0
    key = p.heads * (p.head_dim + p.rope_dim)
    qkv = np.where(latent, 2 * key + 2 * key + 2 * ag, 2 * ag + 4 * kg)
    narrow = np.where(latent, 4 * p.q_rank + 4 * p.kv_rank + 2 * p.rope_dim, 0.0)
    flash = p.attention > 0
    scores = np.where(flash, 0.0, (2 + 3 * p.dropout) * p.heads * p.seq / p.cp)
    moe = p.experts > 0
    f = np.where(moe, p.shared_ffn, p.ffn)
    routed = p.topk * moe
    ours = p.kind == Kind.SIRARA
    # Without fused kernels rotated keys and queries, and the activated gate, are tensors of their own.
    apart = (p.launch == Launch.EAGER) * p.gated * ~ours
    qkv = np.where(ours, _own_qkv(p), qkv)
    # What an 8-bit matmul keeps for its weight gradient is its 8-bit input.
    low = np.where((p.dtype >= DTYPES.index("fp8")) & (p.kind == Kind.MEGATRON), 0.5, 1.0)
    return {
        "norms": serial * 4 * h,
        "inputs": serial * (low * 4 * h + 2 * p.dropout * h),
        "latent": t * narrow,
        "qkv": t * (qkv + apart * (2 * ag + 2 * kg)) / p.tp,
        "core": t * (low * 2 * ag + flash * 4 * p.heads + scores) / p.tp,
        "wide": t * 2 * (1 + p.gated) * f / p.tp + t * routed * 2 * (1 + p.gated) * p.expert_ffn / p.tp,
        "narrow": t * (2 * low + 2 * apart) * f / p.tp
        + t * routed * (2 * low + 2 * apart) * p.expert_ffn / p.tp,
        "permuted": t * routed * 2 * low * h / p.tp,
        "router": t * moe * (4 * p.experts + 8 * p.topk) / p.tp,
        "input": serial * 2 * h,
    }


def _own_qkv(p: Points) -> Floats:
    """Bytes [n] per token that ours keeps of q, k and v over all ranks: `own.own_bytes` in closed form.

    Keys and values that are repeated for their query heads are copies; where nothing else is, the product itself is.
    """
    a, kv = p.heads * p.head_dim, np.maximum(p.kv_heads, p.tp) * p.head_dim
    repeated = a != kv
    turned = (p.rotary > 0) | (p.qk_norm > 0)
    product = (~(turned & repeated) | (p.qk_norm > 0)) * (a + 2 * kv)
    return 2 * (product + np.where(repeated, (2 + turned) * a, turned * (a + kv)))


def _kept(p: Points, a: dict[str, Floats]) -> Floats:
    """Bytes [n] that a block keeps under its recompute setting."""
    r, every = p.recompute, sum(v for k, v in a.items() if k != "input")
    ours = p.kind == Kind.SIRARA

    def has(flag: Recompute) -> NDArray[np.bool_]:
        return (r & int(flag)) > 0

    scores = np.where(p.attention > 0, 0.0, a["core"] - p.tokens * 2 * p.heads * p.head_dim / p.tp)
    kept = every - has(Recompute.CORE) * scores
    kept = (
        kept
        - has(Recompute.NORM) * a["norms"] * np.where(ours, 1.0, 0.5)
        - (has(Recompute.ACT) | has(Recompute.MLP)) * a["narrow"]
    )
    kept = kept - has(Recompute.MLP) * a["wide"] - has(Recompute.UP) * np.where(p.kv_rank > 0, a["qkv"], 0.0)
    h, ag, kg = p.hidden, p.heads * p.head_dim, p.kv_heads * p.head_dim
    serial = p.tokens / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    ops = serial * 4 * h + p.tokens / p.tp * (4 * ag + 2 * kg + 4 * p.heads + 2 * p.ffn)
    kept = np.where(has(Recompute.OPS), ops, kept)
    kept = np.where(has(Recompute.FULL), a["input"], kept)
    return p.recompute_share * kept + (1 - p.recompute_share) * every


def let_go(p: Points, a: dict[str, Floats]) -> Floats:
    """Bytes [n, piece] of one block and microbatch that are not kept where a piece of `PIECES` is made again."""
    serial = p.tokens / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    norm = serial * 2 * p.hidden
    # The product that q, k and v come from stays.
    product = p.tokens * 2 * (p.heads + 2 * np.maximum(p.kv_heads, p.tp)) * p.head_dim / p.tp
    every = sum(v for k, v in a.items() if k != "input")
    found = {
        "norm1": norm,
        "norm2": norm,
        "act": a["narrow"],
        "wide": a["wide"],
        "attention": np.maximum(0.0, a["qkv"] + a["core"] - product),
        "block": every - a["input"],
    }
    return np.stack([np.broadcast_to(found[piece], (len(p),)) for piece in PIECES], axis=1)


def made_again(p: Points, a: dict[str, Floats]) -> Floats:
    """Bytes [n, 3] of the largest part that backward has made again at a time, on each stage."""
    sizes_of = {"attention": a["qkv"] + a["core"], "wide": a["wide"] + a["narrow"],
                "block": sum(v for k, v in a.items() if k != "input")}  # fmt: skip
    each = [(p.again[:, :, PIECES.index(k)] > 0) * v[:, None] for k, v in sizes_of.items()]
    return np.maximum.reduce(each)


def kept_each(p: Points, a: dict[str, Floats]) -> Floats:
    """Bytes [n, 3 or 1] that a block of each stage keeps of one microbatch."""
    kept = _kept(p, a)
    if not p.again.any():
        return kept[:, None]
    return kept[:, None] - (p.again * let_go(p, a)[:, None, :]).sum(axis=2)


def put_off(p: Points, s: Stages, a: dict[str, Floats], each: Floats) -> Floats:
    """Bytes [n, 3] that weight gradients which are put off need beyond what blocks keep: inputs and output gradients.

    Of ours: by zero-bubble schedules of several microbatches, by others of one where dx is sent early.
    """
    m, pp = p.microbatches[:, None], p.pp[:, None]
    # Later ranks put more off: of those between the ends the last one most.
    i = np.stack([s.index[:, 0], np.maximum(s.index[:, 1], p.pp - 2), s.index[:, 2]], axis=1)
    zero_bubble = np.isin(p.schedule, (Schedule.ZB_H1, Schedule.ZB_V))[:, None]
    early = dx_first(p) & (p.offload_activations == 0)
    count = np.where(zero_bubble, np.clip(i + 1 - np.maximum(0, pp - m), 1, m), early[:, None] & (i > 0))
    ours = (p.kind == Kind.SIRARA) & (p.pp > 1)
    return ours[:, None] * count * s.blocks * np.maximum(0.0, owed_bytes(p, a)[:, None] - each)


def owed_bytes(p: Points, a: dict[str, Floats]) -> Floats:
    """Bytes [n] that weight gradients of one block and microbatch are made of: inputs and output gradients."""
    products = p.tokens * (4 * p.heads + 4 * p.kv_heads) * p.head_dim / p.tp
    return a["norms"] + products + a["wide"] + a["narrow"] + 2 * a["input"]


def head_kept(p: Points) -> Floats:
    """Bytes [n] that our head keeps of a microbatch from its forward to its backward: see `own.OwnBytes.head`."""
    vocab, serial = p.vocab / p.tp, p.tokens / np.where(p.sequence_parallel > 0, p.tp, 1.0)
    chunk = np.minimum(p.tokens, np.maximum(CHUNK_TOKENS, LOGITS_BYTES / (2 * vocab)))
    late = np.where(p.pp > 1, chunk * (vocab + p.hidden), vocab * p.hidden)
    return (p.kind == Kind.SIRARA) * 2 * (serial * p.hidden + p.tokens * p.hidden + late)


def _embedding_kept(p: Points) -> Floats:
    """The embedding's dropout mask."""
    return p.dropout * p.tokens * p.hidden / np.where(p.sequence_parallel > 0, p.tp, 1.0)


def in_flight(p: Points, s: Stages) -> Floats:
    """Microbatches [n, 3] that a stage holds, in units of its whole depth."""
    pp, v, m, i = p.pp[:, None], p.vpp[:, None], p.microbatches[:, None], s.index
    kind = p.schedule[:, None]
    plain = np.minimum(m, pp - i)
    chunks = np.minimum(m * v, 2 * (pp - i - 1) + (v - 1) * pp + 1)
    found = np.where(kind == Schedule.GPIPE, m, plain)
    found = np.where((kind == Schedule.INTERLEAVED) & (v > 1), chunks / v, found)
    found = np.where((kind == Schedule.ZB_H1) | (kind == Schedule.ZB_V), np.minimum(m, pp), found)
    return np.where(kind == Schedule.ZB_H2, np.minimum(m, 2 * pp - 1), found)


def _loss(p: Points) -> Floats:
    """What the loss holds at once, of 16-bit logits on."""
    logits = p.tokens * p.vocab / p.tp
    per = np.select([p.loss == Loss.TORCH, p.loss == Loss.PARALLEL], [14.0, 8.0], 2.0)
    return logits * per


def _head_gradient(p: Points) -> Floats:
    """The head's weight gradient before it is added, and gradients of its input."""
    weight = p.vocab * p.hidden / p.tp
    return 2 * weight + 8 * p.tokens * p.hidden / np.where(p.sequence_parallel > 0, p.tp, 1.0)


def _working(p: Points, a: dict[str, Floats]) -> Floats:
    """What one block needs beyond what it keeps, while it goes backward."""
    again = ((p.recompute & int(Recompute.FULL)) > 0) | ((p.recompute & int(Recompute.OPS)) > 0)
    every = sum(v for k, v in a.items() if k != "input")
    gradients = a["wide"] + a["narrow"] + 2 * a["input"]
    return np.where(again, every, 0.0) + gradients
