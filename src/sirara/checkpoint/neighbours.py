"""Neighbours: ranks on this machine into whose memory parts of a checkpoint are put while it is read.

every rank    a table of what it holds: tensor, address, box           (comm/window.py)
a reader      part of a piece ─► boxes of a neighbour that meet it ─► runs, each in one stretch on both sides ─► put
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod

import numpy as np

from sirara.comm.direct import DirectLink
from sirara.comm.group import Comm
from sirara.comm.window import Window, open_window
from sirara.pure.layout import Box, intersection

Memory = dict[int, list[tuple[Box, np.ndarray]]]
"""Tensor -> the boxes that this rank holds of it, with their memory."""


@contextmanager
def open_neighbours(comm: Comm, memory: Memory, *, dims: int) -> "Iterator[Neighbours | None]":
    """The ranks of `comm`, into whose memory one may put while the block runs, as they may into `memory`.

    Collective at its beginning; to be left when all ranks are known to be done.  None on all ranks where they are not
    all on one machine, or may not write into each other.
    Args:    dims: the most dimensions of any tensor, the same on all ranks.
    """
    if not isinstance(comm.link, DirectLink):
        yield None
        return
    with open_window(comm.link, _table(memory, dims)) as window:
        yield None if window is None else Neighbours(window, dims)


def _table(memory: Memory, dims: int) -> np.ndarray:
    """[R, 3 + 2 * dims]: tensor, address, dimensions, offset .., size .. of each box that this rank holds."""
    rows = []
    for tensor, held in memory.items():
        for box, target in held:
            fill = (0,) * (dims - len(box.size))
            if box.volume:
                rows.append((tensor, target.ctypes.data, len(box.size), *box.offset, *fill, *box.size, *fill))
    return np.array(rows, np.int64).reshape(-1, 3 + 2 * dims)


class Neighbours:
    """The memory of the other ranks on this machine."""

    def __init__(self, window: Window, dims: int) -> None:
        self._window, self._dims = window, dims
        self._held = cache(self._read_table)

    def put(self, rank: int, tensor: int, part: Box, block: np.ndarray) -> None:
        """Fills the elements `part` of a tensor wherever a rank holds them.  From any thread.

        Args:    block: these elements, in the shape of the part; it may be a view.
        Raises:  CommError when that rank has left.
        """
        peer = self._window.comm.ranks.index(rank)
        for held, address in self._held(peer).get(tensor, ()):
            common = intersection(part, held)
            if common is None:
                continue
            source = block[(*common.relative_to(part).slices, ...)]
            inner = [block.itemsize * prod(held.size[d + 1 :]) for d in range(len(held.size))]
            corner = address + sum(o * n for o, n in zip(common.relative_to(held).offset, inner, strict=True))
            depth, run_bytes = _one_stretch(common.size, source.strides, inner, block.itemsize)
            own = _places(source.ctypes.data, common.size[:depth], source.strides)
            self._window.put(peer, own, _places(corner, common.size[:depth], inner), run_bytes)

    def _read_table(self, peer: int) -> dict[int, list[tuple[Box, int]]]:
        held: dict[int, list[tuple[Box, int]]] = {}
        for tensor, address, k, *numbers in self._window.table(peer).tolist():
            box = Box(tuple(numbers[:k]), tuple(numbers[self._dims : self._dims + k]))
            held.setdefault(tensor, []).append((box, address))
        return held


def _one_stretch(
    size: Sequence[int], source: Sequence[int], target: Sequence[int], item: int
) -> tuple[int, int]:
    """(leading dimensions to walk over, bytes of what follows them), where the rest lies in one stretch on both sides.

    source, target: strides in bytes.
    """
    depth, run = len(size), item
    while depth and (size[depth - 1] == 1 or source[depth - 1] == target[depth - 1] == run):
        depth -= 1
        run *= size[depth]
    return depth, run


def _places(first: int, size: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Addresses of the elements of a grid, in C order."""
    places = np.array([first], np.int64)
    for n, step in zip(size, strides, strict=False):
        places = (places[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
    return places
