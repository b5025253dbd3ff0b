"""Matrices that lie in flat ranges of many ranks: each travels to its owner, is worked on, and its ranges return.

    round n       gather  |  work  |  return
    round n + 1            gather  |  work  |  return          one matrix per owner and round (pure/muon.py)

While a rank works on its matrix of a round, the next one arrives and the last one leaves.  All ranks begin and wait
for the exchanges in the same order.  Between two ranks there is one message per exchange: the parts of a share that
are not neighbours are packed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sirara.comm.group import Comm, Transfer
from sirara.errors import InvariantError
from sirara.pure.layout import Box, box_runs
from sirara.pure.muon import Matrix, MuonPlan, Part

Tensor = torch.Tensor
Work = Callable[[Tensor], Tensor]

_GATHER_TAG, _RETURN_TAG = 1, 3
"""And the next one: exchanges of neighbouring rounds are in flight at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What `place` holds of a matrix.

    cuts: where it lies in the range that the place updates.  boxes: which elements of the matrix these are, in order.
    run: the same as one run of the flattened matrix, where it is one.
    """

    place: int
    cuts: tuple[slice, ...]
    boxes: tuple[Box, ...]
    run: slice | None

    @property
    def numel(self) -> int:
        return sum(box.volume for box in self.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round as one rank sees it.

    own: the matrix that this rank works on, None when there is none left.  taken: the shares that it is made of;
    returned: those that go back.  given: what this rank holds and sends, kept: what it holds and gets back, each with
    its matrix.  Shares of this rank in its own matrix are in both lists and do not travel.
    """

    own: Matrix | None
    taken: tuple[Share, ...]
    returned: tuple[Share, ...]
    given: tuple[tuple[Matrix, Share], ...]
    kept: tuple[tuple[Matrix, Share], ...]


