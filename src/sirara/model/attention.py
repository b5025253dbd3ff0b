"""The attention half of a block: q, k and v from one matrix product, heads, positions, `attend`, output.

Shape letters: B sequences, L tokens, D model, N heads, K key-value heads, E features of a head.
"""

from collections.abc import Sequence

from torch import Tensor, cat, nn

from sirara.model.again import Again
from sirara.model.attend import Mask, attend
from sirara.model.dropout import Cut
from sirara.model.linear import linear
from sirara.model.ops import rms_norm
from sirara.model.rotary import Rotary, rotate, split_heads
from sirara.model.split import Remake
from sirara.model.weights import Making, Weights
from sirara.pure.rng import DropoutKey
from sirara.pure.shape import ModelShape


class KvCache:
    """Keys and values of the tokens so far, per layer: lets generation compute one token at a time."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k_BLKE: Tensor, v_BLKE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the layer, the new ones last."""
        if layer in self._layers:
            k, v = self._layers[layer]
            k_BLKE, v_BLKE = cat((k, k_BLKE), 1), cat((v, v_BLKE), 1)
        self._layers[layer] = (k_BLKE, v_BLKE)
        return k_BLKE, v_BLKE


class Attention(nn.Module):
    """x_BLD -> x_BLD, or this rank's share of the tokens [T / t, D] -> the same.  remake: of x, see `linear`."""

    def __init__(
        self, shape: ModelShape, layer: int, making: Making, mask: Mask, rotary: Rotary | None, dropout: float
    ) -> None:
        super().__init__()
        self.shape = shape
        self.wiring = making.wiring
        self.layer = layer
        self.mask = mask
        self.rotary = rotary
        self.dropout = dropout
        names = ("q_proj", "k_proj", "v_proj") if shape.traits.qkv == "separate" else ("qkv_proj",)
        self._qkv: list[Weights] = []
        for name in names:
            weights = Weights(f"attn.{name}", making)
            self.add_module(name, weights)
            self._qkv.append(weights)
        if shape.traits.qk_norm:
            self.q_norm = Weights("attn.q_norm", making)
            self.k_norm = Weights("attn.k_norm", making)
        self.o_proj = Weights("attn.o_proj", making)

    def forward(
        self,
        x_BLD: Tensor,
        positions_BL: Tensor,
        documents_BL: Tensor | None,
        key: DropoutKey | None,
        cache: KvCache | None = None,
        remake: Remake | None = None,
    ) -> Tensor:
        transposed = self.shape.traits.conv1d
        qkv = linear(
            x_BLD,
            *weights_and_biases(self._qkv),
            transposed=transposed,
            wiring=self.wiring,
            remake=remake,
        )
        qkv = qkv.view(*positions_BL.shape, -1)
        tables = self.rotary.tables(positions_BL, x_BLD.dtype) if self.rotary is not None else None
        if self.wiring.makes_again("attention") and cache is None:
            norms = [self.q_norm.weight, self.k_norm.weight] if self.shape.traits.qk_norm else []
            again = Again(lambda qkv: self._core(qkv, tables, documents_BL, key, None), norms)
            y, remade = again.forward(qkv)
        else:
            y, remade = self._core(qkv, tables, documents_BL, key, cache), None
        return linear(
            y,
            *weights_and_biases([self.o_proj]),
            transposed=transposed,
            part="row",
            wiring=self.wiring,
            remake=remade,
        )

    def _core(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        documents_BL: Tensor | None,
        key: DropoutKey | None,
        cache: KvCache | None,
    ) -> Tensor:
        """[B, L, features of this rank's heads]: from the product with the first matrices to that with the last."""
        shape, traits, size = self.shape, self.shape.traits, self.wiring.size
        heads, kv_heads = shape.heads // size, max(1, shape.kv_heads // size)
        q, k, v = split_heads(
            qkv,
            heads,
            kv_heads,
            per_head=traits.qkv == "per_head",
            tables=None if traits.qk_norm else tables,
        )
        if traits.qk_norm:
            q = rms_norm(q, self.q_norm.weight, shape.norm_eps)
            k = rms_norm(k, self.k_norm.weight, shape.norm_eps)
            if tables is not None:
                q, k = rotate(q, tables), rotate(k, tables)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        return attend(
            q,
            k,
            v,
            self.mask,
            documents_BM=documents_BL,
            p=self.dropout,
            key=key,
            layer=self.layer,
            cut=self._cut(q, k),
        )

    def _cut(self, q_BLNE: Tensor, k_BMKE: Tensor) -> Cut | None:
        """Where this rank's attention weights [B, N, L, M] lie among those of all heads."""
        if self.wiring.size == 1:
            return None
        one_head = q_BLNE.shape[1] * k_BMKE.shape[1]
        first = self.wiring.rank * q_BLNE.shape[2] * one_head
        return Cut(first=first, step=self.shape.heads * one_head, runs=q_BLNE.shape[0])


def weights_and_biases(layers: Sequence[Weights]) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
    """The arguments of `linear` for layers that share their input."""
    biases = [w.bias for w in layers if w.bias is not None]
    return [w.weight for w in layers], biases or None
