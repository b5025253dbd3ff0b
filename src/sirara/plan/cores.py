"""Plays a schedule's table on ranks that share cores: while n ranks compute, each takes `slow(n)` times as long.

    rank 0   F0 F1 .. |  clock of all ranks      A computation has work in seconds of a rank alone.  The clock goes
    rank 1   RF0 F0 . |  from one end of work to the next; between two, n does not change.

`pure/simulate.py` proves that tables end and gives every rank cores of its own; with slow(n) = 1 both take as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sirara.errors import InvariantError
from sirara.pure.schedule import Action, Kind, Schedule, receive_of
from sirara.pure.simulate import Costs

Slow = Callable[[float], float]
"""Processes that compute at once -> factor of each one's time."""
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_EPSILON_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Seconds: until the last rank ends, and per rank how long it was busy, slowed down as it was."""

    makespan_s: float
    busy_s: tuple[float, ...]


@dataclass(slots=True)
class _Rank:
    row: tuple[Action, ...]
    at: int = 0
    left_s: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Clock:
    costs: Costs
    now_s: float = 0.0
    arrived: set[Action] = field(default_factory=set)

    def settle(self, rank: _Rank) -> None:
        """Lets a rank go on until it computes, waits or is done."""
        while rank.at < len(rank.row) and rank.left_s <= 0.0:
            action = rank.row[rank.at]
            if action.kind in _RECEIVES:
                if action not in self.arrived:
                    return
                # The receiver copies what it is sent.
                rank.left_s = self.costs.transfer_s
            elif action.kind in _SENDS:
                self.arrived.add(receive_of(action))
            else:
                rank.left_s = self.costs.of(action)
            rank.at += 1


def play(table: Schedule, costs: Costs, *, slow: Slow, alike: int = 1) -> Played:
    """The table on the clock.

    Args:    alike: processes that play each rank side by side (data- and tensor-parallel ones).
    Raises:  InvariantError for a table that never ends.
    """
    ranks = [_Rank(row) for row in table.rows]
    clock = _Clock(costs)
    while True:
        before = -1
        # A send may let a rank go on that was settled before it.
        while before != (before := sum(rank.at for rank in ranks)):
            for rank in ranks:
                clock.settle(rank)
        active = [rank for rank in ranks if rank.left_s > 0.0]
        if not active:
            break
        factor = slow(len(active) * alike)
        step_s = min(rank.left_s for rank in active)
        clock.now_s += step_s * factor
        for rank in active:
            rank.busy_s += step_s * factor
            rank.left_s -= step_s
            if rank.left_s < _EPSILON_S:
                rank.left_s = 0.0
    stuck = [n for n, rank in enumerate(ranks) if rank.at < len(rank.row)]
    if stuck:
        raise InvariantError(f"schedule {table.name} never ends", why=f"ranks {stuck} wait for ever")
    return Played(makespan_s=clock.now_s, busy_s=tuple(rank.busy_s for rank in ranks))


def together_s(works_s: Sequence[float], *, slow: Slow, alike: int = 1) -> float:
    """Seconds until ranks that begin together have done their work."""
    now_s, done_s = 0.0, 0.0
    for n, work_s in enumerate(sorted(works_s)):
        now_s += (work_s - done_s) * slow((len(works_s) - n) * alike)
        done_s = work_s
    return now_s
