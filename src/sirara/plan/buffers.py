"""How many buffers a rank makes for the gradient sums of one flat group, played as `parallel/reduce.py` does it.

    local    blocks of 2^k microbatches on a binary counter: max(1, k) full-size buffers
    sent     the last block's sum stays until its exchange ends, beside what has arrived of the peers' sums
    shards   the owner adds them in order on a binary counter of shard-size buffers

Only sizes and dtypes are played, so a step of thousands of microbatches takes milliseconds.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from sirara.pure.tree import Deal

MOST_PLAYED = 1024
"""Microbatches; with more the closed form is used."""
Made = Counter[tuple[str, str]]
"""Buffers by size ("full", "shard") and dtype ("leaf": as autograd gives gradients, "sum")."""


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
        return Buffers(full_sum=not lean, once_sum=lean, shard_sum=2 if more else 1)
    leaf = "sum" if same or dealt.k > 0 or dealt.dp == 1 else "leaf"
    if dealt.microbatches > MOST_PLAYED and dealt.dp > 1:
        return _closed(dealt, leaf, lean=lean)
    two, three = (_played(dealt, leaf, groups, lean=lean) for groups in (2, 3))
    each = {kind: three[kind] - two[kind] for kind in three}
    return Buffers(
        full_leaf=each.get(("full", "leaf"), 0),
        full_sum=each.get(("full", "sum"), 0),
        shard_leaf=each.get(("shard", "leaf"), 0),
        shard_sum=each.get(("shard", "sum"), 0),
        once_leaf=two["full", "leaf"] - 2 * each.get(("full", "leaf"), 0),
        once_sum=two["full", "sum"] - 2 * each.get(("full", "sum"), 0),
        once_shard_leaf=two["shard", "leaf"] - 2 * each.get(("shard", "leaf"), 0),
        once_shard_sum=two["shard", "sum"] - 2 * each.get(("shard", "sum"), 0),
    )


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


def _played(dealt: Deal, leaf: str, groups: int, *, lean: bool) -> Made:
    """What a pool has made after a step of several groups of one size."""
    made, free = Counter(), Counter()
    players = [_Player(deal=dealt, leaf=leaf, made=made, free=free) for _ in range(groups)]
    for place in range(dealt.places):
        for n, player in enumerate(players):
            player.add(place)
            if lean:
                # The exchange of one unit ends when the next one's begins.
                players[n - 1].complete()
    for player in players:
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
    made: Made
    free: Made
    local: list[_Entry] = field(default_factory=list)
    shard: list[_Entry] = field(default_factory=list)
    pending: tuple[_Entry | None, int] | None = None
    rounds: int = 0

    def take(self, size: str, dtype: str) -> None:
        if self.free[size, dtype]:
            self.free[size, dtype] -= 1
        else:
            self.made[size, dtype] += 1

    def give(self, e: _Entry) -> None:
        if e.owned:
            self.free[e.size, e.dtype] += 1

    def add(self, place: int) -> None:
        if self.local and self.local[-1].level == 0:
            top = self.local.pop()
            self.push(self.local, _Entry(1, top.size, top.dtype))
        else:
            self.take("full", self.leaf)
            self.push(self.local, _Entry(0, "full", self.leaf))
        if self.deal.closes(place):
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
