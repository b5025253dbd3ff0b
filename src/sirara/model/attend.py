"""attend(q, k, v, mask): the one place where tokens look at each other.

A query sees the keys at or before it, of its own document, within the window; ALiBi lowers a score by its
head's slope per token of distance. Where plain causality is all, the kernel knows it by itself; else an
additive bias says it.

Shape letters: B sequences, L queries, M keys, N heads, K key-value heads, E features of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from sirara.model.dropout import Cut, dropout
from sirara.model.ops import wide
from sirara.pure.rng import DropoutKey


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head (Press et al., arXiv:2108.12409): 2^(-8i/n), odd counts interleaved."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return tuple(slopes)


class Mask:
    """What a query may see, beyond causality; shared by all blocks of a model.

    The last bias is kept, because every block of a forward pass asks for the same.
    """

    def __init__(self, *, window: int | None = None, slopes: tuple[float, ...] | None = None) -> None:
        self.window = window
        self.slopes = slopes
        self._last: tuple[tuple[object, ...], Tensor | None, Tensor] | None = None

    def keep_heads(self, slopes: tuple[float, ...]) -> None:
        """From now on the slopes of the heads that this rank computes."""
        self.slopes, self._last = slopes, None

    def bias(
        self, queries: int, keys: int, documents_BM: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Additive [1 or B, 1 or N, L, M] for the last `queries` of `keys` tokens; None: plain causality."""
        windowed = self.window is not None and self.window < keys
        if self.slopes is None and documents_BM is None and not windowed and queries in (1, keys):
            return None
        if torch.compiler.is_compiling():
            return self._compute(queries, keys, documents_BM, dtype, device)
        version = None if documents_BM is None else documents_BM._version
        wanted = (queries, keys, version, dtype, device)
        if self._last is None or self._last[0] != wanted or self._last[1] is not documents_BM:
            self._last = (wanted, documents_BM, self._compute(queries, keys, documents_BM, dtype, device))
        return self._last[2]

    def _compute(
        self, queries: int, keys: int, documents_BM: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        at_L = torch.arange(keys - queries, keys, device=device)
        back_LM = at_L.unsqueeze(1) - torch.arange(keys, device=device)
        hidden = back_LM < 0
        if self.window is not None:
            hidden = hidden | (back_LM >= self.window)
        hidden = hidden.view(1, 1, queries, keys)
        if documents_BM is not None:
            other = documents_BM[:, -queries:].unsqueeze(2) != documents_BM.unsqueeze(1)
            hidden = hidden | other.unsqueeze(1)
        bias = torch.zeros((), dtype=dtype, device=device)
        if self.slopes is not None:
            slopes = torch.tensor(self.slopes, dtype=torch.float64, device=device).view(1, -1, 1, 1)
            bias = (back_LM * -slopes).to(dtype)
        return bias.masked_fill(hidden, -math.inf)


def attend(
    q_BLNE: Tensor,
    k_BMKE: Tensor,
    v_BMKE: Tensor,
    mask: Mask,
    *,
    documents_BM: Tensor | None = None,
    p: float = 0.0,
    key: DropoutKey | None = None,
    layer: int = 0,
    cut: Cut | None = None,
) -> Tensor:
    """softmax(q k / sqrt(E) + mask) v -> [B, L, N * E].

    p: dropout of attention weights when there is a key; that takes a path which holds all weights at once.
    cut: where these heads' weights lie among those [B, N, L, M] of all heads.
    """
    queries, keys, heads = q_BLNE.shape[1], k_BMKE.shape[1], q_BLNE.shape[2]
    # The CPU kernel takes a bias finer than its inputs.
    bias_dtype = wide(q_BLNE.dtype) if q_BLNE.device.type == "cpu" else q_BLNE.dtype
    bias = mask.bias(queries, keys, documents_BM, bias_dtype, q_BLNE.device)
    q, k, v = q_BLNE.transpose(1, 2), _per_query_head(k_BMKE, heads), _per_query_head(v_BMKE, heads)
    causal = bias is None and queries > 1
    if p > 0.0 and key is not None:
        y_BNLE = _explicit(q, k, v, bias, p, key, layer, cut)
    else:
        y_BNLE = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
    return y_BNLE.transpose(1, 2).flatten(2)


def _per_query_head(x_BMKE: Tensor, heads: int) -> Tensor:
    """[B, N, M, E] with each key-value head repeated for its group of query heads."""
    x_BKME = x_BMKE.transpose(1, 2)
    if x_BMKE.shape[2] == heads:
        return x_BKME
    return x_BKME.repeat_interleave(heads // x_BMKE.shape[2], dim=1)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    p: float,
    key: DropoutKey,
    layer: int,
    cut: Cut | None,
) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide(q.dtype)) * q.shape[-1] ** -0.5
    if bias is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    else:
        scores = scores + bias
    weights = dropout(torch.softmax(scores, -1), p, key, layer, "attention", cut)
    return torch.matmul(weights.to(q.dtype), v)
