"""From a configuration to one rank's model, optimizer and state: on a device, or on paper (train/trace.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sirara.comm.mail import Mail
from sirara.comm.world import Comms
from sirara.config.check import check_layout, frozen_names
from sirara.config.schema import RunConfig
from sirara.mesh import Mesh
from sirara.model.decoder import Decoder
from sirara.parallel.parallelize import Layout, parallelize
from sirara.pure.families import ModelShape, UnitSpec, unit_specs, with_frozen
from sirara.pure.schedule import chunks_of, schedule
from sirara.pure.split import split_units, unit_costs
from sirara.pure.tree import Deal, deal
from sirara.train.optim import make_optimizer
from sirara.train.precision import precision_of
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One rank's parts.  Weights are zero until somebody initialises or loads them; the optimizer's state is zero.

    deal: which data-parallel rank computes which microbatch.
    """

    deal: Deal
    stepper: Step
    state: TrainState


def specs_of(config: RunConfig, shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The units of the model with what the configuration freezes.

    Raises:  LayoutError or ConfigError for a mesh or a kind of training that does not fit the model.
    """
    check_layout(config, shape)
    specs = unit_specs(shape)
    return with_frozen(specs, frozen_names(config.train.freeze, specs)) if config.train.freeze else specs


def decoder_of(config: RunConfig, shape: ModelShape) -> Decoder:
    """The model of a configuration, without memory; shape: its own, or a smaller one's."""
    return Decoder(
        shape,
        dropout=config.model.dropout,
        attention_dropout=config.model.attention_dropout,
        label_smoothing=config.train.label_smoothing,
        device="meta",
        dtype=precision_of(config.train.precision).weights,
    )


def assemble(
    config: RunConfig,
    shape: ModelShape,
    specs: Sequence[UnitSpec],
    *,
    mesh: Mesh,
    comms: Comms,
    device: torch.device,
    mail: Callable[..., Mail] = Mail,
) -> Assembly:
    """Splits the model as the configuration's mesh says and gives this rank its part.  Collective.

    Args:    specs: of the model's units, with what is frozen.  mail: makes the letters between pipeline ranks.
    Raises:  LayoutError or ConfigError for a mesh or a kind of training that the model cannot do.
    """
    train, m = config.train, config.mesh
    precision = precision_of(train.precision)
    # Stages 2 and 3 hold no full-size sums between microbatches, unless a block is asked for.
    deepest = 0 if m.zero >= 2 else 3
    dealt = deal(train.global_batch // train.micro_batch, mesh.dp, m.block, max_k=deepest)
    model = decoder_of(config, shape)
    table = schedule(
        m.schedule,
        ranks=mesh.pp,
        chunks=chunks_of(m.schedule, m.virtual_stages),
        microbatches=dealt.places,
    )
    split = split_units(
        unit_costs(specs, shape.hidden, recomputed=float(train.recompute == "full")),
        table.stages,
        None if m.split == "auto" else m.split,
        owners=[table.rank_of(stage) for stage in range(table.stages)],
    )
    layout = Layout(
        zero=m.zero,
        deal=dealt,
        schedule=table,
        split=split,
        hidden=shape.hidden,
        weights=precision.weights,
        sums=precision.sums,
        sequence=m.sequence_parallel,
        keep=m.gather == "step",
        recompute=train.recompute,
        compile=train.compile,
        fast=config.numerics == "fast",
    )
    stage = parallelize(model, specs, layout, comms=comms, device=device, mail=mail)
    o = train.optimizer
    optimizer = make_optimizer(
        name=o.name,
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        nesterov=o.nesterov,
        ns_steps=o.ns_steps,
    )
    stepper = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optimizer, clip=train.clip_grad_norm)
    state = TrainState(stage=stage, mesh=mesh, state_names=optimizer.states_of, counters=Counters())
    state.reset_optimizer()
    return Assembly(deal=dealt, stepper=stepper, state=state)
