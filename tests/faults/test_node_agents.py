"""Two nodes of two ranks each under torchrun, one agent per node: the agent of a node is killed with all its workers
and keepers, and the run goes on with equal bits, on two nodes or on the one that is left.

    node 0   torchrun ── rank 0 + keeper, rank 1 + keeper ── <root>/node-0     images of ranks 0, 1, copies of 2, 3
    node 1   torchrun ── rank 2 + keeper, rank 3 + keeper ── <root>/node-1     images of ranks 2, 3, copies of 0, 1
"""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from sirara.config.processes import wait_for_processes
from sirara.events import read
from tests.faults.campaign import Cases
from tests.faults.test_node_loss_runs import LONG_S, STEPS, Nodes, equal, taken
from tests.faults.test_training_is_killed import TORCHRUN
from tests.project import Done, Project, until

pytestmark = pytest.mark.timeout(400)


class Pairs(Nodes):
    """As `Nodes`, with two ranks on each of two nodes under torchrun."""

    ranks, most = 2, 2

    def start(self, *words: str, nodes: int) -> list:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        place = [
            "--nnodes",
            str(nodes),
            "--nproc-per-node",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
        ]
        return [
            self.project.start(*words, "--json", launcher=(TORCHRUN[0], *place, "--node-rank", str(n)))
            for n in range(nodes)
        ]

    def kill(self, victim: int, processes: list) -> None:
        processes[victim].kill()  # the agent
        super().kill(victim, processes)

    def resumed(self, nodes: int) -> list[Done]:
        processes = self.start("resume", self.run.id, nodes=nodes)
        return [self.project.finish(p, timeout_s=LONG_S) for p in processes]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Cases]:
    cases = Cases()
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nagents of nodes: {cases}")


@pytest.fixture(scope="module")
def peace(project: Project) -> dict:
    done = project.sirara("run", "toy.yaml", "name=peace", f"train.steps={STEPS}", "--json", timeout_s=LONG_S)
    assert done.code == 0, done.err
    return equal(done)


@pytest.fixture(scope="module")
def pairs(project: Project, case: Cases) -> Pairs:
    nodes = Pairs(project, "peer")
    ended = nodes.train_and_lose(1, 22)
    assert [len(nodes.processes(n)) for n in (0, 1)] == [4, 4]  # two trainers, two keepers
    case("agents killed with their workers and keepers", ended[1].code == -signal.SIGKILL)
    assert ended[0].code not in (0, None), ended[0].err  # the node that is left does not take it for success
    assert "rank 2" in ended[0].err or "rank 3" in ended[0].err, ended[0].err
    return nodes


def test_a_node_of_two_ranks_is_replaced_and_gets_both_images_from_its_peer(pairs, peace, case):
    pairs.rewind(1, renumber=False)
    told = pairs.project.sirara("ckpt", "why", str(pairs.run.path))
    done, event = pairs.resume(nodes=2)
    case("losses of a node of two ranks")
    assert event["from_step"] >= 22 and {"memory", "peer"} <= taken(event) and event["nodes"] == 2
    assert f"a resume on 2 nodes takes step {event['from_step']}" in told.out, told.out
    assert equal(done) == peace and done.result["grade"] == "exact"


def test_the_two_ranks_of_the_node_that_is_left_go_on_alone(pairs, peace, case):
    pairs.rewind(1, renumber=False)
    done, event = pairs.resume(nodes=1)
    case("losses of a node of two ranks")
    assert event["from_step"] >= 22 and "disk" not in taken(event) and event["nodes"] == 1
    assert equal(done) == peace


@pytest.mark.long
def test_an_agent_alone_is_killed_its_two_ranks_die_and_memory_is_newer_than_the_disk(pairs, peace, case):
    """The machine stays: its workers see that their agent is gone, its keepers end what they have."""
    pairs.rewind(renumber=False)
    processes = pairs.start("resume", pairs.run.id, "train.steps=100000", nodes=2)
    known = len(read(pairs.run.events))

    def saved() -> bool:
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
        return any(e["kind"] == "save" and "memory" in e["tiers"] for e in read(pairs.run.events)[known:])

    until(saved, timeout_s=LONG_S)
    os.kill(processes[1].pid, signal.SIGKILL)
    ended = [pairs.project.finish(p, timeout_s=100) for p in processes]
    case("agents killed", ended[1].code == -signal.SIGKILL)
    assert ended[0].code not in (0, None)
    assert wait_for_processes(pairs.run.processes(2), wait_s=60) == []
    newest = max(e["step"] for e in read(pairs.run.events) if e["kind"] == "save")
    told = pairs.project.sirara("ckpt", "why", str(pairs.run.path), "--json")
    assert told.result["takes"] >= newest > 20 and told.result["nodes"] == 2
