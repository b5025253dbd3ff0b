"""What our own modules keep and need of one microbatch, in bytes, counted from what they save (model/*.py).

    block   x, x + attention: inputs of the norms      norm1, norm2: their outputs      q k v, out, log-sum-exp
            [gate | up], and the activation's output; all in the dtype of weights but for sums in `wide`
    head    losses and gradients are made in forward, a chunk of tokens at a time: dx is kept for backward, and dW,
            or where backward is split the last chunk's d logits instead (model/loss.py)

On the CPU temporaries of norms, softmax and the like are spans that fit a cache; elsewhere they are whole tensors.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.plan.memory import CHUNK_TOKENS, LOGITS_BYTES
from sirara.plan.points import PIECES
from sirara.pure.recompute import all_kinds
from sirara.pure.shape import ModelShape

SPAN_ELEMENTS = 1 << 19
"""Of a temporary on the CPU: model/ops.py."""
LONGEST_SUM = 384
"""Tokens over which the CPU's matrix library adds a product onto a sum in one pass; of more, and where sums have
another dtype, gradients of a unit lie beside the sums until all are made.  Found by trying, for fp32."""

LIBRARY_BYTES, THREAD_BYTES = 18 << 20, 17 << 20
"""What torch 2.13's CPU libraries (MKL, oneDNN) keep of memory for packed matrices after a step, and of it per thread
in fp32 and fp64.  Allocated bytes after two steps less those of `Zero.bytes_held`, llamas of 8M to 38M parameters on
an Intel Xeon with AMX: 34 to 36 MiB with one thread, 52 with two; 23 in bf16 with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBytes:
    """Bytes of one microbatch on one tensor-parallel rank.

    whole: a block keeps.  pieces: what of it goes for each of `PIECES`.  head: the head keeps from forward to backward.
    loss: all that the head needs at once.  working: a block's backward beyond what it keeps.
    embedding: the embedding's gradient.  boundary: a hidden state between stages.
    libraries: what the matrix library keeps for itself once it has been used.
    owed: what a block's weight gradients are made of, where they are put off: inputs and output gradients of matrices.
    """

    whole: float
    pieces: NDArray[np.float64]
    head: float
    loss: float
    working: float
    embedding: float
    boundary: float
    libraries: float
    owed: float


