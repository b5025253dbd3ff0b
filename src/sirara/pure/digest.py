"""State digest: two sums modulo 2^64 over every element of every tensor of the training state.

    D_k = sum over tensors and elements j of  bits(j) * A_k[j mod 65536] * C_k(name, j div 65536)        k = 1, 2

bits(j) is the element as an unsigned integer of its own width; A_k is a fixed table, C_k a keyed value, both odd.  The
sum knows no order, so each rank adds what it owns and the sums of ranks add up: the digest is one of the logical state,
whatever the layout.  docs/numerics.md has the definition byte by byte; checkpoint/digest.py takes it of tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.pure.layout import Box, box_runs
from sirara.pure.rng import key_of, words

TABLE = 65_536
"""Elements that share one keyed value, and the length of the fixed tables."""

WORD = (1 << 64) - 1
TABLES = tuple(words(key_of("digest table", k), 0, TABLE) | np.uint64(1) for k in (1, 2))
UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Digest:
    """The two sums; `+` joins the digests of disjoint parts of the state."""

    first: int = 0
    second: int = 0

    def __add__(self, other: "Digest") -> "Digest":
        return Digest((self.first + other.first) & WORD, (self.second + other.second) & WORD)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"

    @staticmethod
    def parse(text: str) -> "Digest":
        return Digest(int(text[:16], 16), int(text[16:], 16))

    def signed(self) -> tuple[int, int]:
        """The sums as signed words, for tensors and arrays of int64."""
        first, second = (v - (1 << 64) if v >> 63 else v for v in (self.first, self.second))
        return first, second

    @staticmethod
    def from_rows(rows_R2: Iterable[Sequence[int]]) -> "Digest":
        """The joint digest of all ranks' `signed` rows."""
        return sum((Digest(*(int(v) & WORD for v in row)) for row in rows_R2), Digest())


def keyed(name: str, first: int, last: int) -> list[NDArray[np.uint64]]:
    """C_1 and C_2 of the table blocks first..last-1."""
    return [words(key_of("digest", k, name), first, last) | np.uint64(1) for k in (1, 2)]


def digest_run(name: str, start: int, bits: NDArray[np.unsignedinteger]) -> Digest:
    """The digest of elements [start, start + len(bits)) of the tensor `name` in C order."""
    stop = start + len(bits)
    first = start // TABLE
    keys = keyed(name, first, -(-stop // TABLE))
    wide = np.empty(TABLE, np.uint64)
    sums = [0, 0]
    for block in range(first, -(-stop // TABLE)):
        lo, hi = max(start, block * TABLE), min(stop, (block + 1) * TABLE)
        n, at = hi - lo, lo - block * TABLE
        np.copyto(wide[:n], bits[lo - start : hi - start])
        for k in (0, 1):
            # The dot product of integers wraps modulo 2^64, as the definition wants.
            sums[k] += int(np.dot(wide[:n], TABLES[k][at : at + n])) * int(keys[k][block - first])
    return Digest(sums[0] & WORD, sums[1] & WORD)


def digest_box(name: str, shape: Sequence[int], box: Box, bits: NDArray[np.unsignedinteger]) -> Digest:
    """The digest of one box of a tensor; bits: its elements in C order, as unsigned integers of their width."""
    runs = box_runs(shape, box)
    if len(runs) <= 1:
        return digest_run(name, runs[0][0], bits) if runs else Digest()
    starts = np.array([start for start, _ in runs], np.int64)
    rows_RN = bits.reshape(len(runs), -1)
    first, last = int(starts[0]) // TABLE, (int(starts[-1]) + rows_RN.shape[1] - 1) // TABLE + 1
    keys = keyed(name, first, last)
    within = np.arange(rows_RN.shape[1], dtype=np.int64)
    step = max(1, TABLE // rows_RN.shape[1])
    sums = [0, 0]
    for low in range(0, len(runs), step):
        at = starts[low : low + step, None] + within
        wide = rows_RN[low : low + step].astype(np.uint64)
        for k in (0, 1):
            factors = TABLES[k][at & (TABLE - 1)] * keys[k][(at >> 16) - first]
            sums[k] += int((wide * factors).sum(dtype=np.uint64))
    return Digest(sums[0] & WORD, sums[1] & WORD)
