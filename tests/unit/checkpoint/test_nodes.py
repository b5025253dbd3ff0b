"""Node tiers: who keeps what, the commit on every node, what is served and rebuilt."""

import random
import subprocess
import sys
from itertools import pairwise

import pytest

from sirara.checkpoint.link import Peer, Who
from sirara.checkpoint.parity import block_range
from sirara.checkpoint.serve import RemoteNode
from sirara.errors import CheckpointError, CommTimeout, StorageError
from sirara.pure.copies import parity_layout, peer_layout
from tests.checkpoints import in_ranks
from tests.cluster import clusters
from tests.generations import RUN, read_image

PARITY = {"tier": "parity", "data": 4, "parity": 2}


@pytest.fixture
def cluster():
    with clusters() as make:
        yield make


def held(c, node, step=None):
    return sorted(
        (h.kind, h.rank if h.kind != "parity" else h.block)
        for h in c.keepers[c.ranks_of(node)[0]].inventory()
        if step in (None, h.step)
    )


def test_blocks_of_an_image_cover_it_in_order():
    for size in (0, 1, 63, 64, 65, 4096, 12_288, 999_999):
        for k in (1, 2, 4, 7):
            ranges = [block_range(size, k, j) for j in range(k)]
            assert sum(n for _, n in ranges) == size
            assert all(a + n == b for (a, n), (b, _) in pairwise(ranges))
            assert all(n <= ranges[0][1] for _, n in ranges)


def test_memory_is_a_pointer_to_the_arena(cluster):
    c = cluster("memory", nodes=2)
    c.save(1)
    assert held(c, 0) == [("arena", 0)] and held(c, 1) == [("arena", 1)]
    image, data = c.image(1, 1)
    assert read_image(c.store(1), image) == bytes(data)


def test_without_an_arena_a_copy_is_kept(cluster):
    c = cluster("memory", nodes=1)
    image, data = c.image(0, 1)
    results = c.keepers[0].keep(image, memoryview(data), tiers=["memory", "object"], arena=None)
    assert results["memory"].ok and list(results) == ["memory"]
    data[:] = bytes(len(data))
    assert read_image(c.store(0), image) == bytes(c.image(0, 1)[1])


def test_peers_hold_each_others_images(cluster):
    c = cluster({"tier": "peer", "copies": 2}, nodes=4, local_size=2)
    c.save(1)
    assert held(c, 0) == [("arena", 0), ("arena", 1), ("image", 2), ("image", 3)]
    assert held(c, 3) == [("arena", 6), ("arena", 7), ("image", 4), ("image", 5)]
    for rank, node in ((0, 1), (1, 1), (6, 2), (7, 2)):
        image, data = c.image(rank, 1)
        assert read_image(c.store(node), image) == bytes(data)
        assert c.store(node).bad_pieces(1, image.uuid, rank) == []


def test_three_copies_and_a_ring(cluster):
    c = cluster({"tier": "peer", "copies": 3}, nodes=5)
    c.save(1)
    for rank in range(5):
        nodes = [node for node in range(5) if any(item[1] == rank for item in held(c, node))]
        assert len(nodes) == 3 and rank in nodes


def test_every_node_holds_m_blocks_of_parity(cluster):
    c = cluster(PARITY, nodes=6, local_size=2)
    c.save(1)
    for node in range(6):
        found = held(c, node)
        assert [k for k, _ in found].count("parity") == 2 * 2  # m, for each place on the node
        assert {name.split("-")[0] for kind, name in found if kind == "parity"} == {"0.0", "0.1"}
    total = sum(h.size for node in range(6) for h in c.keepers[2 * node].inventory() if h.kind == "parity")
    largest = max(c.image(rank, 1)[0].size for rank in range(12))
    assert total <= 12 * (largest * 2 / 4 + 64)


def test_the_results_tell_bytes_and_faults_by_tier(cluster):
    c = cluster("memory", {"tier": "peer"}, PARITY, {"tier": "disk"})
    results = c.keep(1)
    size = c.image(0, 1)[0].size
    assert {name: (r.ok, r.bytes) for name, r in results[0].items()} == {
        "memory": (True, size),
        "peer": (True, size),
        "parity": (True, 2 * size),
        "disk": (True, size),
    }
    assert all(r.seconds >= 0 and r.fault == "" for r in results[0].values())


