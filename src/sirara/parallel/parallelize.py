"""parallelize: THE order in which a model is split and wrapped.

    split stages -> tensor -> recompute -> compile -> zero

What it asks of a model is small, so that a user's own module can fill it: an ordered list of units (an embedding,
blocks with one hidden state in and out, a head with the loss), and per unit the table of its logical tensors.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import nn

from sirara.comm.mail import Mail
from sirara.comm.world import Comms
from sirara.errors import ConfigError, LayoutError
from sirara.parallel.pipeline import Hidden, Pipeline
from sirara.parallel.stage import Chunk
from sirara.parallel.tensor import TensorAxis
from sirara.parallel.zero import Zero
from sirara.pure.families import UnitSpec
from sirara.pure.groups import Group, flat_groups
from sirara.pure.recompute import FULL, Kinds, Setting, keeps_little, kinds_of_blocks, name_of
from sirara.pure.schedule import Action, Kind, Schedule, sending_early, sends_early
from sirara.pure.tree import Deal


class Trainable(Protocol):
    """A model that can be parallelized; its parameters may lie on the meta device, its buffers are made by the user.

    units()  [embed, block, ..., head], called as
        embed(tokens_BL, positions_BL, key) -> x_BLD          key: DropoutKey, or None for no dropout
        block(x_BLD, positions_BL, documents_BL, key) -> x_BLD
        head(x_BLD, targets_BL, scale) -> (objective, losses_BL)       the objective's gradient is that of
                                                                       scale * sum(losses_BL)

    Every parameter has a `TensorSpec`.  Randomness is the key's: evaluation and a block that is run again are told by
    it, and `training` is never switched.  What only some models can do is asked for by name: `set_axis(axis)` to
    compute with parts of its matrices
    (tensor parallelism), `split_backward()` to put weight gradients off (zero-bubble schedules, and dx before
    weight gradients in the others; without it the input half of backward does all the work),
    and of a block `recompute_modules(modules)` to keep less (of `pure.recompute.MODULES`).
    """

    def units(self) -> list[nn.Module]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that parallelize may decide by; none of it changes what is computed, but for `fast` and tensor parallelism.

    split: the units of each stage.  hidden: features of the state between units.
    recompute: recipes as in `pure.recompute`.
    sequence: sequence parallelism.  keep: ZeRO 3 gathers once per step.
    """

    zero: int
    deal: Deal
    schedule: Schedule
    split: Sequence[range]
    hidden: int
    weights: torch.dtype
    sums: torch.dtype
    sequence: bool = False
    keep: bool = False
    recompute: Setting = "none"
    compile: bool = False
    fast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank has of the model: its chunks, their flat groups, and the pipeline that runs them.

    groups: per tp rank all flat groups of the model, as every rank knows them.
    split: the units of each stage.  homes: unit -> pipeline rank.
    order: units in the order in which a step uses their weights.
    """

    chunks: dict[int, Chunk]
    zero: Zero
    pipeline: Pipeline
    comms: Comms
    groups: tuple[tuple[Group, ...], ...]
    split: tuple[range, ...]
    homes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that has the losses."""
        return self.homes[-1]


def parallelize(
    model: Trainable,
    specs: Sequence[UnitSpec],
    layout: Layout,
    *,
    comms: Comms,
    device: torch.device,
    mail: Callable[..., Mail] = Mail,
) -> Stage:
    """The model as this rank's chunks of flat groups, ready to be initialised or loaded.

    Args:    mail: makes the letters between pipeline ranks.
    Raises:  LayoutError or ConfigError when the model cannot do what the layout asks for.
    """
    units, schedule = model.units(), _played(model, layout, tp=comms.tp.size)
    homes = _homes(layout, len(units))
    mine = {
        stage: {unit: units[unit] for unit in layout.split[stage]}
        for stage in schedule.stages_of(comms.pp.rank)
    }
    local = {unit: module for part in mine.values() for unit, module in part.items()}

    if comms.tp.size > 1:
        _able(model, "set_axis", "tensor parallelism")(TensorAxis(comms.tp, sequence=layout.sequence))

    deferral = None
    halves = any(action.kind == Kind.INPUT for action in schedule.rows[comms.pp.rank])
    if halves and hasattr(model, "split_backward"):
        deferral = model.split_backward()  # pyright: ignore[reportAttributeAccessIssue]
    again = {
        unit: kinds for stage, part in mine.items() for unit, kinds in _again(layout, stage, part, len(units))
    }
    for unit, kinds in again.items():
        if kinds != FULL:
            _able(local[unit], "recompute_modules", f"recompute of {name_of(kinds)}")(kinds)

    compiled = sorted(local.keys() - {0, len(units) - 1}) if layout.compile else []
    if compiled:
        # Dynamo counts versions of a function over all blocks that share it and, past its limit, runs the others as
        # they are written: other bits, on other blocks in every layout.
        limits = importlib.import_module("torch._dynamo.config")
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(limits, name, 1 << 20)
        # In place: names of submodules and parameters stay what they are, so checkpoints do too.
        for unit in compiled:
            local[unit].compile(dynamic=False)

    groups = tuple(
        flat_groups(specs, tp=comms.tp.size, tp_rank=t, sequence=layout.sequence)
        for t in range(comms.tp.size)
    )
    for unit, module in local.items():
        _check_table(unit, module, groups[comms.tp.rank], tp=comms.tp.size)
    zero = Zero(
        local,
        groups[comms.tp.rank],
        comms=comms,
        home=homes.__getitem__,
        deal=layout.deal,
        stage=layout.zero,
        dtype=layout.weights,
        sum_dtype=layout.sums,
        device=device,
        fast=layout.fast,
        keep=layout.keep,
    )
    if hasattr(model, "set_sink"):
        model.set_sink(zero.sink)  # pyright: ignore[reportAttributeAccessIssue]
    chunks = {
        stage: Chunk(
            stage,
            part,
            zero,
            model_units=len(units),
            recompute=[unit for unit in part if again.get(unit) == FULL],
            deferral=deferral,
            compiled=[unit for unit in part if unit in compiled],
        )
        for stage, part in mine.items()
    }
    pipeline = Pipeline(
        chunks,
        schedule,
        mail(comms.pp, device=device) if comms.pp.size > 1 else None,
        rank=comms.pp.rank,
        hidden=Hidden(
            size=layout.hidden, dtype=layout.weights, shards=comms.tp.size if layout.sequence else 0
        ),
        alarm=comms.world.alarm,
    )
    return Stage(
        chunks=chunks,
        zero=zero,
        pipeline=pipeline,
        comms=comms,
        groups=groups,
        split=tuple(layout.split),
        homes=homes,
        order=_order(pipeline.row, chunks),
    )


