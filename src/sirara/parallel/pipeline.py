"""Plays a schedule's row on one pipeline rank: any table, one path; a single process is a pipeline of one stage.

    rank 0   F0 SF0 F1 SF1 RB0 B0 F2 SF2 ...           1f1b, two stages: SF hidden state to the next stage
    rank 1   RF0 F0 I0 SB0 W0 RF1 F1 I1 SB1 W1 ...     SB its gradient to the stage before, RF and RB their arrival

What must come is said at the start of the step; a send is a post that never waits; a tensor is let go when its
receiver has it.  Stages of one rank hand over in place.  A data-parallel rank with fewer microbatches than the table
("ghosts") sends nothing for the missing ones, but takes part in the moves of weights and gradients.

Why no rank waits for ever, on any mesh pp x dp x tp.  The tables are proven to end when sends never wait and receives
do (pure/simulate.py): all actions of all rows have an order in which each comes after those before it in its row and
after the send that it receives.  All ranks of one pp coordinate play the same row.  Take the first action in that
order that some rank has not finished.  What comes before it in its row has been finished by all ranks of that
coordinate, so all of them are inside it, and the letter it needs has been sent.  Exchanges over tp begin and end inside
one action; those over dp (gather, reduce) begin in one action and are waited for in the same or a later one.  So the
partners stand in this very action and have begun what it waits for: it ends, on every rank, and the next one is first.
That asks of the moves over dp and tp:

    1. which moves an action makes follows from its place in the row, never from data or from a microbatch being real
    2. an exchange is begun in the same action on all its ranks, and waited for in the same action, in one order
    3. between two actions nothing waits; `finish` comes after the last action of the row

An exception on one rank rings the alarm and poisons the mail: whoever waits for this rank, or for one that waits for
it, raises the same within moments (comm/alarm.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sirara.comm.alarm import HEARD, Alarm
from sirara.comm.header import Tag
from sirara.comm.mail import Letter, Mail
from sirara.errors import InvariantError, SiraraError
from sirara.parallel.stage import Chunk, Inputs, Trail
from sirara.pure.rng import DropoutKey
from sirara.pure.schedule import Action, Kind, Schedule

Tensor = torch.Tensor
Place = tuple[int, int]
"""(stage, microbatch of the table)."""

_COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_FORWARD = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The hidden state between two stages: [B, L, size], or this rank's share [B * L / shards, size] of the tokens.

    shards: ranks among which sequence parallelism splits the tokens; 0 without it.
    """

    size: int
    dtype: torch.dtype
    shards: int = 0

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        B, L = inputs.tokens_BL.shape
        return (B * L // self.shards, self.size) if self.shards else (B, L, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch; `microbatch` is its number in the step, `key` None without dropout."""

    microbatch: int
    inputs: Inputs
    key: DropoutKey | None = None


class Pipeline:
    """One rank of a pipeline.

    Args:  chunks: this rank's stages by number.  mail: between the pipeline's ranks, None when there is one rank.
           rank: place on the pp axis.  alarm: rung when an action fails.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        schedule: Schedule,
        mail: Mail | None,
        *,
        rank: int,
        hidden: Hidden,
        alarm: Alarm | None = None,
    ) -> None:
        if tuple(sorted(chunks)) != schedule.stages_of(rank) or (mail is None and schedule.ranks > 1):
            raise InvariantError(
                f"rank {rank} of pipeline {schedule.name} holds stages {sorted(chunks)}, mail: {mail is not None}",
                why=f"its row computes stages {schedule.stages_of(rank)} of {schedule.ranks} ranks",
            )
        self.chunks, self.schedule, self.mail, self.rank = dict(chunks), schedule, mail, rank
        self.hidden, self.alarm = hidden, alarm
        self.row = schedule.rows[rank]
        self.forward_row = tuple(action for action in self.row if action.kind in _FORWARD)
        self.rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]

    def run(self, work: Sequence[Work], *, scale: float) -> list[Tensor]:
        """Forward and backward of all of `work`: gradients of scale * sum of losses, in ascending order per stage.

        Args:     work: at most as many as the table has microbatches; the rest are ghosts.
        Returns:  losses_BL of each on the rank of the last stage, nothing on the others.
        Raises:   InvariantError when ranks disagree about a microbatch; CommError when another rank failed.
        """
        if len(work) > self.schedule.microbatches:
            raise InvariantError(f"{len(work)} microbatches for a table of {self.schedule.microbatches}")
        play = _Training(
            self, [item.inputs for item in work], [item.microbatch for item in work], work, scale
        )
        with self._telling():
            play.all(self.row)
            if self.mail is not None:
                self.mail.finish()
        return play.losses_in_order()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Inputs | None]) -> list[Tensor]:
        """Forward alone, of any number of batches, in turns of as many as the table has.

        Args:     batches: the same number on all ranks; None where this data-parallel rank has none.
        Returns:  losses_BL of each batch that is one, on the rank of the last stage; nothing on the others.
        """
        losses: list[Tensor] = []
        size = self.schedule.microbatches
        marks: list[list[int]] = []
        with self._telling():
            for start in range(0, len(batches), size):
                turn = batches[start : start + size]
                if self.mail is not None and len(marks) > 1:
                    # Bounds what lies in memory for slower ranks: the turn before the last one has been taken.
                    self.mail.finish(marks[-2])
                play = _Evaluation(self, turn, range(start, start + len(turn)))
                play.all(self.forward_row)
                losses.extend(play.losses_in_order())
                if self.mail is not None:
                    marks.append(self.mail.mark())
            if self.mail is not None:
                self.mail.finish()
        return losses

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.alarm is not None:
                self.alarm.ring(error)
            if self.mail is not None:
                try:
                    self.mail.poison(error)
                except (SiraraError, RuntimeError) as gone:
                    # A neighbour has left already; what made this rank fail is the better story.
                    error.add_note(f"the other ranks of the pipeline could not be told: {gone}")
            raise


@dataclass(slots=True)
class _Play:
    """The tensors of one pass over a row, between the action that makes them and the one that uses them up."""

    pipeline: Pipeline
    inputs: Sequence[Inputs | None]
    numbers: Sequence[int]
    states: dict[Place, Tensor] = field(default_factory=dict, init=False)
    gradients: dict[Place, Tensor] = field(default_factory=dict, init=False)
    outgoing: dict[tuple[Kind, Place], Tensor] = field(default_factory=dict, init=False)
    letters: dict[tuple[Kind, Place], Letter] = field(default_factory=dict, init=False)
    losses: dict[int, Tensor] = field(default_factory=dict, init=False)

    def all(self, row: Sequence[Action]) -> None:
        """Plays the row."""
        pipeline = self.pipeline
        real = [inputs is not None for inputs in self.inputs]
        real += [False] * (pipeline.schedule.microbatches - len(real))
        self._expect(row, real)
        for action in row:
            try:
                if real[action.microbatch]:
                    self._do(action.kind, action.stage, action.microbatch)
                elif action.kind in _COMPUTES and self._has_ghost(action.microbatch):
                    pipeline.chunks[action.stage].ghost(action.kind)
            except Exception as error:
                if getattr(error, "code", "") != HEARD:
                    error.add_note(
                        f"at {action} of pipeline rank {pipeline.rank}, schedule {pipeline.schedule.name}"
                    )
                raise
        left = [*self.states, *self.gradients, *self.outgoing, *self.letters]
        if left:
            raise InvariantError(f"the table of {pipeline.schedule.name} left tensors behind", why=f"{left}")

    def losses_in_order(self) -> list[Tensor]:
        return [self.losses[i] for i in sorted(self.losses)]

    def _expect(self, row: Sequence[Action], real: Sequence[bool]) -> None:
        mail, rank_of, hidden = self.pipeline.mail, self.pipeline.rank_of, self.pipeline.hidden
        if mail is None:
            return
        for kind, stage, i in ((a.kind, a.stage, a.microbatch) for a in row):
            step = {Kind.RECEIVE_FORWARD: -1, Kind.RECEIVE_BACKWARD: 1}.get(kind, 0)
            inputs = self.inputs[i] if step and real[i] else None
            if inputs is not None:
                tag = Tag(step > 0, stage + step, self.numbers[i])
                self.letters[kind, (stage, i)] = mail.expect(
                    rank_of[stage + step], tag, shape=hidden.shape(inputs), dtype=hidden.dtype
                )

    def _do(self, kind: Kind, stage: int, i: int) -> None:
        place = (stage, i)
        if kind == Kind.RECEIVE_FORWARD:
            self.states[place] = self.letters.pop((kind, place)).wait()
        elif kind == Kind.RECEIVE_BACKWARD:
            self.gradients[place] = self.letters.pop((kind, place)).wait()
        elif kind == Kind.SEND_FORWARD:
            self._send(Tag(False, stage, self.numbers[i]), stage + 1, self.outgoing.pop((kind, place)))
        elif kind == Kind.SEND_BACKWARD:
            self._send(Tag(True, stage, self.numbers[i]), stage - 1, self.outgoing.pop((kind, place)))
        else:
            self._compute(kind, self.pipeline.chunks[stage], place)

    def _send(self, tag: Tag, to_stage: int, tensor: Tensor) -> None:
        if self.pipeline.mail is None:
            raise InvariantError(f"the {tag} is for another rank, of which there is none")
        self.pipeline.mail.send(self.pipeline.rank_of[to_stage], tag, tensor)

    def _compute(self, kind: Kind, chunk: Chunk, place: Place) -> None:
        raise NotImplementedError

    def _has_ghost(self, i: int) -> bool:
        raise NotImplementedError

    def _leave_state(self, place: Place, y: Tensor) -> None:
        """The output of a stage goes to the next one, here or elsewhere."""
        stage, i = place
        if self.pipeline.rank_of[stage + 1] == self.pipeline.rank:
            self.states[stage + 1, i] = y
        else:
            self.outgoing[Kind.SEND_FORWARD, place] = y.contiguous()

    def _leave_gradient(self, place: Place, dx: Tensor | None) -> None:
        stage, i = place
        if dx is None:
            raise InvariantError(
                f"stage {stage} gave no gradient of its input for microbatch {self.numbers[i]}"
            )
        if self.pipeline.rank_of[stage - 1] == self.pipeline.rank:
            self.gradients[stage - 1, i] = dx
        else:
            self.outgoing[Kind.SEND_BACKWARD, place] = dx.contiguous()


@dataclass(slots=True)
class _Training(_Play):
    work: Sequence[Work]
    scale: float
    trails: dict[Place, Trail] = field(default_factory=dict, init=False)

    def _has_ghost(self, i: int) -> bool:
        return True

    def _compute(self, kind: Kind, chunk: Chunk, place: Place) -> None:
        i = place[1]
        item = self.work[i]
        if kind == Kind.FORWARD:
            trail, y = chunk.forward(self.states.pop(place, None), item.inputs, item.key, self.scale)
            self.trails[place] = trail
            if chunk.last:
                self.losses[i] = y
            else:
                self._leave_state(place, y)
        elif kind == Kind.WEIGHT:
            chunk.backward_weight(self.trails.pop(place), item.microbatch)
        else:
            dy = self.gradients.pop(place, None)
            if kind == Kind.BACKWARD:
                dx = chunk.backward(self.trails.pop(place), dy, item.microbatch)
            else:
                dx = chunk.backward_input(self.trails[place], dy, item.microbatch)
            if not chunk.first:
                self._leave_gradient(place, dx)


@dataclass(slots=True)
class _Evaluation(_Play):
    def _has_ghost(self, i: int) -> bool:
        # Behind the last batch every rank stops; before it, a rank without one takes part in ZeRO's moves.
        return i < len(self.inputs)

    def _compute(self, kind: Kind, chunk: Chunk, place: Place) -> None:
        inputs = self.inputs[place[1]]
        if inputs is None:
            return
        y = chunk.evaluate(self.states.pop(place, None), inputs)
        if chunk.last:
            self.losses[place[1]] = y
        else:
            self._leave_state(place, y)
