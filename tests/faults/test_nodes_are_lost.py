"""Nodes that are lost, hang, die in the middle or keep wrong bytes: what can be rebuilt is rebuilt bit for bit, what
cannot is named, and nobody waits for ever.

Six nodes with a memory folder of their own. Each case asserts that its fault fired; their number is printed at the end.
"""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import combinations

import pytest

from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.parity import block_range
from sirara.checkpoint.parity_block import ParityBlock
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError
from sirara.pure.copies import Stripes
from tests.checkpoints import flip_bit
from tests.cluster import clusters
from tests.generations import RUN, image_of, manifest_of, read_image

PARITY = {"tier": "parity", "data": 4, "parity": 2}
NODES, M = range(6), 2
LOSSES = [lost for n in (1, 2) for lost in combinations(NODES, n)]
TOO_MANY = list(combinations(NODES, M + 1))


class Cases:
    def __init__(self):
        self.names = []

    def __call__(self, name, fired=True):
        assert fired, f"{name}: the fault did not happen"
        self.names.append(name)


@pytest.fixture(scope="module")
def case(request):
    cases = Cases()
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nnodes are lost: {len(cases.names)} fault cases")


@pytest.fixture
def cluster():
    with clusters() as make:
        yield make


def whole(c, rank, step, node):
    """Whether the node holds the rank's image bit for bit."""
    image, data = c.image(rank, step)
    return read_image(c.store(node), image) == bytes(data) and not c.store(node).bad_pieces(
        step, image.uuid, rank
    )


def rebuild(c, rank, step=1, *, at=None):
    return c.keepers[rank if at is None else at].rebuild(step, c.image(rank, step)[0].uuid, rank)


# ---- nodes that are gone


@pytest.mark.parametrize("lost", LOSSES, ids=str)
def test_m_lost_nodes_are_rebuilt_bit_for_bit(cluster, case, lost):
    c = cluster(PARITY)
    c.save(1)
    for node in lost:
        c.lose(node)
    c.replace(*lost)
    for node in lost:
        with pytest.raises(CheckpointError):
            whole(c, node, 1, node)  # it is gone indeed
        rebuild(c, node)
    case(f"lost {lost}")
    assert all(whole(c, rank, 1, rank) for rank in NODES)


@pytest.mark.parametrize("lost", TOO_MANY, ids=str)
def test_one_more_is_a_clear_answer(cluster, case, lost):
    c = cluster(PARITY)
    c.save(1)
    for node in lost:
        c.lose(node)
    c.replace(*lost)
    for rank in lost:
        with pytest.raises(
            CheckpointError, match=f"image of rank {rank} of step 1 cannot be rebuilt"
        ) as caught:
            rebuild(c, rank)
        assert missing(rank, lost) in caught.value.why
        assert not c.store(rank).inventory() and c.store(rank).faults() == []
    case(f"lost {lost}")


def missing(rank, lost):
    """What an answer has to name: of the stripe of the rank's first block all that is lost."""
    stripes = Stripes(6, 2)
    stripe = stripes.stripe(rank, 0)
    rows = [row for row, holder in enumerate(stripes.holders(stripe)) if holder in lost]
    if len(rows) == 2:
        return "no parity of its block 0 is left"
    members = [
        f"the image of rank {m} (node {m})" for m in stripes.members(stripe) if m in lost and m != rank
    ]
    parity = [f"parity 0.0-{stripe}, row {row}" for row in rows]
    return f"stripe {stripe} of group 0.0 has 3 of 4 blocks that are needed; missing: {', '.join(members + parity)}"