class Travel:
    """A plan as one rank carries it out.

    Args:  comm: the ranks of the plan by place, in a group that nothing else uses.
    """

    def __init__(self, comm: Comm, plan: MuonPlan) -> None:
        self.comm, self.plan, self.place = comm, plan, comm.rank
        self.groups = frozenset(matrix.group for matrix in plan.matrices)
        self.rounds = tuple(self._round(members) for members in plan.rounds)

    def check(self, numels: Sequence[int]) -> None:
        """Raises:  InvariantError when the ranges are not those of the plan."""
        bounds = [self.plan.updated(g, self.place) for g in range(len(self.plan.groups[0]))]
        if list(numels) != [hi - lo for lo, hi in bounds]:
            raise InvariantError(
                f"the plan is for flat ranges {bounds}", why=f"found ranges of {list(numels)}"
            )

    def through(self, flat: Mapping[int, Tensor], work: Work) -> Iterator[tuple[Matrix, tuple[slice, ...]]]:
        """Replaces every matrix in the updated ranges by work(matrix); yields (matrix, its cuts) as they return.

        Args:  flat: the updated range [U] by group.  work: [M, N] -> [M, N], contiguous both.
        """
        flying: Iterator[tuple[Matrix, tuple[slice, ...]]] = iter(())
        arriving = self._gather(0, flat)
        for n, one in enumerate(self.rounds):
            matrix_MN = arriving()
            arriving = self._gather(n + 1, flat)
            done_MN = None if matrix_MN is None else work(matrix_MN)
            yield from flying
            flying = self._return(n, one, done_MN, flat)
        yield from flying

    def _gather(self, n: int, flat: Mapping[int, Tensor]) -> Callable[[], Tensor | None]:
        """Starts bringing the matrices of round n together; the result waits for this rank's own."""
        if n >= len(self.rounds):
            return lambda: None
        one = self.rounds[n]
        sends = [
            (matrix.owner, _of_range(share, flat[matrix.group]))
            for matrix, share in one.given
            if matrix.owner != self.place
        ]
        matrix_MN, received = None, list[tuple[Share, Tensor]]()
        if one.own is not None:
            like = flat[one.own.group]
            matrix_MN = like.new_empty(one.own.shape)
            for share in one.taken:
                if share.place == self.place:
                    _into_matrix(share, _of_range(share, like), matrix_MN)
                elif share.run is not None:
                    received.append((share, matrix_MN.view(-1)[share.run]))
                else:
                    received.append((share, like.new_empty(share.numel)))
        transfer = self.comm.exchange(
            "gather matrices", sends, [(s.place, t) for s, t in received], tag=_GATHER_TAG + n % 2
        )

        def finish() -> Tensor | None:
            transfer.wait()
            for share, values in received:
                if share.run is None and matrix_MN is not None:
                    _into_matrix(share, values, matrix_MN)
            return matrix_MN

        return finish

    def _return(
        self, n: int, one: Round, done_MN: Tensor | None, flat: Mapping[int, Tensor]
    ) -> Iterator[tuple[Matrix, tuple[slice, ...]]]:
        """Starts taking the matrices of round n back; the iterator waits before it yields."""
        sends, received = list[tuple[int, Tensor]](), list[tuple[Matrix, Share, Tensor]]()
        if done_MN is not None:
            sends = [(s.place, _of_matrix(s, done_MN)) for s in one.returned if s.place != self.place]
        for matrix, share in one.kept:
            range_U = flat[matrix.group]
            if matrix.owner == self.place and done_MN is not None:
                _into_range(share, _of_matrix(share, done_MN), range_U)
            elif len(share.cuts) == 1:
                received.append((matrix, share, range_U[share.cuts[0]]))
            else:
                received.append((matrix, share, range_U.new_empty(share.numel)))
        transfer = self.comm.exchange(
            "return matrices", sends, [(m.owner, t) for m, _, t in received], tag=_RETURN_TAG + n % 2
        )
        return self._returned(transfer, one, received, flat)

    def _returned(
        self,
        transfer: Transfer,
        one: Round,
        received: Sequence[tuple[Matrix, Share, Tensor]],
        flat: Mapping[int, Tensor],
    ) -> Iterator[tuple[Matrix, tuple[slice, ...]]]:
        transfer.wait()
        for matrix, share, values in received:
            if len(share.cuts) > 1:
                _into_range(share, values, flat[matrix.group])
        for matrix, share in one.kept:
            yield matrix, share.cuts

    def _round(self, members: Sequence[int]) -> Round:
        plan = self.plan
        own = next((m for m in members if plan.matrices[m].owner == self.place), None)
        places = range(plan.places)
        return Round(
            own=None if own is None else plan.matrices[own],
            taken=() if own is None else self._shares(own, [(p, plan.sent(own, p)) for p in places]),
            returned=() if own is None else self._shares(own, [(p, plan.held(own, p)) for p in places]),
            given=tuple(
                (plan.matrices[m], share)
                for m in members
                for share in self._shares(m, [(self.place, plan.sent(m, self.place))])
            ),
            kept=tuple(
                (plan.matrices[m], share)
                for m in members
                for share in self._shares(m, [(self.place, plan.held(m, self.place))])
            ),
        )

    def _shares(self, m: int, held: Sequence[tuple[int, Sequence[Part]]]) -> tuple[Share, ...]:
        """The parts of each place as a share, where it has any."""
        matrix = self.plan.matrices[m]
        shares = []
        for place, parts in held:
            lo = self.plan.updated(matrix.group, place)[0]
            boxes = tuple(box for part in parts for box in part.boxes)
            if boxes:
                cuts = tuple(slice(part.start - lo, part.stop - lo) for part in parts)
                shares.append(Share(place=place, cuts=cuts, boxes=boxes, run=_one_run(matrix.shape, boxes)))
        return tuple(shares)


def _one_run(shape: tuple[int, int], boxes: Sequence[Box]) -> slice | None:
    """The boxes, laid end to end, as one run of the flattened matrix; None when they are several."""
    runs = [run for box in boxes for run in box_runs(shape, box)]
    neighbours = all(a[1] == b[0] for a, b in pairwise(runs))
    return slice(runs[0][0], runs[-1][1]) if neighbours else None


def _of_range(share: Share, range_U: Tensor) -> Tensor:
    """The share as one tensor: a view of the range where it is one piece of it."""
    parts = [range_U[cut] for cut in share.cuts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _into_range(share: Share, values: Tensor, range_U: Tensor) -> None:
    for cut, part in zip(share.cuts, values.split([c.stop - c.start for c in share.cuts]), strict=True):
        range_U[cut].copy_(part)


def _of_matrix(share: Share, matrix_MN: Tensor) -> Tensor:
    """The share as one tensor: a view of the matrix where it is one run of it."""
    if share.run is not None:
        return matrix_MN.view(-1)[share.run]
    return torch.cat([matrix_MN[box.slices].reshape(-1) for box in share.boxes])


def _into_matrix(share: Share, values: Tensor, matrix_MN: Tensor) -> None:
    for box, part in zip(share.boxes, values.split([box.volume for box in share.boxes]), strict=True):
        matrix_MN[box.slices].copy_(part.view(box.size))
