"""Rotary positions: the angles feature pairs turn by, the turn, and the cut of q, k and v before it.

Feature i of the first half of a head and feature i of the second half are a pair (Hugging Face's order).

Shape letters: B sequences, L tokens, T = B * L, N heads, K key-value heads, E features of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sirara.model.ops import elementwise, spans
from sirara.pure.shape import ModelShape


def frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each feature pair, float64 [E / 2], with the shape's scaling."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float64)
    base = shape.rope_theta ** (-pairs / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return base
    slow = base / scaling.factor
    if scaling.kind == "linear":
        return slow
    # Llama 3: waves that fit into the original context often enough stay, others stretch, a ramp between.
    turns = scaling.original_max_seq * base / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return slow * (1 - ramp) + base * ramp


class Rotary:
    """Cosines and sines of a microbatch's positions, shared by all blocks of a model.

    The last answer is kept, because every block of a forward pass asks for the same positions.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.frequencies = frequencies(shape)
        self._last: tuple[Tensor, int, torch.dtype, tuple[Tensor, Tensor]] | None = None

    def tables(self, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, E]: the turned head is x * cos + swapped halves of x * sin."""
        if torch.compiler.is_compiling():
            return self._compute(positions_BL, dtype)
        last = self._last
        if last is not None and last[0] is positions_BL and last[1:3] == (positions_BL._version, dtype):
            return last[3]
        tables = self._compute(positions_BL, dtype)
        self._last = (positions_BL, positions_BL._version, dtype, tables)
        return tables

    def _compute(self, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inner = torch.float64 if dtype == torch.float64 else torch.float32
        radians = self.frequencies.to(positions_BL.device, inner)
        angles = positions_BL.reshape(-1, 1).to(inner) * radians
        if torch.compiler.is_compiling():
            cos, sin = angles.cos(), angles.sin()
        else:
            cos = elementwise(torch.cos, torch.empty_like(angles), angles)
            sin = elementwise(torch.sin, torch.empty_like(angles), angles)
        return (
            torch.cat((cos, cos), -1).unsqueeze(1).to(dtype),
            torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype),
        )


def split_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    *,
    per_head: bool = False,
    tables: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, L, N, E], k and v [B, L, K, E] from qkv [B, L, (N + 2K) * E], q and k turned if there are tables.

    The last dim is [q | k | v], or [q | k | v] of each head in turn when `per_head`.
    """
    cos, sin = tables if tables is not None else (None, None)
    return _SplitHeads.apply(qkv, heads, kv_heads, per_head, cos, sin)


def rotate(x_BLNE: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The heads of x turned by their tokens' angles."""
    return _Rotate.apply(x_BLNE, *tables)


def _turn(x_TNE: Tensor, out_TNE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, way: int) -> None:
    """Writes x turned forward (way 1) or back (way -1) into out."""
    half = x_TNE.shape[-1] // 2
    if torch.compiler.is_compiling():
        out_TNE.copy_(x_TNE * cos_T1E + way * torch.roll(x_TNE, half, -1) * sin_T1E)
        return
    for low, high in spans(x_TNE.shape[0], x_TNE.shape[1] * x_TNE.shape[2], x_TNE.device):
        x, out, cos, sin = x_TNE[low:high], out_TNE[low:high], cos_T1E[low:high], sin_T1E[low:high]
        torch.mul(x, cos, out=out)
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=way)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)


def _parts(qkv: Tensor, heads: int, kv_heads: int, per_head: bool) -> list[Tensor]:
    """Views of q, k, v as [T, N or K, E]."""
    if per_head:
        split = qkv.view(-1, heads, 3, qkv.shape[-1] // (3 * heads))
        return [split[:, :, i] for i in range(3)]
    split = qkv.view(-1, heads + 2 * kv_heads, qkv.shape[-1] // (heads + 2 * kv_heads))
    return list(split.split([heads, kv_heads, kv_heads], 1))


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        per_head: bool,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.cut = (heads, kv_heads, per_head)
        ctx.shape = qkv.shape
        ctx.save_for_backward(cos, sin)
        parts = _parts(qkv, heads, kv_heads, per_head)
        if cos is not None and sin is not None:
            for i in range(2):
                turned = torch.empty(parts[i].shape, dtype=qkv.dtype, device=qkv.device)
                _turn(parts[i], turned, cos, sin, 1)
                parts[i] = turned
        return tuple(p.unflatten(0, qkv.shape[:2]) for p in parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dqkv = torch.empty(ctx.shape, dtype=grad_outputs[0].dtype, device=grad_outputs[0].device)
        for i, (out, grad) in enumerate(zip(_parts(dqkv, *ctx.cut), grad_outputs, strict=True)):
            if cos is not None and i < 2:
                _turn(grad.flatten(0, 1), out, cos, sin, -1)
            else:
                out.copy_(grad.flatten(0, 1))
        return dqkv, None, None, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BLNE, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_outputs[0], cos, sin, -1), None, None


def _turned(x_BLNE: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    out = torch.empty(x_BLNE.shape, dtype=x_BLNE.dtype, device=x_BLNE.device)
    _turn(x_BLNE.flatten(0, 1), out.flatten(0, 1), cos, sin, way)
    return out
