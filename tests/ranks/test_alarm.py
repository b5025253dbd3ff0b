"""The first failure is heard by all ranks, in whatever they wait for."""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.comm.alarm import LINGER_S, LOOK_S, Alarm, Patience, describe
from sirara.comm.world import World, world_comm
from sirara.errors import CommError, InvariantError
from tests.harness import RankFailed, run_ranks


def comm_here(direct: bool = True) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return world_comm(world, timeout_s=15.0, direct=direct)


class FakeStore:
    """A dictionary with the store's words; `gone` as when its host has left."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.looks = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._reach()
        return self.values.setdefault(key, desired.encode())

    def add(self, key: str, amount: int) -> int:
        self._reach()
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._reach()
        self.looks += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key]

    def _reach(self) -> None:
        if self.gone:
            raise RuntimeError("the host of the store left")


def test_the_first_to_ring_is_the_one_that_is_heard() -> None:
    store = FakeStore()
    Alarm(store, 3, 4).ring(ValueError("boom\nmore"))
    Alarm(store, 1, 4).ring(KeyError("later"))
    heard = Alarm(store, 0, 4).look()
    assert heard is not None and heard.code == "SR702"
    assert heard.what == "rank 3 failed: ValueError: boom"
    assert heard.why == "more" and "rank 0" in heard.where


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_stores_of_torch_keep_the_first_alarm(kind: str, tmp_path: Path) -> None:
    if kind == "tcp":
        store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", 0, 1, is_master=True))
    else:
        store = dist.PrefixStore("group", dist.FileStore(str(tmp_path / "store"), 1))
    assert Alarm(store, 0, 4).look() is None
    Alarm(store, 3, 4).ring(ValueError("boom"))
    Alarm(store, 1, 4).ring(KeyError("later"))
    heard = Alarm(store, 0, 4).look()
    assert heard is not None and heard.what == "rank 3 failed: ValueError: boom"


def test_an_error_of_ours_is_told_with_its_code_place_and_reason() -> None:
    error = InvariantError("one is two", where="rank 5", why="1 != 2")
    assert describe(error, rank=5) == (
        "rank 5 failed: InvariantError[SR900]: one is two",
        "rank 5; 1 != 2",
    )


def test_a_rank_that_repeats_what_it_heard_names_the_rank_that_failed() -> None:
    store = FakeStore()
    Alarm(store, 3, 4).ring(ValueError("boom"))
    heard = Alarm(store, 0, 4).look()
    assert heard is not None
    assert describe(heard, rank=0)[0] == "rank 3 failed: ValueError: boom"
    other = FakeStore()
    Alarm(other, 0, 4).ring(heard)
    assert Alarm(other, 1, 4).look() is None


def test_the_failure_itself_is_raised_when_the_store_is_gone() -> None:
    store = FakeStore()
    store.gone = True
    alarm = Alarm(store, 2, 4)
    with pytest.raises(ValueError, match="boom") as raised, alarm.guard():
        raise ValueError("boom")
    assert "the host of the store left" in raised.value.__notes__[0]
    assert alarm.look() is None


def test_rank_0_leaves_at_once_when_all_others_have_said_that_they_leave() -> None:
    store = FakeStore()
    for rank in (3, 1, 2):
        Alarm(store, rank, 4).leave(ValueError(f"boom of {rank}"))
    began = time.monotonic()
    Alarm(store, 0, 4).leave(KeyError("later"))
    assert time.monotonic() - began < LINGER_S
    heard = Alarm(store, 0, 4).look()
    assert heard is not None and heard.what == "rank 3 failed: ValueError: boom of 3"
    store.gone = True
    Alarm(store, 0, 4).leave(KeyError("later"))


def host_fails(port: int) -> str:
    """The store lies in the process of rank 0, which fails; what the other one hears."""
    rank = dist.get_rank()
    alarm = Alarm(dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0), rank, 2)
    dist.barrier()
    if rank == 0:
        time.sleep(LOOK_S / 2)  # between the other's first look and its second
        alarm.leave(ValueError("boom of the host"))
        os._exit(9)
    with pytest.raises(CommError, match="rank 0 failed: ValueError: boom of the host") as heard:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            alarm.listen()
            time.sleep(0.01)
    raise heard.value


def test_the_failure_of_the_host_of_the_store_is_heard_before_it_leaves() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, host_fails, port)
    assert "rank 0 failed: ValueError: boom of the host" in str(failure.value.__cause__)


def test_listening_in_a_loop_asks_the_store_a_few_times_a_second() -> None:
    store = FakeStore()
    alarm = Alarm(store, 0, 4)
    for _ in range(1000):
        alarm.listen()
    assert store.looks == 1


def test_patience_ends_at_its_deadline() -> None:
    patience = Patience(0.01, None)
    began = time.monotonic()
    while patience.pause():
        assert time.monotonic() - began < 5
    assert time.monotonic() - began >= 0.01


def one_fails(rank_that_fails: int) -> tuple[str, float]:
    """Everybody waits for a tensor of the next rank; one rank fails instead of sending."""
    comm = comm_here()
    text = "nothing"
    try:
        with comm.alarm.guard():
            if comm.rank == rank_that_fails:
                raise ValueError("boom of one rank")
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            # Rank by rank: those behind the failed one wait for ranks that wait.
            into = torch.zeros(4)
            comm.exchange("wait", [], [(before, into)], tag=1).wait()
            comm.exchange("pass on", [(after, into)], [], tag=1).wait()
    except (ValueError, CommError) as error:
        text = str(error)
    moment = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"left {comm.rank}", "")
    store.wait([f"left {rank}" for rank in range(comm.size)])
    return text, moment


def test_ranks_that_wait_for_a_tensor_hear_it_within_two_seconds() -> None:
    answers = run_ranks(3, one_fails, 1)
    assert answers[1][0] == "boom of one rank"
    for rank in (0, 2):
        assert "error[SR702]: rank 1 failed: ValueError: boom of one rank" in answers[rank][0]
        assert answers[rank][1] - answers[1][1] < 2


def fails_and_leaves(direct: bool) -> None:
    comm = comm_here(direct)
    if comm.rank == 1:
        comm.alarm.ring(ValueError("boom before leaving"))
        os._exit(9)
    comm.exchange("orphan", [], [(1, torch.zeros(4))], tag=1).wait()


@pytest.mark.parametrize("direct", [True, False])
def test_a_rank_whose_peer_left_tells_why_it_left(direct: bool) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, fails_and_leaves, direct)
    assert failure.value.rank == 1
    told = "rank 0 raised CommError: error[SR702]: rank 1 failed: ValueError: boom before leaving"
    assert told in str(failure.value)


def killed() -> None:
    comm = comm_here()
    if comm.rank == 1:
        os._exit(9)
    with comm.alarm.guard():
        peer = 1 if comm.rank == 0 else 0
        comm.exchange("orphan", [], [(peer, torch.zeros(4))], tag=1).wait()


def test_the_first_to_miss_a_killed_rank_rings_for_it() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(3, killed)
    text = str(failure.value)
    assert "a peer left: rank 1" in text


def killed_before_a_collective() -> None:
    comm = comm_here()
    if comm.rank in (1, 3):
        os._exit(9)
    with comm.alarm.guard():
        comm.gather_rows("agree", torch.zeros(1))


def test_ranks_that_were_killed_are_named_where_the_library_sees_a_broken_connection_alone() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(4, killed_before_a_collective)
    named = set(re.findall(r"a peer left during agree: rank ([0-9, ]+)", str(failure.value)))
    assert named & {"1", "3", "1, 3"} and named <= {"1", "3", "1, 3"}, failure.value
