"""The step of a layout from measured times: what the executor does, phase by phase, as a profile knows it.

    accumulate   units of each stage by the schedule's own table, on cores that ranks share      plan/cores.py
                 + gathers of ZeRO 3, exchanges and sums of ZeRO 2 and 3, merges of the local tree
    reduce       the last round's exchange, shards added            agree   norms of shards, one small gather
    update       optimizer on the updated range                     publish weights rounded and gathered

A unit's time is one that was measured for this model, microbatch, dtype and tensor-parallel degree; where one is
missing nothing is predicted here, and the formulas of cost.py, at measured rates, stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from sirara.config.schema import RunConfig
from sirara.plan.cores import Played, Slow, play, together_s
from sirara.plan.cost import Times
from sirara.plan.from_config import WEIGHT_BYTES, plays_early, stage_units
from sirara.plan.held import Held, specs_of
from sirara.plan.profile import Profile, UnitTime, signature_of, wide_of
from sirara.pure.groups import Group, flat_groups
from sirara.pure.recompute import FULL, kinds_of_blocks, name_of
from sirara.pure.schedule import schedule, sending_early
from sirara.pure.shape import ModelShape
from sirara.pure.simulate import Costs

MOST_PLAYED = 512
"""Microbatches; of more, what each further one takes is what the last of these took."""
ROW_GROUPS = 1e-4
"""Seconds that a flat group takes a step beside its elements: Python of its buffers, transfers and update.
An assumption: it is small beside the rest for groups of a million elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Seconds of one unit and microbatch of a process alone."""

    forward: float
    backward: float
    input: float
    weight: float
    again: float
    """What of backward is the forward that runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moves:
    """Seconds of a process alone on one pipeline rank: per microbatch in the table, and once at the end of a step."""

    per_microbatch: float
    exchange: float
    update: float