def test_two_ranks_per_node_are_rebuilt_each_in_its_own_group(cluster, case):
    c = cluster(PARITY, local_size=2)
    c.save(1)
    for node in (1, 4):
        c.lose(node)
    c.replace(1, 4)
    for rank in (2, 3, 8, 9):
        rebuild(c, rank)
        assert whole(c, rank, 1, rank // 2)
    case("nodes with two ranks")


def test_nodes_that_cannot_be_reached_count_as_lost(cluster, case):
    c = cluster(PARITY)
    c.save(1)
    c.lose(0)
    c.kill(3)
    c.replace(0)
    rebuild(c, 0)
    assert whole(c, 0, 1, 0)
    case("one lost, one does not answer")
    c.kill(5)
    shutil.rmtree(c.memory(0))
    with pytest.raises(CheckpointError, match="cannot be rebuilt") as caught:
        rebuild(c, 0)
    assert "nobody told where node 3 is" in caught.value.why
    assert "rank 5 on node 5 cannot be reached" in caught.value.why
    case("one lost, two do not answer")


@pytest.mark.parametrize("lost", NODES)
def test_a_lost_node_is_on_its_partner(cluster, case, lost):
    c = cluster({"tier": "peer", "copies": 2})
    c.save(1)
    c.lose(lost)
    partner = lost ^ 1
    assert whole(c, lost, 1, partner)
    assert [
        h for n in NODES if n not in (lost, partner) for h in c.store(n).inventory() if h.rank == lost
    ] == []
    case(f"peer of {lost}")


def test_the_former_generation_is_rebuilt_when_the_newest_was_not_committed(cluster, case):
    c = cluster(PARITY)
    c.save(1)
    c.keep(2)
    c.lose(3)
    c.replace(3)
    rebuild(c, 3, step=1)
    assert whole(c, 3, 1, 3)
    assert not any(h.committed for n in NODES for h in c.store(n).inventory() if h.step == 2)
    case("lost between two generations")


# ---- wrong bytes


def parity_files(c, node, step=1):
    return sorted(p for p in c.generation(node, step).glob("parity-*") if p.suffix != ".json")


def first_parity_of(c, rank):
    """The file with row 0 of the parity of a rank's first block."""
    stripes = Stripes(6, 2)
    stripe = stripes.stripe(rank, 0)
    return c.generation(stripes.holders(stripe)[0], 1) / f"parity-0.0-{stripe}-0"


def test_a_flipped_bit_in_a_replica_is_named(cluster, case):
    c = cluster({"tier": "peer"})
    c.save(1)
    image, _ = c.image(0, 1)
    flip_bit(c.generation(1, 1) / "image-0", int(image.position[3]) + 11)
    assert c.store(1).bad_pieces(1, image.uuid, 0) == [3]
    assert whole(c, 0, 1, 0)  # the other copy
    case("flipped bit in a replica")


@pytest.mark.parametrize("what", ["flipped", "truncated", "no file", "no description", "torn description"])
def test_a_damaged_block_of_parity_is_done_without_and_named(cluster, case, what, caplog):
    c = cluster(PARITY)
    c.save(1)
    path = first_parity_of(c, 2)
    damage(path, what)
    c.lose(2)
    c.replace(2)
    with caplog.at_level("WARNING", "sirara"):
        rebuild(c, 2)
    assert whole(c, 2, 1, 2)
    if what != "no description":
        assert path.name.removeprefix("parity-") in caplog.text
    case(f"parity {what}")


def damage(path, what):
    if what == "flipped":
        flip_bit(path, 1000)
    elif what == "truncated":
        os.truncate(path, 1000)
    elif what == "no file":
        path.unlink()
    elif what == "no description":
        path.with_name(path.name + ".json").unlink()
    elif what == "torn description":
        os.truncate(path.with_name(path.name + ".json"), 500)


def test_a_survivor_with_a_flipped_bit_counts_as_lost_and_is_named(cluster, case, caplog):
    c = cluster(PARITY)
    c.save(1)
    image, _ = c.image(4, 1)
    flip_bit(c.memory(4) / RUN / "arena-4-1", 4096 + int(image.position[2]) + 5)
    c.lose(1)
    c.replace(1)
    with caplog.at_level("WARNING", "sirara"):
        rebuild(c, 1)
    assert whole(c, 1, 1, 1)
    assert f"rank 4's image on rank 4 on node 4: 1 of {len(image.index)} pieces are damaged" in caplog.text
    case("flipped bit in a survivor")
    rebuild(c, 4)
    assert whole(c, 4, 1, 4)
    case("a damaged image is rebuilt on its own node")


def test_more_damage_than_parity_is_a_clear_answer(cluster, case):
    c = cluster(PARITY)
    c.save(1)
    c.lose(1)
    for rank in (2, 3):  # two stripes have all three of them among their four members
        image, _ = c.image(rank, 1)
        flip_bit(c.memory(rank) / RUN / f"arena-{rank}-1", 4096 + int(image.position[0]))
    c.replace(1)
    with pytest.raises(CheckpointError, match="cannot be rebuilt") as caught:
        rebuild(c, 1)
    assert (
        "the image of rank 3 (node 3)" in caught.value.why
        or "the image of rank 5 (node 5)" in caught.value.why
    )
    assert "pieces are damaged" in caught.value.why
    case("one lost, two damaged")


def test_an_arena_that_is_used_again_counts_as_lost(cluster, case):
    c = cluster(PARITY)
    c.save(1)
    c.save(2)
    for rank in (0, 1):  # step 3 begins in the arena of step 1
        image, data = image_of(c.plan, rank, 3, world=6)
        c.keepers[rank].keep(image, memoryview(data), tiers=["memory"], arena=None)
        (c.memory(rank) / RUN / f"arena-{rank}-1").unlink()
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match="is gone"):
            whole(c, rank, 1, rank)
        rebuild(c, rank, step=1)
        assert whole(c, rank, 1, rank)
        assert whole(c, rank, 2, rank)
    case("an arena is gone")


