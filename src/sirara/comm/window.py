"""Windows: memory of this process that its peers on the same machine may write into, for as long as it says so.

    every rank    opens a window: a word that says "open", and a table of what lies where, both in its own memory
    a peer        reads the table once; then, whenever it has something: looks at the word, writes to the place itself
    every rank    closes its window once all have said, by other means, that they are done

So nobody waits for a single transfer, and nothing is kept until somebody fetches it.  The word keeps a writer out of a
process that has left, and out of another one that has its number now.  A window is closed by its owner alone: who
leaves early, because it failed, may still receive what was under way.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from sirara.comm.direct import DirectLink

_MOST_RUNS = 1024
"""Runs of one call: IOV_MAX on Linux."""

Move = Callable[[int, np.ndarray, np.ndarray], int]
"""(pid, own spans, that process's spans): bytes that were copied, -1 when it is not allowed.  Spans are int64 rows of
(address, bytes)."""


@contextmanager
def open_window(link: DirectLink, table_RC: np.ndarray) -> "Iterator[Window | None]":
    """A window onto this rank's memory while the block runs.  Collective at its beginning.

    Args:    table_RC: what peers are told of it; its meaning is the caller's.  C is the same on all ranks.
    Returns: None on all ranks where the system does not let them write.
    """
    comm = link.comm
    table_RC = np.ascontiguousarray(table_RC, dtype=np.int64)
    # The word, and a place for each peer to prove that it can write here.
    door = np.zeros(1 + comm.size, dtype=np.int64)
    door[0] = word = 1 + int.from_bytes(os.urandom(7), "little")
    try:
        row = [door.ctypes.data, word, table_RC.ctypes.data, len(table_RC)]
        rows = comm.gather_rows("open windows", torch.tensor(row, dtype=torch.int64)).tolist()
        window = None
        read, write = _mover("process_vm_readv"), _mover("process_vm_writev")
        if read is not None and write is not None:
            window = Window(link, read, write, rows, table_RC.shape[1])
            window.prove()
        comm.gather_rows("try windows", torch.zeros(1))
        able = window is not None and bool((np.delete(door[1:], comm.rank) == word).all())
        answers = comm.gather_rows("agree on windows", torch.tensor([int(able)]))
        yield window if bool(answers.all()) else None
    finally:
        door[0] = 0


def _mover(name: str) -> Move | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    function.restype = ctypes.c_ssize_t

    def move(pid: int, own_N2: np.ndarray, theirs_N2: np.ndarray) -> int:
        return function(pid, own_N2.ctypes.data, len(own_N2), theirs_N2.ctypes.data, len(theirs_N2), 0)

    return move


class Window:
    """The peers' windows, as one rank sees them; see the module's docstring.  Usable from any thread."""

    def __init__(
        self, link: DirectLink, read: Move, write: Move, rows: Sequence[Sequence[int]], columns: int
    ) -> None:
        self.comm = link.comm
        self._link, self._read, self._write, self._rows, self._columns = link, read, write, rows, columns

    def prove(self) -> None:
        """Writes its word into every peer; where that fails, the peer will miss it."""
        for peer, (door, word, *_) in enumerate(self._rows):
            if peer != self.comm.rank:
                value = np.array([word], np.int64)
                place = door + 8 * (1 + self.comm.rank)
                self._write(self._pid(peer), _span(value), np.array([[place, 8]]))

    def table(self, peer: int) -> np.ndarray:
        """[R, C]: what a peer tells of its memory."""
        _, _, address, count = self._rows[peer]
        table_RC = np.zeros((count, self._columns), np.int64)
        if count and self._peek(peer, address, table_RC) != table_RC.nbytes:
            raise self._link.gone(peer)
        return table_RC

    def put(self, peer: int, own_N: np.ndarray, theirs_N: np.ndarray, run_bytes: int) -> None:
        """Copies runs of `run_bytes` bytes from addresses of this process to addresses of a peer.

        Raises:  CommError when the peer's window is closed or the peer is gone.
        """
        for low in range(0, len(own_N), _MOST_RUNS):
            own_N2, theirs_N2 = (
                np.stack([at, np.full_like(at, run_bytes)], axis=1)
                for at in (own_N[low : low + _MOST_RUNS], theirs_N[low : low + _MOST_RUNS])
            )
            while len(own_N2):
                got = self._write(self._pid(peer), own_N2, theirs_N2) if self._is_open(peer) else 0
                if got <= 0:
                    raise self._link.gone(peer)
                # The kernel may transfer less than was asked for.
                ends = np.cumsum(own_N2[:, 1])
                done = int(np.searchsorted(ends, got, side="right"))
                part = got - int(ends[done - 1] if done else 0)
                own_N2, theirs_N2 = own_N2[done:], theirs_N2[done:]
                if part:
                    own_N2[0] += (part, -part)
                    theirs_N2[0] += (part, -part)

    def _is_open(self, peer: int) -> bool:
        address, word, *_ = self._rows[peer]
        seen = np.zeros(1, np.int64)
        return self._peek(peer, address, seen) == 8 and int(seen[0]) == word

    def _peek(self, peer: int, address: int, out: np.ndarray) -> int:
        return self._read(self._pid(peer), _span(out), np.array([[address, out.nbytes]]))

    def _pid(self, peer: int) -> int:
        return self._link.peers[peer][0]


def _span(array: np.ndarray) -> np.ndarray:
    return np.array([[array.ctypes.data, array.nbytes]])