def measured_times(
    config: RunConfig, shape: ModelShape, profile: Profile, held: Held, formula: Times, *, ranks: int, per_node: int
) -> Times | None:  # fmt: skip
    """The step by measured times, split into the formula's terms; None where a unit was not measured.

    Args:  ranks: of the job.  per_node: of one node, which share its cores on the CPU.
    """
    offloaded = {config.offload.optimizer, config.offload.params, config.offload.activations} != {"none"}
    if config.train.compile or config.mesh.cp > 1 or config.mesh.ep > 1 or offloaded:
        return None
    on_node = min(ranks, per_node)
    split = stage_units(config, shape)
    stages = _stages(config, shape, profile, split, on_node)
    if stages is None:
        return None
    m, deal = config.mesh, held.deal
    crowd = profile.crowd_s
    moves = _all_moves(config, shape, profile, held, ranks=ranks, on_node=on_node)
    if moves is None:
        return None
    alike = max(1, on_node // m.pp)
    nbytes = (
        config.train.micro_batch * config.data.seq_len * shape.hidden * WEIGHT_BYTES[config.train.precision]
    )
    letter = profile.move_s("letter", ranks=2, nbytes=nbytes) if m.pp > 1 else 0.0
    costs = _costs(config, stages, moves, letter or 0.0, held)
    played, scale = _played(config, deal.places, costs, crowd, alike)
    exchange = together_s([x.exchange for x in moves], slow=crowd, alike=alike)
    update = together_s([x.update for x in moves], slow=crowd, alike=alike)
    busiest = int(np.argmax(played.busy_s))
    return _as_times(
        formula,
        span=played.makespan_s * scale,
        busy=played.busy_s[busiest] * scale,
        units=_share(stages, moves, held, busiest),
        exchange=exchange,
        update=update,
        mine=costs,
    )


def _stages(
    config: RunConfig, shape: ModelShape, profile: Profile, split: Sequence[range], processes: int
) -> list[list[_Unit]] | None:
    """Per virtual stage its units' times."""
    last = split[-1].stop - 1
    found: list[list[_Unit]] = []
    for stage, units in enumerate(split):
        blocks = sum(0 < u < last for u in units)
        kinds = iter(kinds_of_blocks(config.train.recompute, stage=stage, blocks=blocks))
        rows: list[_Unit] = []
        for unit in units:
            name = "embed" if unit == 0 else "head" if unit == last else "block"
            again = next(kinds) if name == "block" else frozenset[str]()
            row = _unit(config, shape, profile, name, again, processes)
            if row is None:
                return None
            rows.append(row)
        found.append(rows)
    return found


def _unit(
    config: RunConfig, shape: ModelShape, profile: Profile, unit: str, again: frozenset[str], processes: int
) -> _Unit | None:
    whole = again == FULL
    m, train = config.mesh, config.train
    kind = "none" if whole or unit != "block" else name_of(again)
    wanted = {
        "signature": signature_of(shape), "unit": unit, "micro_batch": train.micro_batch,
        "seq_len": config.data.seq_len, "tp": m.tp, "sequence": m.sequence_parallel and m.tp > 1,
        "dtype": train.precision, "recompute": kind,
        "dropped": dropped_of(config) if unit != "head" else "",
    }  # fmt: skip
    rows = [u for u in profile.units if all(getattr(u, k) == v for k, v in wanted.items())]
    if not rows:
        return None
    threads = train_threads(config, profile, processes)

    def distance(u: UnitTime) -> tuple[int, float]:
        return abs(u.threads - threads), abs(np.log(u.processes / processes))

    row = min(rows, key=distance)
    # A process alone: the simulation slows it down by those that compute beside it.
    alone = 1 / profile.crowd_s(row.processes)
    again_s = row.forward_s if whole else 0.0
    return _Unit(
        forward=(row.light_s if whole else row.forward_s) * alone,
        backward=(row.backward_s + again_s) * alone,
        input=(row.input_s + again_s) * alone,
        weight=row.weight_s * alone,
        again=again_s * alone,
    )


def dropped_of(config: RunConfig) -> str:
    """What is dropped at random, as `UnitTime.dropped` says it."""
    rates = {"hidden": config.model.dropout, "scores": config.model.attention_dropout}
    return " ".join(name for name, rate in rates.items() if rate > 0)


def train_threads(config: RunConfig, profile: Profile, processes: int) -> int:
    """Threads of a rank, as a launch gives them."""
    asked = config.launch.threads
    return asked if isinstance(asked, int) else max(1, profile.machine.cores // processes)


# ---- gathers, exchanges, sums and updates


def _all_moves(
    config: RunConfig, shape: ModelShape, profile: Profile, held: Held, *, ranks: int, on_node: int
) -> list[_Moves] | None:
    m = config.mesh
    groups = flat_groups(specs_of(config, shape), tp=m.tp, sequence=m.sequence_parallel)
    found: list[_Moves] = []
    for stage in held.stages:
        mine = [g for g in groups if any(u.unit in r for u in g.uses for r in stage.units)]
        rank = _Rank(
            config=config, profile=profile, held=held, groups=mine, order=[u for r in stage.units for u in r],
            across=ranks > on_node, on_node=on_node,
        )  # fmt: skip
        try:
            found.append(rank.moves())
        except _NotMeasured:
            return None
    return found


class _NotMeasured(Exception):
    """A turn in the control flow, never seen outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One pipeline rank's groups, and what its moves take."""

    config: RunConfig
    profile: Profile
    held: Held
    groups: Sequence[Group]
    order: Sequence[int]
    across: bool
    on_node: int

    def moves(self) -> _Moves:
        deal, m = self.held.deal, self.config.mesh
        cut = m.zero >= 2 and deal.dp > 1
        places = max(1, deal.places)
        each = self._gathers() if m.zero >= 3 and deal.dp > 1 else 0.0
        exchange = update = 0.0
        for g in self.groups:
            if not g.trainable:
                continue
            rounds, shard = deal.rounds, g.shard_numel(deal.dp)
            one = self._reduce(g, shard)
            early = rounds if cut else rounds - 1
            each += early * one / places + self._merges(g, shard)
            exchange += (rounds - early) * one + self._widen(shard)
            update += self._update(g, shard) + ROW_GROUPS
            exchange += self._publish(g, shard)
        rows = self.profile.move_s("rows", ranks=m.pp * deal.dp * m.tp, nbytes=4096, across=self.across)
        return _Moves(
            per_microbatch=each,
            exchange=exchange + self._alone(rows or 0.0, m.pp * deal.dp * m.tp),
            update=update,
        )

    @property
    def leaf_bytes(self) -> int:
        """Of what is exchanged: gradients as autograd makes them where a block is one microbatch, else sums."""
        return self.weight_bytes if self.held.deal.k == 0 and self.held.deal.dp > 1 else self.sum_bytes

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES[self.config.train.precision]

    @property
    def sum_bytes(self) -> int:
        return 8 if self.config.train.precision == "fp64" else 4

    def _alone(self, seconds: float, processes: int) -> float:
        """What was measured while so many processes did the same, for a process alone."""
        return seconds / self.profile.crowd_s(min(processes, self.on_node))

    def _exchange(self, nbytes: float) -> float:
        """Each rank receives `nbytes` in all."""
        dp = self.held.deal.dp
        found = self.profile.move_s("exchange", ranks=dp, nbytes=nbytes, across=self.across)
        if found is None:
            found = self.profile.move_s("exchange", ranks=dp, nbytes=nbytes)
        if found is None:
            raise _NotMeasured
        return self._alone(found, dp)

    def _pass(self, kind: str, elements: float) -> float:
        rate = self.profile.rate(f"{kind} {self._dtype_of(kind)}", processes=self.on_node)
        if rate is None:
            raise _NotMeasured
        return self._alone(elements / rate, self.on_node)

    def _dtype_of(self, kind: str) -> str:
        """Sums are wide, whatever weights are; what has both dtypes has the weights' name."""
        own = self.config.train.precision
        return own if kind in ("add low", "round") else wide_of(own)

    def _low(self, kind: str) -> str:
        """The sum of what has another dtype than sums."""
        low = kind == "add" and self.leaf_bytes != self.sum_bytes
        return "add low" if low else kind

    def _reduce(self, g: Group, shard: int) -> float:
        """One round of one group: what arrives, and the shards that are added."""
        deal = self.held.deal
        if deal.dp == 1:
            return 0.0
        senders = min(deal.dp, deal.blocks)
        sent = self._exchange(shard * self.leaf_bytes * (senders - 1))
        return sent + self._pass(self._low("add"), shard * max(1, senders - 1)) + self._pass("copy", shard)

    def _merges(self, g: Group, shard: int) -> float:
        """Per microbatch: full buffers of the local tree that are added; every second leaf is added as it is made."""
        deal = self.held.deal
        size = min(1 << deal.k, deal.places)
        merges = max(0, size - 1 - size // 2)
        return self._pass("add", shard * deal.dp * merges) / size if merges else 0.0

    def _widen(self, shard: int) -> float:
        dp = self.held.deal.dp
        if self.config.mesh.zero or dp == 1:
            return 0.0
        return self._pass("copy", shard) + self._exchange(shard * self.sum_bytes * (dp - 1))

    def _update(self, g: Group, shard: int) -> float:
        held = shard * (1 if self.config.mesh.zero else self.held.deal.dp)
        found = self._pass("norm", shard) + self._pass(f"update {self.config.train.optimizer.name}", held)
        return found + (self._pass("round", held) if self.weight_bytes != self.sum_bytes else 0.0)

    def _publish(self, g: Group, shard: int) -> float:
        dp = self.held.deal.dp
        if dp == 1 or self.config.mesh.zero not in (1, 2):
            return 0.0
        return self._exchange(shard * self.weight_bytes * (dp - 1))

    def _gathers(self) -> float:
        """Per microbatch, of ZeRO 3: each unit is gathered for forward and for backward, but at the turn."""
        dp = self.held.deal.dp
        per_unit: dict[int, float] = dict.fromkeys(self.order, 0.0)
        for g in self.groups:
            for use in g.uses:
                if use.unit in per_unit:
                    shard = g.shard_numel(dp)
                    per_unit[use.unit] += self._exchange(shard * self.weight_bytes * (dp - 1))
                    per_unit[use.unit] += self._pass("copy", shard) * self.weight_bytes / self.sum_bytes
        if self.config.mesh.gather == "step":
            return sum(per_unit.values()) / max(1, self.held.deal.places)
        seconds = list(per_unit.values())
        # The last two units of forward are still in their places when backward begins, and the other way round.
        kept = sum(seconds[-2:]) + sum(seconds[:2])
        return max(0.0, 2 * sum(seconds) - kept)


# ---- the table


def _costs(
    config: RunConfig, stages: Sequence[Sequence[_Unit]], moves: Sequence[_Moves], letter_s: float, held: Held
) -> Costs:
    """Seconds of each virtual stage's actions; moves of a rank are spread over its forwards and backwards."""
    owner = {s: n for n, stage in enumerate(held.stages) for s in held.table.stages_of(stage.rank)}
    chunks = config.mesh.chunks

    def moved(stage: int) -> float:
        return moves[owner[stage]].per_microbatch / chunks

    def column(name: str, share: float) -> tuple[float, ...]:
        return tuple(
            sum(getattr(u, name) for u in units) + share * moved(s) for s, units in enumerate(stages)
        )

    # A third of the moves beside forward, the rest where gradients are added.
    halves = tuple(
        (sum(u.backward if n == 0 and s == 0 else u.input for n, u in enumerate(units)),
         sum(0.0 if n == 0 and s == 0 else u.weight for n, u in enumerate(units)))
        for s, units in enumerate(stages)
    )  # fmt: skip
    return Costs(
        forward_s=column("forward", 1 / 3),
        backward_s=column("backward", 2 / 3),
        input_s=tuple(i + moved(s) / 3 for s, (i, _) in enumerate(halves)),
        weight_s=tuple(w + moved(s) / 3 for s, (_, w) in enumerate(halves)),
        transfer_s=letter_s,
    )


def _played(config: RunConfig, places: int, costs: Costs, crowd: Slow, alike: int) -> tuple[Played, float]:
    """(the table as the executor plays it, factor for microbatches that were left out)."""
    m = config.mesh
    some = min(places, MOST_PLAYED)
    if m.schedule == "interleaved":
        some = max(m.pp, some // m.pp * m.pp)
    table = schedule(m.schedule, ranks=m.pp, chunks=m.chunks, microbatches=some)
    return play(
        sending_early(table) if plays_early(config) else table, costs, slow=crowd, alike=alike
    ), places / some


def _share(
    stages: Sequence[Sequence[_Unit]], moves: Sequence[_Moves], held: Held, rank: int
) -> tuple[float, float, float]:
    """Of a busy pipeline rank: shares of first computations, of recompute and of moves between ranks."""
    mine = [u for s in held.table.stages_of(rank) for u in stages[s]]
    again = sum(u.again for u in mine)
    first = sum(u.forward + u.backward for u in mine) - again
    moved = moves[rank].per_microbatch
    whole = first + again + moved
    return first / whole, again / whole, moved / whole


def _as_times(
    formula: Times,
    *,
    span: float,
    busy: float,
    units: tuple[float, float, float],
    exchange: float,
    update: float,
    mine: Costs,
) -> Times:
    """The formula's terms, of which those that compute share what was measured as the formula splits it."""
    first, again, moved = (busy * share for share in units)
    inside = ("matmul", "attention", "memory_bound", "launch", "tp")
    parts = {name: max(0.0, float(getattr(formula, name)[0])) for name in inside}
    total = sum(parts.values()) or 1.0
    values = {f.name: 0.0 for f in fields(formula)}
    values |= {name: first * part / total for name, part in parts.items()}
    values |= {
        "recompute": again,
        "bubble": span - busy,
        "dp": moved + exchange,
        "optimizer": update,
        "step_s": span + exchange + update,
        "forward_s": max(mine.forward_s),
        "backward_s": max(mine.backward_s),
    }
    return replace(formula, **{name: np.array([value]) for name, value in values.items()})