def test_a_stale_block_of_another_save_is_not_taken(cluster, case, caplog):
    c = cluster(PARITY)
    c.save(1)
    path = first_parity_of(c, 2)
    stale, _ = image_of(c.plan, 2, 1, world=6, attempt=9)
    described = path.with_name(path.name + ".json")
    block = ParityBlock.from_bytes(described.read_bytes(), where="here")
    described.write_bytes(dataclasses.replace(block, uuid=stale.uuid).to_bytes())
    c.lose(2)
    c.replace(2)
    with caplog.at_level("WARNING", "sirara"):
        rebuild(c, 2)
    assert whole(c, 2, 1, 2)
    assert f"belongs to another save (step 1, uuid {stale.uuid})" in caplog.text
    case("stale parity")


def test_a_stale_generation_is_kept_apart_from_the_step_of_the_same_number(cluster, case):
    c = cluster(PARITY)
    c.save(1)
    for node in NODES:
        c.kill(node)
    again = cluster(PARITY, attempt=2)
    again.save(1)
    again.lose(5)
    again.replace(5)
    rebuild(again, 5)
    assert whole(again, 5, 1, 5) and again.image(5, 1)[1] != c.image(5, 1)[1]
    with pytest.raises(CheckpointError):
        whole(c, 5, 1, 5)
    case("two saves of one step")


def test_a_foreign_image_is_refused_and_named(cluster, case):
    c = cluster({"tier": "peer"})
    c.save(1)
    path = c.generation(1, 1) / "rank-0.json"
    foreign, _ = image_of(c.plan, 0, 1, world=6, run="run-2")
    path.write_bytes(dataclasses.replace(foreign, uuid=c.image(0, 1)[0].uuid).to_bytes())
    with pytest.raises(CheckpointError, match="belongs to run 'run-2', this is run 'run-1'"):
        whole(c, 0, 1, 1)
    assert any("run-2" in fault for fault in c.store(1).faults())
    case("foreign image in the folder")
    other, data = c.image(3, 2)
    results = c.keepers[2].keep(other, memoryview(data), tiers=["peer"], arena=None)
    assert "rank 2 on node 2 sends the image of rank 3" in results["peer"].fault
    case("another rank's image is sent")


