"""What each pipeline rank of one layout holds between and during steps, counted with the executor's own rules.

    units of a stage     pure/split.py          flat groups, shards, padding      pure/groups.py
    alive microbatches   pure/simulate.py       gradient sums                     sums.py

What blocks keep for backward comes from `memory.py`, asked for a stage of one block and one of two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sirara.config.check import frozen_names
from sirara.config.schema import RunConfig
from sirara.plan.constants import Constants
from sirara.plan.from_config import AUTO_DEPTH, STATES, WEIGHT_BYTES, plays_early, stage_units
from sirara.plan.hardware import Table
from sirara.plan.memory import ON_DEVICE, activations, head_kept, let_go, memory, owed_bytes
from sirara.plan.own import OwnBytes, own_bytes
from sirara.plan.points import Points, concatenate, pieces_of
from sirara.plan.sums import bytes_of, gradient_sums, sum_bytes
from sirara.pure.families import ModelShape, UnitSpec, unit_specs, with_frozen
from sirara.pure.groups import ALIGN, Group, flat_groups
from sirara.pure.recompute import Kinds, kinds_of_blocks
from sirara.pure.schedule import Schedule, rank_of, schedule, sending_early
from sirara.pure.simulate import Costs, simulate
from sirara.pure.tree import Deal, deal

MOST_SIMULATED = 2
"""Microbatches per stage that are played at most: what is alive at once does not grow after them."""


EVALUATED = 8
"""Batches that are in a pipeline at once when it evaluates: `AT_ONCE` of train/evaluate.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one pipeline rank, by what they are for; `units`: of each of its chunks."""

    rank: int
    blocks: int
    units: tuple[range, ...]
    weights: int
    masters: int
    optimizer: int
    gradients: int
    """Sums of gradients, partial sums of the tree, and what is exchanged."""
    window: int
    """Gathered weights of ZeRO 3."""
    activations: float
    loss: float
    transient: float
    alive: float
    """Microbatches whose activations are held at once, in stages of this rank's whole depth."""
    libraries: int = 0
    """What matrix libraries keep for themselves; on accelerators it is part of the context."""
    letter: float = 0.0
    """A hidden state on its way to or from another stage."""

    @property
    def static(self) -> int:
        """What lives on between steps."""
        return self.weights + self.masters + self.optimizer + self.gradients + self.window + self.libraries

    @property
    def step(self) -> float:
        """The peak of a step."""
        return self.static + self.activations + max(self.loss, self.transient)

    def phases(self) -> dict[str, float]:
        """Allocated bytes at the peak of each phase of a run.

        start: initial values are drawn for one slab at a time.  save: weights and state are copied to the host, piece
        by piece.  resume: as start.  evaluation: forwards alone; the hidden states of all batches in the pipeline may
        wait at its slowest stage, on their way in or out.
        """
        state = self.weights + self.masters + self.optimizer + self.window
        waiting = 2 * EVALUATED * len(self.units) * self.letter
        return {
            "start": state,
            "step": self.step,
            "checkpoint save": self.static,
            "resume": state,
            "evaluation": self.static + max(self.loss, self.transient) + waiting,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One layout's pipeline ranks, and how its microbatches are dealt and scheduled."""

    stages: tuple[StageMemory, ...]
    deal: Deal
    table: Schedule
    """Of at most MOST_SIMULATED microbatches per stage."""
    places: int
    parameters: int
    """Of the busiest rank."""

    @property
    def busiest(self) -> StageMemory:
        return max(self.stages, key=lambda s: s.step)


def held(config: RunConfig, shape: ModelShape, point: Points, hardware: Table, constants: Constants) -> Held:
    """The memory of every pipeline rank.

    Args:  point: of this configuration, one entry.
    """
    m, tp = config.mesh, int(point.tp[0])
    units = specs_of(config, shape)
    split = stage_units(config, shape)
    # A context-parallel rank's part of a sequence has a gradient of its own.
    leaves, ranks = config.train.global_batch // config.train.micro_batch * m.cp, int(point.shards[0])
    deepest = 0 if m.zero >= 2 else AUTO_DEPTH
    dealt = deal(leaves, ranks, m.block, max_k=deepest)
    if m.block == "auto":
        dealt = Deal(microbatches=leaves, dp=ranks, k=int(point.block[0]))
    played = min(dealt.places, MOST_SIMULATED * m.stages)
    if m.schedule == "interleaved" and dealt.places % m.pp == 0:
        played = max(m.pp, played // m.pp * m.pp)
    table, alive, owed = _on_the_clock(m.schedule, m.pp, m.chunks, played, plays_early(config))
    if m.schedule == "gpipe":
        # All forwards come first, however many there are.
        alive = (dealt.places,) * m.pp
    groups = _groups(units, tp, m.sequence_parallel)
    block = _block_bytes(point, hardware, constants)
    own = own_bytes(config, shape, tp=tp, weight=_weight_bytes(config), on_cpu=hardware.on_cpu[0])
    if own is not None:
        block = _counted(own, block, offloaded=config.offload.activations != "none")
    stages = tuple(
        _stage(config, rank, split, groups, dealt, block, alive[rank] / m.chunks, owed[rank] / m.chunks)
        for rank in range(m.pp)
    )
    here = max(
        sum(g.numel for g in groups if any(u.unit in r for u in g.uses for r in s.units)) for s in stages
    )
    return Held(stages=stages, deal=dealt, table=table, places=dealt.places, parameters=here)


@lru_cache(maxsize=64)
def _groups(units: tuple[UnitSpec, ...], tp: int, sequence: bool) -> tuple[Group, ...]:
    return tuple(flat_groups(units, tp=tp, sequence=sequence))


@lru_cache(maxsize=64)
def _on_the_clock(
    name: str, ranks: int, chunks: int, microbatches: int, early: bool
) -> tuple[Schedule, tuple[int, ...], tuple[int, ...]]:
    """(table, microbatches alive at once, weight gradients put off at once), by rank.

    Kept: splits, blocks of microbatches and ZeRO stages that are tried one after another have the same one.
    """
    table = schedule(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    costs = Costs.uniform(table.stages)
    result = simulate(table, costs)
    owed = simulate(sending_early(table), costs).owed_peak if early else result.owed_peak
    return table, result.live_peak, owed


def specs_of(config: RunConfig, shape: ModelShape) -> tuple[UnitSpec, ...]:
    """The model's units, frozen tensors marked."""
    units = unit_specs(shape)
    return with_frozen(units, frozen_names(config.train.freeze, units)) if config.train.freeze else units


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Bytes that one block keeps of one microbatch, and what a stage holds beside its blocks."""

    whole: float
    pieces: NDArray[np.float64]
    """What it lets go of that for each piece of `PIECES` that it makes again."""
    embedding: float
    working: float
    loss: float
    head: float = 0.0
    """What the head keeps of a microbatch from its forward to its backward."""
    rows: float = 0.0
    """The embedding's gradient, made when the rest of a microbatch has been let go."""
    boundary: float = 0.0
    libraries: float = 0.0
    owed: float = 0.0
    """What its put off weight gradients are made of."""

    def kept(self, kinds: Kinds) -> float:
        """Of a block that makes `kinds` again."""
        return self.whole - float((pieces_of(kinds) * self.pieces).sum())


def _weight_bytes(config: RunConfig) -> int:
    return WEIGHT_BYTES[config.train.precision]


def _counted(own: OwnBytes, formula: _Block, *, offloaded: bool) -> _Block:
    """A block of our own modules, counted from what they save."""
    on_host = ON_DEVICE if offloaded else 1.0
    return _Block(
        whole=own.whole * on_host,
        pieces=own.pieces * on_host,
        embedding=formula.embedding,
        working=own.working,
        loss=own.loss,
        head=own.head,
        rows=own.embedding,
        boundary=own.boundary,
        libraries=own.libraries,
        owed=own.owed * on_host,
    )


def _block_bytes(p: Points, hardware: Table, constants: Constants) -> _Block:
    """Asks the memory model for stages of one and two blocks, one microbatch alive."""
    alone = p.with_(
        pp=1, vpp=1, schedule=1, layers=1, global_batch=p.micro_batch * p.dp, offload_activations=0
    )
    # A block's work is that of the stage which makes most again.
    again = np.broadcast_to(p.again.max(axis=1, keepdims=True), p.again.shape)
    plain = alone.with_(recompute=0, again=0)
    m = memory(
        concatenate([plain, plain.with_(layers=2), alone.with_(vocab=1, again=again)]), hardware, constants
    )
    whole = float(m.activations[1] - m.activations[0])
    on_host = ON_DEVICE if p.offload_activations[0] > 0 else 1.0
    return _Block(
        whole=whole * on_host,
        pieces=let_go(plain, activations(plain))[0] * on_host,
        embedding=max(0.0, float(m.activations[0]) - whole),
        working=float(m.transient[2]),
        loss=float(m.transient[0]),
        head=float(head_kept(p)[0]),
        owed=float(owed_bytes(plain, activations(plain))[0]) * on_host,
    )


def _stage(
    config: RunConfig,
    rank: int,
    split: Sequence[range],
    groups: Sequence[Group],
    dealt: Deal,
    block: _Block,
    alive: float,
    owed: float,
) -> StageMemory:
    m = config.mesh
    by_stage = {s: r for s, r in enumerate(split) if rank_of(m.schedule, m.pp, s) == rank}
    mine = list(by_stage.values())
    last = split[-1].stop - 1

    units = {unit for r in mine for unit in r}
    here = units.__contains__

    held_groups = [g for g in groups if any(here(use.unit) for use in g.uses)]
    weights = masters = optimizer = 0
    offloaded = config.offload.optimizer != "none"
    # Weights on the host come unit by unit, as gathered ones do.
    gathers = m.zero >= 3 or config.offload.params != "none"
    sums = sum_bytes(config)
    for g in held_groups:
        shard = g.shard_numel(dealt.dp)
        own = bytes_of(config, g)
        weights += (config.offload.params == "none") * own * shard * (1 if m.zero >= 3 else dealt.dp)
        updated = shard * (dealt.dp if m.zero == 0 else 1)
        if g.trainable and here(g.uses[0].unit) and not offloaded:
            masters += sums * updated * (own < sums)
            optimizer += _states(config, g) * sums * updated
    counts = {stage: len(r) - (0 in r) - (last in r) for stage, r in by_stage.items()}
    blocks = sum(counts.values())
    kept = _kept(config, counts, block)
    # A sent hidden state is held until the next stage has it, a received gradient while it is used.
    beside = (m.pp > 1) * 2 * block.boundary + here(last) * max(0.0, alive - 1) * block.head
    # What is owed is kept already where a block is not made again.
    late = sum(max(0.0, block.owed - block.kept(kinds)) for kinds in _kinds(config, counts))
    if offloaded:
        # Two units' are here at a time, as two units' weights are.
        trained = [g for g in held_groups if g.trainable]
        gradients = sum(_two_places(config, mine, trained, dealt, last))
    else:
        gradients = gradient_sums(config, rank, by_stage, held_groups, here, dealt)
    return StageMemory(
        rank=rank,
        blocks=blocks,
        units=tuple(mine),
        weights=weights,
        masters=masters,
        optimizer=optimizer,
        gradients=gradients,
        window=_window(config, mine, held_groups, dealt, last) if gathers else 0,
        activations=alive * (kept + here(0) * block.embedding) + beside + owed * late,
        loss=block.loss if here(last) else 0.0,
        transient=max(block.working, here(0) * (block.rows - kept)),
        alive=alive,
        libraries=round(block.libraries),
        letter=block.boundary if m.pp > 1 else 0.0,
    )


def _kept(config: RunConfig, counts: Mapping[int, int], block: _Block) -> float:
    """Bytes that the blocks of a rank keep of one microbatch, stage by stage."""
    return sum(block.kept(kinds) for kinds in _kinds(config, counts))


def _kinds(config: RunConfig, counts: Mapping[int, int]) -> Iterator[Kinds]:
    """What each block of a rank makes again."""
    for stage, blocks in counts.items():
        yield from kinds_of_blocks(config.train.recompute, stage=stage, blocks=blocks)


def _states(config: RunConfig, group: Group) -> int:
    matrices = group.decay and group.unit > 0 and "block" in group.name
    return 1 if config.train.optimizer.name == "muon" and matrices else STATES[config.train.optimizer.name]


def _window(config: RunConfig, mine: Sequence[range], groups: Sequence[Group], dealt: Deal, last: int) -> int:
    """Places of gathered weights, as `parallel/window.py` lays them out."""
    if config.mesh.gather == "step":
        return sum(_lengths(config, mine, groups, dealt).values())
    return sum(_two_places(config, mine, groups, dealt, last))


def _lengths(
    config: RunConfig, mine: Sequence[range], groups: Sequence[Group], dealt: Deal
) -> dict[int, int]:
    """Bytes of each unit of a rank, whole, in the order of the model."""
    length: dict[int, int] = dict.fromkeys(sorted(unit for r in mine for unit in r), 0)
    for g in groups:
        nbytes = g.shard_numel(dealt.dp) * dealt.dp * bytes_of(config, g)
        for use in g.uses:
            if use.unit in length:
                length[use.unit] += -(-nbytes // ALIGN) * ALIGN
    return length


def _two_places(
    config: RunConfig, mine: Sequence[range], groups: Sequence[Group], dealt: Deal, last: int
) -> tuple[int, int]:
    """Bytes of two places that units take in turn."""
    length = _lengths(config, mine, groups, dealt)
    order = list(length)
    place = {unit: n % 2 for n, unit in enumerate(order)}
    ends = order[0] == 0 and order[-1] == last
    if ends and len(order) > 2 and place[order[-1]] != place[order[0]]:
        place[order[-1]], place[order[-2]] = place[order[0]], 1 - place[order[0]]
    first, second = (max((length[u] for u in order if place[u] == p), default=0) for p in (0, 1))
    return first, second