def test_only_the_tiers_that_are_due_are_kept(cluster):
    c = cluster("memory", {"tier": "peer", "every": 10}, {"tier": "disk"}, nodes=2)
    c.save(1, tiers=["memory"])
    assert held(c, 0) == [("arena", 0)]
    c.save(2, tiers=["disk", "object"])
    assert held(c, 0, 2) == [("image", 0)] and c.keepers[0].stores[1].tier == "disk"


def test_where_others_are_saved_more_often_the_own_image_is_copied(cluster):
    c = cluster({"tier": "memory", "every": 1}, {"tier": "peer", "every": 10}, nodes=2)
    c.save(10)
    for step in (11, 12, 13):
        c.save(step, tiers=["memory"])  # both arenas are used again
    for rank in (0, 1):
        image, data = c.image(rank, 10)
        for node in (0, 1):
            assert read_image(c.store(node), image) == bytes(data)
    same = cluster({"tier": "memory", "every": 10}, {"tier": "peer", "every": 10}, nodes=2, attempt=2)
    same.save(20)
    assert held(same, 0, 20) == [("arena", 0), ("image", 1)]


def test_memory_stays_flat_over_many_saves(cluster):
    c = cluster("memory", {"tier": "peer"}, PARITY)
    sizes = []
    for step in range(1, 8):
        c.save(step)
        files = [p for node in range(6) for p in c.memory(node).rglob("*") if p.is_file()]
        sizes.append((len(files), sum(p.stat().st_size for p in files if p.name[0] in "ip")))
    assert len(set(sizes[2:])) == 1
    assert {h.step for h in c.keepers[0].inventory() if h.kind != "arena"} == {6, 7}


def test_a_commit_reaches_every_node_and_names_those_it_does_not(cluster):
    c = cluster("memory", nodes=4, local_size=2)
    c.keep(1)
    assert not any(h.committed for node in range(4) for h in c.keepers[2 * node].inventory())
    c.keepers.pop(4).close()  # the first keeper of node 2; the second one takes the commit
    c.kill(3)
    faults = c.commit(1)
    assert list(faults) == [3] and "rank 7 on node 3 cannot be reached" in faults[3]
    for node in range(4):
        assert c.store(node).manifest(1, c.image(0, 1)[0].uuid) == (c.manifest(1) if node < 3 else None)


def test_reports_arrive_at_rank_0(cluster):
    c = cluster("memory", nodes=3)
    in_ranks(3, lambda r: c.keepers[r].report("uuid-1", b"done %d" % r))
    assert c.keepers[0].reports("uuid-1", range(3), deadline_s=5) == {r: b"done %d" % r for r in range(3)}
    with pytest.raises(CommTimeout, match="lacks 2 of 3 ranks: 0, 2"):
        c.keepers[1].report("uuid-2", b"done")
        c.keepers[0].reports("uuid-2", range(3), deadline_s=0.05)
    c.keepers[2].report("uuid-2", b"the disk of node 2 is full", failed=True)
    with pytest.raises(StorageError, match="rank 2 could not keep") as caught:
        c.keepers[0].reports("uuid-2", range(3), deadline_s=5)
    assert "the disk of node 2 is full" in caught.value.why


def test_a_new_keeper_serves_what_the_folders_hold(cluster):
    c = cluster("memory", {"tier": "peer"}, nodes=2)
    c.save(3)
    for node in (0, 1):
        c.kill(node)
    later = cluster("memory", {"tier": "peer"}, nodes=2, attempt=2)
    me = Who(run=RUN, rank=0, node=0, attempt=2)
    node = RemoteNode(Peer(later.keepers[1].address, me=me, name="node 1", token="secret", idle_s=5))
    found, faults, replaced = node.inventory()
    assert faults == replaced == [] and [(h.kind, h.rank, h.step, h.committed) for h in found] == [
        ("image", 0, 3, True),
        ("arena", 1, 3, True),
    ]
    for rank in (0, 1):
        image, data = c.image(rank, 3)
        assert node.image(3, image.uuid, rank).to_bytes() == image.to_bytes()
        assert node.bad_pieces(3, image.uuid, rank) == []
        out = bytearray(image.size)
        parts = [memoryview(out)[:10], memoryview(out)[10:11], memoryview(out)[11:]]
        node.read(3, image.uuid, rank, parts, 0)
        assert out == data
    assert node.manifest(3, image.uuid) == c.manifest(3)
    assert node.manifest(4, image.uuid) is None
    with pytest.raises(CheckpointError, match="is missing"):
        node.image(4, image.uuid, 0)


