"""Dropout whose mask is a function of (seed, step, microbatch, layer, site, element), not of who computes it.

The same integers as `pure.rng.dropout_keep`, in torch's int64: additions and products wrap alike, and a shift
right is followed by a mask, because int64 shifts carry the sign.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from sirara.model.ops import spans
from sirara.pure.rng import GAMMA, DropoutKey, drop_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which elements of the whole tensor a rank holds: `runs` equal runs, run i from first + i * step on."""

    first: int
    step: int = 0
    runs: int = 1


def dropout(
    x: Tensor, p: float, key: DropoutKey | None, layer: int, site: str, cut: Cut | None = None
) -> Tensor:
    """x with elements dropped with probability p and the others divided by 1 - p; x itself without a key.

    cut: where x lies in the tensor whose elements the mask counts; None: x is all of it.
    """
    if key is None or p == 0.0:
        return x
    # What is called from a compiled function would be compiled too, even where that function itself is not any more.
    compiled = torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
    drop = _drop_outside_graphs if compiled else _drop_by_key
    return drop(x, p, key, layer, site, cut or Cut(first=0))


def _drop_by_key(x: Tensor, p: float, key: DropoutKey, layer: int, site: str, cut: Cut) -> Tensor:
    # Traced, the words of a mask are constants: too long for compiled code, and new ones for every microbatch.
    return _Dropout.apply(x, p, key.stream(layer, site), cut)


# The public `torch.compiler.disable` loads the compiler, two seconds, when this file is imported.
_drop_outside_graphs = _disable_dynamo(_drop_by_key)


def keep_mask(stream: int, p: float, count: int, device: torch.device, first: int = 0) -> Tensor:
    """Which of elements first..first+count-1 stay, bool [count]."""
    start = first // 2
    words = -(-(first + count) // 2) - start
    keep = torch.empty(2 * words, dtype=torch.bool, device=device)
    for low, high in spans(words, 2, device):
        x = torch.arange(start + low, start + high, dtype=torch.int64, device=device)
        x = _splitmix64(x.mul_(_signed(GAMMA)).add_(_signed(stream)))
        halves = torch.stack((x & 0xFFFFFFFF, _shift(x, 32)), -1)
        torch.ge(halves.view(-1), drop_threshold(p), out=keep[2 * low : 2 * high])
    return keep[first - 2 * start :][:count]


def _splitmix64(x: Tensor) -> Tensor:
    x = x + _signed(GAMMA)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, stream: int, cut: Cut) -> Tensor:
        firsts = [cut.first + i * cut.step for i in range(cut.runs)]
        runs = [keep_mask(stream, p, x.numel() // cut.runs, x.device, first) for first in firsts]
        keep = (runs[0] if len(runs) == 1 else torch.cat(runs)).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return _drop(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return _drop(grad_outputs[0], keep, ctx.scale), None, None, None


def _drop(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    return torch.where(keep, x * scale, 0.0)
