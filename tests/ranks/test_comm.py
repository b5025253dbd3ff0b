"""Sends, receives and gathers between real ranks, by gloo and by reading a neighbour's memory."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.comm.carriers import LibraryCarrier
from sirara.comm.world import World, connect_axes, world_comm
from sirara.errors import CommError, CommTimeout, InvariantError
from sirara.mesh import Mesh
from tests.harness import RankFailed, run_ranks


def comm_here(direct: bool, timeout_s: float = 10.0) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return world_comm(world, timeout_s=timeout_s, direct=direct)


def ring(direct: bool, rounds: int) -> tuple[list[float], bool]:
    comm = comm_here(direct)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    seen = []
    for n in range(rounds):
        out = torch.full((1 + 1000 * n,), float(100 * comm.rank + n))
        into = torch.empty_like(out)
        comm.exchange("ring", [(after, out)], [(before, into)], tag=1 + n % 3).wait()
        seen.append(float(into.mean()))
        # The buffer is ours again: writing it now must not reach a neighbour that is still reading.
        out.fill_(-1.0)
    return seen, comm.link is not None


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_passes_what_its_neighbour_sent(direct: bool, size: int) -> None:
    for rank, (seen, linked) in enumerate(run_ranks(size, ring, direct, 7)):
        assert seen == [float(100 * ((rank - 1) % size) + n) for n in range(7)]
        assert linked is direct


def shards(direct: bool, dtype: torch.dtype) -> torch.Tensor:
    comm = comm_here(direct)
    full = torch.zeros(3 * comm.size, dtype=dtype)
    full[3 * comm.rank : 3 * comm.rank + 3] = comm.rank + 1
    comm.all_gather_shards("shards", full, tag=5).wait()
    return full


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_rank_ends_with_all_shards(direct: bool, dtype: torch.dtype) -> None:
    expected = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3], dtype=dtype)
    assert all(torch.equal(full, expected) for full in run_ranks(3, shards, direct, dtype))


def rows() -> list[list[int]]:
    return comm_here(True).gather_rows("rows", torch.tensor([dist.get_rank(), -(2**62)])).tolist()


def test_rows_keep_64_bit_integers() -> None:
    assert run_ranks(3, rows) == [[[r, -(2**62)] for r in range(3)]] * 3


def wrong_size() -> None:
    comm = comm_here(True)
    other = 1 - comm.rank
    out, into = torch.zeros(4 + comm.rank), torch.zeros(4)
    comm.exchange("wrong size", [(other, out)], [(other, into)], tag=1).wait()


def test_a_send_of_another_size_is_an_error_with_both_sizes() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, wrong_size)
    assert isinstance(failure.value.error, InvariantError)
    assert "20 bytes" in str(failure.value) and "16 bytes" in str(failure.value)


def neighbour_dies() -> str:
    comm = comm_here(True, timeout_s=15.0)
    if comm.rank == 1:
        time.sleep(0.2)
        os._exit(9)
    began = time.monotonic()
    try:
        comm.exchange("orphan", [], [(1, torch.zeros(4))], tag=1).wait()
    except CommError as error:
        raise AssertionError(f"seen after {time.monotonic() - began < 5}: {error.code}") from error
    return "no error"


def test_a_neighbour_that_dies_is_noticed_in_seconds() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, neighbour_dies)
    assert failure.value.rank == 1 or "seen after True: SR701" in str(failure.value)


def first_calls() -> dict[str, tuple[int, list[str]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    comms = connect_axes(world, Mesh(pp=2, dp=2, rank=rank).groups(), timeout_s=10.0, direct=False)
    found = {name: getattr(comms, name) for name in ("world", "dp", "tp", "pp", "copies", "ties", "plane")}
    return {name: (comm.size, [what for _, what in comm.trace]) for name, comm in found.items()}


def test_all_ranks_of_a_group_meet_before_a_few_of_them_exchange() -> None:
    # On NCCL the first call of a group waits for every rank: tied weights of a first and a last stage, three stages
    # apart, waited for ever for the one in between, which has none of them.
    for calls in run_ranks(4, first_calls):
        assert {name: size for name, (size, _) in calls.items() if size > 1}.keys() == {
            *("world", "dp", "pp", "ties", "plane")
        }
        assert all(made == ["meet"] * (size > 1) for size, made in calls.values())


def letter_that_never_comes() -> float:
    comm = comm_here(False, timeout_s=1.0)
    carrier = LibraryCarrier(comm, torch.device("cpu"), ways="gloo")
    began = time.monotonic()
    if comm.rank == 0:
        carrier.expect(1)
        with pytest.raises(CommTimeout):
            carrier.next(1)
    else:
        time.sleep(4.0)
    return time.monotonic() - began


def test_groups_of_letters_keep_the_deadline_of_the_run() -> None:
    # They had the library's own, half an hour.
    assert run_ranks(2, letter_that_never_comes)[0] < 4.0