def test_a_torn_generation_is_no_copy(cluster, case):
    c = cluster({"tier": "peer"}, PARITY)
    c.save(1)
    for node in NODES:
        (c.generation(node, 1) / "manifest.json").unlink()
    assert not any(h.committed for node in NODES for h in c.store(node).inventory())
    case("no manifest")
    c.commit(1)
    os.truncate(c.generation(2, 1) / "manifest.json", 300)
    assert {h.committed for h in c.store(2).inventory()} == {False}
    assert any("manifest.json is torn" in fault for fault in c.store(2).faults())
    c.lose(3)
    c.replace(3)
    rebuild(c, 3)
    assert whole(c, 3, 1, 3)  # the manifest of another node commits it
    assert all(h.committed for h in c.store(3).inventory())
    case("a torn manifest on one node")


# ---- faults in the middle of a save


class Proxy:
    """Stands between a keeper and another one; after so many bytes to the latter it cuts, hangs or flips a bit."""

    def __init__(self, address, *, after, action):
        self._target, self._after, self._action = address, after, action
        self.fired = threading.Event()
        self._open = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            host, port = self._target.split(":")
            far = socket.create_connection((host, int(port)))
            self._open += [near, far]
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source, sink, counted):
        passed = 0
        try:
            while data := source.recv(65536):
                if counted and passed <= self._after < passed + len(data) and not self.fired.is_set():
                    data = bytearray(data)
                    at = self._after - passed
                    if self._action == "flip":
                        data[at] ^= 1
                    else:
                        sink.sendall(data[:at])
                    self.fired.set()
                    if self._action == "hang":
                        return
                    if self._action == "cut":
                        raise OSError("cut")
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for s in (source, sink):
                s.close() if self._action != "cut" else cut(s)

    def close(self):
        self._server.close()
        for s in self._open:
            cut(s)


def cut(sock):
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@pytest.fixture
def proxied(request):
    made = []

    def make(c, source, target, **how):
        """Everything that rank `source` sends to rank `target` goes through a proxy."""
        made.append(Proxy(c.keepers[target].address, **how))
        addresses = {rank: keeper.address for rank, keeper in c.keepers.items()}
        c.keepers[source].meet(addresses | {target: made[-1].address})
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


TRANSFER_FAULTS = [
    ("cut", 40_000, r"(the connection to|closed|rank 2 on node 2)"),
    ("hang", 40_000, r"does not answer"),
    ("flip", 40_000, r"arrived damaged"),
    ("cut", 1500, r"(the connection to|closed|rank 2 on node 2)"),
    ("hang", 1500, r"does not answer"),
]


@pytest.mark.parametrize(("action", "after", "says"), TRANSFER_FAULTS)
def test_a_peer_that_fails_in_the_middle_of_an_image(cluster, case, proxied, action, after, says):
    c = cluster({"tier": "peer"}, idle_s=1.0)
    c.save(1)
    proxy = proxied(c, 2, 3, after=after, action=action)
    results = c.keep(2)
    case(f"peer, {action} after {after}", proxy.fired.is_set())
    assert [rank for rank in NODES if not results[rank]["peer"].ok] == [2]
    assert re.search(says, results[2]["peer"].fault) and "node 3" in results[2]["peer"].fault
    assert whole(c, 2, 1, 3), "the former generation stays"
    assert c.image(2, 2)[0].uuid not in [h.uuid for h in c.store(3).inventory() if h.rank == 2]
    c.meet()
    c.save(3)
    assert whole(c, 2, 3, 3)


