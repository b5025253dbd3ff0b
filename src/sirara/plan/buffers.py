"""How many buffers a rank makes for the gradient sums of one flat group, played as `parallel/reduce.py` does it.

    local    blocks of 2^k microbatches on a binary counter: max(1, k) full-size buffers
    sent     the last block's sum stays until its exchange ends, beside what has arrived of the peers' sums
    shards   the owner adds them in order on a binary counter of shard-size buffers

Only sizes and dtypes are played, so a step of thousands of microbatches takes milliseconds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from sirara.pure.tree import Deal

MOST_PLAYED = 1024
"""Microbatches; with more the closed form is used."""
MOST_IN_TURN = 2048
"""Microbatches times groups of a rank with several chunks; with more no group is taken to use another's buffers."""
Made = Counter[tuple[int, str, str]]
"""Buffers by elements of the group, size ("full", "shard") and dtype ("leaf": as autograd gives them, "sum")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Buffers that every group adds to the pool, and those that groups of one size use in turn."""

    full_leaf: int = 0
    full_sum: int = 0
    shard_leaf: int = 0
    shard_sum: int = 0
    once_leaf: int = 0
    once_sum: int = 0
    """Full-size ones that groups of one size use in turn."""
    once_shard_leaf: int = 0
    once_shard_sum: int = 0
    """Shard-size ones of that kind: what arrives."""


@cache
def buffers_of(dealt: Deal, *, lean: bool, fast: bool, same: bool) -> Buffers:
    """Plays one step of the busiest rank.

    lean: sums are cut (ZeRO 2 and 3).  same: gradients of leaves have the dtype of sums.
    """
    if fast:
        if dealt.dp == 1:
            return Buffers(full_sum=1)
        more = lean and dealt.places > 1
        return Buffers(full_sum=not lean, once_sum=lean, shard_sum=1, once_shard_sum=int(more))
    leaf = leaf_kind(dealt, same=same)
    if dealt.microbatches > MOST_PLAYED and dealt.dp > 1:
        return _closed(dealt, leaf, lean=lean)
    turns = (0,) * dealt.places
    two, three = (
        {kind[1:]: n for kind, n in made_in_turn(turns, groups, dealt, leaf, lean=lean).items()}
        for groups in (((0, 0, 1), (0, 1, 1)), ((0, 0, 1), (0, 1, 1), (0, 2, 1)))
    )
    each = {kind: three[kind] - two.get(kind, 0) for kind in three}
    return Buffers(
        full_leaf=each.get(("full", "leaf"), 0),
        full_sum=each.get(("full", "sum"), 0),
        shard_leaf=each.get(("shard", "leaf"), 0),
        shard_sum=each.get(("shard", "sum"), 0),
        once_leaf=two.get(("full", "leaf"), 0) - 2 * each.get(("full", "leaf"), 0),
        once_sum=two.get(("full", "sum"), 0) - 2 * each.get(("full", "sum"), 0),
        once_shard_leaf=two.get(("shard", "leaf"), 0) - 2 * each.get(("shard", "leaf"), 0),
        once_shard_sum=two.get(("shard", "sum"), 0) - 2 * each.get(("shard", "sum"), 0),
    )


def leaf_kind(dealt: Deal, *, same: bool) -> str:
    """The dtype of buffers that gradients are written to; `same`: leaves have the dtype of sums."""
    return "sum" if same or dealt.k > 0 or dealt.dp == 1 else "leaf"


def _closed(dealt: Deal, leaf: str, *, lean: bool) -> Buffers:
    """The same in closed form: a shard more or less where rounds are no power of two, and without scratch."""
    rounds = dealt.rounds
    arriving = min(dealt.dp, dealt.blocks) - 1
    counter = (rounds - 1).bit_length()
    if leaf == "leaf" or lean:
        counter = max(1, counter)
    more = rounds > 1
    each = 0 if lean else max(1, dealt.k) + (more and dealt.k > 0)
    once = 2 if lean else int(more and dealt.k == 0)
    kept = 0 if lean else arriving
    low = leaf == "leaf"
    return Buffers(
        full_leaf=each * low,
        full_sum=each * (not low),
        once_leaf=once * low,
        once_sum=once * (not low),
        shard_leaf=kept * low,
        shard_sum=counter + kept * (not low),
        once_shard_leaf=2 * lean * arriving * low,
        once_shard_sum=2 * lean * arriving * (not low),
    )


