"""Placement of copies and parity over nodes; the odds against brute force and against the published table."""

from itertools import combinations
from math import comb

import pytest

from sirara.errors import ConfigError
from sirara.pure.copies import ParityLayout, PeerLayout, Stripes, parity_layout, peer_layout, ring_counts


def ring(n: int, copies: int) -> PeerLayout:
    return PeerLayout(copies=copies, groups=(), ring=tuple(range(n)), why="")


# N = 16 (15 for triples), k nodes lost at once, in per cent: the notes' table.
TABLE = [
    ("pairs", peer_layout(16, 2), 2.00, (93.3, 80.0, 61.5)),
    ("ring m=2", ring(16, 2), 2.00, (86.7, 62.9, 36.3)),
    ("triples", peer_layout(15, 3), 3.00, (100.0, 98.9, 95.6)),
    ("RS 3+1 x4", parity_layout(16, 3, 1), 1.33, (80.0, 45.7, 14.1)),
    ("RS 6+2 x2", parity_layout(16, 6, 2), 1.33, (100.0, 80.0, 43.1)),
    ("RS 4+4 x2", parity_layout(16, 4, 4), 2.00, (100.0, 100.0, 100.0)),
]


@pytest.mark.parametrize(("name", "layout", "memory", "want"), TABLE, ids=[row[0] for row in TABLE])
def test_the_table_of_the_notes(name, layout, memory, want):
    assert tuple(round(100 * layout.survival(lost), 1) for lost in (2, 3, 4)) == want
    if isinstance(layout, ParityLayout):
        n, m = len(layout.groups[0]), layout.m
        assert round(1 + m / (n - m), 2) == memory
    else:
        assert 1 + len(layout.holders[0]) == memory


def survives(layout: PeerLayout | ParityLayout, lost: set[int]) -> bool:
    if isinstance(layout, ParityLayout):
        return all(len(lost & set(group)) <= layout.m for group in layout.groups)
    return all(node not in lost or set(others) - lost for node, others in layout.holders.items())


@pytest.mark.parametrize(
    "layout",
    [
        *(peer_layout(n, m) for n in range(2, 10) for m in (2, 3, 4)),
        *(parity_layout(n, k, m) for n in range(2, 11) for k, m in ((2, 1), (4, 2), (2, 2), (1, 3))),
        *(ring(n, m) for n in range(3, 9) for m in (2, 3)),
    ],
)
def test_the_odds_are_those_of_brute_force(layout):
    groups = layout.groups if isinstance(layout, ParityLayout) else (*layout.groups, layout.ring)
    nodes = sorted(node for group in groups for node in group)
    for lost in range(len(nodes) + 1):
        good = sum(survives(layout, set(c)) for c in combinations(nodes, lost))
        assert layout.survival(lost) == pytest.approx(good / comb(len(nodes), lost), abs=1e-12)


def test_a_ring_where_all_may_be_counted():
    assert ring_counts(4, 2) == [1, 4, 2, 0, 0]
    assert ring_counts(3, 3) == [1, 3, 3, 0]


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_every_image_is_on_that_many_nodes_and_every_node_keeps_as_many(copies):
    for nodes in range(copies, 14):
        layout = peer_layout(nodes, copies)
        assert layout.why == "" and sorted(layout.holders) == list(range(nodes))
        assert all(len({node, *others}) == copies for node, others in layout.holders.items())
        kept = [others.count(n) for n in range(nodes) for others in layout.holders.values()]
        assert sum(kept) == nodes * (copies - 1)
        assert all(sum(n in others for others in layout.holders.values()) == copies - 1 for n in range(nodes))


def test_what_nodes_are_too_few_for_is_said():
    assert "3 nodes can hold 3 copies of an image, not 4" in peer_layout(3, 4).why
    assert peer_layout(1, 2).holders == {0: ()} and "1 nodes" in peer_layout(1, 2).why
    assert "2 nodes cannot lose 2" in parity_layout(2, 4, 2).why and parity_layout(2, 4, 2).m == 1
    assert parity_layout(1, 4, 2).groups == ()
    with pytest.raises(ConfigError):
        parity_layout(300, 250, 7)
    with pytest.raises(ConfigError):
        peer_layout(4, 1)


@pytest.mark.parametrize(("k", "m"), [(4, 2), (6, 2), (2, 1), (2, 3), (1, 1)])
def test_groups_hold_every_node_once_and_can_always_lose_m(k, m):
    for nodes in range(m + 1, 40):
        layout = parity_layout(nodes, k, m)
        assert sorted(n for group in layout.groups for n in group) == list(range(nodes))
        assert layout.m == m and all(len(group) > m for group in layout.groups)
        sizes = [len(group) for group in layout.groups]
        assert max(sizes) - min(sizes) <= 1
        if nodes >= (m + 1) * -(-nodes // (k + m)):
            assert max(sizes) <= k + m
        assert (layout.why == "") == (set(sizes) == {k + m})


def test_no_domain_holds_more_of_a_group_than_it_may_lose_where_that_is_possible():
    racks = [f"rack-{n // 4}" for n in range(24)]  # 6 racks of 4 neighbours
    layout = parity_layout(24, 4, 2, racks)
    assert layout.why == ""
    assert all(len({racks[n] for n in group}) == 6 for group in layout.groups)
    assert all(survives(layout, {n for n in range(24) if racks[n] == rack}) for rack in racks)
    plain = parity_layout(24, 4, 2)
    assert not survives(plain, {0, 1, 2, 3}), "neighbours alone would not have done"


def test_dealing_reaches_the_least_possible_share_of_a_domain():
    for sizes in ((5, 3, 2, 2), (6, 6), (9, 1, 1, 1), (1,) * 12, (4, 4, 4)):
        labels = [f"d{d}" for d, size in enumerate(sizes) for _ in range(size)]
        for k, m in ((4, 2), (2, 1), (3, 3)):
            layout = parity_layout(12, k, m, labels)
            for d, size in enumerate(sizes):
                most = max(sum(labels[n] == f"d{d}" for n in group) for group in layout.groups)
                assert most <= -(-size // len(layout.groups))


def test_a_domain_that_is_too_large_is_said():
    labels = ["a"] * 4 + ["b"] * 2
    assert "has 4 nodes of one group, which survives the loss of 2" in parity_layout(6, 4, 2, labels).why
    assert "share a failure domain" in peer_layout(6, 2, labels).why
    assert peer_layout(6, 2, ["a", "a", "a", "b", "b", "b"]).why == ""
    assert "4 failure domains are named for 6 nodes" in parity_layout(6, 4, 2, ["a", "b", "a", "b"]).why


def test_pairs_cross_racks():
    labels = ["a", "a", "b", "b", "c", "c", "d", "d", "d"]
    layout = peer_layout(9, 2, labels)
    for node, others in layout.holders.items():
        assert labels[node] not in {labels[o] for o in others}
    assert layout.why == ""


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 1), (6, 2), (5, 3), (8, 4), (4, 3)])
def test_stripes_rotate_so_that_all_nodes_do_the_same(n, m):
    s = Stripes(n, m)
    for stripe in range(n):
        assert sorted((*s.holders(stripe), *s.members(stripe))) == list(range(n))
        for row, place in enumerate(s.holders(stripe)):
            assert (stripe, row) in s.held(place)
        for column, place in enumerate(s.members(stripe)):
            assert s.stripe(place, column) == stripe
    for place in range(n):
        assert len({s.stripe(place, block) for block in range(s.k)}) == s.k
        assert len(set(s.held(place))) == m