def own_bytes(config: RunConfig, shape: ModelShape, *, tp: int, weight: int, on_cpu: bool) -> OwnBytes | None:
    """What the configuration's modules keep; None where nothing was counted: compiled blocks, dropped scores, fp8.

    Args:  weight: bytes of a weight, and of an activation.
    """
    train, model = config.train, config.model
    if train.compile or model.attention_dropout > 0 or train.precision == "fp8" or config.mesh.cp > 1:
        return None
    tokens = train.micro_batch * config.data.seq_len
    serial = tokens / tp if config.mesh.sequence_parallel else tokens
    wide = 8 if weight == 8 else 4
    sizes = _block(shape, tokens, serial, tp, weight, wide)
    whole = sum(sizes.values())
    # Attention is made again from the product of its matrices, which is kept then.
    product = tokens * (shape.heads // tp + 2 * max(1, shape.kv_heads // tp)) * shape.head_dim * weight
    pieces = np.array([_gone(sizes, piece, product) for piece in PIECES])
    spans = 2.0 * SPAN_ELEMENTS * wide
    hidden, vocab = shape.hidden, -(-shape.vocab // tp)
    most = max(CHUNK_TOKENS, LOGITS_BYTES // (vocab * weight))
    chunk = -(-tokens // -(-tokens // most))
    dw = vocab * hidden * (weight if chunk >= tokens else wide)
    logits = chunk * vocab * weight
    # Softmax and its logarithm: spans, or as many fp32 numbers as logits, twice.
    soft = spans if on_cpu else 2.0 * chunk * vocab * wide
    split = config.mesh.pp > 1
    kept = tokens * hidden * weight
    head = serial * hidden * weight + kept + (logits + chunk * hidden * weight if split else dw)
    parameters = _matrices(shape, tp)
    apart = on_cpu and (weight != wide or tokens > LONGEST_SUM)
    return OwnBytes(
        whole=whole,
        pieces=pieces,
        head=head,
        # The norm's output, dx, scaled x and dx of the chunk.
        loss=logits + dw + soft + serial * hidden * weight + 2 * kept + 2 * chunk * hidden * weight,
        working=_working(config, sizes, shape, tokens, serial, tp, weight) + apart * parameters * weight,
        # Sparse on the CPU, where the table is whole.
        embedding=3 * kept if on_cpu and tp == 1 else vocab * hidden * (wide + weight * (weight != wide)),
        boundary=serial * hidden * weight,
        libraries=on_cpu * _libraries(config, weight),
        owed=_owed(shape, sizes, tokens, tp, weight),
    )


def _owed(shape: ModelShape, sizes: dict[str, float], tokens: float, tp: int, weight: int) -> float:
    a, k = shape.heads // tp, max(1, shape.kv_heads // tp)
    inputs = sizes["norm1"] + tokens * a * shape.head_dim * weight + sizes["norm2"] + sizes["act"]
    products = tokens * (a + 2 * k) * shape.head_dim * weight
    return inputs + products + sizes["wide"] + 2 * sizes["input"]


def _libraries(config: RunConfig, weight: int) -> float:
    threads = config.launch.threads if isinstance(config.launch.threads, int) else 1
    return LIBRARY_BYTES if weight < 4 else LIBRARY_BYTES + THREAD_BYTES * threads


def _block(
    shape: ModelShape, tokens: float, serial: float, tp: int, weight: int, wide: int
) -> dict[str, float]:
    """What one block keeps, by what it is."""
    traits, g = shape.traits, shape.head_dim
    a, k = shape.heads // tp, max(1, shape.kv_heads // tp)
    hidden, ffn = serial * shape.hidden * weight, tokens * shape.ffn / tp * weight
    head = tokens * g * weight
    product = (a + 2 * k) * head
    turned = traits.positions == "rope"
    # Keys and values that are repeated for their query heads are copies; else v is a view of the whole product.
    repeated = a != k
    copies = (a if repeated else k) * head
    if traits.qk_norm:
        core = a * head + copies + (copies if repeated else 0.0)
        qkv = product
    elif turned:
        core = a * head + copies + (copies if repeated else 0.0)
        qkv = 0.0 if repeated else product
    else:
        core = 2 * copies if repeated else 0.0
        qkv = product
    statistics = serial * wide * (2 if traits.norm == "rms" else 4)
    return {
        "input": hidden,
        "middle": hidden + statistics,
        "norm1": hidden,
        "norm2": hidden,
        "product": qkv,
        "core": core + a * head + tokens * a * wide,
        "wide": (1 + (traits.mlp == "swiglu")) * ffn,
        "act": ffn,
    }


def _gone(sizes: dict[str, float], piece: str, product: float) -> float:
    if piece == "attention":
        return sizes["core"] + sizes["product"] - product
    if piece == "block":
        return sum(sizes.values()) - sizes["input"]
    return sizes[piece]


def _working(
    config: RunConfig, sizes: dict[str, float], shape: ModelShape, tokens: float, serial: float, tp: int, weight: int
) -> float:  # fmt: skip
    """A block's backward at its widest: between the products of the MLP, what was let go made again."""
    kinds = all_kinds(config.train.recompute)
    hidden = serial * shape.hidden * weight
    again = 0.0
    for kind in kinds:
        if "full" in kind:
            again = max(again, sum(sizes.values()) - sizes["input"])
        elif "mlp" in kind:
            again = max(again, sizes["norm2"] + sizes["wide"] + sizes["act"])
        elif "act" in kind:
            again = max(again, sizes["act"])
        elif "attention" in kind:
            again = max(again, sizes["core"] - sizes["wide"])
    # Gradients of the output, along both branches, and of [gate | up].
    arrived = 2 * tokens * shape.hidden * weight if tp > 1 else 0.0
    return again + 2 * hidden + sizes["wide"] + arrived


def _matrices(shape: ModelShape, tp: int) -> float:
    """Elements of a block's matrices on one tensor-parallel rank."""
    g = shape.head_dim
    qkv = (shape.heads / tp + 2 * max(1.0, shape.kv_heads / tp)) * g
    gated = 1 + (shape.traits.mlp == "swiglu")
    return shape.hidden * (qkv + shape.heads / tp * g + (1 + gated) * shape.ffn / tp)
