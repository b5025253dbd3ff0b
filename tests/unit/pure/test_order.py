"""Every sample once per epoch, whoever asks, wherever one resumes, whatever becomes of the blend."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.errors import ConfigError, InvariantError
from sirara.pure.order import PERIOD, SampleOrder, Source, apportion, blend_places, permute

SEEDS = st.integers(0, 2**63)
STREAMS = st.lists(st.integers(2, 400), min_size=3, max_size=5)
WEIGHTS = st.lists(st.integers(1, 1000), min_size=5, max_size=5)
BIG = 2**41 + 12345


def names(n):
    return [f"s{k}" for k in range(n)]


def sources_of(tokens, prefix="s"):
    return [Source(id=f"{prefix}{k}", name=f"{prefix}{k}", tokens=t) for k, t in enumerate(tokens)]


def order_of(tokens, weights, seed=7, seq_len=8):
    weights = weights[: len(tokens)]
    return SampleOrder.begin(
        sources_of(tokens), apportion(weights, names(len(tokens))), seed=seed, seq_len=seq_len
    )


def triples(located):
    return list(zip(located.source.tolist(), located.epoch.tolist(), located.index.tolist(), strict=True))


def permuted(size, key):
    return permute(np.arange(size, dtype=np.uint64), np.uint64(size), np.uint64(key))


# ── the permutation ────────────────────────────────────────


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation_of_every_size(size, key):
    assert sorted(permuted(size, key).tolist()) == list(range(size))


@given(
    size=st.sampled_from([2**32 - 1, 2**32 + 1, 2**41 + 7, 2**62 + 3]), key=SEEDS, start=st.integers(0, 2**31)
)
def test_permute_is_injective_and_in_range_beyond_two_to_the_forty(size, key, start):
    image = permute(np.arange(start, start + 2000, dtype=np.uint64), np.uint64(size), np.uint64(key))
    assert int(image.max()) < size
    assert len(set(image.tolist())) == 2000


def test_permute_is_elementwise_in_place_size_and_key():
    places = np.array([3, 0, 17, 4], dtype=np.uint64)
    sizes = np.array([5, 1, 40, 7], dtype=np.uint64)
    keys = np.array([1, 2, 3, 2**64 - 1], dtype=np.uint64)
    together = permute(places, sizes, keys).tolist()
    assert together == [int(permute(p, s, k)) for p, s, k in zip(places, sizes, keys, strict=True)]


def test_permute_sends_every_place_everywhere_about_equally_often():
    # 12 places, 24,000 keys: each cell expects 2,000; chi-square of 121 degrees of freedom below 200.
    size, keys = 12, np.arange(24_000, dtype=np.uint64)
    image = permute(np.arange(size, dtype=np.uint64)[None, :], np.uint64(size), keys[:, None])
    table = np.stack([np.bincount(image[:, place].astype(int), minlength=size) for place in range(size)])
    assert ((table - 2000) ** 2 / 2000).sum() < 200


def test_permute_leaves_no_trace_of_the_order():
    size = 100_000
    image = permuted(size, 99).astype(np.float64)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(image, np.arange(size))[0, 1]) < 0.02
    assert (image == np.arange(size)).sum() < 10


# ── the blend ────────────────────────────────────────


def test_two_identical_sources_with_weights_one_to_999_are_apportioned_exactly():
    assert apportion([0.001, 0.999], names(2)) == (66, 65_470)
    source, rank = blend_places((66, 65_470))
    assert np.bincount(source).tolist() == [66, 65_470]
    assert rank[source == 0].tolist() == list(range(66))
    assert rank[source == 1].tolist() == list(range(65_470))


def test_identical_sources_in_one_blend_have_their_own_orders():
    sources = [Source(id="same#0", name="a", tokens=801), Source(id="same#1", name="b", tokens=801)]
    order = SampleOrder.begin(sources, apportion([0.001, 0.999], names(2)), seed=1, seq_len=8)
    found = triples(order.locate(0, PERIOD * 2))
    for k in (0, 1):
        epoch = [index for source, e, index in found if source == k and e == 0]
        assert sorted(epoch) == list(range(100))
    assert [i for s, e, i in found if s == 0 and e == 0] != [i for s, e, i in found if s == 1 and e == 0]


def test_more_than_255_sources_all_get_their_share():
    weights = [1 + k % 3 for k in range(300)]
    counts = apportion(weights, names(300))
    source, _ = blend_places(counts)
    assert np.bincount(source, minlength=300).tolist() == list(counts)
    assert max(abs(c - w * PERIOD / sum(weights)) for c, w in zip(counts, weights, strict=True)) < 1


@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=40))
def test_apportion_gives_the_largest_remainders(weights):
    total = sum(weights)
    if min(weights) * PERIOD < total:
        return
    counts = apportion(weights, names(len(weights)))
    shares = [Fraction(w * PERIOD, total) for w in weights]
    assert sum(counts) == PERIOD
    assert all(0 <= c - (s // 1) <= 1 for c, s in zip(counts, shares, strict=True))
    raised = [s % 1 for c, s in zip(counts, shares, strict=True) if c > s // 1]
    rest = [s % 1 for c, s in zip(counts, shares, strict=True) if c == s // 1]
    assert not raised or not rest or min(raised) >= max(rest)


@settings(max_examples=8, deadline=None)
@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=4))
def test_each_place_goes_to_the_source_that_lags_most(weights):
    counts = apportion(weights, names(len(weights)))
    source, _ = blend_places(counts)
    taken = [0] * len(counts)
    for place in range(3000):
        lags = [count * (place + 1) - had * PERIOD for count, had in zip(counts, taken, strict=True)]
        assert source[place] == lags.index(max(lags))
        taken[source[place]] += 1


@given(weights=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_no_source_is_ever_a_whole_sample_ahead_of_its_share(weights):
    counts = apportion(weights, names(len(weights)))
    source, _ = blend_places(counts)
    for k, count in enumerate(counts):
        taken = np.cumsum(source == k)
        assert (taken * PERIOD - count * np.arange(1, PERIOD + 1)).max() < PERIOD


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_make_no_blend_are_refused(weights):
    with pytest.raises(ConfigError, match="weight"):
        apportion(weights, names(2))


def test_a_weight_too_small_to_ever_be_read_is_refused():
    with pytest.raises(ConfigError, match="never be read"):
        apportion([1e-6, 1.0], names(2))


def test_a_source_of_weight_zero_is_left_out():
    assert apportion([0, 1], names(2)) == (0, PERIOD)


# ── the order of samples ────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(tokens=STREAMS, weights=WEIGHTS, seed=SEEDS)
def test_every_sample_comes_once_per_epoch(tokens, weights, seed):
    order = order_of(tokens, weights, seed)
    found = order.locate(0, 3000)
    for k in range(len(tokens)):
        size = order.samples_per_epoch(k)
        mine = found.source == k
        epochs, indices = found.epoch[mine], found.index[mine]
        assert epochs.tolist() == [n // size for n in range(mine.sum())]
        for epoch in range(int(mine.sum()) // size):
            assert sorted(indices[epochs == epoch].tolist()) == list(range(size))


@given(tokens=st.integers(2, 1000), seq_len=st.integers(1, 70))
def test_every_token_but_the_first_is_a_target_once_per_epoch(tokens, seq_len):
    order = order_of([tokens], [1], seq_len=seq_len)
    seen = []
    for index in order.locate(0, order.samples_per_epoch(0)).index.tolist():
        start, count = order.span(0, index)
        assert 1 <= count <= seq_len
        seen += range(start + 1, start + count + 1)
    assert sorted(seen) == list(range(1, tokens))


@settings(max_examples=40, deadline=None)
@given(tokens=STREAMS, weights=WEIGHTS, first=st.integers(0, 2**41), count=st.integers(1, 200))
def test_valid_targets_are_those_of_the_spans(tokens, weights, first, count):
    order = order_of(tokens, weights)
    spans = [order.span(source, index)[1] for source, _, index in triples(order.locate(first, count))]
    assert order.valid_targets(first, count) == sum(spans)


@settings(max_examples=40, deadline=None)
@given(
    tokens=STREAMS,
    weights=WEIGHTS,
    first=st.sampled_from([0, 5, PERIOD - 3, 3 * PERIOD - 1, BIG]),
    world=st.integers(1, 8),
    micro=st.integers(1, 5),
)
def test_any_world_size_reads_the_same_global_batch(tokens, weights, first, world, micro):
    order = order_of(tokens, weights)
    batches = 12
    whole = triples(order.locate(first, batches * micro))
    by_rank = {
        (b, n): triple
        for rank in range(world)
        for b in range(rank, batches, world)
        for n, triple in enumerate(triples(order.locate(first + b * micro, micro)))
    }
    assert [by_rank[b, n] for b in range(batches) for n in range(micro)] == whole


@settings(max_examples=25, deadline=None)
@given(
    tokens=STREAMS,
    before=WEIGHTS,
    after=WEIGHTS,
    again=WEIGHTS,
    cut=st.integers(0, 2000),
    cut_again=st.integers(0, 500),
    added=st.integers(0, 2),
)
def test_a_changed_blend_never_repeats_or_loses_a_sample(tokens, before, after, again, cut, cut_again, added):
    order = order_of(tokens, before)
    sources = sources_of([*tokens, *([50] * added)])
    past = triples(order.locate(0, cut))
    for at, weights in ((cut, after), (cut + cut_again, again)):
        weights = [*weights, 3, 4][: len(sources)]
        order = order.reblended(at, sources, apportion(weights, names(len(sources))))
    found = triples(order.locate(0, cut + cut_again + 1000))
    assert found[:cut] == past
    for k in range(len(sources)):
        size = order.samples_per_epoch(k)
        mine = [(epoch, index) for source, epoch, index in found if source == k]
        assert [epoch for epoch, _ in mine] == [n // size for n in range(len(mine))]
        assert len(set(mine)) == len(mine)


@settings(max_examples=40, deadline=None)
@given(tokens=STREAMS, weights=WEIGHTS, sample=st.integers(0, 3 * PERIOD))
def test_cursors_count_the_samples_before(tokens, weights, sample):
    order = order_of(tokens, weights)
    counted = np.bincount(order.locate(0, sample).source, minlength=len(tokens))
    assert order.cursors(sample) == tuple(counted.tolist())


def test_a_source_dropped_from_the_blend_goes_on_where_it_was_when_it_comes_back():
    order = order_of([801, 801], [1, 1])
    without = order.reblended(60, order.sources, (PERIOD, 0))
    back = without.reblended(100, order.sources, (PERIOD // 2, PERIOD // 2))
    indices = [index for source, _, index in triples(back.locate(0, 240)) if source == 1]
    assert len(indices) == 100
    assert sorted(indices) == list(range(100))


def test_the_order_of_a_source_does_not_depend_on_its_neighbours():
    alone = order_of([801], [1], seed=3).locate(0, 100).index.tolist()
    blended = order_of([801, 333, 5], [2, 1, 1], seed=3).locate(0, 400)
    assert blended.index[blended.source == 0][:100].tolist() == alone


def test_seeds_and_epochs_give_different_orders():
    first = order_of([8001], [1], seed=1).locate(0, 2000).index
    other = order_of([8001], [1], seed=2).locate(0, 1000).index
    assert (first[:1000] == first[1000:]).sum() < 20
    assert (first[:1000] == other).sum() < 20


def test_samples_beyond_two_to_the_forty_are_found_without_counting_up_to_them():
    order = SampleOrder.begin(
        sources_of([2**48 + 5, 2**33]), apportion([0.3, 0.7], names(2)), seed=1, seq_len=4096
    )
    found = order.locate(BIG, 1000)
    assert found.source.dtype == found.epoch.dtype == found.index.dtype == np.int64
    assert (found.index >= 0).all()
    assert sum(order.cursors(BIG)) == BIG
    start, count = order.span(0, order.samples_per_epoch(0) - 1)
    assert (start + count, count) == (2**48 + 4, 4)


def test_the_order_of_a_known_run_never_changes():
    # Checkpoints continue by this order: a change of these numbers needs a new version of it.
    order = order_of([100, 60, 30], [5, 3, 1], seed=1234)
    assert triples(order.locate(0, 9)) == [
        (0, 0, 12),
        (1, 0, 0),
        (0, 0, 7),
        (2, 0, 1),
        (0, 0, 10),
        (1, 0, 6),
        (0, 0, 1),
        (1, 0, 1),
        (0, 0, 11),
    ]


def test_segments_that_do_not_rise_from_zero_are_a_broken_promise():
    order = order_of([100, 60, 30], [5, 3, 1])
    with pytest.raises(InvariantError, match="rise from 0"):
        SampleOrder(order.sources, [*order.segments, *order.segments], seed=1, seq_len=8)