@pytest.mark.parametrize(
    ("action", "after", "says"), [(a, 10_000 if n > 2000 else n, s) for a, n, s in TRANSFER_FAULTS]
)
def test_a_member_that_fails_in_the_middle_of_a_block(cluster, case, proxied, action, after, says):
    c = cluster(PARITY, idle_s=1.0, deadline_s=10.0)
    c.save(1)
    proxy = proxied(c, 2, 0, after=after, action=action)
    results = c.keep(2)
    case(f"parity, {action} after {after}", proxy.fired.is_set())
    assert not results[2]["parity"].ok and "node 0" in results[2]["parity"].fault
    assert re.search(says, results[2]["parity"].fault)
    assert not results[0]["parity"].ok and re.search(r"rank 2|ranks 2", results[0]["parity"].fault)
    c.lose(5)
    c.replace(5)
    rebuild(c, 5, step=1)
    assert whole(c, 5, 1, 5), "the former generation stays"
    c.save(3)
    c.lose(1)
    c.replace(1)
    rebuild(c, 1, step=3)
    assert whole(c, 1, 3, 1)


def test_a_node_that_dies_during_a_save_is_named_by_all_that_need_it(cluster, case):
    c = cluster({"tier": "peer"}, PARITY, idle_s=1.0, deadline_s=4.0)
    c.save(1)

    gone = threading.Event()

    def dies(image, data):
        c.lose(4)
        gone.set()
        return {}

    def comes_later(image, data):
        assert gone.wait(30)
        return c.keep_own(5, 2, ["peer", "parity"])

    results = c.keep(2, keep={4: dies, 5: comes_later})
    assert not results[5]["peer"].ok and "rank 4 on node 4" in results[5]["peer"].fault
    for rank in (0, 1, 2, 3, 5):
        assert not results[rank]["parity"].ok and "rank" in results[rank]["parity"].fault
        assert re.search(r"rank 4|ranks 4", results[rank]["parity"].fault), results[rank]["parity"].fault
    case("a node dies during a save")
    c.replace(4)
    rebuild(c, 4, step=1)
    assert whole(c, 4, 1, 4) and whole(c, 4, 1, 5)


def test_a_member_that_never_comes_is_named(cluster, case):
    c = cluster(PARITY, deadline_s=2.0)
    results = c.keep(1, keep={3: lambda image, data: {}})
    for rank in (0, 1, 2, 4, 5):
        assert "lacks the blocks of ranks 3" in results[rank]["parity"].fault
    case("a member never comes")


def test_a_full_holder_is_named_by_the_sender(cluster, case, monkeypatch):
    c = cluster({"tier": "peer"}, PARITY, deadline_s=4.0)
    c.save(1)
    real, fired = os.posix_fallocate, []

    def full(fd, offset, length):
        if f"memory-{3}" in os.readlink(f"/proc/self/fd/{fd}") and "gen-" in os.readlink(
            f"/proc/self/fd/{fd}"
        ):
            fired.append(length)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    results = c.keep(2)
    case("a holder has no space", bool(fired))
    assert "no space left" in results[2]["peer"].fault and "node 3" in results[2]["peer"].fault
    assert "no space left" in results[3]["parity"].fault
    assert [h.step for h in c.store(3).inventory() if h.rank == 2] == [1]


def test_the_own_disk_is_full(cluster, case):
    class Full(Disk):
        def touch(self, effect, path):
            if effect == "open" and "disk-0" in str(path):
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    c = cluster("memory", {"tier": "disk"}, nodes=1)
    for store in c.keepers[0].stores:
        store.disk = Full()
    results = c.keep(1)[0]
    assert results["memory"].ok and "the quota for" in results["disk"].fault
    case("own disk full")


# ---- faults in the middle of a rebuild


