"""The link between keepers: frames, the handshake, deadlines; who is turned away and how every fault is named."""

import os
import socket
import threading
import time

import pytest

from sirara.checkpoint import link
from sirara.checkpoint.link import Peer, Server, Who, own_host
from sirara.errors import CheckpointError, CommError, CommTimeout, StorageError

ME = Who(run="run-1", rank=0, node=0, attempt=3)
FAR = Who(run="run-1", rank=5, node=2, attempt=3)


@pytest.fixture
def served():
    """A server that echoes, and what it does by request."""
    servers = []

    def make(handler=None, *, who=FAR, token="secret", idle_s=5.0):
        servers.append(Server(handler or echo, me=who, token=token, host="127.0.0.1", idle_s=idle_s))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def echo(request, size, connection):
    data = connection.receive_payload(size)
    connection.send({"said": request}, [memoryview(data)])


def peer(address, *, me=ME, token="secret", idle_s=5.0, name="rank 5 on node 2"):
    return Peer(address, me=me, name=name, token=token, idle_s=idle_s)


def soon():
    return time.monotonic() + 10


def test_frames_arrive_as_they_were_sent(served):
    p = peer(served().address)
    for size in (0, 1, 4096, 3_000_001):
        data = os.urandom(size)
        parts = [memoryview(data)[: size // 3], memoryview(data)[size // 3 :]]
        header, answer = p.ask({"n": size}, parts, until=soon())
        assert (header, answer) == ({"said": {"n": size}}, data)
    p.close()


def test_many_small_buffers_go_in_one_frame(served):
    data = os.urandom(1000)
    parts = [memoryview(data)[i : i + 1] for i in range(1000)]
    assert peer(served().address).ask({}, parts, until=soon())[1] == data


def test_one_server_serves_many_at_once(served):
    server = served()
    answers = {}

    def one(i):
        answers[i] = peer(server.address).ask({"i": i}, [memoryview(bytes(100_000))], until=soon())[0]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == {i: {"said": {"i": i}} for i in range(16)}


@pytest.mark.parametrize(
    ("client", "says"),
    [
        ({"token": "other"}, "does not know this run's token"),
        ({"me": Who(run="run-2", rank=0, node=0, attempt=3)}, "belongs to run 'run-2'"),
        ({"me": Who(run="run-1", rank=0, node=0, attempt=2)}, "belongs to attempt 2, attempt 3 owns the run"),
        ({"name": "rank 4 on node 2"}, "rank 4 on node 2 was called, rank 5 on node 2 answers"),
    ],
)
def test_strangers_are_turned_away_by_name(served, client, says):
    with pytest.raises((CommError, CheckpointError), match=says):
        peer(served().address, **client).ask({}, until=soon())


def test_a_client_without_the_token_reaches_no_handler(served):
    reached = []
    server = served(lambda *a: reached.append(a))
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        assert b"does not speak this protocol" in raw.recv(4096)
    with pytest.raises(CommError):
        peer(server.address, token="").ask({}, until=soon())
    assert reached == []


def test_a_server_that_does_not_know_the_token_is_not_trusted(served):
    sent = []
    server = served(lambda r, s, c: sent.append(r), token="other")
    with pytest.raises(CommError, match="rank 5 on node 2 does not know this run's token"):
        peer(server.address).ask({"private": 1}, until=soon())
    assert sent == []


def test_a_fault_of_the_far_end_is_raised_here_with_its_own_words(served):
    def full(request, size, connection):
        raise StorageError(
            "no space left", code="SR601", where="/dev/shm", why="7 bytes free", try_="free some"
        )

    p = peer(served(full).address)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            p.ask({}, until=soon())
        fault = caught.value
        assert (fault.what, fault.code, fault.why) == ("no space left", "SR601", "7 bytes free")
        assert fault.where == "rank 5 on node 2: /dev/shm" and fault.try_ == ("free some",)


def test_a_fault_in_the_middle_of_a_long_transfer_is_heard_while_sending(served):
    def refuse(request, size, connection):
        raise StorageError("no space left", code="SR601")

    sent = []

    def talk(connection):
        for _ in range(10_000):
            if connection.has_answer():
                return
            connection.send({}, [memoryview(bytes(1 << 20))])
            sent.append(1)

    with pytest.raises(StorageError, match="no space left"):
        peer(served(refuse).address).ask({}, until=soon(), talk=talk)
    assert len(sent) < 10_000


def test_a_request_that_is_not_understood_is_an_error_not_a_hang(served):
    def needs(request, size, connection):
        connection.send({"x": request["missing"]})

    with pytest.raises(CommError, match=r"rank 0 on node 0 asked for something .* KeyError"):
        peer(served(needs).address).ask({}, until=soon())


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as s:
        address = f"127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(CommError, match=f"rank 5 on node 2 cannot be reached at {address}"):
        peer(address).ask({}, until=soon())


def test_a_deadline_that_has_passed_is_said_before_anything_is_sent(served):
    with pytest.raises(CommTimeout, match="cannot be reached"):
        peer(served().address).ask({}, until=time.monotonic() - 1)


def test_a_peer_that_accepts_and_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        p = peer(f"127.0.0.1:{silent.getsockname()[1]}", idle_s=0.2)
        with pytest.raises(CommTimeout, match=r"rank 5 on node 2 does not answer: it sent no byte for 0.2 s"):
            p.ask({}, until=soon())


def test_a_peer_that_stops_reading(served):
    blocked = threading.Event()
    server = served(lambda r, s, c: blocked.wait(10), idle_s=10)
    data = memoryview(bytes(64 << 20))  # more than the buffers of both sockets
    with pytest.raises(CommTimeout, match=r"rank 5 on node 2 does not answer: it took no byte for 0.3 s"):
        peer(server.address, idle_s=0.3).ask({}, [data], until=soon())
    blocked.set()


def test_a_slow_peer_meets_the_deadline_of_the_whole(served):
    stop = threading.Event()

    def trickle(request, size, connection):
        for _ in range(1000):
            if stop.wait(0.02):
                return
            connection.send({"n": 0}, [])

    def talk(connection):
        while True:
            connection.receive()

    with pytest.raises(CommTimeout, match="the deadline has passed"):
        peer(served(trickle).address).ask({}, until=time.monotonic() + 0.3, talk=talk)
    stop.set()


def test_a_peer_that_dies_in_the_middle(served):
    def die(request, size, connection):
        connection.close()
        raise StorageError("dead")

    with pytest.raises(CommError, match="rank 5 on node 2"):
        peer(served(die).address).ask({}, [memoryview(bytes(1000))], until=soon())


def test_a_client_that_hangs_is_given_up_by_the_server(served):
    faults = []

    def read(request, size, connection):
        try:
            connection.receive_payload(size)
        except CommTimeout as fault:
            faults.append(str(fault))
            done.set()
            raise

    done = threading.Event()
    server = served(read, idle_s=0.2)

    def half(connection):
        done.wait(10)

    p = peer(server.address)
    with pytest.raises(CommTimeout, match="rank 0 on node 0 does not answer: it sent no byte"):
        p.ask({"n": 1}, until=soon(), talk=lambda c: half_frame(c, done))
    assert faults


def half_frame(connection, done):
    # Another frame is announced whose payload never comes.
    connection._socket.sendall(b"SRL1" + (2).to_bytes(4, "little") + (100).to_bytes(8, "little") + b"{}")
    done.wait(10)


def test_a_closed_server_leaves_no_connection_open(served):
    server = served()
    p = peer(server.address)
    p.ask({}, until=soon())
    server.close()
    with pytest.raises(CommError):
        p.ask({}, until=soon())


def test_the_own_address_is_that_of_the_route():
    assert own_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(CommError, match="no network leads to"):
        own_host("no-such-host.invalid")


@pytest.mark.parametrize("own", [["10.0.0.7", "10.1.0.7"], []])
def test_an_own_name_that_is_loopback_here_gives_an_address_that_others_can_reach(monkeypatch, own):
    """Debian's /etc/hosts has the own name at 127.0.1.1."""
    known = {"node0": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(socket, "gethostbyname", known.__getitem__)
    monkeypatch.setattr("sirara.checkpoint.link._addresses", lambda: iter(own))
    host = own_host("node0")
    assert host == "10.0.0.7" if own else host.startswith("127.")
    assert own_host("localhost") == own_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("far", [link._FAR_AWAY, "255.255.255.255"], ids=["routed", "no route"])
def test_own_addresses_are_not_loopback_and_can_be_served_at(monkeypatch, far):
    monkeypatch.setattr(link, "_FAR_AWAY", far)  # a broadcast address is refused, like one without a route
    for host in link._addresses():
        assert not host.startswith("127.")
        with socket.create_server((host, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
