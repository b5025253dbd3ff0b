"""Which units of a model (embedding, blocks, head) a pipeline stage holds: contiguous ranges, balanced by cost.

    8 blocks and a head as dear as two, 4 stages:

    unit     embed b0 b1   b2 b3   b4 b5 b6   b7 head
    stage    0             1       2          3

With one stage per rank the slowest stage sets the pace, and the best split is found exactly.  With several, the
stages of a rank add up, and the slowest *rank* sets it: see `_over_ranks`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sirara.errors import LayoutError
from sirara.pure.families import UnitSpec

_Score = tuple[float, float, float]
EMBED_FLOPS_PER_ELEMENT = 64
"""An embedding does no matmul: it moves `hidden` elements per token, forward and again backward.  Counted as the
matmul FLOPs that pass in that time, some tens per element; beside a block's 24 * hidden per element it is little."""


def unit_costs(units: Sequence[UnitSpec], hidden: int, *, recomputed: float = 0.0) -> tuple[float, ...]:
    """FLOPs per token of each unit, forward and backward (three times forward).

    Args:  recomputed: share of the blocks' forward that is computed again in backward, 0 .. 1; the head's never is.
    """
    embed, *blocks, head = units
    passes = 3.0 + recomputed
    return (
        3.0 * (embed.flops_per_token + EMBED_FLOPS_PER_ELEMENT * hidden),
        *(passes * block.flops_per_token for block in blocks),
        3.0 * head.flops_per_token,
    )