@pytest.mark.parametrize("action", ["cut", "hang"])
def test_a_source_that_fails_during_a_rebuild_is_replaced(cluster, case, monkeypatch, caplog, action):
    for module in ("serve", "peers", "generation", "parity", "parity_group"):
        monkeypatch.setattr(f"sirara.checkpoint.{module}.CHUNK_BYTES", 4096)
    c = cluster(PARITY, idle_s=1.0)
    c.save(1)
    c.lose(2)
    c.replace(2)
    victim, read, fired = c.keepers[4], GenerationStore.read, []

    def fails(self, step, uuid, rank, buffers, position):
        # The check of the pieces goes another way; this is the reading of blocks, the third of them.
        if self in victim.stores:
            fired.append(position)
            if len(fired) == 3:
                if action == "cut":
                    victim.close()
                else:
                    time.sleep(1.6)
        return read(self, step, uuid, rank, buffers, position)

    monkeypatch.setattr(GenerationStore, "read", fails)
    with caplog.at_level("WARNING", "sirara"):
        rebuild(c, 2)
    case(f"a source, {action} during a rebuild", len(fired) >= 3)
    assert whole(c, 2, 1, 2)
    assert "rank 4 on node 4" in caplog.text


def test_bytes_that_change_after_the_check_are_not_kept(cluster, case, monkeypatch):
    c = cluster(PARITY)
    c.save(1)
    c.lose(2)
    c.replace(2)
    read, fired = GenerationStore.read, []

    def wrong(self, step, uuid, rank, buffers, position):
        read(self, step, uuid, rank, buffers, position)
        if rank == 4 and not fired:
            fired.append(1)
            buffers[0][7] ^= 4

    monkeypatch.setattr(GenerationStore, "read", wrong)
    with pytest.raises(CheckpointError, match="cannot be rebuilt") as caught:
        rebuild(c, 2)
    assert "pieces come out wrong" in caught.value.why
    case("bytes change after the check", bool(fired))
    assert c.store(2).inventory() == [] and c.store(2).faults() == []


# ---- real processes

KEEPER = """
import sys, threading
from pathlib import Path
from sirara.checkpoint.nodes import NodeTiers
from sirara.config.schema import TierConfig
node = int(sys.argv[1])
tiers = [TierConfig(tier="memory"), TierConfig(tier="peer", copies=2)]
keeper = NodeTiers(tiers, run="run-1", rank=node, world=2, local_size=1, node=node, attempt=1, token="secret",
                   memory=Path(sys.argv[2]), idle_s=10.0)
print(keeper.address, flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def far_keeper(cluster):
    """A cluster of two nodes, and a keeper of node 1 in a process of its own: (cluster, process, its address)."""
    c = cluster("memory", {"tier": "peer"}, nodes=2, idle_s=1.0)
    c.kill(1)
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER, "1", str(c.memory(1))], stdout=subprocess.PIPE, text=True
    )
    try:
        yield c, process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_named(case, far_keeper, how):
    c, process, address = far_keeper
    c.keepers[0].meet({0: c.keepers[0].address, 1: address})
    image, data = c.image(0, 1)
    assert c.keepers[0].keep(image, memoryview(data), tiers=["memory", "peer"], arena=None)["peer"].ok
    process.send_signal(how)
    if how == signal.SIGKILL:
        process.wait()
    later, data = c.image(0, 2)
    result = c.keepers[0].keep(later, memoryview(data), tiers=["memory", "peer"], arena=None)
    assert result["memory"].ok and not result["peer"].ok
    assert "rank 1 on node 1" in result["peer"].fault
    case(f"process gets {how.name}")
    process.kill()
    process.wait()
    # A new process on that node serves what the dead one kept.
    assert whole(c, 0, 1, 1)
    manifest = manifest_of(c.plan, [c.image(r, 1)[0] for r in (0, 1)])
    c.start(1)
    c.meet()
    c.keepers[0].commit(1, image.uuid, manifest)
    assert any(h.rank == 0 and h.committed for h in c.keepers[1].inventory())


def test_every_block_of_every_image_lies_in_a_stripe_of_its_own():
    """What the rebuilding above relies on, for the sizes used in it."""
    c = Stripes(6, 2)
    for rank in NODES:
        assert len({c.stripe(rank, j) for j in range(c.k)}) == c.k
    assert block_range(1, 4, 0) == (0, 1) and block_range(1, 4, 3) == (1, 0)
