"""Pipeline schedules as tables: which rank computes which stage of which microbatch, in which order.

    1f1b, 3 stages, 4 microbatches (time runs to the right; a backward takes two columns)

    rank 0   F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
    rank 1   .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
    rank 2   .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

A model is cut into stages 0 .. ranks * chunks - 1.  Stages are dealt to ranks round and round, or for "zb-v" down
and up again (a V), so that the rank of the first stage also has the last:

    stage         0 1 2 3   4 5 6 7
    rank, round   0 1 2 3   0 1 2 3
    rank, V       0 1 2 3   3 2 1 0

Order of each stage: microbatches ascend in forward, backward, input and weight gradients.  Exact gradient sums
depend on it: a rule here may choose *when* a stage computes, never the order of its microbatches.

A rank runs its row from left to right; a send never waits, a receive waits until its message is there.  `pure.simulate`
proves for every table that this ends.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import cycle, islice

from sirara.errors import LayoutError


class Kind(StrEnum):
    """What an action does. INPUT and WEIGHT are the halves of BACKWARD: dx first, dW whenever there is time."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a row.

    stage:  of 0 .. stages - 1, over all ranks.  SEND_FORWARD is the output of `stage` on its way to stage + 1,
    RECEIVE_FORWARD the input of `stage`; SEND_BACKWARD is dx of `stage` on its way to stage - 1, RECEIVE_BACKWARD dy of
    `stage`.  microbatch: 0 .. microbatches - 1 of this data-parallel rank.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A table: one row of actions per pipeline rank, transfers included."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return rank_of(self.name, self.ranks, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, ascending: its chunks."""
        return tuple(s for s in range(self.stages) if self.rank_of(s) == rank)


_RECEIVE_OF_SEND = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
}
_CHUNKS: Mapping[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, None),
    "zb-h1": (1, 1),
    "zb-v": (2, 2),
}
SCHEDULES = tuple(_CHUNKS)
SPLIT_BACKWARD = ("zb-h1", "zb-v")
"""Schedules that compute input and weight gradients apart."""


def chunks_of(name: str, virtual_stages: int | str = "auto") -> int:
    """Stages per rank of a schedule: what was asked for, or with "auto" the fewest it takes.

    Raises:  LayoutError naming the valid alternatives.
    """
    if name not in _CHUNKS:
        raise LayoutError(
            f"mesh.schedule={name!r} is not known",
            where="mesh.schedule",
            try_=[f"one of {', '.join(SCHEDULES)}"],
        )
    fewest, most = _CHUNKS[name]
    if virtual_stages == "auto":
        return fewest
    chunks = int(virtual_stages)
    if chunks < fewest or (most is not None and chunks > most):
        valid = f"{fewest}" if most == fewest else f"at least {fewest}"
        others = [n for n, (lo, hi) in _CHUNKS.items() if lo <= chunks and (hi is None or chunks <= hi)]
        raise LayoutError(
            f"mesh.virtual_stages={chunks} does not fit mesh.schedule={name}",
            where="mesh.virtual_stages",
            why=f"{name} takes {valid} stage{'s' if fewest > 1 else ''} per rank",
            try_=[f"mesh.virtual_stages={fewest}", *(f"mesh.schedule={n}" for n in others)],
        )
    return chunks


