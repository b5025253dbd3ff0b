"""Reed-Solomon over GF(2^8): k blocks of data and m of parity, of which any k give all data back.

    parity_i = sum_j  c_ij * data_j        c_ij = 1 / ((k + i) xor j)       a Cauchy matrix, so every square part of it
                                                                            can be inverted
The field is that of polynomial 0x11d and the matrix that of ISA-L's gf_gen_cauchy1_matrix: both make the same bytes.
Here it is in numpy, the oracle and the fallback; `checkpoint.isal` is the fast one.
Blocks are numbered 0..k-1 (data) and k..k+m-1 (parity). Shapes: k blocks of L bytes are data_kL.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sirara.errors import ConfigError, InvariantError

_POLYNOMIAL = 0x11D


def _field() -> tuple[np.ndarray, np.ndarray]:
    """exp over twice the order of the group (so that sums of two logarithms need no modulo), and log."""
    exp, log = np.zeros(510, np.int64), np.zeros(256, np.int64)
    x = 1
    for i in range(255):
        exp[i] = exp[i + 255] = x
        log[x] = i
        x <<= 1
        x ^= _POLYNOMIAL if x & 0x100 else 0
    return exp, log


_EXP, _LOG = _field()


def _products() -> np.ndarray:
    table = _EXP[_LOG[:, None] + _LOG[None, :]].astype(np.uint8)
    table[0, :] = table[:, 0] = 0
    return table


PRODUCT = _products()  # PRODUCT[a, b] = a * b, uint8 [256, 256]


def inverse(a: int) -> int:
    if not 0 < a < 256:
        raise InvariantError(f"{a} has no inverse in GF(2^8)")
    return int(_EXP[255 - _LOG[a]])


def coefficients(k: int, m: int) -> np.ndarray:
    """c_ij, uint8 [m, k]. Raises ConfigError when k + m is more than the field has elements for."""
    if k < 1 or m < 0 or k + m > 256:
        raise ConfigError(f"{k} + {m} blocks are no Reed-Solomon code", why="k >= 1 and k + m <= 256")
    return np.array([[inverse((k + i) ^ j) for j in range(k)] for i in range(m)], np.uint8).reshape(m, k)


def combine(matrix_nk: np.ndarray, blocks_kL: Sequence[np.ndarray]) -> np.ndarray:
    """matrix times blocks, uint8 [n, L]."""
    length = len(blocks_kL[0]) if len(blocks_kL) else 0
    out = np.zeros((len(matrix_nk), length), np.uint8)
    for i, row in enumerate(matrix_nk):
        for c, block in zip(row, blocks_kL, strict=True):
            add_product(int(c), block, out[i])
    return out


def add_product(c: int, block_L: np.ndarray, target_L: np.ndarray) -> None:
    """target += c * block (which is xor)."""
    if c:
        target_L ^= block_L if c == 1 else PRODUCT[c][block_L]


def encode(data_kL: Sequence[np.ndarray], m: int) -> np.ndarray:
    """The m blocks of parity, uint8 [m, L]."""
    return combine(coefficients(len(data_kL), m), data_kL)


def decode(blocks: Mapping[int, np.ndarray], k: int, m: int) -> np.ndarray:
    """All data, uint8 [k, L], from any k blocks by their number. Raises InvariantError when there are fewer."""
    have = sorted(blocks)[:k]
    return combine(decoding(k, m, have, range(k)), [blocks[i] for i in have])


def decoding(k: int, m: int, have: Sequence[int], want: Sequence[int]) -> np.ndarray:
    """The matrix [len(want), k] that makes the wanted data blocks of the k blocks in `have`."""
    if len(have) != k or len(set(have)) != k or not all(0 <= i < k + m for i in have):
        raise InvariantError(f"{k} different blocks of 0..{k + m - 1} are needed, these are {list(have)}")
    generator = np.concatenate([np.eye(k, dtype=np.uint8), coefficients(k, m)])
    return _inverted(generator[list(have)])[list(want)]


def _inverted(matrix_kk: np.ndarray) -> np.ndarray:
    """By Gauss-Jordan, in the field."""
    k = len(matrix_kk)
    work = np.concatenate([matrix_kk, np.eye(k, dtype=np.uint8)], axis=1)
    for column in range(k):
        pivot = next((r for r in range(column, k) if work[r, column]), None)
        if pivot is None:
            raise InvariantError("a part of a Cauchy matrix cannot be inverted")
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = PRODUCT[inverse(int(work[column, column]))][work[column]]
        for r in range(k):
            if r != column and work[r, column]:
                work[r] ^= PRODUCT[work[r, column]][work[column]]
    return work[:, k:]
