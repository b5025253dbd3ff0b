"""Which sample stands at which place of a run: integer functions with random access, nothing stored.

    sample number ──segment──▶ place in its blend ──period of 65,536──▶ (source, cursor)
    (source, cursor) ──samples per epoch──▶ (source, epoch, place)
    (source, epoch, place) ──keyed permutation──▶ (source, epoch, index)

A source is a stream of T tokens. Its sample j has the targets [j * L + 1, (j + 1) * L + 1) of the stream
and, as inputs, the tokens one place before; the last sample of an epoch may be shorter. So every token but
the first is a target exactly once per epoch. Nothing depends on the horizon, the batch size, the layout or
who asks.

A changed blend opens a new segment at the sample where it takes effect; the cursor of every source goes on
from where the old segment left it, so no sample of an epoch is repeated or lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from sirara.errors import ConfigError, InvariantError
from sirara.pure.rng import key_of, splitmix64

PERIOD = 65_536
"""Blend weights are met exactly once per this many samples."""

ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One token stream of the blend; `id` names its content (it keys the order), `name` is for people."""

    id: str
    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From sample `start` on: samples per period and cursor at `start`, each per source."""

    start: int
    counts: tuple[int, ...]
    cursors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where consecutive samples come from: int64 arrays of equal length."""

    source: np.ndarray
    epoch: np.ndarray
    index: np.ndarray