def split_units(
    costs: Sequence[float],
    stages: int,
    explicit: Sequence[int] | None = None,
    *,
    owners: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """The units of each stage, in order: contiguous, none empty, the embedding on the first, the head on the last.

    Args:    costs: of unit 0 (the embedding), the blocks, the head.  explicit: blocks per stage (`mesh.split`).
             owners: the pipeline rank of each stage, if a rank has more than one.
    Raises:  LayoutError for more stages than units, or an explicit split that does not fit, with one that does.
    """
    if stages > len(costs):
        raise LayoutError(
            f"{stages} pipeline stages are more than the model's {len(costs)} units",
            where="mesh.pp",
            why=f"embedding + {len(costs) - 2} layers + head = {len(costs)}; each stage holds at least one",
            try_=[f"at most {len(costs)} stages: mesh.pp times the stages per rank"],
        )
    if explicit is not None:
        return _explicit(costs, stages, explicit, owners)
    if owners is None or len(set(owners)) == stages:
        return _ranges(_exact(costs, stages))
    return _ranges(_over_ranks(costs, stages, owners))


def blocks_per_stage(split: Sequence[range]) -> list[int]:
    """A split as `mesh.split` spells it."""
    last = split[-1].stop - 1
    return [len(r) - (0 in r) - (last in r) for r in split]


def _explicit(
    costs: Sequence[float], stages: int, explicit: Sequence[int], owners: Sequence[int] | None
) -> tuple[range, ...]:
    layers = len(costs) - 2
    inner = explicit[1:-1]
    if len(explicit) != stages:
        fault = f"has {len(explicit)} entries for {stages} stages"
    elif sum(explicit) != layers:
        fault = f"adds up to {sum(explicit)} layers, the model has {layers}"
    elif min(explicit) < 0 or (inner and min(inner) < 1):
        fault = (
            "leaves a stage without a unit; only the first (embedding) and the last (head) may have 0 layers"
        )
    else:
        stops = [1 + n for n in accumulate(explicit)]
        return _ranges([0, *stops[:-1], len(costs)])
    auto = blocks_per_stage(split_units(costs, stages, owners=owners))
    raise LayoutError(
        f"mesh.split={list(explicit)} {fault}",
        where="mesh.split",
        why=f"{len(explicit)} entries, sum {sum(explicit)}; {stages} stages, {layers} layers",
        try_=["mesh.split=auto", f"mesh.split={auto}"],
    )


def _ranges(bounds: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise(bounds))


def _exact(costs: Sequence[float], stages: int) -> list[int]:
    """Bounds with the cheapest dearest stage; among these, the least sum of squares, so that no other stage lags."""
    total = [0.0, *accumulate(costs)]
    bottleneck = _best(total, stages, limit=float("inf"), power=None)[0]
    return _best(total, stages, limit=bottleneck * (1 + 1e-12), power=2)[1]


def _best(total: Sequence[float], stages: int, *, limit: float, power: int | None) -> tuple[float, list[int]]:
    """The best (score, bounds) with no stage above `limit`: score is the dearest stage, or the sum of cost ** power."""
    units = len(total) - 1
    nothing = float("inf")
    score = [0.0] + [nothing] * units
    cuts: list[list[int]] = []
    for stage in range(stages):
        better, cut = [nothing] * (units + 1), [0] * (units + 1)
        # Later stages need a unit each, and so does each earlier one.
        for stop in range(stage + 1, units - (stages - stage - 1) + 1):
            # On a tie the earliest start: early stages keep the most microbatches alive and had better be light.
            for start in range(stop - 1, stage - 1, -1):
                cost = total[stop] - total[start]
                if cost > limit:
                    break
                value = max(score[start], cost) if power is None else score[start] + cost**power
                if value <= better[stop]:
                    better[stop], cut[stop] = value, start
        score = better
        cuts.append(cut)
    bounds = [units]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return score[units], bounds[::-1]


def _over_ranks(costs: Sequence[float], stages: int, owners: Sequence[int]) -> list[int]:
    """Bounds that level the cost of ranks, then that of stages.

    Blocks of one model nearly always cost the same, and then only their number counts: dealing them one by one to the
    cheapest rank, and there to its cheapest stage, is exact.  Blocks that differ start from that deal, and from the
    split that levels stages, and move one at a time away from the dearest rank for as long as it helps: a heuristic.
    """
    total = [0.0, *accumulate(costs)]
    starts = (_dealt(costs, stages, owners), _exact(costs, stages))
    return min(_improved(total, start, owners) for start in starts)[1]


def _improved(total: Sequence[float], bounds: list[int], owners: Sequence[int]) -> tuple[_Score, list[int]]:
    best = _score(total, bounds, owners), bounds
    while True:
        moves = _moves(best[1], owners, _dearest(total, best[1], owners))
        found = min([(_score(total, moved, owners), moved) for moved in moves], default=best)
        if found[0] >= best[0]:
            return best
        best = found


def _dealt(costs: Sequence[float], stages: int, owners: Sequence[int]) -> list[int]:
    blocks = len(costs) - 2
    each = sum(costs[1:-1]) / blocks if blocks else 0.0
    counts = [0 if stage in (0, stages - 1) else 1 for stage in range(stages)]
    load = [each * n for n in counts]
    load[0] += costs[0]
    load[-1] += costs[-1]
    for _ in range(blocks - sum(counts)):
        ranks: dict[int, float] = {}
        for stage, rank in enumerate(owners):
            ranks[rank] = ranks.get(rank, 0.0) + load[stage]
        # On a tie the later rank: the earlier one keeps more microbatches alive.
        stage = min(range(stages), key=lambda s: (ranks[owners[s]], -owners[s], load[s]))
        counts[stage] += 1
        load[stage] += each
    counts[0] += 1
    counts[-1] += 1
    return [0, *accumulate(counts)]


def _score(
    total: Sequence[float], bounds: Sequence[int], owners: Sequence[int]
) -> tuple[float, float, float]:
    """Dearest rank, sum of squares of ranks, sum of squares of stages."""
    stages = [total[b] - total[a] for a, b in pairwise(bounds)]
    ranks = _rank_costs(stages, owners)
    return max(ranks), sum(c * c for c in ranks), sum(c * c for c in stages)


def _rank_costs(stages: Sequence[float], owners: Sequence[int]) -> list[float]:
    ranks = [0.0] * (max(owners) + 1)
    for cost, rank in zip(stages, owners, strict=True):
        ranks[rank] += cost
    return ranks


def _dearest(total: Sequence[float], bounds: Sequence[int], owners: Sequence[int]) -> int:
    ranks = _rank_costs([total[b] - total[a] for a, b in pairwise(bounds)], owners)
    return ranks.index(max(ranks))


def _moves(bounds: list[int], owners: Sequence[int], rank: int) -> list[list[int]]:
    """All bounds in which a stage of `rank` has one unit less and any other stage one more."""
    found: list[list[int]] = []
    stages = len(owners)
    for giver in (s for s in range(stages) if owners[s] == rank):
        for taker in range(stages):
            if taker == giver or bounds[giver + 1] - bounds[giver] < 2:
                continue
            lo, hi, step = (giver + 1, taker + 1, -1) if taker > giver else (taker + 1, giver + 1, 1)
            found.append([*bounds[:lo], *(b + step for b in bounds[lo:hi]), *bounds[hi:]])
    return found
