"""Real training on several nodes, some of which are lost for good: what memory, peers and parity hold of it goes on
with equal bits, on as many nodes or on fewer.

A node is one process of one rank under a launcher's environment, its keeper, and a folder of its own for memory and
disk ({node} in the path). A run is killed once, and resumed again and again from what it left, each time with other
losses.
"""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirara.checkpoint.arena import arena_head
from sirara.config.processes import ProcessId, wait_for_processes
from sirara.config.run_folder import RunFolder
from sirara.events import live, read
from tests.checkpoints import flip_bit
from tests.faults.campaign import Cases
from tests.project import Done, Project, until

STEPS, NODES = 28, 4
EQUAL = ("step", "loss_hex", "digest", "tokens")
LONG_S = 280
pytestmark = pytest.mark.timeout(300)

TIERS = {
    "peer": "{tier: memory, every: 2}, {tier: peer, copies: 2, every: 2}",
    "parity": "{tier: memory, every: 2}, {tier: parity, data: 2, parity: 2, every: 2}",
    "memory": "{tier: memory, every: 2}",
}


@pytest.fixture(scope="module")
def case(request) -> Iterator[Cases]:
    cases = Cases()
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nruns on nodes: {cases}")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture(scope="module")
def peace(project) -> dict:
    """The result of the run that nobody disturbs, on one process."""
    done = project.sirara("run", "toy.yaml", "name=peace", f"train.steps={STEPS}", "--json", timeout_s=LONG_S)
    assert done.code == 0, done.err
    return {name: done.result[name] for name in EQUAL}


