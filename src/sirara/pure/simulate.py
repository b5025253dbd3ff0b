"""Plays a pipeline schedule on paper: proves that it runs, and says how long it takes and what it keeps alive.

    rank 0   F0 F1 SF.. | clock of rank 0         A send puts its message on a channel and never waits; it is there
    rank 1   RF0 F0 ..  | clock of rank 1         `transfer_s` later.  A receive waits for the head of its channel.

A channel is what one stage sends to its neighbour in one direction.  The order in which ranks are played does not
change the result: a row says what its rank does next, and a message waits for its reader.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from sirara.errors import InvariantError
from sirara.pure.schedule import Action, Kind, Schedule, receive_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds per stage, one number each; any other unit of time will do.

    backward_s is input and weight gradient computed together, often less than input_s + weight_s.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: float = 0.0

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        transfer_s: float = 0.0,
    ) -> "Costs":
        """The same for all stages, backward_s = input_s + weight_s."""
        return cls(
            forward_s=(forward_s,) * stages,
            backward_s=(input_s + weight_s,) * stages,
            input_s=(input_s,) * stages,
            weight_s=(weight_s,) * stages,
            transfer_s=transfer_s,
        )

    def of(self, action: Action) -> float:
        match action.kind:
            case Kind.FORWARD:
                return self.forward_s[action.stage]
            case Kind.BACKWARD:
                return self.backward_s[action.stage]
            case Kind.INPUT:
                return self.input_s[action.stage]
            case Kind.WEIGHT:
                return self.weight_s[action.stage]
            case _:
                return 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """One computation on the clock of its rank."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a schedule went. Tuples have one entry per rank.

    Attributes:  makespan_s: from the first start to the last end on any rank.
                 busy_s: time spent computing.
                 live_peak: the most microbatches alive at once, counted per stage of the rank: from a forward to its
                 backward or weight gradient.  One of them is the activations of one stage, 1 / chunks of a rank.
                 owed_peak: the most weight gradients put off at once: their inputs and output gradients are kept.
                 timeline: what was computed when.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    live_peak: tuple[int, ...]
    owed_peak: tuple[int, ...]
    timeline: tuple[tuple[Span, ...], ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time until the makespan in which they compute nothing."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def simulate(schedule: Schedule, costs: Costs) -> Result:
    """Plays a table.

    Raises:  InvariantError if it does not compute each stage of each microbatch once, microbatches ascending; if
             something is read that was not made or received before; if sends and receives of a channel do not match in
             number and order; if ranks wait for each other for ever.
    """
    _check_complete(schedule)
    channels: dict[Action, deque[tuple[Action, float]]] = {}
    players = [_Player(schedule, rank, costs, channels) for rank in range(schedule.ranks)]
    # A rank plays until it waits; a round in which nobody could do anything is the end or a deadlock.
    while sum(player.play() for player in players):
        pass
    stuck = [f"rank {p.rank} at {p.row[p.at]}" for p in players if p.at < len(p.row)]
    if stuck:
        raise InvariantError(f"{_named(schedule)} never ends", why=f"waiting for ever: {', '.join(stuck)}")
    unread = [str(receive) for queue in channels.values() for receive, _ in queue]
    if unread:
        raise InvariantError(f"{_named(schedule)} sends what nobody receives", why=", ".join(unread))
    return Result(
        makespan_s=max(player.clock_s for player in players),
        busy_s=tuple(player.busy_s for player in players),
        live_peak=tuple(player.live_peak for player in players),
        owed_peak=tuple(player.owed_peak for player in players),
        timeline=tuple(tuple(player.spans) for player in players),
    )


@dataclass(slots=True)
class _Player:
    """One rank: where it is in its row, its clock, and what it holds."""

    schedule: Schedule
    rank: int
    costs: Costs
    channels: dict[Action, deque[tuple[Action, float]]]
    at: int = 0
    clock_s: float = 0.0
    busy_s: float = 0.0
    live: int = 0
    live_peak: int = 0
    owed: int = 0
    owed_peak: int = 0
    held: set[Action] = field(default_factory=set)
    """Receives and computations of this rank that are done."""
    spans: list[Span] = field(default_factory=list)

    @property
    def row(self) -> tuple[Action, ...]:
        return self.schedule.rows[self.rank]

    def play(self) -> bool:
        """Runs until this rank has to wait; False if it had to at once."""
        start = self.at
        row = self.row
        while self.at < len(row):
            action = row[self.at]
            if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                if not self._receive(action):
                    break
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                self._send(action)
            else:
                self._compute(action)
            self.at += 1
        return self.at > start

    def _receive(self, action: Action) -> bool:
        queue = self.channels.get(_channel(action))
        if not queue:
            return False
        message, arrival_s = queue.popleft()
        if message != action:
            raise InvariantError(
                f"{_named(self.schedule)} receives out of order",
                where=f"rank {self.rank}",
                why=f"waits for {action}, the next message is {message}",
            )
        self.clock_s = max(self.clock_s, arrival_s)
        self.held.add(action)
        return True

    def _send(self, action: Action) -> None:
        if action.kind is Kind.SEND_FORWARD:
            made = [Action(Kind.FORWARD, action.stage, action.microbatch)]
        else:
            made = [Action(kind, action.stage, action.microbatch) for kind in (Kind.INPUT, Kind.BACKWARD)]
        if self.held.isdisjoint(made):
            raise InvariantError(
                f"{_named(self.schedule)} sends {action} before it is made", where=f"rank {self.rank}"
            )
        receive = receive_of(action)
        arrival_s = self.clock_s + self.costs.transfer_s
        self.channels.setdefault(_channel(receive), deque()).append((receive, arrival_s))

    def _compute(self, action: Action) -> None:
        for alternatives in _reads(action, self.schedule.stages):
            if self.held.isdisjoint(alternatives):
                missing = " or ".join(str(a) for a in alternatives)
                raise InvariantError(
                    f"{_named(self.schedule)} computes {action} too early",
                    where=f"rank {self.rank}",
                    why=f"nothing before it in the row is {missing}",
                )
        cost_s = self.costs.of(action)
        self.spans.append(Span(action, self.clock_s, self.clock_s + cost_s))
        self.clock_s += cost_s
        self.busy_s += cost_s
        self.held.add(action)
        self.live += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
        self.owed += (action.kind is Kind.INPUT) - (action.kind is Kind.WEIGHT)
        self.live_peak = max(self.live_peak, self.live)
        self.owed_peak = max(self.owed_peak, self.owed)


def _reads(action: Action, stages: int) -> Iterator[tuple[Action, ...]]:
    """What must be on the rank before a computation; of each tuple one entry is enough."""
    stage, i = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            if stage:
                yield Action(Kind.RECEIVE_FORWARD, stage, i), Action(Kind.FORWARD, stage - 1, i)
        case Kind.BACKWARD | Kind.INPUT:
            yield (Action(Kind.FORWARD, stage, i),)
            if stage < stages - 1:
                yield Action(Kind.RECEIVE_BACKWARD, stage, i), Action(action.kind, stage + 1, i)
        case _:
            yield (Action(Kind.INPUT, stage, i),)


def _channel(receive: Action) -> Action:
    return Action(receive.kind, receive.stage, 0)


def _check_complete(schedule: Schedule) -> None:
    """Each stage, on its own rank, computes microbatches 0, 1, .. forward and then backward, whole or in two halves."""
    seen: dict[tuple[Kind, int], list[int]] = {}
    for rank, row in enumerate(schedule.rows):
        mine = schedule.stages_of(rank)
        for action in row:
            if action.stage not in mine and action.kind in _COMPUTES:
                raise InvariantError(
                    f"{_named(schedule)} has {action} on rank {rank}, which has stages {mine}"
                )
            seen.setdefault((action.kind, action.stage), []).append(action.microbatch)
    all_of_them = list(range(schedule.microbatches))
    for stage in range(schedule.stages):
        found = {kind: seen[kind, stage] for kind in _COMPUTES if (kind, stage) in seen}
        whole = (Kind.FORWARD, Kind.BACKWARD)
        halves = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        wrong = [kind for kind, microbatches in found.items() if microbatches != all_of_them]
        if wrong or tuple(found) not in (whole, halves):
            raise InvariantError(
                f"{_named(schedule)} does not compute stage {stage} once per microbatch in ascending order",
                why="; ".join(f"{kind}: {found[kind]}" for kind in found),
            )


_COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


def _named(schedule: Schedule) -> str:
    return (
        f"schedule {schedule.name} of {schedule.ranks} ranks, {schedule.chunks} stages each, "
        f"{schedule.microbatches} microbatches"
    )
