"""What tools find in the folders of nodes: images, parity decoded without a server, what is bad in them."""

import json
import shutil
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.places import NodeStore, Places, copies_of, manifests_of, places_of
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub_places import scrub_places, torn
from sirara.config.run_folder import RunFolder
from sirara.errors import CheckpointError
from sirara.pure.manifest import parse_manifest
from tests.checkpoints import differing, even, flip_bit, load, save, small_state
from tests.cluster import SIZES, Cluster
from tests.node_copies import keep_images, keep_parity

WORLD = 5
STATE = small_state(3)
BOXES = even(STATE, WORLD)


@pytest.fixture
def step(tmp_path):
    return save(tmp_path / "run", 4, STATE, BOXES)


def places(root, nodes=range(WORLD)):
    stores = tuple(
        NodeStore(name=f"memory of node {n}", store=GenerationStore(root / f"node-{n}", "run-1"))
        for n in nodes
    )
    return Places(run="run-1", stores=stores)


def read(step, root, nodes=range(WORLD)):
    """The state over the copies of these nodes alone."""
    manifest = Snapshot(step).manifest
    with TemporaryDirectory() as scratch:
        copies, unasked = copies_of(places(root, nodes), manifest, scratch=Path(scratch))
        assert not unasked
        return load(Snapshot.over(manifest, copies), STATE)


def test_images_of_all_nodes_are_the_whole_state(step, tmp_path):
    keep_images(tmp_path / "nodes", step, STATE, BOXES)
    assert differing(read(step, tmp_path / "nodes"), STATE) == []
    with pytest.raises(CheckpointError, match="good in none of 4 copies"):
        read(step, tmp_path / "nodes", nodes=range(4))


@pytest.mark.parametrize("m", [1, 2])
def test_any_m_lost_nodes_are_decoded_and_one_more_is_not(step, tmp_path, m):
    root = tmp_path / "nodes"
    keep_images(root, step, STATE, BOXES)
    keep_parity(root, step, STATE, BOXES, m)
    for lost in combinations(range(WORLD), m):
        left = [n for n in range(WORLD) if n not in lost]
        assert differing(read(step, root, left), STATE) == []
    for lost in combinations(range(WORLD), m + 1):
        with pytest.raises(CheckpointError, match="good in none"):
            read(step, root, [n for n in range(WORLD) if n not in lost])


def test_what_real_keepers_have_kept_is_read_without_them(tmp_path):
    """Parity 4 + 2 over six nodes: any two of them may be gone, with three the lost images are named."""
    cluster = Cluster(tmp_path, ["memory", {"tier": "parity", "data": 4, "parity": 2}])
    try:
        cluster.save(3)
        manifest = parse_manifest(cluster.manifest(3), where="test")
        for node in (1, 4):
            cluster.lose(node)
        assert read_cluster(cluster, manifest, tmp_path / "a") == sum(SIZES)
        cluster.lose(5)
        with pytest.raises(CheckpointError, match="good in none of"):
            read_cluster(cluster, manifest, tmp_path / "b")
    finally:
        cluster.close()


def read_cluster(cluster, manifest, scratch):
    """Bytes of the tensor, all hashes checked."""
    stores = tuple(NodeStore(name=f"memory of node {n}", store=cluster.store(n)) for n in range(6))
    at = Places(run="run-1", stores=stores)
    assert all(not one.faults for one in scrub_places(at))
    copies, _ = copies_of(at, manifest, scratch=scratch)
    return len(Snapshot.over(manifest, copies).read("w/master"))


def test_a_damaged_image_is_found_by_its_hash_and_read_from_parity(step, tmp_path):
    root = tmp_path / "nodes"
    keep_images(root, step, STATE, BOXES)
    keep_parity(root, step, STATE, BOXES, 1)
    image = next((root / "node-2").rglob("image-2"))
    found = list(scrub_places(places(root)))
    assert len(found) == 2 * WORLD and not any(s.faults for s in found) and all(s.committed for s in found)
    stored = GenerationStore(root / "node-2", "run-1").inventory()[0]
    at = int(GenerationStore(root / "node-2", "run-1").image(4, stored.uuid, 2).position[0])
    flip_bit(image, at)
    bad = [s for s in scrub_places(places(root), 4) if s.faults]
    assert [(s.place, s.what) for s in bad] == [("memory of node 2", "image of rank 2")]
    assert len(bad[0].faults) == 1 and bad[0].faults[0].endswith("does not match its hash")
    assert list(scrub_places(places(root), 5)) == []
    # The state is read in spite of it: that image is decoded from the others.
    assert differing(read(step, root), STATE) == []


def test_a_damaged_block_of_parity_is_named(step, tmp_path):
    root = tmp_path / "nodes"
    keep_parity(root, step, STATE, BOXES, 1)
    flip_bit(next(p for p in (root / "node-1").rglob("parity-*") if p.suffix != ".json"), 5)
    bad = [s for s in scrub_places(places(root)) if s.faults]
    assert len(bad) == 1 and bad[0].place == "memory of node 1" and "parity" in bad[0].faults[0]


def test_uncommitted_and_torn_things_are_told_apart(step, tmp_path):
    root = tmp_path / "nodes"
    keep_images(root, step, STATE, BOXES, commit=False)
    assert not any(s.committed for s in scrub_places(places(root)))
    assert manifests_of(places(root)) == ([], []) and torn(places(root)) == []
    next((root / "node-0").rglob("rank-0.json")).write_text("{")
    assert len(torn(places(root))) == 1 and "rank-0.json" in torn(places(root))[0]


def test_the_places_of_a_run_are_those_of_its_configuration(step, tmp_path):
    run = tmp_path / "demo"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"format": 1, "run": "run-1"}))
    (run / "config.yaml").write_text(
        f"""\
name: demo
model: {{family: llama, layers: 1, hidden: 32, heads: 2, ffn: 64, vocab: 61, max_seq: 32}}
data: {{train: [{{path: store}}], seq_len: 32}}
train: {{steps: 9, global_batch: 2, micro_batch: 2, optimizer: {{name: adamw, lr: 0.1}}}}
checkpoint:
  tiers: [{{tier: memory, path: "{tmp_path}/nodes/node-{{node}}"}}, disk]
"""
    )
    keep_images(tmp_path / "nodes", step, STATE, BOXES, nodes=[0, 3])
    found = places_of(RunFolder(run))
    assert [at.name for at in found.stores] == ["memory of node 0", "memory of node 3"]
    assert found.run == "run-1" and found.unasked == ()
    assert [place for _, place in manifests_of(found, 4)[0]] == ["memory of node 0", "memory of node 3"]
    shutil.rmtree(tmp_path / "nodes" / "node-0")
    assert [at.name for at in places_of(RunFolder(run)).stores] == ["memory of node 3"]
    (run / "config.yaml").write_text("name: demo\n")
    assert "config.yaml names: model is missing" in places_of(RunFolder(run)).unasked[0]