class Nodes:
    """A run on nodes 0 .. n-1 of one machine, with tiers as in TIERS, and the disk every 20 steps."""

    ranks, most = 1, NODES  # per node; nodes at the start

    def __init__(self, project: Project, kind: str) -> None:
        self.project, self.kind = project, kind
        name = f"{kind}-{self.ranks}"
        self.root, self._left = project.folder / f"nodes-{name}", project.folder / f"left-{name}"
        tiers = TIERS[kind].replace("every:", f"path: '{self.root}/node-{{node}}', every:")
        self.words = (
            f"checkpoint.tiers=[{tiers}, {{tier: disk, every: 20}}]",
            "checkpoint.when_busy=wait",
            f"train.steps={STEPS}",
            "mesh.zero=1",
        )
        self.run: RunFolder

    def folder(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def start(self, *words: str, nodes: int) -> list:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        env = {
            "WORLD_SIZE": str(nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        # One process alone under no launcher: sirara starts its worker itself.
        return [
            self.project.start(
                *words, "--json", env=env | {"RANK": str(n), "GROUP_RANK": str(n)} if nodes > 1 else {}
            )
            for n in range(nodes)
        ]

    def train_and_lose(self, victim: int, step: int) -> list[Done]:
        """Trains until a save into memory at `step` or later is committed, newer than the one on the disk; then node
        `victim` is killed with its keeper.  How the processes ended, in rank order."""
        known = len(self.project.runs())
        processes = self.start("run", "toy.yaml", f"name=on-{self.kind}", *self.words, nodes=self.most)

        def newest() -> int:
            assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
            runs = self.project.runs()
            saves = read(runs[-1].events) if len(runs) > known else []
            return max((e["step"] for e in saves if e["kind"] == "save"), default=0)

        until(lambda: newest() >= step, timeout_s=LONG_S)
        self.run = self.project.runs()[-1]
        self.kill(victim, processes)
        ended = [self.project.finish(p, timeout_s=60) for p in processes]
        writers = [p for n in range(self.most) for p in self.processes(n)]
        assert wait_for_processes(writers, wait_s=60) == []
        # Later saves may have been committed; the disk holds step 20 at most.
        assert self.run.committed_steps() == [20]
        shutil.copytree(self.project.folder / "runs", self._left / "runs")
        shutil.copytree(self.root, self._left / "nodes")
        return ended

    def kill(self, victim: int, processes: list) -> None:
        """processes: as `start` gave them."""
        for process in self.processes(victim):
            os.kill(process.pid, signal.SIGKILL)

    def processes(self, node: int) -> list[ProcessId]:
        """The trainer and the keeper of each rank of a node in the first attempt."""
        found = read(self.run.control / "attempts" / "0001.jsonl")
        at = [(r["rank"], ProcessId.from_record(r)) for r in found if r["rank"] is not None]
        return [process for rank, process in at if rank // self.ranks == node]

    def rewind(self, *lost: int, renumber: bool) -> None:
        """As the killed run left it, but some nodes are gone with all that was on them; those that are left are
        numbered anew when nobody takes the places of the others."""
        runs = self.project.folder / "runs"
        for left, place in ((self._left / "runs", runs), (self._left / "nodes", self.root)):
            shutil.rmtree(place)
            shutil.copytree(left, place)
        for node in lost:
            shutil.rmtree(self.folder(node))
        for new, old in enumerate(n for n in range(self.most) if n not in lost):
            if renumber and new != old:
                self.folder(old).rename(self.folder(new))
                # Where an arena lies is written down; on a real node its path would not change.
                for path in self.folder(new).glob("*/gen-*/arena-*"):
                    path.write_text(path.read_text().replace(str(self.folder(old)), str(self.folder(new))))

    def resume(self, *, nodes: int) -> tuple[Done, dict]:
        """(how rank 0 ended, its resume event)."""
        first, *others = self.resumed(nodes)
        assert first.code == 0, first.err
        assert all(done.code == 0 for done in others)
        events = read(self.run.events)
        assert [r["step"] for r in live(read(self.run.metrics), events)] == list(range(1, STEPS + 1))
        return first, [e for e in events if e["kind"] == "resume"][-1]

    def resumed(self, nodes: int) -> list[Done]:
        processes = self.start(
            "resume", self.run.id, *(() if nodes > 1 else ("launch.nproc=1",)), nodes=nodes
        )
        return [self.project.finish(p, timeout_s=LONG_S) for p in processes]


def equal(done: Done) -> dict:
    return {name: done.result[name] for name in EQUAL}


def taken(event: dict) -> set[str]:
    """The tiers that bytes were taken from."""
    return {tier for _, tier, what, _ in event["sources"] if "taken from" in what}


@pytest.fixture(scope="module")
def with_peers(project, case) -> Nodes:
    nodes = Nodes(project, "peer")
    ended = nodes.train_and_lose(2, 22)
    case("killed nodes")
    assert ended[2].code == -signal.SIGKILL
    for n in (0, 1, 3):  # nobody waits, nobody takes it for success
        assert ended[n].code not in (0, None), ended[n].err
    return nodes


@pytest.fixture(scope="module")
def with_parity(project, case) -> Nodes:
    nodes = Nodes(project, "parity")
    nodes.train_and_lose(1, 22)
    case("killed nodes")
    return nodes


# ---- memory and peers


def test_processes_that_died_find_their_own_memory_newer_than_the_disk(with_peers, peace, case):
    with_peers.rewind(renumber=False)
    done, event = with_peers.resume(nodes=NODES)
    case("losses of all processes")
    assert event["from_step"] >= 22 and taken(event) == {"memory"}
    assert equal(done) == peace and done.result["grade"] == "exact"


def test_a_node_that_is_replaced_gets_its_image_from_its_peer(with_peers, peace, case):
    with_peers.rewind(2, renumber=False)
    assert not with_peers.folder(2).exists()
    done, event = with_peers.resume(nodes=NODES)
    case("losses of one node")
    assert event["from_step"] >= 22 and {"memory", "peer"} <= taken(event)
    assert equal(done) == peace


def test_fewer_nodes_go_on_from_peers(with_peers, peace, case):
    with_peers.rewind(0, 3, renumber=True)
    done, event = with_peers.resume(nodes=2)
    case("losses of two nodes, one of each pair")
    assert event["from_step"] >= 22 and "disk" not in taken(event)
    assert equal(done) == peace


def test_both_nodes_of_a_pair_are_lost_and_the_disk_is_older(with_peers, peace, case):
    with_peers.rewind(2, 3, renumber=True)
    done, event = with_peers.resume(nodes=2)
    case("losses of a pair")
    assert event["from_step"] == 20 and "disk" in taken(event)
    why = [why for step, _, _, why in event["sources"] if step is not None and step > 20]
    assert any("the images of ranks 2, 3 are nowhere" in text for text in why), event["sources"]
    assert equal(done) == peace


@pytest.mark.long
def test_a_damaged_image_is_named_and_its_peer_gives_the_pieces(with_peers, peace, case):
    with_peers.rewind(renumber=False)
    damaged = 0
    for path in with_peers.folder(1).glob("*/arena-1-*"):
        damaged += arena_head(path).step > 20
        flip_bit(path, path.stat().st_size // 2)
    for path in with_peers.folder(1).glob("*/gen-*/image-1"):
        flip_bit(path, path.stat().st_size // 2)
    done, event = with_peers.resume(nodes=NODES)
    case("damaged images", damaged)
    assert event["from_step"] >= 22 and "peer" in taken(event)
    assert any(
        "pieces were bad in one copy and good in another" in what for _, _, what, _ in event["sources"]
    )
    assert equal(done) == peace


def test_a_run_that_has_saved_into_memory_alone_goes_on_from_there(project, peace, case):
    known = len(project.runs())
    memory = f"{{tier: memory, every: 2, path: {project.folder}/alone}}"
    words = (f"checkpoint.tiers=[{memory}, {{tier: disk, every: 1000}}]", f"train.steps={STEPS}")
    process = project.start("run", "toy.yaml", "name=in-memory", *words)
    project.wait_for_step(1, process, more_than=known)
    run = project.runs()[-1]
    until(
        lambda: (
            process.poll() is not None
            or any(e["kind"] == "save" and e["step"] >= 4 for e in read(run.events))
        )
    )
    process.kill()
    case("losses of all processes", process.wait() == -signal.SIGKILL)
    assert run.committed_steps() == []
    done = project.sirara("resume", run.id, "--json", timeout_s=LONG_S)
    assert done.code == 0, done.err
    event = [e for e in read(run.events) if e["kind"] == "resume"][-1]
    assert event["from_step"] >= 4 and taken(event) == {"memory"}
    assert equal(done) == peace and run.committed_steps() == [STEPS]


# ---- memory and parity


@pytest.mark.parametrize(
    "lost", [pytest.param((1,), marks=pytest.mark.long), (0, 2)], ids=["one of 2+2", "two of 2+2"]
)
def test_fewer_nodes_go_on_from_parity(with_parity, peace, case, lost):
    with_parity.rewind(*lost, renumber=True)
    done, event = with_parity.resume(nodes=NODES - len(lost))
    case(f"losses of {len(lost)} nodes of 2+2")
    assert event["from_step"] >= 22 and "disk" not in taken(event)
    assert any(tier == "parity" for _, tier, _, _ in event["sources"])
    assert equal(done) == peace


def test_one_node_more_than_parity_tolerates_is_a_clear_answer_and_an_older_step(with_parity, peace, case):
    with_parity.rewind(0, 1, 3, renumber=True)
    done, event = with_parity.resume(nodes=1)
    case("losses of three nodes of 2+2")
    assert event["from_step"] == 20
    told = json.dumps(event)
    assert "cannot be rebuilt" in told or "are nowhere" in told, event
    assert equal(done) == peace


def test_when_nothing_is_left_the_run_does_not_begin_again_at_step_0(with_parity, case):
    with_parity.rewind(0, 1, 3, renumber=True)
    (step,) = with_parity.run.checkpoints.glob("step-*")
    shutil.rmtree(step)
    (done,) = with_parity.resumed(1)
    case("losses of everything")
    assert done.code == 65 and "cannot be rebuilt" in done.err, done.err
    told = with_parity.project.sirara("ckpt", "why", str(with_parity.run.path))
    assert told.code == 65 and "no step can be restored" in told.out and "step 20 " in told.out, told.out
    assert not [e for e in read(with_parity.run.events) if e["kind"] == "resume"]
