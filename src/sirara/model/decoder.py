"""One decoder for all families: an ordered list of units with one hidden state between them.

Shape letters: B sequences, L tokens, D model, V vocabulary.
"""

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn

from sirara.errors import LayoutError
from sirara.model.attend import Mask, alibi_slopes
from sirara.model.attention import KvCache
from sirara.model.blocks import Block, Embed, Head
from sirara.model.rotary import Rotary
from sirara.model.split import Axis, Deferral, Sink, Wiring
from sirara.model.weights import Making
from sirara.pure.families import UnitSpec, unit_specs
from sirara.pure.rng import DropoutKey
from sirara.pure.shape import ModelShape


def can_be_dealt(shape: ModelShape, tp: int) -> bool:
    """Whether heads and ffn are shared out evenly over so many tensor-parallel ranks; kv heads may be copied."""
    kv = shape.kv_heads
    return not (shape.heads % tp or shape.ffn % tp or (kv % tp and tp % kv))


class Decoder(nn.Module):
    """Embedding, blocks, head of a `ModelShape`; on `meta` until somebody gives the parameters memory.

    dropout: of the embedding and of what a block adds to its input.  attention_dropout: of attention weights.
    label_smoothing: the part of each target that is spread evenly over the vocabulary in training.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        label_smoothing: float = 0.0,
        device: str | torch.device = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape = shape
        specs = unit_specs(shape)
        self.wirings: list[Wiring] = []

        def making(unit: UnitSpec) -> Making:
            tensors = {t.local: t for t in unit.tensors}
            self.wirings.append(Wiring())
            return Making(specs=tensors, device=torch.device(device), dtype=dtype, wiring=self.wirings[-1])

        positions = shape.traits.positions
        slopes = alibi_slopes(shape.heads) if positions == "alibi" else None
        self.mask = mask = Mask(window=shape.sliding_window, slopes=slopes)
        rotary = Rotary(shape) if positions == "rope" else None
        self.embed = Embed(shape, making(specs[0]), dropout)
        self.blocks = nn.ModuleList(
            Block(shape, i, making(unit), mask, rotary, dropout=dropout, attention_dropout=attention_dropout)
            for i, unit in enumerate(specs[1:-1])
        )
        self.head = Head(shape, making(specs[-1]), label_smoothing)
        if shape.tie_embeddings:
            self.head.proj.weight.data = self.embed.tokens.weight.data

    def units(self) -> list[nn.Module]:
        """The units in order, aligned with `unit_specs(shape)`."""
        return [self.embed, *self.blocks, self.head]

    def set_axis(self, axis: Axis) -> None:
        """Every unit computes with this rank's part of its tensors, which the caller gives to the parameters.

        Raises: LayoutError when heads or ffn cannot be dealt out evenly.
        """
        heads, kv, ffn = self.shape.heads, self.shape.kv_heads, self.shape.ffn
        if not can_be_dealt(self.shape, axis.size):
            raise LayoutError(
                f"{heads} heads, {kv} kv heads and an ffn of {ffn} cannot be dealt out to {axis.size} ranks",
                why="heads and ffn must be divisible by their number, kv heads divide it or be divisible by it",
                try_=["another mesh.tp"],
            )
        for wiring in self.wirings:
            wiring.axis = axis if axis.size > 1 else None
        if self.mask.slopes is not None:
            own = slice(axis.rank * heads // axis.size, (axis.rank + 1) * heads // axis.size)
            self.mask.keep_heads(alibi_slopes(heads)[own])

    def set_sink(self, sink: Sink | None) -> None:
        """Weight gradients are written where the sink wants them; that of the embedding may be sparse then."""
        for wiring in self.wirings:
            wiring.sink = sink

    def split_backward(self) -> Deferral:
        """From now on linear layers leave their weight gradients to the deferral while it is active.

        Norms give theirs at once; so does the embedding.
        """
        deferral = Deferral()
        for wiring in self.wirings:
            wiring.deferral = deferral
        return deferral

    def recompute_modules(self, modules: Collection[str]) -> None:
        """What every block makes again in backward instead of keeping it: of `pure.recompute.MODULES`."""
        for block in self.blocks:
            cast(Block, block).recompute_modules(modules)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        positions_BL: Tensor | None = None,
        documents_BL: Tensor | None = None,
        key: DropoutKey | None = None,
        cache: KvCache | None = None,
    ) -> Tensor:
        """Logits [B, L, V]: for tests, sampling and whoever wants the whole model at once."""
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
        x_BLD = self.embed(tokens_BL, positions_BL, key)
        for block in self.blocks:
            x_BLD = block(x_BLD, positions_BL, documents_BL, key, cache)
        return self.head.logits(x_BLD)
