"""A small model of the user's own that fills the protocol of `parallelize`, from plain torch alone."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sirara.comm.world import World, connect_axes
from sirara.mesh import Mesh, build_mesh
from sirara.parallel.parallelize import Layout, Stage, parallelize
from sirara.pure.families import Init, TensorSpec, UnitSpec, init_slice, with_frozen
from sirara.pure.placement import REPLICATE
from sirara.pure.schedule import chunks_of
from sirara.pure.schedule import schedule as make_schedule
from sirara.pure.split import split_units
from sirara.pure.tree import Deal, deal
from sirara.train.precision import precision_of

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


def tensor(name, local, shape, *, kind="normal", tied_to=None, dtype=None) -> TensorSpec:
    """A replicated tensor of a toy; matrices decay."""
    return TensorSpec(
        name=name,
        local=local,
        shape=shape,
        placement=REPLICATE,
        decay=len(shape) > 1,
        init=Init(kind=kind, std=0.1),
        tied_to=tied_to,
        dtype=dtype,
    )


def specs(*, tied: bool) -> tuple[UnitSpec, ...]:
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


def assemble(
    *,
    zero: int = 1,
    microbatches: int = 12,
    block: int | str = "auto",
    precision: str = "fp32",
    tied: bool = True,
    pp: int = 1,
    schedule: str = "1f1b",
    direct: bool = True,
    frozen: tuple[str, ...] = (),
    dtypes: dict[str, str] | None = None,
    seed: int = 7,
    model: Any = None,
    table: tuple[UnitSpec, ...] | None = None,
    **layout: Any,
) -> tuple[Stage, Mesh, Deal]:
    """The toy, or another model with its table of tensors, on the ranks of the current group, with initial weights."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    mesh = build_mesh(world=size, rank=rank, pp=pp)
    comms = connect_axes(world, mesh.groups(), timeout_s=20, direct=direct)
    kind = precision_of(precision)
    dealt = deal(microbatches, mesh.dp, block, max_k=0 if zero >= 2 else 3)
    actions = make_schedule(schedule, ranks=pp, chunks=chunks_of(schedule), microbatches=dealt.places)
    units = with_frozen(table or specs(tied=tied), frozen)
    if dtypes:
        units = tuple(
            replace(u, tensors=tuple(replace(t, dtype=dtypes.get(t.local)) for t in u.tensors)) for u in units
        )
    split = split_units(
        [1.0] * len(units), actions.stages, owners=[actions.rank_of(s) for s in range(actions.stages)]
    )
    stage = parallelize(
        model or Toy(),
        units,
        Layout(
            zero=zero,
            deal=dealt,
            schedule=actions,
            split=split,
            hidden=HIDDEN,
            weights=kind.weights,
            sums=kind.sums,
            **layout,
        ),
        comms=comms,
        device=torch.device("cpu"),
    )
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, seed, a, b)))
    return stage, mesh, dealt