def permute(place: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The image of `place` under the permutation `key` of [0, size); uint64, elementwise, broadcasting.

    A Feistel network on the pairs of Z_a x Z_b, a about sqrt(size) and a * b >= size, alternately adds a
    keyed word of one half to the other. Images beyond `size` walk on along their cycle, which comes back
    below `size`; since a * b < size + a, few walks are needed. Sizes up to 2^63.
    """
    places, size, key = np.broadcast_arrays(*(np.asarray(x, dtype=np.uint64) for x in (place, size, key)))
    # Flat, because numpy warns about the wanted wrap-around of scalars, not of arrays.
    size, key = size.reshape(-1), key.reshape(-1)
    image = _feistel(places.reshape(-1), size, key)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], size[outside], key[outside])
        outside = outside[image[outside] >= size[outside]]
    return image.reshape(places.shape)


def _feistel(place: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    one = np.uint64(1)
    # b makes up for any rounding of the root, so a * b >= size holds whatever a is.
    a = np.maximum(np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64), one)
    b = (size + a - one) // a
    left, right = np.divmod(place, b)
    for turn in range(ROUNDS):
        round_key = splitmix64(key + np.uint64(turn))
        if turn % 2 == 0:
            left = (left + splitmix64(right ^ round_key) % a) % a
        else:
            right = (right + splitmix64(left ^ round_key) % b) % b
    return left * b + right


def apportion(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Samples of each source per period: the largest remainders of weight / sum * 65,536, ties by index.

    Raises ConfigError when a weight is no finite number >= 0, all are 0, or a positive weight gets no sample.
    """
    for weight, name in zip(weights, names, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight {weight} of {name} is not a finite number >= 0", where="data.train")
    # repr gives the shortest decimal, so 0.1 is one tenth and ties are ties.
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise ConfigError(
            f"the weights of all {len(weights)} training sources are 0; give one a positive weight",
            where="data.train",
        )
    shares = [weight / total * PERIOD for weight in exact]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: PERIOD - sum(counts)]:
        counts[k] += 1
    for weight, name, count in zip(weights, names, counts, strict=True):
        if weight > 0 and count == 0:
            raise ConfigError(
                f"weight {weight:g} of {name} is too small a share: it would never be read",
                where="data.train",
                why=f"its share is {float(Fraction(repr(weight)) / total):.3g}, less than half of 1/{PERIOD}",
                try_=(f"a weight of at least {float(total) / PERIOD:.3g}", "weight 0 to leave it out"),
            )
    return tuple(counts)


def blend_places(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(source, rank among the samples of its source) for each place of one period; int32.

    Each place goes to the source that lags its share most (ties: the first). The pattern repeats with the
    greatest common divisor of the counts, so equal shares cost nothing.
    """
    if sum(counts) != PERIOD:
        raise InvariantError(f"the counts of a blend sum to {sum(counts)}, not to {PERIOD}")
    repeats = math.gcd(*counts)
    short = PERIOD // repeats
    share = np.array(counts, dtype=np.int64) // repeats
    lag = np.zeros(len(counts), dtype=np.int64)
    pattern = np.empty(short, dtype=np.int32)
    for place in range(short):
        lag += share
        chosen = int(lag.argmax())
        lag[chosen] -= short
        pattern[place] = chosen
    source = np.tile(pattern, repeats)
    by_source = np.argsort(source, kind="stable")
    first_of_source = np.cumsum([0, *counts[:-1]])
    rank = np.empty(PERIOD, dtype=np.int32)
    rank[by_source] = np.arange(PERIOD) - first_of_source[source[by_source]]
    return source, rank


class SampleOrder:
    """The order of all samples of a run.  Sources are only ever added, so their indices stay."""

    def __init__(
        self, sources: Sequence[Source], segments: Sequence[Segment], *, seed: int, seq_len: int
    ) -> None:
        self.sources = tuple(sources)
        self.segments = tuple(segments)
        self.seed = seed
        self.seq_len = seq_len
        self._tokens = np.array([source.tokens for source in sources], dtype=np.int64)
        self._sizes = -(-(self._tokens - 1) // seq_len)
        # Keyed by content, not by index: a source keeps its order whatever stands beside it.
        self._keys = np.array([key_of("order", seed, source.id) for source in sources], dtype=np.uint64)
        self._places: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._check()

    @classmethod
    def begin(
        cls, sources: Sequence[Source], counts: Sequence[int], *, seed: int, seq_len: int
    ) -> "SampleOrder":
        """The order of a new run."""
        segment = Segment(start=0, counts=tuple(counts), cursors=(0,) * len(sources))
        return cls(sources, [segment], seed=seed, seq_len=seq_len)

    def reblended(self, first: int, sources: Sequence[Source], counts: Sequence[int]) -> "SampleOrder":
        """The same order up to sample `first` and another blend from there on.

        `sources` begin with those of this order; counts are per source of the new list.
        """
        added = len(sources) - len(self.sources)
        if [s.id for s in sources[: len(self.sources)]] != [s.id for s in self.sources]:
            raise InvariantError("a changed blend may only add sources at the end of the list")
        kept = [segment for segment in self.segments if segment.start < first]
        opened = Segment(start=first, counts=tuple(counts), cursors=self.cursors(first) + (0,) * added)
        padded = [
            Segment(start=s.start, counts=s.counts + (0,) * added, cursors=s.cursors + (0,) * added)
            for s in kept
        ]
        return SampleOrder(sources, [*padded, opened], seed=self.seed, seq_len=self.seq_len)

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples per period of each source in the blend that holds now."""
        return self.segments[-1].counts

    def samples_per_epoch(self, source: int) -> int:
        return int(self._sizes[source])

    def locate(self, first: int, count: int) -> Located:
        """Source, epoch and index of the samples [first, first + count)."""
        source = np.empty(count, dtype=np.int64)
        cursor = np.empty(count, dtype=np.int64)
        for number, segment in enumerate(self.segments):
            end = self.segments[number + 1].start if number + 1 < len(self.segments) else first + count
            low, high = max(first, segment.start), min(first + count, end)
            if low >= high:
                continue
            period, place = np.divmod(
                np.arange(low - segment.start, high - segment.start, dtype=np.int64), PERIOD
            )
            sources, ranks = self._blend(number)
            chosen = sources[place]
            source[low - first : high - first] = chosen
            per_period = np.array(segment.counts, dtype=np.int64)[chosen]
            base = np.array(segment.cursors, dtype=np.int64)[chosen]
            cursor[low - first : high - first] = base + period * per_period + ranks[place]
        size = self._sizes[source]
        epoch, place = np.divmod(cursor, size)
        key = splitmix64(self._keys[source] ^ splitmix64(epoch.astype(np.uint64)))
        index = permute(place.astype(np.uint64), size.astype(np.uint64), key).astype(np.int64)
        return Located(source=source, epoch=epoch, index=index)

    def cursors(self, sample: int) -> tuple[int, ...]:
        """How many samples each source has given before sample number `sample`, over all epochs."""
        number = max(n for n, segment in enumerate(self.segments) if segment.start <= sample)
        segment = self.segments[number]
        periods, place = divmod(sample - segment.start, PERIOD)
        begun = np.bincount(self._blend(number)[0][:place], minlength=len(self.sources))
        return tuple(
            cursor + periods * count + int(more)
            for cursor, count, more in zip(segment.cursors, segment.counts, begun, strict=True)
        )

    def span(self, source: int, index: int) -> tuple[int, int]:
        """(first input token t, number of targets n) of a sample: inputs [t, t + n), targets one later."""
        start = index * self.seq_len
        return start, min(self.seq_len, int(self._tokens[source]) - 1 - start)

    def targets(self, located: Located) -> np.ndarray:
        """Targets of each located sample (int64): seq_len, less in the last sample of an epoch."""
        return np.minimum(self.seq_len, self._tokens[located.source] - 1 - located.index * self.seq_len)

    def valid_targets(self, first: int, count: int) -> int:
        """Targets in the samples [first, first + count), without reading a token."""
        return int(self.targets(self.locate(first, count)).sum())

    def _blend(self, segment: int) -> tuple[np.ndarray, np.ndarray]:
        if segment not in self._places:
            self._places[segment] = blend_places(self.segments[segment].counts)
        return self._places[segment]

    def _check(self) -> None:
        short = [source.name for source in self.sources if source.tokens < 2]
        if short:
            raise InvariantError(f"sources without a target reach the order: {', '.join(short)}")
        starts = [segment.start for segment in self.segments]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise InvariantError(f"segments start at {starts}; they must rise from 0")
        if any(
            len(s.counts) != len(self.sources) or len(s.cursors) != len(self.sources) for s in self.segments
        ):
            raise InvariantError("a segment does not have one count and one cursor per source")
