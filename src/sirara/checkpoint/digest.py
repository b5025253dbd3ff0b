"""State digest: two sums modulo 2^64 over every element of every tensor of the training state.

    D_k = sum over tensors and elements j of  bits(j) * A_k[j mod 65536] * C_k(name, j div 65536)        k = 1, 2

bits(j) is the element as an unsigned integer of its own width; A_k is a fixed table, C_k a keyed value, both odd.  The
sum knows no order, so each rank adds what it owns and the sums of ranks add up: the digest is one of the logical state,
whatever the layout.  docs/numerics.md has the definition byte by byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sirara.pure.layout import Box, box_runs
from sirara.pure.rng import key_of, words

TABLE = 65_536
"""Elements that share one keyed value, and the length of the fixed tables."""

_WORD = (1 << 64) - 1
_A = tuple(words(key_of("digest table", k), 0, TABLE) | np.uint64(1) for k in (1, 2))
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Digest:
    """The two sums; `+` joins the digests of disjoint parts of the state."""

    first: int = 0
    second: int = 0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.first + other.first) & _WORD, (self.second + other.second) & _WORD)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"

    @staticmethod
    def parse(text: str) -> "Digest":
        return Digest(int(text[:16], 16), int(text[16:], 16))

    def as_int64(self) -> torch.Tensor:
        """[2]: the sums as signed words, for adding over ranks."""
        return torch.from_numpy(np.array([self.first, self.second], dtype=np.uint64).view(np.int64))

    @staticmethod
    def from_rows(rows_R2: torch.Tensor) -> "Digest":
        """The joint digest of all ranks' `as_int64` rows."""
        return sum((Digest(*(int(v) & _WORD for v in row)) for row in rows_R2.tolist()), Digest())


def digest_slice(name: str, start: int, data: torch.Tensor) -> Digest:
    """The digest of elements [start, start + len(data)) of the tensor `name` in C order; data is 1-D, contiguous."""
    if data.is_cuda:
        return _on_device(name, start, data)
    return _on_host(name, start, data.view(_SIGNED[data.element_size()]).numpy())


def digest_boxes(name: str, shape: Sequence[int], boxes: Sequence[Box], data: torch.Tensor) -> Digest:
    """The digest of some boxes of a tensor; data is 1-D: box after box, each in C order."""
    total, at = Digest(), 0
    for box in boxes:
        part = data[at : at + box.volume]
        at += box.volume
        runs = box_runs(shape, box)
        if len(runs) == 1:
            total += digest_slice(name, runs[0][0], part)
        elif runs:
            total += _on_runs(name, np.array([start for start, _ in runs]), part.view(len(runs), -1))
    return total


def digest_of(parts: Iterable[tuple[str, int, torch.Tensor]]) -> Digest:
    """The joint digest of (name, start, data) parts."""
    return sum((digest_slice(*part) for part in parts), Digest())


def _keys(name: str, first: int, last: int) -> list[NDArray[np.uint64]]:
    """C_1 and C_2 of the table blocks first..last-1."""
    return [words(key_of("digest", k, name), first, last) | np.uint64(1) for k in (1, 2)]


def _on_host(name: str, start: int, data: NDArray[np.signedinteger]) -> Digest:
    bits = data.view(_UNSIGNED[data.itemsize])
    stop = start + len(bits)
    first = start // TABLE
    keys = _keys(name, first, -(-stop // TABLE))
    wide, product = np.empty(TABLE, np.uint64), np.empty(TABLE, np.uint64)
    sums = [0, 0]
    for block in range(first, -(-stop // TABLE)):
        lo, hi = max(start, block * TABLE), min(stop, (block + 1) * TABLE)
        n, at = hi - lo, lo - block * TABLE
        np.copyto(wide[:n], bits[lo - start : hi - start])
        for k in (0, 1):
            np.multiply(wide[:n], _A[k][at : at + n], out=product[:n])
            sums[k] += int(product[:n].sum(dtype=np.uint64)) * int(keys[k][block - first])
    return Digest(sums[0] & _WORD, sums[1] & _WORD)


def _on_runs(name: str, starts_R: NDArray[np.int64], data_RN: torch.Tensor) -> Digest:
    """Runs of equal length in rows, run r from element starts[r] on."""
    width, sums = data_RN.element_size(), [0, 0]
    mask = (1 << (8 * width)) - 1
    first, last = int(starts_R[0]) // TABLE, (int(starts_R[-1]) + data_RN.shape[1] - 1) // TABLE + 1
    keys = [torch.from_numpy(c.view(np.int64)).to(data_RN.device) for c in _keys(name, first, last)]
    tables = [torch.from_numpy(a.view(np.int64)).to(data_RN.device) for a in _A]
    starts = torch.from_numpy(starts_R).to(data_RN.device)
    within = torch.arange(data_RN.shape[1], device=data_RN.device)
    step = max(1, TABLE // data_RN.shape[1])
    for low in range(0, len(starts_R), step):
        at = starts[low : low + step, None] + within
        wide = data_RN[low : low + step].view(_SIGNED[width]).to(torch.int64)
        if width < 8:
            wide = wide & mask
        for k in (0, 1):
            factors = tables[k][at & (TABLE - 1)] * keys[k][(at >> 16) - first]
            sums[k] += int((wide * factors).sum())
    return Digest(sums[0] & _WORD, sums[1] & _WORD)


def _on_device(name: str, start: int, data: torch.Tensor) -> Digest:
    """The same in torch's int64, whose products and sums wrap modulo 2^64."""
    width = data.element_size()
    stop = start + data.numel()
    first = start // TABLE
    keys = _keys(name, first, -(-stop // TABLE))
    tables = [torch.from_numpy(a.view(np.int64)).to(data.device) for a in _A]
    mask = (1 << (8 * width)) - 1
    sums = [0, 0]
    for block in range(first, -(-stop // TABLE)):
        lo, hi = max(start, block * TABLE), min(stop, (block + 1) * TABLE)
        at = lo - block * TABLE
        wide = data[lo - start : hi - start].view(_SIGNED[width]).to(torch.int64)
        if width < 8:
            wide = wide.bitwise_and_(mask)
        for k in (0, 1):
            part = int((wide * tables[k][at : at + hi - lo]).sum())
            sums[k] += (part & _WORD) * int(keys[k][block - first])
    return Digest(sums[0] & _WORD, sums[1] & _WORD)
