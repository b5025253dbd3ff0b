"""The units of a decoder: embedding, block, head. Parameters lie where `TensorSpec.local` says.

Shape letters: B sequences, L tokens, T = B * L, D model, V vocabulary, N rows of a part of it, t ranks of the axis.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sirara.errors import InvariantError
from sirara.model.attend import Mask
from sirara.model.attention import Attention, KvCache
from sirara.model.dropout import Cut, dropout
from sirara.model.linear import linear
from sirara.model.loss import token_losses
from sirara.model.mlp import Mlp
from sirara.model.ops import wide
from sirara.model.rotary import Rotary
from sirara.model.split import Axis, Wiring
from sirara.model.weights import Making, Norm, Weights
from sirara.pure.rng import DropoutKey
from sirara.pure.shape import ModelShape


class Embed(nn.Module):
    """Token embedding, plus learned positions, normed, as the family has it.

    Returns x_BLD, or [T / t, D] when tokens are spread over the tensor axis; so do blocks, which take the same.
    """

    def __init__(self, shape: ModelShape, making: Making, dropout: float) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.vocab = shape.vocab
        self.dropout = dropout
        self.tokens = Weights("tokens", making)
        self.positions = Weights("positions", making) if shape.traits.positions == "learned" else None
        self.norm = Norm("norm", making, shape.norm_eps) if shape.traits.embed_norm else None

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, key: DropoutKey | None) -> Tensor:
        axis = self.wiring.axis
        if axis is None:
            x = embedding(tokens_BL, self.tokens.weight, sparse=self.wiring.sink is not None)
        else:
            x = embedding_part(tokens_BL, self.tokens.weight, self.vocab, axis)
            if axis.sequence:
                positions_BL = positions_BL.flatten().chunk(axis.size)[axis.rank]
        if self.positions is not None:
            x = x + embedding(positions_BL, self.positions.weight)
        if self.norm is not None:
            x = self.norm(x)
        return dropout(x, self.dropout, key, -1, "embed", own_tokens(x, self.wiring))


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
        cut = own_tokens(x_BLD, self.wiring)
        again = self.norm1.remake(x_BLD)
        y = self.attn(self.norm1(x_BLD), positions_BL, documents_BL, key, cache, again)
        x_BLD = x_BLD + dropout(y, self.dropout, key, self.layer, "attention output", cut)
        y = self.mlp(x_BLD, self.norm2)
        return x_BLD + dropout(y, self.dropout, key, self.layer, "mlp output", cut)

    def recompute_modules(self, modules: Collection[str]) -> None:
        """What is made again in backward instead of kept: of `pure.recompute.MODULES`."""
        self.wiring.recompute = frozenset(modules)


class Head(nn.Module):
    """Norm and projection to the vocabulary; as a unit of training it gives losses and never the logits."""

    def __init__(self, shape: ModelShape, making: Making, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.vocab, self.label_smoothing = shape.vocab, label_smoothing
        self.norm = Norm("norm", making, shape.norm_eps)
        self.proj = Weights("proj", making)

    def forward(self, x_BLD: Tensor, targets_BL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(objective, losses_BL): see `token_losses`."""
        objective, losses_T = token_losses(
            self.norm(x_BLD).flatten(0, -2),
            self.proj.weight,
            targets_BL.flatten(),
            scale,
            # Evaluation is plain cross-entropy, so that exp(loss) is a perplexity.
            smoothing=self.label_smoothing if torch.is_grad_enabled() else 0.0,
            vocab=self.vocab,
            axis=self.wiring.axis,
            deferral=self.wiring.deferral,
        )
        return objective, losses_T.view(targets_BL.shape)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """[B, L, V]; of a head that is not cut."""
        if self.wiring.axis is not None:
            raise InvariantError(
                "logits of the whole vocabulary were asked of a rank that holds a part of it",
                why=f"the head is cut over {self.wiring.size} tensor-parallel ranks, which only make losses",
                try_=["evaluate", "sample from a checkpoint with one process"],
            )
        return linear(self.norm(x_BLD), [self.proj.weight])


def embedding(index_BL: Tensor, weight_VD: Tensor, *, sparse: bool = False) -> Tensor:
    """Rows of the weight; a row's gradients add up in the order of the index, in fp32 for lower dtypes.

    sparse: the weight's gradient may hold the rows that occur alone (on the CPU).
    """
    return _Embedding.apply(index_BL, weight_VD, sparse)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index_BL: Tensor, weight_VD: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(index_BL)
        ctx.shape, ctx.sparse = weight_VD.shape, sparse and weight_VD.device.type == "cpu"
        return nn.functional.embedding(index_BL, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        index_BL = ctx.saved_tensors[0]
        if not ctx.sparse:
            return None, _row_sums(dy, index_BL, ctx.shape[0]), None
        present, index = torch.unique(index_BL, return_inverse=True)
        rows = _sums(dy.to(wide(dy.dtype)), index, len(present)).to(dy.dtype)
        found = torch.sparse_coo_tensor(
            present[None], rows, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return None, found, None


def own_tokens(x: Tensor, wiring: Wiring) -> Cut | None:
    """Where a rank's share of the tokens lies in [B, L, D], for dropout; None when it holds all of them."""
    return Cut(first=wiring.rank * x.numel()) if wiring.sequence else None


def embedding_part(index_BL: Tensor, weight_ND: Tensor, vocab: int, axis: Axis) -> Tensor:
    """Rows of a vocabulary of which this rank holds N, from rank * ceil(vocab / t) on; N may be 0.

    Returns [B, L, D], or this rank's tokens [T / t, D] with sequence parallelism.
    """
    return _EmbeddingPart.apply(index_BL, weight_ND, axis.rank * -(-vocab // axis.size), axis)


class _EmbeddingPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index_BL: Tensor, weight_ND: Tensor, first: int, axis: Axis) -> Tensor:
        rows, width = weight_ND.shape
        index_T = index_BL.flatten() - first
        elsewhere_T = (index_T < 0) | (index_T >= rows)
        # Row N stands for all tokens of other ranks.
        index_T.masked_fill_(elsewhere_T, rows)
        ctx.save_for_backward(index_T)
        ctx.rows, ctx.axis = rows, axis
        if rows:
            x_TD = weight_ND.index_select(0, index_T.clamp(max=rows - 1))
            x_TD.masked_fill_(elsewhere_T.unsqueeze(1), 0.0)
        else:
            x_TD = weight_ND.new_zeros(index_T.numel(), width)
        if axis.sequence:
            return axis.scatter_sum(x_TD).wait()
        return axis.sum(x_TD).wait().view(*index_BL.shape, width)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (index_T,) = ctx.saved_tensors
        dy_TD = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        if ctx.axis.sequence:
            dy_TD = ctx.axis.gather_tokens(dy_TD).wait()
        return None, _row_sums(dy_TD, index_T, ctx.rows + 1)[: ctx.rows], None, None


def _row_sums(dy: Tensor, index: Tensor, rows: int) -> Tensor:
    """[rows, D]: per row the sum of dy over the places where the index names it."""
    if dy.dtype == wide(dy.dtype):
        return _sums(dy, index, rows)
    if dy.device.type != "cpu":
        return _sums(dy.to(wide(dy.dtype)), index, rows).to(dy.dtype)
    # Few rows of a vocabulary occur: only theirs are added up in fp32.
    present, index = torch.unique(index, return_inverse=True)
    dw = dy.new_zeros(rows, dy.shape[-1])
    dw[present] = _sums(dy.to(wide(dy.dtype)), index, len(present)).to(dy.dtype)
    return dw


def _sums(dy: Tensor, index: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, index, rows, -1, False)
