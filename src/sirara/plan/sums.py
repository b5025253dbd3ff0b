"""Bytes of a pipeline rank's gradient sums: buffers of the reduction tree, played in the order in which they are made.

a rank with one chunk       groups of one size are alike: buffers.py plays two and three of them
a rank with several         chunks take each other's buffers: played in the schedule's own order
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

from sirara.config.schema import RunConfig
from sirara.plan.buffers import MOST_IN_TURN, MOST_PLAYED, Buffers, buffers_of, leaf_kind, made_in_turn
from sirara.plan.from_config import WEIGHT_BYTES, plays_early
from sirara.pure.groups import Group
from sirara.pure.schedule import Action, Kind, schedule, sending_early
from sirara.pure.tree import Deal

Here = Callable[[int], bool]
"""Whether a unit is on a rank."""


def gradient_sums(
    config: RunConfig, rank: int, mine: Mapping[int, range], groups: Sequence[Group], here: Here, dealt: Deal
) -> int:
    """Bytes of all sums of a rank, partial sums and what is exchanged included.

    Args:  mine: the rank's stages, with their units.  groups: those of which it has a part.
    """
    found = _in_turn(config, rank, mine, groups, here, dealt)
    if found is not None:
        return found
    fast, lean = config.numerics == "fast", config.mesh.zero >= 2
    return _each_sum(config, groups, here, dealt, buffers_of(dealt, lean=lean, fast=fast, same=_same(config)))


def _each_sum(config: RunConfig, groups: Sequence[Group], here: Here, dealt: Deal, buffers: Buffers) -> int:
    """Bytes of all sums of a rank; from ZeRO 2 on full buffers are shared, and two units have them at a time."""
    sums, cut = sum_bytes(config), config.mesh.zero >= 2
    uses = Counter[tuple[int, int]]()
    units = {use.unit for g in groups for use in g.uses if here(use.unit)}
    for g in groups:
        if g.trainable:
            uses[g.shard_numel(dealt.dp), bytes_of(config, g)] += sum(here(use.unit) for use in g.uses)
    total = _guests(config, groups, here, dealt)
    for (shard, leaf), count in uses.items():
        full = shard * dealt.dp
        if count == 1 and cut and config.numerics != "fast" and dealt.microbatches <= MOST_PLAYED:
            # Nobody of its size takes turns with it; its exchange ends when the next unit of its chunk begins one.
            others = config.mesh.chunks == 1 and len(units) > 1
            groups_of = ((0, 0, shard), (0, 1, 0)) if others else ((0, 0, shard),)
            kind = leaf_kind(dealt, same=_same(config))
            alone = made_in_turn((0,) * dealt.places, groups_of, dealt, kind, lean=True)
            total += _bytes_made(alone, dealt.dp, leaf, sums)
            continue
        each = shard * (buffers.shard_leaf * leaf + buffers.shard_sum * sums)
        each += full * (buffers.full_leaf * leaf + buffers.full_sum * sums)
        # ZeRO 0 gathers the summed shards again: in a buffer that sums were made in, where there is one.
        each += full * sums * (config.mesh.zero == 0 and dealt.dp > 1 and not buffers.full_sum)
        once = full * (buffers.once_leaf * leaf + buffers.once_sum * sums)
        once += shard * (buffers.once_shard_leaf * leaf + buffers.once_shard_sum * sums)
        total += count * each + once
    return total


def _bytes_made(made: Mapping[tuple[int, str, str], int], dp: int, leaf: int, sums: int) -> int:
    return sum(
        n * shard * (dp if size == "full" else 1) * (leaf if kind == "leaf" else sums)
        for (shard, size, kind), n in made.items()
    )


def _in_turn(
    config: RunConfig, rank: int, mine: Mapping[int, range], groups: Sequence[Group], here: Here, dealt: Deal
) -> int | None:
    """`_each_sum` of a rank with several chunks, which take each other's buffers; None where that is not played."""
    m = config.mesh
    uses = [
        (stage, g, use.unit) for stage, units in mine.items() for g in groups if g.trainable
        for use in g.uses if use.unit in units
    ]  # fmt: skip
    plain = config.numerics != "fast" and len({bytes_of(config, g) for _, g, _ in uses}) == 1
    if m.chunks == 1 or not plain or dealt.places * len(uses) > MOST_IN_TURN:
        return None
    sums, leaf = sum_bytes(config), bytes_of(config, uses[0][1])
    turns = _turns(m.schedule, m.pp, m.chunks, dealt.places, plays_early(config))[rank]
    order = sorted(uses, key=lambda use: -use[2])
    made = made_in_turn(
        turns,
        tuple((_turn(stage, embedding=unit == 0), unit, g.shard_numel(dealt.dp)) for stage, g, unit in order),
        dealt,
        leaf_kind(dealt, same=_same(config)),
        lean=m.zero >= 2,
    )
    if m.zero == 0 and dealt.dp > 1:
        # Every group's shards are gathered again, in a full buffer of its own.
        own = Counter(g.shard_numel(dealt.dp) for _, g, _ in uses)
        made = {
            **made,
            **{(n, "full", "sum"): max(made.get((n, "full", "sum"), 0), c) for n, c in own.items()},
        }
    return _guests(config, groups, here, dealt) + _bytes_made(made, dealt.dp, leaf, sums)


def _guests(config: RunConfig, groups: Sequence[Group], here: Here, dealt: Deal) -> int:
    """Bytes of shards that arrive from another rank's use of the same weights, where they are added."""
    if config.mesh.zero >= 2 or (dealt.dp == 1 and config.numerics != "fast"):
        return 0
    tied = (
        g for g in groups if g.trainable and here(g.uses[0].unit) and not all(here(u.unit) for u in g.uses)
    )
    return sum(g.shard_numel(dealt.dp) * sum_bytes(config) for g in tied)


@lru_cache(maxsize=64)
def _turns(name: str, ranks: int, chunks: int, microbatches: int, early: bool) -> tuple[tuple[int, ...], ...]:
    """By rank, its stages, as `_turn` numbers them, in the order in which it makes weight gradients in them."""
    table = schedule(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    table = sending_early(table) if early else table
    late, first = (Kind.BACKWARD, Kind.WEIGHT), (Kind.BACKWARD, Kind.INPUT)

    def turns(row: Sequence[Action]) -> Iterator[int]:
        for action in row:
            if action.kind in late:
                yield _turn(action.stage, embedding=False)
            if action.kind in first and action.stage == 0:
                yield _turn(action.stage, embedding=True)

    return tuple(tuple(turns(row)) for row in table.rows)


def _turn(stage: int, *, embedding: bool) -> int:
    """An embedding's gradient is not put off: it is a turn of its own."""
    return 2 * stage + embedding


def sum_bytes(config: RunConfig) -> int:
    return 8 if config.train.precision == "fp64" else 4


def _same(config: RunConfig) -> bool:
    return config.train.precision in ("fp64", "fp32")


def bytes_of(config: RunConfig, group: Group) -> int:
    known = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    return known[group.dtype] if group.dtype else WEIGHT_BYTES[config.train.precision]