@cache
def made_in_turn(
    turns: tuple[int, ...], groups: tuple[tuple[int, int, int], ...], dealt: Deal, leaf: str, *, lean: bool
) -> Mapping[tuple[int, str, str], int]:
    """What the pool of a rank has made after a step: groups of one size take each other's buffers.

    Args:  turns: chunks in the order in which a microbatch's gradients are made in them.
           groups: (chunk, unit, elements) in the order of backward, those of a unit side by side.
    """
    made, free = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    chunks: dict[int, dict[int, list[_Player]]] = {}
    for chunk, unit, numel in groups:
        player = _Player(deal=dealt, leaf=leaf, numel=numel, made=made, free=free)
        chunks.setdefault(chunk, {}).setdefault(unit, []).append(player)
    begun: list[_Player] = []
    for turn in turns:
        for players in chunks.get(turn, {}).values():
            for player in players:
                player.add()
            if lean:
                # The exchange of one unit ends when the next one's has begun.
                for player in begun:
                    player.complete()
                begun = players
    every = [player for units in chunks.values() for players in units.values() for player in players]
    for player in every:
        player.complete()
        player.total()
    return made


@dataclass(slots=True)
class _Entry:
    level: int
    size: str
    dtype: str
    owned: bool = True


@dataclass(slots=True)
class _Player:
    """One `GradientSum` on rank 0."""

    deal: Deal
    leaf: str
    numel: int
    made: Made
    free: Made
    local: list[_Entry] = field(default_factory=list)
    shard: list[_Entry] = field(default_factory=list)
    pending: tuple[_Entry | None, int] | None = None
    rounds: int = 0
    place: int = 0

    def take(self, size: str, dtype: str) -> None:
        kind = self.numel, size, dtype
        if self.free[kind]:
            self.free[kind] -= 1
        else:
            self.made[kind] += 1

    def give(self, e: _Entry) -> None:
        if e.owned:
            self.free[self.numel, e.size, e.dtype] += 1

    def add(self) -> None:
        if self.local and self.local[-1].level == 0:
            top = self.local.pop()
            self.push(self.local, _Entry(1, top.size, top.dtype))
        else:
            self.take("full", self.leaf)
            self.push(self.local, _Entry(0, "full", self.leaf))
        self.place += 1
        if self.deal.closes(self.place - 1):
            self.begin(self.fold(self.local))

    def push(self, entries: list[_Entry], e: _Entry) -> None:
        while entries and entries[-1].level == e.level:
            e = self.merge(entries.pop(), e)
        entries.append(e)

    def merge(self, older: _Entry, newer: _Entry) -> _Entry:
        for target, other in ((older, newer), (newer, older)):
            if target.owned and target.dtype == "sum":
                self.give(other)
                return _Entry(older.level + 1, target.size, "sum")
        self.take(older.size, "sum")
        self.give(older)
        self.give(newer)
        return _Entry(older.level + 1, older.size, "sum")

    def fold(self, entries: list[_Entry]) -> _Entry | None:
        total = entries.pop() if entries else None
        while entries and total is not None:
            total = self.merge(entries.pop(), total)
        return total

    def begin(self, partial: _Entry | None) -> None:
        self.complete()
        senders = self.deal.senders(self.rounds)
        self.rounds += 1
        if self.deal.dp == 1:
            if partial is not None:
                self.push(self.shard, _Entry(self.deal.k, "full", partial.dtype))
            return
        for _ in range(senders - 1):
            self.take("shard", self.leaf)
        self.pending = partial, senders

    def complete(self) -> None:
        if self.pending is None:
            return
        (partial, senders), self.pending = self.pending, None
        for peer in range(senders):
            self.push(self.shard, _Entry(self.deal.k, "shard", self.leaf, owned=peer > 0))
        for e in self.shard:
            if not e.owned:
                self.take(e.size, e.dtype)
                e.owned = True
        if partial is not None:
            self.give(partial)

    def total(self) -> None:
        e = self.fold(self.shard)
        if e is None or not e.owned or e.dtype != "sum":
            self.take("shard" if self.deal.dp > 1 else "full", "sum")