def test_chunks_are_cut_alike_on_both_ends(cluster, monkeypatch):
    for module in ("serve", "peers", "generation", "parity", "parity_group"):
        monkeypatch.setattr(f"sirara.checkpoint.{module}.CHUNK_BYTES", 4096)
    c = cluster("memory", {"tier": "peer"}, PARITY)
    c.save(1)
    image, data = c.image(0, 1)
    me = Who(run=RUN, rank=3, node=3, attempt=1)
    node = RemoteNode(Peer(c.keepers[0].address, me=me, name="node 0", token="secret", idle_s=5))
    out = bytearray(20_000)
    node.read(
        1, image.uuid, 0, [memoryview(out)[:5000], memoryview(out)[5000:5001], memoryview(out)[5001:]], 77
    )
    assert out == data[77:20_077]
    c.lose(2)
    c.lose(5)
    c.replace(2, 5)
    for rank in (2, 5):
        lost, want = c.image(rank, 1)
        c.keepers[rank].rebuild(1, lost.uuid, rank)
        assert read_image(c.store(rank), lost) == bytes(want)


def test_a_rebuilt_image_is_committed_and_can_be_asked_of_any_node(cluster):
    c = cluster(PARITY)
    c.save(1)
    c.lose(4)
    image, data = c.image(4, 1)
    me = Who(run=RUN, rank=0, node=0, attempt=1)
    node = RemoteNode(Peer(c.keepers[2].address, me=me, name="node 2", token="secret", idle_s=5))
    assert node.rebuild(1, image.uuid, 4).to_bytes() == image.to_bytes()
    assert read_image(c.store(2), image) == bytes(data)
    (found,) = [h for h in c.keepers[2].inventory() if h.rank == 4]
    assert found.committed and found.kind == "image" and found.node == 4


@pytest.mark.parametrize("seed", range(4))
def test_any_cluster_survives_what_its_layout_says(cluster, monkeypatch, seed):
    for module in ("serve", "peers", "generation", "parity", "parity_group"):
        monkeypatch.setattr(f"sirara.checkpoint.{module}.CHUNK_BYTES", 4096)
    rng = random.Random(seed)
    for attempt in range(1, 4):
        nodes, k, m = rng.randint(2, 8), rng.randint(1, 5), rng.randint(1, 3)
        domains = [f"rack-{rng.randint(0, 3)}" for _ in range(nodes)] if rng.random() < 0.5 else []
        c = cluster(
            {"tier": "parity", "data": k, "parity": m, "domains": domains},
            {"tier": "peer", "domains": domains},
            nodes=nodes,
            local_size=rng.choice([1, 1, 2]),
            sizes=[7, *rng.choices([0, 0, 1, 63, 64, 65, 4096, 5000, 20_000, 50_001], k=rng.randint(1, 6))],
            attempt=attempt,
        )
        c.save(1)
        peers = peer_layout(nodes, 2, domains)
        for rank in range(c.world):
            image, data = c.image(rank, 1)
            for node in peers.holders[rank // c.local_size]:
                assert read_image(c.store(node), image) == bytes(data)
        layout = parity_layout(nodes, k, m, domains)
        lost = sorted(node for group in layout.groups for node in rng.sample(group, rng.randint(0, layout.m)))
        for node in lost:
            c.lose(node)
        c.replace(*lost)
        for rank in (rank for node in lost for rank in c.ranks_of(node)):
            image, data = c.image(rank, 1)
            c.keepers[rank].rebuild(1, image.uuid, rank)
            assert read_image(c.store(rank // c.local_size), image) == bytes(data)
        c.close()


def test_too_few_nodes_or_bad_domains_are_said(cluster, caplog):
    c = cluster({"tier": "parity", "data": 4, "parity": 2, "domains": ["a"] * 3 + ["b"] * 3})
    assert any("has 3 nodes of one group" in w for w in c.keepers[0].warnings)
    alone = cluster(PARITY, {"tier": "peer"}, nodes=1, attempt=2)
    results = alone.keep(1)[0]
    assert not results["parity"].ok and "no group of nodes makes parity" in results["parity"].fault
    assert not results["peer"].ok and "1 nodes can hold 1 copies" in results["peer"].fault


def test_groups_of_fewer_nodes_work(cluster):
    c = cluster(PARITY, nodes=4)
    c.save(1)
    c.lose(0)
    c.lose(1)
    c.replace(0, 1)
    for rank in (0, 1):
        image, data = c.image(rank, 1)
        c.keepers[rank].rebuild(1, image.uuid, rank)
        assert read_image(c.store(rank), image) == bytes(data)


def test_the_keeper_side_does_without_torch():
    code = "import sys, sirara.checkpoint.nodes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
