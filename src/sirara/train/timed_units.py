"""Jobs that time an embedding, a block and a head of a model, forward and backward, as parallel/stage.py runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sirara.comm.world import connect_axes
from sirara.config.schema import RunConfig
from sirara.model.decoder import Decoder
from sirara.parallel.parallelize import Layout, Stage, parallelize
from sirara.parallel.stage import Chunk, Inputs
from sirara.plan.measured import dropped_of
from sirara.plan.profile import UnitTime, signature_of
from sirara.pure.families import ModelShape, init_slice, unit_specs
from sirara.pure.recompute import Kinds, name_of
from sirara.pure.rng import DropoutKey
from sirara.pure.schedule import schedule
from sirara.pure.tree import Deal
from sirara.train.assemble import decoder_of
from sirara.train.precision import precision_of
from sirara.train.rounds import Job, Place

Tensor = torch.Tensor
Timed = Callable[[int, str, Callable[[], Tensor | None]], Tensor | None]

UNITS = ("embed", "block", "head")
FORWARD, LIGHT, BACKWARD, INPUT, WEIGHT = "f", "l", "b", "i", "w"


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """One of each unit, a chunk of its own over one set of flat groups, on tensor-parallel rows of `tp` ranks."""

    place: Place
    config: RunConfig
    shape: ModelShape
    tp: int
    stage: Stage
    model: Decoder
    plain: Sequence[Chunk]
    light: Sequence[Chunk]
    inputs: Inputs

    def job(self, *, active: int, threads: int, again: Kinds) -> Job:
        """Two microbatches through all units, of which blocks compute `again` in backward."""
        what = f"units, tp {self.tp}, {active} at once, recompute {name_of(again)}"
        return Job(what=what, run=lambda: self._cycle(again), active=active, threads=threads)

    def rows(self, job: Job, *, again: Kinds) -> list[UnitTime]:
        """What was found.  Collective."""
        found: list[UnitTime] = []
        for unit in UNITS:
            at = {w: self.place.typical(job.times.get(unit + w, [])) for w in "flbiw"}
            found.append(
                UnitTime(
                    signature=signature_of(self.shape), unit=unit, micro_batch=self.config.train.micro_batch,
                    seq_len=self.config.data.seq_len, tp=self.tp,
                    sequence=self.config.mesh.sequence_parallel and self.tp > 1,
                    dtype=self.config.train.precision, threads=job.threads, processes=job.active,
                    recompute=name_of(again), forward_s=at["f"], light_s=at["l"] or at["f"], backward_s=at["b"],
                    input_s=at["i"] or at["b"], weight_s=at["w"] or 1e-9,
                    dropped=dropped_of(self.config) if unit != "head" else "",
                )
            )  # fmt: skip
        return found

    def _cycle(self, again: Kinds) -> dict[str, list[float]]:
        self.model.recompute_modules(again)
        notes: dict[str, list[float]] = {}

        def timed(at: int, what: str, call: Callable[[], Tensor | None]) -> Tensor | None:
            began = self.place.now()
            found = call()
            notes.setdefault(UNITS[at] + what, []).append(self.place.now() - began)
            return found

        for microbatch in (0, 1):
            self._microbatch(microbatch, timed)
        self.stage.zero.release(self.stage.zero.reduce())
        return notes

    def _microbatch(self, i: int, timed: Timed) -> None:
        """Forward and backward: of the first microbatch at once, of the second in halves."""
        trails, x = [], None
        key = DropoutKey(seed=0, step=0, microbatch=i) if dropped_of(self.config) else None
        for at, chunk in enumerate(self.plain):
            if i == 1 and at == 1 and x is not None:
                copy = x.detach()
                timed(at, LIGHT, lambda c=copy: self.light[1].forward(c, self.inputs, key, 1.0)[1])
            made = []

            def forward(chunk: Chunk = chunk, x: Tensor | None = x, made: list[object] = made) -> Tensor:
                trail, y = chunk.forward(x, self.inputs, key, 1e-3)
                made.append(trail)
                return y

            x = timed(at, FORWARD, forward)
            trails.append(made[0])
        dy: Tensor | None = None
        for at in (2, 1, 0):
            chunk, trail = self.plain[at], trails[at]
            if i == 0 or at == 0:
                dy = timed(at, BACKWARD, lambda c=chunk, t=trail, d=dy, i=i: c.backward(t, d, i))
                continue
            dy = timed(at, INPUT, lambda c=chunk, t=trail, d=dy, i=i: c.backward_input(t, d, i))
            timed(at, WEIGHT, lambda c=chunk, t=trail, i=i: c.backward_weight(t, i))


def make_units(place: Place, config: RunConfig, shape: ModelShape, *, tp: int) -> Units:
    """Units with fresh weights.  Collective."""
    train, kind, n = config.train, precision_of(config.train.precision), place.world.size
    alone = [[r] for r in range(n)]
    rows = [list(range(low, low + tp)) for low in range(0, n, tp)]
    comms = connect_axes(
        place.world, {"dp": alone, "tp": rows, "pp": alone, "plane": rows}, timeout_s=place.comm.timeout_s
    )
    small = replace(shape, layers=1)
    model = decoder_of(config, small)
    layout = Layout(
        zero=0,
        deal=Deal(microbatches=2, dp=1, k=1),
        schedule=schedule("1f1b", ranks=1, chunks=1, microbatches=2),
        split=(range(3),),
        hidden=shape.hidden,
        weights=kind.weights,
        sums=kind.sums,
        sequence=config.mesh.sequence_parallel and tp > 1,
        compile=train.compile,
    )
    stage = parallelize(model, unit_specs(small), layout, comms=comms, device=place.device)
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 0, a, b)))
    deferral = model.split_backward()
    modules = {n: module for chunk in stage.chunks.values() for n, module in chunk.units.items()}

    def chunks(again: Sequence[int] = ()) -> list[Chunk]:
        return [
            Chunk(0, {n: m}, stage.zero, model_units=3, recompute=again, deferral=deferral)
            for n, m in modules.items()
        ]

    return Units(
        place=place, config=config, shape=shape, tp=tp, stage=stage, model=model, plain=chunks(), light=chunks((1,)),
        inputs=_inputs(config, shape, place.device),
    )  # fmt: skip


def _inputs(config: RunConfig, shape: ModelShape, device: torch.device) -> Inputs:
    size = (config.train.micro_batch, config.data.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, size, generator=generator).to(device)
    positions = torch.arange(size[1], device=device).expand(size)
    return Inputs(tokens_BL=tokens, targets_BL=tokens.roll(-1, 1), positions_BL=positions)