def _played(model: Trainable, layout: Layout, *, tp: int) -> Schedule:
    """The layout's table, with dx sent early where that costs nothing and the model can split its backward."""
    early = sends_early(tp=tp, compiled=layout.compile, keeps_little=keeps_little(layout.recompute))
    return sending_early(layout.schedule) if early and hasattr(model, "split_backward") else layout.schedule


def _check_table(unit: int, module: nn.Module, groups: Sequence[Group], *, tp: int) -> None:
    """Holds a unit against the table of its tensors: what is not in it would be neither trained, saved nor moved.

    Raises:  LayoutError that names what differs.
    """
    told = {
        name: leaf.size
        for group in groups
        for use in group.uses
        if use.unit == unit
        for name, leaf in zip(use.leaves, group.leaves, strict=True)
    }
    real = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    where = f"unit {unit}, {type(module).__name__}"
    for name in sorted(told.keys() ^ real.keys()):
        known = name in real
        raise LayoutError(
            f"{name} is a parameter {'without a TensorSpec' if known else 'of a TensorSpec alone'}",
            where=where,
            why="a rank holds, trains and saves what the table of tensors lists",
            try_=[f"a TensorSpec with local={name!r}" if known else f"no TensorSpec with local={name!r}"],
        )
    for name, size in told.items() if tp == 1 else ():
        # A pack has a dim of its own in the table.
        if prod(real[name]) != prod(size) or (len(real[name]) == len(size) and real[name] != tuple(size)):
            raise LayoutError(
                f"{name} is {list(real[name])} in the module and {list(size)} in the table of tensors",
                where=where,
                try_=["the same shape on both sides"],
            )
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise LayoutError(
                f"the buffer {name} lies on the meta device, and nothing makes it", where=where,
                try_=["make buffers on the device, they are the user's own"],
            )  # fmt: skip
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise LayoutError(
                f"{name} is a {type(part).__name__}: its masks come from a process's own random numbers",
                where=where,
                why="no other layout, no block that is run again and no resume would draw them again",
                try_=["sirara.model.dropout with the key that the unit is called with", "p=0"],
            )  # fmt: skip


def _homes(layout: Layout, units: int) -> tuple[int, ...]:
    """Unit -> pipeline rank; the split covers every unit once, in order."""
    covered = [unit for part in layout.split for unit in part]
    if covered != list(range(units)) or len(layout.split) != layout.schedule.stages:
        raise LayoutError(
            f"{len(layout.split)} stages hold the units {covered}",
            why=f"the model has {units} units and the schedule {layout.schedule.stages} stages",
        )
    return tuple(layout.schedule.rank_of(stage) for stage, part in enumerate(layout.split) for _ in part)


def _again(layout: Layout, stage: int, part: Iterable[int], units: int) -> list[tuple[int, Kinds]]:
    """The units of a stage of which something is made again in backward, blocks alone, and what."""
    blocks = [unit for unit in part if 0 < unit < units - 1]
    dealt = kinds_of_blocks(layout.recompute, stage=stage, blocks=len(blocks))
    return [(unit, kinds) for unit, kinds in zip(blocks, dealt, strict=True) if kinds]


def _order(row: Sequence[Action], chunks: dict[int, Chunk]) -> tuple[int, ...]:
    """Units in the order in which one step of this rank uses their weights; weight gradients need none."""
    order: list[int] = []
    for action in row:
        if action.kind == Kind.FORWARD:
            order += chunks[action.stage].units
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            order += reversed(chunks[action.stage].units)
    return tuple(order)


def _able(model: object, method: str, what: str):  # noqa: ANN202 - the method's own type
    """The model's method of that name.

    Raises:  ConfigError when it has none.
    """
    found = getattr(model, method, None)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} cannot do {what}: it has no method {method}",
            try_=["leave the option out", f"give the model a method {method}"],
        )
    return found
