"""One tree for every deal: enumeration with floats whose sum depends on the association."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.errors import ConfigError
from sirara.pure.tree import Deal, aligned_nodes, combine, deal, node_sums


class Counter:
    """The binary counter in its plainest form: a list of (level, value)."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, np.float32]] = []

    def push(self, level: int, value: np.float32) -> None:
        while self.entries and self.entries[-1][0] == level:
            value = self.entries.pop()[1] + value
            level += 1
        self.entries.append((level, value))

    def fold(self) -> np.float32:
        total = self.entries.pop()[1]
        while self.entries:
            total = self.entries.pop()[1] + total
        return total


def by_deal(leaves: np.ndarray, d: Deal) -> np.float32:
    whole = Counter()
    for b in range(d.blocks):
        block = Counter()
        for i in d.block(b):
            block.push(0, leaves[i])
        whole.push(d.k, block.fold())
    return whole.fold()


def test_every_block_size_and_number_of_microbatches_adds_to_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    orders = 0
    for m in range(1, 34):
        leaves = (rng.standard_normal(m) * 10.0 ** rng.integers(-4, 5, m)).astype(np.float32)
        expected = by_deal(leaves, Deal(microbatches=m, dp=1, k=0))
        orders += int(m > 2 and np.add.reduce(leaves[::-1], dtype=np.float32) != expected)
        for k in range(6):
            assert by_deal(leaves, Deal(microbatches=m, dp=1, k=k)) == expected, (m, k)
    # The claim is empty unless another order gives other bits.
    assert orders > 15


@given(st.integers(1, 64), st.integers(1, 9), st.integers(0, 5))
def test_every_microbatch_has_one_owner_and_place(m: int, dp: int, k: int) -> None:
    d = Deal(microbatches=m, dp=dp, k=k)
    places = {i: (rank, place) for rank in range(dp) for place, i in enumerate(d.mine(rank))}
    assert sorted(places) == list(range(m))
    assert all(d.owner(i) == places[i] for i in range(m))
    assert d.places == max(len(d.mine(rank)) for rank in range(dp))
    assert sum(d.senders(r) for r in range(d.rounds)) == d.blocks


@given(st.integers(1, 200), st.integers(1, 16))
def test_auto_never_makes_the_busiest_rank_busier(m: int, dp: int) -> None:
    d = deal(m, dp)
    assert max(len(d.mine(r)) for r in range(dp)) == -(-m // dp)


def test_auto_takes_the_largest_block_that_costs_no_balance() -> None:
    assert deal(16, 2).k == 3
    assert deal(12, 2).k == 1
    assert deal(12, 3).k == 2
    assert deal(12, 4).k == 0
    assert deal(12, 1).blocks == 1


def test_a_block_that_is_no_subtree_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.block=3"):
        deal(8, 2, 3)


@given(st.integers(0, 500), st.integers(0, 500))
def test_aligned_nodes_tile_their_range(a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    nodes = aligned_nodes(start, stop)
    spans = [(i << level, (i + 1) << level) for level, i in nodes]
    assert [n for s in spans for n in range(*s)] == list(range(start, stop))


@given(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=5), st.integers(0, 2**32))
def test_norm_sums_have_equal_bits_for_any_cut(leaves: int, cuts: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).random(leaves) ** 8
    bounds = sorted({0, leaves, *(c for c in cuts if c < leaves)})
    whole = combine(dict(zip(aligned_nodes(0, leaves), node_sums(values, 0), strict=True)), leaves)
    nodes = {}
    for lo, hi in itertools.pairwise(bounds):
        nodes |= dict(zip(aligned_nodes(lo, hi), node_sums(values[lo:hi], lo), strict=True))
    assert combine(nodes, leaves) == whole
    assert whole == pytest.approx(values.sum(), rel=1e-12)


def test_padding_behind_the_last_leaf_changes_no_bit() -> None:
    values = np.random.default_rng(1).random(5)
    padded = np.concatenate([values, np.zeros(3)])
    whole = combine(dict(zip(aligned_nodes(0, 5), node_sums(values, 0), strict=True)), 5)
    assert combine(dict(zip(aligned_nodes(0, 8), node_sums(padded, 0), strict=True)), 5) == whole
