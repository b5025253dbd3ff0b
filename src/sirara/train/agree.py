"""What all ranks agree on before an update, in one small gather: losses, finiteness, the gradient norm, requests.

    row of a rank    [request, group and place of the first bad element, what it measured of the step before,
                      loss sums of its microbatches, norm sums per group and aligned node]

One logical parameter counts once: of its copies (replicated over tp, tied over stages) one rank speaks.  Sums are
combined in an order that is a function of the model alone, so the norm has equal bits for every dp, pp and ZeRO stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, sqrt

import numpy as np
import torch

from sirara.mesh import Mesh
from sirara.parallel.flat import FlatGroup
from sirara.parallel.parallelize import Stage
from sirara.pure.groups import GRAIN, Group
from sirara.pure.tree import Deal, aligned_nodes, combine, node_sums
from sirara.train.meter import FACTS

Tensor = torch.Tensor

HALF = GRAIN // 2
"""Norm sums are rows of half a grain, so that no shard is a single row, which torch would split by threads."""

Bad = tuple[float, float]
"""(number of the group, flat place in it) of a gradient element that is not finite; (inf, inf) when all are."""
FINE: Bad = (inf, inf)

_SAID = 3
_HEAD = _SAID + len(FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after the gather; `bad` is the first non-finite gradient element, in canonical order.

    facts: [ranks, FACTS] of the step before, zero where a rank told none.
    """

    loss_sum: float
    norm: float
    bad: Bad | None
    request: int
    facts: np.ndarray


@dataclass(frozen=True, slots=True)
class Place:
    """Where one group's norm sums lie: in the rows of `ranks` (by dp), from column `at` on."""

    group: Group
    ranks: tuple[int, ...]
    at: int


class Agreement:
    """Makes and reads the rows; what lies where is the same on all ranks, without talking."""

    def __init__(self, stage: Stage, mesh: Mesh, deal: Deal) -> None:
        self.stage, self.mesh, self.deal = stage, mesh, deal
        self.width = first = _HEAD + deal.places
        places: dict[tuple[int, int], Place] = {}
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                at = first
                for index, group in enumerate(stage.groups[tp]):
                    if stage.homes[group.unit] == pp and _speaks(group, tp):
                        ranks = tuple(mesh.rank_at(pp=pp, dp=dp, tp=tp) for dp in range(mesh.dp))
                        places[index, tp] = Place(group, ranks, at)
                        at += _most_nodes(group.shard_numel(mesh.dp) // HALF, mesh.dp)
                self.width = max(self.width, at)
        self.places = {key: places[key] for key in sorted(places)}

    def reach(
        self, shards: list[Tensor], losses: list[float], request: int, facts: Sequence[float] = ()
    ) -> Agreed:
        """Collective.

        Args:  shards: gradients of the groups that this rank updates.  losses: of its microbatches, in order.
               facts: what it measured of the step before (train/meter.py).
        """
        zero, mesh, deal = self.stage.zero, self.mesh, self.deal
        sums, bad = grain_sums(shards, zero.trained)
        row = np.zeros(self.width)
        row[:_SAID] = request, *bad
        row[_SAID : _SAID + len(facts)] = facts
        row[_HEAD : _HEAD + len(losses)] = losses
        for values, flat in zip(sums, zero.trained, strict=True):
            place = self.places.get((flat.index, mesh.coordinate("tp")))
            if place is not None:
                nodes = node_sums(values, flat.shard[0] // HALF)
                row[place.at : place.at + len(nodes)] = nodes
        sent = torch.from_numpy(row).to(zero.device)
        rows = self.stage.comms.world.gather_rows("agree on the step", sent).cpu().numpy()
        loss = 0.0
        for i in range(deal.microbatches):
            dp, at = deal.owner(i)
            loss += float(rows[mesh.rank_at(pp=self.stage.loss_rank, dp=dp), _HEAD + at])
        square = 0.0
        for place in self.places.values():
            square += _total(place, rows)
        first_bad = min((float(group), float(place)) for group, place in rows[:, 1:_SAID])
        return Agreed(
            loss_sum=loss,
            norm=sqrt(square) if square >= 0 else square,
            bad=None if first_bad == FINE else first_bad,
            request=int(rows[:, 0].max()),
            facts=rows[:, _SAID:_HEAD],
        )

    def name_of(self, bad: Bad) -> str:
        """The logical tensor of a bad element."""
        index, flat = map(int, bad)
        group = self.stage.groups[self.mesh.coordinate("tp")][index]
        for piece in group.pieces(flat, flat + 1):
            return piece.tensor.name
        return group.name


def _speaks(group: Group, tp_rank: int) -> bool:
    """Whether this tp rank speaks for the group in the norm."""
    return group.trainable and tp_rank % group.copies == 0


def _total(place: Place, rows: np.ndarray) -> float:
    width = place.group.shard_numel(len(place.ranks)) // HALF
    nodes = {
        node: float(rows[rank, place.at + n])
        for dp, rank in enumerate(place.ranks)
        for n, node in enumerate(_nodes(width, dp))
    }
    return combine(nodes, place.group.numel // HALF)


@lru_cache(maxsize=4096)
def _nodes(width: int, rank: int) -> tuple[tuple[int, int], ...]:
    return tuple(aligned_nodes(rank * width, (rank + 1) * width))


def _most_nodes(width: int, ranks: int) -> int:
    return max(len(_nodes(width, rank)) for rank in range(ranks))


def grain_sums(shards: list[Tensor], groups: list[FlatGroup]) -> tuple[list[np.ndarray], Bad]:
    """Per group the sums of squares of each half grain, float64, and the first non-finite element."""
    if not shards:
        return [], FINE
    norms = [torch.linalg.vector_norm(shard_S.view(-1, HALF), dim=1) for shard_S in shards]
    flat = torch.cat(norms).cpu().double().numpy()
    parts = np.split(flat, np.cumsum([len(n) for n in norms])[:-1])
    bad = FINE if np.isfinite(flat).all() else _first_bad(shards, groups, parts)
    return [np.square(part) for part in parts], bad


def _first_bad(shards: list[Tensor], groups: list[FlatGroup], norms: list[np.ndarray]) -> Bad:
    """The first non-finite element, FINE when there is none: then norms that only overflowed are made right.

    A true fault spoils every norm, so nothing is looked at behind the first one.
    """
    for index, (shard_S, norm) in enumerate(zip(shards, norms, strict=True)):
        for row in np.flatnonzero(~np.isfinite(norm)).tolist():
            values = shard_S.view(-1, HALF)[row].double()
            wrong = (~torch.isfinite(values)).nonzero().flatten()
            if len(wrong):
                element = groups[index].shard[0] + row * HALF + int(wrong[0])
                return float(groups[index].index), float(element)
            norm[row] = float(values.square().sum().sqrt())
    return FINE
