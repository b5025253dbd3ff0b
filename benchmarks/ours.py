"""Our side of every benchmark: mesh, model, parallelize and step, put together as the Trainer does it."""

import torch
import torch.distributed as dist
from benchmarks.peers import BETAS, CLIP, DECAY, EPS, LR, shape_of

from sirara.comm.world import World, connect_axes
from sirara.mesh import build_mesh
from sirara.model.decoder import Decoder
from sirara.parallel.parallelize import Layout, Stage, parallelize
from sirara.parallel.stage import Inputs
from sirara.pure.families import init_slice, unit_specs
from sirara.pure.schedule import chunks_of, schedule
from sirara.pure.split import split_units, unit_costs
from sirara.pure.tree import deal
from sirara.train.optim import AdamW
from sirara.train.precision import precision_of
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step


class Ours:
    """A llama of `size` on a mesh of all ranks; dp takes what pp and tp leave.

    Args:  microbatches: per data-parallel rank.  zero, pp, tp, sequence, name, split, keep, recompute, fast, compile:
           as in the configuration; `name` is the schedule's.
    """

    def __init__(
        self,
        precision,
        *,
        microbatches,
        micro,
        size,
        zero=1,
        pp=1,
        tp=1,
        sequence=False,
        name="1f1b",
        split=None,
        keep=False,
        recompute="none",
        fast=False,
        compile=False,
        block="auto",
    ):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, node=0)
        self.mesh = build_mesh(world=ranks, rank=rank, pp=pp, tp=tp)
        self.comms = connect_axes(world, self.mesh.groups(), timeout_s=120)
        kind = precision_of("bf16" if precision == "autocast" else precision)
        self.deal = deal(microbatches * self.mesh.dp, self.mesh.dp, block, max_k=0 if zero >= 2 else 3)
        shape = shape_of(size)
        specs = unit_specs(shape)
        table = schedule(name, ranks=pp, chunks=chunks_of(name, "auto"), microbatches=self.deal.places)
        owners = [table.rank_of(stage) for stage in range(table.stages)]
        layout = Layout(
            zero=zero,
            deal=self.deal,
            schedule=table,
            split=split_units(unit_costs(specs, shape.hidden), table.stages, split, owners=owners),
            hidden=shape.hidden,
            weights=kind.weights,
            sums=kind.sums,
            sequence=sequence,
            keep=keep,
            recompute=recompute,
            compile=compile,
            fast=fast,
        )
        self.layout, self.table = layout, table
        model = Decoder(shape, device="meta", dtype=kind.weights)
        self.stage: Stage = parallelize(model, specs, layout, comms=self.comms, device=torch.device("cpu"))
        optimizer = AdamW(betas=BETAS, eps=EPS, weight_decay=DECAY)
        self.stepper = Step(stage=self.stage, mesh=self.mesh, deal=self.deal, optimizer=optimizer, clip=CLIP)
        state = TrainState(
            stage=self.stage, mesh=self.mesh, state_names=optimizer.states_of, counters=Counters()
        )
        state.reset_optimizer()
        self.stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 0, a, b)))
        self.positions = torch.arange(size.seq).expand(micro, size.seq)
        self.updates, self.norm = 0, 0.0
        self._began = self._sent()

    def inputs_of(self, batches):
        """What the step pipeline takes, from this rank's microbatches [(tokens, targets)]."""
        mine = self.deal.mine(self.mesh.coordinate("dp"))
        return {
            i: Inputs(tokens_BL=tokens, targets_BL=targets, positions_BL=self.positions)
            for i, (tokens, targets) in zip(mine, batches, strict=True)
        }

    def step(self, batches):
        """One optimizer step over this rank's microbatches [(tokens, targets)]; returns the mean loss times tokens."""
        inputs = self.inputs_of(batches)
        valid = sum(int(t.numel()) for _, t in batches) * self.mesh.dp
        losses = self.stepper.accumulate(inputs, valid_targets=valid, keys=None)
        self.updates += 1
        result = self.stepper.finish(losses, valid_targets=valid, lr=LR, update=self.updates, request=0)
        self.stage.zero.wait_all()
        self.norm = result.grad_norm
        return result.loss * valid / self.mesh.dp

    def grad_norm(self):
        return self.norm

    @property
    def bytes_sent(self):
        """Payload bytes per step that this rank has sent, by axis."""
        return {
            axis: (sent - self._began[axis]) / max(1, self.updates) for axis, sent in self._sent().items()
        }

    def expected_dp_bytes(self):
        """What a step sends over dp per rank in exact mode, from the layout alone: gradients, then weights."""
        others, total = self.mesh.dp - 1, 0
        zero, stage = self.stage.zero, self.layout.zero
        shards = {flat.index: flat.group.shard_numel(self.mesh.dp) for flat in zero.groups}
        leaf, sums = self.layout.weights.itemsize, self.layout.sums.itemsize
        for flat in zero.groups:
            # A block of one microbatch travels as autograd made it, the sum of a larger one in the dtype of sums.
            each = leaf if self.deal.k == 0 and others else sums
            total += len(flat.sums) * self.deal.rounds * others * shards[flat.index] * each
            if stage < 3:
                total += others * shards[flat.index] * (leaf if stage else sums)
        if zero.window is not None:
            resident: dict[int, int | None] = {}
            for unit in self.stage.order:
                place = zero.window.place[unit]
                if resident.get(place) != unit:
                    resident[place] = unit
                    total += others * sum(
                        load.shard_S.numel() * load.shard_S.element_size() for load in zero.window.loads[unit]
                    )
        return total

    def _sent(self):
        names = ("dp", "tp", "pp", "copies", "ties", "plane", "world")
        return {name: getattr(self.comms, name).bytes_sent for name in names}
