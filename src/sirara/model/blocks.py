"""The units of a decoder: embedding, block, head. Parameters lie where `TensorSpec.local` says.

Shape letters: B sequences, L tokens, D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sirara.model.attend import Mask
from sirara.model.attention import Attention, KvCache
from sirara.model.dropout import dropout
from sirara.model.linear import linear
from sirara.model.loss import token_losses
from sirara.model.mlp import Mlp
from sirara.model.ops import wide
from sirara.model.rotary import Rotary
from sirara.model.weights import Making, Norm, Weights
from sirara.pure.rng import DropoutKey
from sirara.pure.shape import ModelShape


class Embed(nn.Module):
    """Token embedding, plus learned positions, normed, as the family has it."""

    def __init__(self, shape: ModelShape, making: Making, dropout: float) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.dropout = dropout
        self.tokens = Weights("tokens", making)
        self.positions = Weights("positions", making) if shape.traits.positions == "learned" else None
        self.norm = Norm("norm", making, shape.norm_eps) if shape.traits.embed_norm else None

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, key: DropoutKey | None) -> Tensor:
        x_BLD = embedding(tokens_BL, self.tokens.weight)
        if self.positions is not None:
            x_BLD = x_BLD + embedding(positions_BL, self.positions.weight)
        if self.norm is not None:
            x_BLD = self.norm(x_BLD)
        return dropout(x_BLD, self.dropout, key, -1, "embed")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        making: Making,
        mask: Mask,
        rotary: Rotary | None,
        *,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.layer = layer
        self.dropout = dropout
        self.norm1 = Norm("norm1", making, shape.norm_eps)
        self.attn = Attention(shape, layer, making, mask, rotary, attention_dropout)
        self.norm2 = Norm("norm2", making, shape.norm_eps)
        self.mlp = Mlp(shape, making)

    def forward(
        self,
        x_BLD: Tensor,
        positions_BL: Tensor,
        documents_BL: Tensor | None,
        key: DropoutKey | None,
        cache: KvCache | None = None,
    ) -> Tensor:
        y = self.attn(self.norm1(x_BLD), positions_BL, documents_BL, key, cache)
        x_BLD = x_BLD + dropout(y, self.dropout, key, self.layer, "attention output")
        y = self.mlp(self.norm2(x_BLD))
        return x_BLD + dropout(y, self.dropout, key, self.layer, "mlp output")


class Head(nn.Module):
    """Norm and projection to the vocabulary; as a unit of training it gives losses and never the logits."""

    def __init__(self, shape: ModelShape, making: Making) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.norm = Norm("norm", making, shape.norm_eps)
        self.proj = Weights("proj", making)

    def forward(self, x_BLD: Tensor, targets_BL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(objective, losses_BL): see `token_losses`."""
        x_TD = self.norm(x_BLD).flatten(0, 1)
        objective, losses_T = token_losses(x_TD, self.proj.weight, targets_BL.flatten(), scale)
        return objective, losses_T.view(targets_BL.shape)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """[B, L, V]."""
        return linear(self.norm(x_BLD), [self.proj.weight])


def embedding(index_BL: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the weight; a row's gradients add up in the order of the index, in fp32 for lower dtypes."""
    return _Embedding.apply(index_BL, weight_VD)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index_BL: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(index_BL)
        ctx.rows = weight_VD.shape[0]
        return nn.functional.embedding(index_BL, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        (index_BL,) = ctx.saved_tensors
        if dy.dtype == wide(dy.dtype):
            return None, _sums(dy, index_BL, ctx.rows)
        if dy.device.type != "cpu":
            return None, _sums(dy.to(wide(dy.dtype)), index_BL, ctx.rows).to(dy.dtype)
        # Few rows of a vocabulary occur: only theirs are added up in fp32.
        present, index = torch.unique(index_BL, return_inverse=True)
        dw = dy.new_zeros(ctx.rows, dy.shape[-1])
        dw[present] = _sums(dy.to(wide(dy.dtype)), index, len(present)).to(dy.dtype)
        return None, dw


def _sums(dy: Tensor, index: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, index, rows, -1, False)
