"""Windows: peers write into memory that is open to them, and into nothing else."""

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sirara.comm import window as window_module
from sirara.comm.direct import DirectLink
from sirara.comm.group import Comm
from sirara.comm.window import Window, open_window
from sirara.comm.world import World, world_comm
from sirara.errors import CommError
from tests.harness import run_ranks

N = 5000  # more runs than go into one call
RUN = 8


def open_comm() -> tuple[Comm, DirectLink]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    comm = world_comm(world, timeout_s=20)
    assert isinstance(comm.link, DirectLink)
    return comm, comm.link


def every_second_word() -> bool:
    """Rank r writes its number into every second word of each peer, at the r-th third."""
    comm, link = open_comm()
    mine = np.full((comm.size, 2 * N), -1, np.int64)
    source = np.full(N, comm.rank, np.int64)
    with open_window(link, np.array([[mine.ctypes.data, mine.shape[1]]])) as window:
        assert window is not None
        for peer in range(comm.size):
            if peer != comm.rank:
                ((address, words),) = window.table(peer).tolist()
                places = address + 8 * (comm.rank * words + 2 * np.arange(N))
                window.put(peer, source.ctypes.data + 8 * np.arange(N), places, RUN)
        comm.gather_rows("all have written", torch.zeros(1))
    wanted = np.full((comm.size, 2 * N), -1, np.int64)
    for peer in range(comm.size):
        if peer != comm.rank:
            wanted[peer, ::2] = peer
    return bool((mine == wanted).all())


def test_every_run_arrives_at_its_place_and_nothing_else_is_touched():
    assert run_ranks(3, every_second_word) == [True] * 3


def write_to_a_closed_one() -> tuple[str, bool]:
    comm, link = open_comm()
    mine = np.zeros(1, np.int64)
    told = ""
    with open_window(link, np.array([[mine.ctypes.data]])) as window:
        assert window is not None
        ((address,),) = window.table(1 - comm.rank).tolist()
        comm.gather_rows("tables are read", torch.zeros(1))
        if comm.rank == 0:
            comm.gather_rows("the other has closed its own", torch.zeros(1))
            try:
                window.put(1, np.array([mine.ctypes.data]), np.array([address]), 8)
            except CommError as error:
                told = error.what
    if comm.rank == 1:
        comm.gather_rows("the other has closed its own", torch.zeros(1))
        mine[0] = 7
    comm.gather_rows("end", torch.zeros(1))
    return told, mine[0] == 7 * comm.rank


def test_a_window_that_is_closed_takes_nothing():
    (told, _), (_, untouched) = run_ranks(2, write_to_a_closed_one)
    assert told == "a peer left: rank 1" and untouched


def one_may_not_write() -> bool:
    comm, link = open_comm()
    real = window_module._mover
    if comm.rank == 1:
        window_module._mover = lambda name: (lambda *_: -1) if name.endswith("writev") else real(name)
    try:
        with open_window(link, np.zeros((0, 2))) as window:
            return window is None
    finally:
        window_module._mover = real


def test_where_one_rank_may_not_write_no_rank_has_a_window():
    assert run_ranks(3, one_may_not_write) == [True] * 3


def test_a_transfer_that_ends_within_a_run_goes_on_from_there():
    """The kernel may move less than it was asked to."""
    target, source = np.zeros(64, np.uint8), np.arange(1, 65, dtype=np.uint8)
    calls = []

    def write(pid: int, own: np.ndarray, theirs: np.ndarray) -> int:
        left = 7
        calls.append(pid)
        for (a, n), (b, _) in zip(own.tolist(), theirs.tolist(), strict=True):
            take = min(left, n)
            at, to = a - source.ctypes.data, b - target.ctypes.data
            target[to : to + take] = source[at : at + take]
            left -= take
        return 7 - left

    def read(pid: int, own: np.ndarray, theirs: np.ndarray) -> int:
        door[0] = 1
        np.frombuffer((window_module.ctypes.c_char * 8).from_address(int(own[0, 0])), np.int64)[0] = 1
        return 8

    door = np.zeros(1, np.int64)
    link: Any = type("Link", (), {"comm": None, "peers": [(os.getpid(), 0)]})()
    window = Window(link, read, write, [(door.ctypes.data, 1, 0, 0)], 1)
    places = np.arange(0, 64, 16)
    window.put(0, source.ctypes.data + places, target.ctypes.data + places[::-1], 16)
    assert (target.reshape(4, 16)[::-1] == source.reshape(4, 16)).all()
    assert len(calls) == 10