def rank_of(name: str, ranks: int, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    turn, at = divmod(stage, ranks)
    return ranks - 1 - at if name == "zb-v" and turn % 2 else at


def schedule(name: str, *, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """The table of a schedule.

    gpipe        all forwards, then all backwards
    1f1b         as few forwards ahead as the pipeline is deep; arXiv:2104.04473, section 2.2.1
    interleaved  1f1b over `chunks` stages per rank; the same paper, section 2.2.2
    zb-h1        1f1b, weight gradients moved to where the rank would wait; arXiv:2401.10241, section 2
    zb-v         the same on a V of two stages per rank, no bubble but fill and drain; the same paper, section 6

    Args:    ranks: degree of pp.  chunks: stages per rank.  microbatches: of one data-parallel rank; any number.
    Raises:  LayoutError naming the valid alternatives.
    """
    chunks_of(name, chunks)
    if ranks < 1 or microbatches < 1:
        raise LayoutError(
            f"a pipeline of {ranks} ranks and {microbatches} microbatches cannot run",
            where="mesh.pp" if ranks < 1 else "train.global_batch",
            try_=["mesh.pp=1" if ranks < 1 else "at least one microbatch per step"],
        )
    orders = _ORDERS[name](ranks, chunks, microbatches)
    rows = tuple(tuple(_with_transfers(name, ranks, ranks * chunks, order)) for order in orders)
    return Schedule(name=name, ranks=ranks, chunks=chunks, microbatches=microbatches, rows=rows)


def sends_early(*, tp: int, compiled: bool, keeps_little: bool) -> bool:
    """Whether the ranks of a layout play `sending_early` of its table: where that costs nothing.

    A compiled block has one backward.  The sum of dx over tp is hidden behind weight gradients.  A block of which much
    is run again would keep what its weight gradients need until all blocks of the stage have run.
    """
    return not (compiled or tp > 1 or keeps_little)


def sending_early(table: Schedule) -> Schedule:
    """The table with every backward whose dx leaves its rank in two halves: dx, the send, then weight gradients.

    Stages that wait for dx wait for one half, so the bubble of gpipe, 1f1b and interleaved shrinks from
    (p - 1)(F + B) to (p - 1)(F + I); weight gradients of one microbatch at most are put off.

        1f1b, rank 1 of 3    RF0 F0 SF0 RF1 F1 SF1 RB0 I0 SB0 W0 RF2 F2 ...
    """
    return replace(table, rows=tuple(tuple(_halved(row)) for row in table.rows))


def _halved(row: tuple[Action, ...]) -> Iterator[Action]:
    sends = {(a.stage, a.microbatch) for a in row if a.kind is Kind.SEND_BACKWARD}
    whole: set[tuple[int, int]] = set()
    for action in row:
        place = (action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD and place in sends:
            whole.add(place)
            yield Action(Kind.INPUT, *place)
            continue
        yield action
        if action.kind is Kind.SEND_BACKWARD and place in whole:
            yield Action(Kind.WEIGHT, *place)


Order = list[Action]
"""What one rank computes, without transfers."""


def _gpipe(ranks: int, chunks: int, microbatches: int) -> list[Order]:
    # Backward ascends as well, for the sake of the sums; the bubble is that of the descending order.
    return [
        [Action(kind, rank, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(microbatches)]
        for rank in range(ranks)
    ]


def _one_f_one_b(ranks: int, chunks: int, microbatches: int) -> list[Order]:
    return [
        _paired(
            [Action(Kind.FORWARD, rank, i) for i in range(microbatches)],
            [Action(Kind.BACKWARD, rank, i) for i in range(microbatches)],
            ahead=ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]


def _interleaved(ranks: int, chunks: int, microbatches: int) -> list[Order]:
    """Groups of microbatches pass chunk 0, then chunk 1, and so on; in backward the last chunk comes first.

    The paper asks for whole groups of `ranks`.  Groups as even as possible, none smaller than `ranks`, keep its bubble
    for every number of microbatches from `ranks` on; each microbatch by which they are larger costs rank 0 chunks - 1
    more live ones.
    """
    count = max(1, microbatches // ranks)
    sizes = [microbatches // count + (g < microbatches % count) for g in range(count)]
    forward: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        forward += [(chunk, i) for chunk in range(chunks) for i in range(start, start + size)]
        start += size
    # Each group ends on its last chunk, so the mirror of the chunks is the order of backward.
    backward = [(chunks - 1 - chunk, i) for chunk, i in forward]
    return [
        _paired(
            [Action(Kind.FORWARD, chunk * ranks + rank, i) for chunk, i in forward],
            [Action(Kind.BACKWARD, chunk * ranks + rank, i) for chunk, i in backward],
            ahead=2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0],
        )
        for rank in range(ranks)
    ]


def _zb_h1(ranks: int, chunks: int, microbatches: int) -> list[Order]:
    orders = [
        _paired(
            [Action(Kind.FORWARD, rank, i) for i in range(microbatches)],
            [Action(Kind.INPUT, rank, i) for i in range(microbatches)],
            ahead=ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]
    # 1f1b holds `ranks` microbatches on rank 0; weight gradients may keep as many on every rank.
    return _with_weights(orders, ranks, limit=ranks)


def _zb_v(ranks: int, chunks: int, microbatches: int) -> list[Order]:
    orders = [
        [a for a in _v_order(ranks, rank, max(microbatches, 2 * ranks - 1)) if a.microbatch < microbatches]
        for rank in range(ranks)
    ]
    return _with_weights(orders, 2 * ranks, limit=2 * ranks)


_ORDERS: Mapping[str, Callable[[int, int, int], list[Order]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}


def _paired(forwards: Order, backwards: Order, *, ahead: int) -> Order:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for n, backward in enumerate(backwards):
        order += forwards[ahead + n : ahead + n + 1]
        order.append(backward)
    return order


def _v_order(ranks: int, rank: int, microbatches: int) -> Iterator[Action]:
    """Forwards and input gradients of one rank of the V, for at least 2 * ranks - 1 microbatches.

    Fewer are this order without those that do not exist: what is left of a runnable table is runnable.
    Legs of the V: `down` is the rank's stage on the way to the last rank, `up` the one on the way back.
    """
    legs = {"down": rank, "up": 2 * ranks - 1 - rank}
    steps = [
        # fill: the first microbatch goes down and comes back up to this rank
        *_times(2 * (ranks - rank) - 1, "F down"),
        *_times(rank, "F up", "F down"),
        *_times(ranks - rank, "F up", "I up"),
        # steady
        *_times(microbatches - (2 * ranks - 1 - rank), "F down", "I down", "F up", "I up"),
        # drain
        *_times(ranks - 1 - rank, "I down", "F up", "I up"),
        *_times(rank, "I down", "I up"),
        *_times(ranks - rank, "I down"),
    ]
    done = dict.fromkeys(steps, 0)
    for step in steps:
        kind, leg = step.split()
        yield Action(Kind(kind), legs[leg], done[step])
        done[step] += 1


def _times(count: int, *steps: str) -> Iterator[str]:
    return islice(cycle(steps), count * len(steps))


def _with_weights(orders: list[Order], stages: int, *, limit: int) -> list[Order]:
    """Adds the weight gradients: where a rank would wait, or before a forward that would keep more than `limit` alive.

    Where a rank waits is found by playing the table in steps; a forward, an input and a weight gradient take one each.
    A microbatch is alive on a stage from its forward to its weight gradient.
    """
    rows: list[Order] = [[] for _ in orders]
    owed: list[Order] = [[] for _ in orders]
    alive = [0] * len(orders)
    at = [0] * len(orders)
    done: set[Action] = set()
    while any(n < len(order) for n, order in zip(at, orders, strict=True)):
        now: Order = []
        for rank, order in enumerate(orders):
            action = order[at[rank]] if at[rank] < len(order) else None
            full = action is not None and action.kind is Kind.FORWARD and alive[rank] >= limit
            if action is not None and not (full and owed[rank]) and done.issuperset(needs(action, stages)):
                at[rank] += 1
                alive[rank] += action.kind is Kind.FORWARD
            elif owed[rank]:
                action = owed[rank].pop(0)
                alive[rank] -= 1
            else:
                continue
            rows[rank].append(action)
            now.append(action)
            if action.kind is Kind.INPUT:
                owed[rank].append(Action(Kind.WEIGHT, action.stage, action.microbatch))
        done.update(now)
    return [row + rest for row, rest in zip(rows, owed, strict=True)]


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """The computations, on whatever rank, that must have ended before this one can start."""
    stage, i = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return (Action(Kind.FORWARD, stage - 1, i),) if stage else ()
        case Kind.BACKWARD | Kind.INPUT:
            own = Action(Kind.FORWARD, stage, i)
            return (own, Action(action.kind, stage + 1, i)) if stage < stages - 1 else (own,)
        case Kind.WEIGHT:
            return (Action(Kind.INPUT, stage, i),)
        case _:
            return ()


def _with_transfers(name: str, ranks: int, stages: int, order: Order) -> Iterator[Action]:
    """Puts a receive just before what reads it and a send just after what made it; none between stages of one rank."""

    def elsewhere(stage: int, other: int) -> bool:
        return 0 <= other < stages and rank_of(name, ranks, stage) != rank_of(name, ranks, other)

    for action in order:
        stage, i = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                source, target = stage - 1, stage + 1
                receive, send = Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD
            case Kind.BACKWARD | Kind.INPUT:
                source, target = stage + 1, stage - 1
                receive, send = Kind.RECEIVE_BACKWARD, Kind.SEND_BACKWARD
            case _:
                yield action
                continue
        if elsewhere(stage, source):
            yield Action(receive, stage, i)
        yield action
        if elsewhere(stage, target):
            yield Action(send, stage, i)


def receive_of(send: Action) -> Action:
    """The receive, on the neighbour's rank, that takes a send."""
    kind, step = _RECEIVE_OF_SEND[send.kind]
    return Action(kind, send.stage + step, send.microbatch)
