"""One rank of a layout on paper: its real modules on meta tensors play one real step, and what passes is counted.

    assemble   decoder, chunks, ZeRO, pipeline, optimizer, as a run makes them      train/assemble.py
    play       accumulate -> reduce -> agree -> update -> publish                   train/step.py, all microbatches
    count      parameters, flat groups, bytes that are held, calls and bytes sent on every axis

Only the edges are stand-ins: tensors have shapes and no memory, and the other ranks are not there (comm/stand_in.py).
"""

from collections import Counter
from dataclasses import dataclass

import torch

from sirara.comm.stand_in import Count, StandIn, StandInMail, stand_in_axes
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError, InvariantError, LayoutError
from sirara.mesh import Mesh
from sirara.parallel.flat import FlatGroup
from sirara.parallel.stage import Inputs
from sirara.pure.families import ModelShape, parameter_count
from sirara.pure.rng import DropoutKey
from sirara.train.assemble import Assembly, assemble, specs_of
from sirara.train.paper import META, OnPaper

HELD = ("weights", "masters", "optimizer", "window", "gradients and exchange")
"""What `Zero.bytes_held` tells apart, in the order in which a trace shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """One flat group of the rank.

    elements: of its parameters.  padding: elements behind and between them, up to a multiple of dp shards.
    shard: elements whose reduced gradient and saved state are this rank's.
    guest: the weights are updated on another pipeline stage and copied here.
    """

    name: str
    elements: int
    padding: int
    shard: int
    guest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank does in one group of ranks in one step; bytes are payload that it sends."""

    ranks: int
    calls: int
    bytes: int
    kinds: dict[str, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rank of a layout holds, and what it does in one step.

    parameters: of the whole model, counted from its tensors; all else was built and played.
    parameters_here: elements that this rank computes with.  groups: its flat groups.
    stages: per (virtual) stage of the rank its units.  held: bytes by kind after the step.
    traffic: by purpose: the axes dp, tp and pp, "ties" (tied weights over stages), "copies" (replicated weights over
    tp), "plane" (Muon's matrices), "world" (all ranks agree).  actions: of the pipeline's row, by kind.
    microbatches: of the step; dealt: to this rank; places: of the rank that has most; block: added up locally.
    """

    mesh: Mesh
    parameters: int
    parameters_here: int
    groups: tuple[GroupLine, ...]
    stages: dict[int, tuple[str, ...]]
    held: dict[str, int]
    traffic: dict[str, Traffic]
    microbatches: int
    dealt: int
    places: int
    block: int
    actions: dict[str, int]


def trace(config: RunConfig, shape: ModelShape, *, rank: int) -> Trace:
    """Builds and plays one rank of the configuration's mesh.

    Raises:  ConfigError when the mesh leaves the number of ranks open, LayoutError when it has no such rank or does
             not fit the model.
    """
    mesh = mesh_of(config, rank)
    specs = specs_of(config, shape)
    comms = {"plane": _plane(mesh), **{axis: mesh.peers(axis) for axis in ("pp", "dp", "tp")}}
    # Compiled blocks hold and send the same; compiling them would take longer than all the rest.
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    built = assemble(
        config,
        shape,
        specs,
        mesh=mesh,
        comms=stand_in_axes(rank, mesh.world, comms),
        device=META,
        mail=StandInMail,
    )
    play(built, config, mesh)
    stage, zero = built.stepper.stage, built.state.zero
    held: dict[str, int] = dict.fromkeys(HELD, 0)
    for what, size in zero.bytes_held():
        held[what] += size
    return Trace(
        mesh=mesh,
        parameters=parameter_count(shape),
        parameters_here=sum(slot.numel for flat in zero.groups for slot in flat.group.slots),
        groups=tuple(_line(flat, mesh.dp) for flat in zero.groups),
        stages={s: tuple(specs[unit].name for unit in chunk.units) for s, chunk in stage.chunks.items()},
        held=held,
        traffic=_traffic(built),
        microbatches=built.deal.microbatches,
        dealt=len(built.deal.mine(mesh.coordinate("dp"))),
        places=built.deal.places,
        block=1 << built.deal.k,
        actions=dict(Counter(str(action.kind) for action in stage.pipeline.row)),
    )


def play(built: Assembly, config: RunConfig, mesh: Mesh) -> None:
    """One whole step on meta tensors."""
    train, length = config.train, config.data.seq_len

    def ids() -> torch.Tensor:
        return torch.empty(train.micro_batch, length, dtype=torch.int64, device=META)

    mine = built.deal.mine(mesh.coordinate("dp"))
    inputs = {i: Inputs(tokens_BL=ids(), targets_BL=ids(), positions_BL=ids()) for i in mine}
    keys = None
    if config.model.dropout or config.model.attention_dropout:
        keys = {i: DropoutKey(seed=config.seed, step=0, microbatch=i) for i in mine}
    targets = train.global_batch * length
    with OnPaper():
        losses = built.stepper.accumulate(inputs, valid_targets=targets, keys=keys)
        result = built.stepper.finish(losses, valid_targets=targets, lr=0.0, update=1, request=0)
    if result.skipped:
        raise InvariantError(f"the step on paper was skipped: {result.bad_parameter} is not finite")


def mesh_of(config: RunConfig, rank: int) -> Mesh:
    """The mesh that the configuration asks for, as one of its ranks sees it."""
    m, launch = config.mesh, config.launch
    others = m.pp * m.cp * m.tp
    dp = m.dp
    if dp == "auto":
        if launch.nproc == "auto":
            raise ConfigError(
                "mesh.dp=auto leaves the number of ranks open, and a trace has no machines to count",
                code="SR122",
                where="mesh.dp",
                try_=["mesh.dp=8", f"launch.nproc={8 * others}"],
            )
        dp = launch.nproc * launch.nodes // others
    mesh = Mesh(pp=m.pp, dp=dp, cp=m.cp, tp=m.tp, rank=rank)
    if not 0 <= rank < mesh.world:
        raise LayoutError(
            f"--rank {rank} is not in this mesh: pp={mesh.pp} dp={mesh.dp} cp={mesh.cp} tp={mesh.tp}",
            why=f"it has {mesh.world} ranks, counted from 0",
            try_=[f"--rank {mesh.world - 1}"],
        )
    return mesh


def _plane(mesh: Mesh) -> list[int]:
    size = mesh.world // mesh.pp
    first = mesh.coordinate("pp") * size
    return list(range(first, first + size))


def _line(flat: FlatGroup, dp: int) -> GroupLine:
    elements = sum(slot.numel for slot in flat.group.slots)
    shard = flat.shard[1] - flat.shard[0]
    return GroupLine(
        name=flat.group.name,
        elements=elements,
        padding=shard * dp - elements,
        shard=shard,
        guest=flat.guest,
    )


def _traffic(built: Assembly) -> dict[str, Traffic]:
    comms = built.stepper.stage.comms
    found: dict[str, Traffic] = {}
    for name in ("dp", "tp", "pp", "ties", "copies", "plane", "world"):
        comm = getattr(comms, name)
        if isinstance(comm, StandIn):
            found[name] = Traffic(
                ranks=comm.size, calls=comm.calls, bytes=comm.bytes_sent, kinds=dict(comm.counts)
            )
    return found
