"""A small model of the user's own that fills the protocol of `parallelize`, from plain torch alone."""

import torch
from torch import nn

from sirara.pure.families import Init, TensorSpec, UnitSpec
from sirara.pure.placement import REPLICATE

VOCAB, HIDDEN, BLOCKS, LENGTH = 37, 56, 3, 6  # every rank of four owns elements, not padding alone


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, HIDDEN, device="meta"))

    def forward(self, tokens_BL, positions_BL, key):
        return nn.functional.embedding(tokens_BL, self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN, device="meta")
        self.unused = nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, x_BLD, positions_BL, documents_BL, key):
        return x_BLD + torch.tanh(self.mix(x_BLD)).cumsum(dim=1) / (1 + positions_BL[..., None])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, HIDDEN, device="meta"))

    def forward(self, x_BLD, targets_BL, scale):
        logits = (
            (x_BLD @ self.weight.T).double()
            if x_BLD.dtype == torch.float64
            else (x_BLD @ self.weight.T).float()
        )
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets_BL.flatten(), ignore_index=-100, reduction="none"
        ).view(targets_BL.shape)
        return losses.sum() * scale, losses.detach()


class Toy:
    def __init__(self):
        self._units = [Embed(), *(Block() for _ in range(BLOCKS)), Head()]

    def units(self):
        return self._units


def specs(*, tied: bool) -> tuple[UnitSpec, ...]:
    def tensor(name, local, shape, *, std=0.1, tied_to=None):
        init = Init(kind="normal", std=std)
        return TensorSpec(
            name=name,
            local=local,
            shape=shape,
            placement=REPLICATE,
            decay=len(shape) > 1,
            init=init,
            tied_to=tied_to,
        )

    blocks = [
        UnitSpec(
            name=f"block.{i}",
            flops_per_token=0,
            tensors=(
                tensor(f"b{i}.mix.weight", "mix.weight", (HIDDEN, HIDDEN)),
                tensor(f"b{i}.mix.bias", "mix.bias", (HIDDEN,)),
                tensor(f"b{i}.unused", "unused", (3,)),
            ),
        )
        for i in range(BLOCKS)
    ]
    embed = UnitSpec(name="embed", flops_per_token=0, tensors=(tensor("embed", "weight", (VOCAB, HIDDEN)),))
    head = UnitSpec(
        name="head",
        flops_per_token=0,
        tensors=(tensor("head", "weight", (VOCAB, HIDDEN), tied_to="embed" if tied else None),),
    )
    return (embed, *blocks, head)
