"""Reed-Solomon: the oracle in numpy against the definition of the field, ISA-L against the oracle."""

import ctypes
import importlib.metadata
from itertools import combinations

import numpy as np
import pytest

from sirara.checkpoint import isal
from sirara.errors import ConfigError, InvariantError
from sirara.pure import erasure

CODES = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (3, 3), (6, 2), (4, 4), (8, 4)]
LENGTHS = [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 1000, 4096, 65537]


def blocks(k: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (k, length), dtype=np.uint8)


def product(a: int, b: int) -> int:
    """Multiplication of polynomials over GF(2), reduced by x^8 + x^4 + x^3 + x^2 + 1."""
    out = 0
    for bit in range(8):
        out ^= (a << bit) if b >> bit & 1 else 0
    for bit in range(15, 7, -1):
        out ^= (0x11D << (bit - 8)) if out >> bit & 1 else 0
    return out


@pytest.fixture(params=["isal", "numpy"])
def either(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(isal, "_library", lambda: None)
    return request.param


def test_the_table_of_products_is_that_of_the_field():
    assert all(erasure.PRODUCT[a, b] == product(a, b) for a in range(256) for b in range(256))
    assert all(product(a, erasure.inverse(a)) == 1 for a in range(1, 256))


def test_the_matrix_is_that_of_isal():
    library = isal._library()
    assert library is not None, "pyeclib is a dependency of the tests"
    for k, m in CODES:
        raw = (ctypes.c_ubyte * ((k + m) * k))()
        library.gf_gen_cauchy1_matrix(raw, k + m, k)
        theirs = np.frombuffer(raw, np.uint8).reshape(k + m, k)
        assert (theirs[:k] == np.eye(k)).all() and (theirs[k:] == erasure.coefficients(k, m)).all()


@pytest.mark.parametrize(("k", "m"), CODES)
def test_any_k_blocks_give_the_data_back(k, m):
    data = blocks(k, 37, seed=k)
    every = [*data, *erasure.encode(data, m)]
    for have in combinations(range(k + m), k):
        assert (erasure.decode({i: every[i] for i in have}, k, m) == data).all(), have


@pytest.mark.parametrize(("k", "m"), CODES)
def test_isal_and_the_oracle_make_the_same_bytes_at_every_length(either, k, m):
    for length in LENGTHS:
        data = blocks(k, length, seed=length)
        want = erasure.encode(data, m)
        made = np.full((m, length), 7, np.uint8)
        isal.combine(erasure.coefficients(k, m), list(data), list(made))
        assert (made == want).all(), length
        added = np.zeros((m, length), np.uint8)
        for i, j in np.random.default_rng(k).permutation([(i, j) for i in range(m) for j in range(k)]):
            isal.encode_update(int(erasure.coefficients(k, m)[i, j]), data[j], added[i])
        assert (added == want).all(), length
        lost = list(range(min(m, k)))
        left = {i: b for i, b in enumerate([*data, *want]) if i not in lost}
        back = np.zeros((len(lost), length), np.uint8)
        have = sorted(left)[:k]
        isal.combine(erasure.decoding(k, m, have, lost), [left[i] for i in have], list(back))
        assert (back == data[lost]).all(), length


def test_stretches_that_begin_anywhere_are_taken(either):
    raw, out = blocks(1, 3000)[0], np.zeros((2, 3000), np.uint8)
    data = [raw[1:700], raw[703:1402], raw[1409:2108]]
    targets = [memoryview(out[0])[3:702], memoryview(out[1])[5:704]]
    isal.combine(erasure.coefficients(3, 2), data, targets)
    want = erasure.encode(data, 2)
    assert (out[0][3:702] == want[0]).all() and (out[1][5:704] == want[1]).all()
    assert not out[0][:3].any() and not out[0][702:].any() and not out[1][704:].any()


def test_parity_of_one_block_is_xor_of_all_up_to_coefficients():
    data = blocks(3, 50)
    c = erasure.coefficients(3, 1)[0]
    want = erasure.PRODUCT[c[0]][data[0]] ^ erasure.PRODUCT[c[1]][data[1]] ^ erasure.PRODUCT[c[2]][data[2]]
    assert (erasure.encode(data, 1)[0] == want).all()


def test_what_is_no_code_is_refused(either):
    with pytest.raises(ConfigError, match="250 \\+ 7"):
        erasure.coefficients(250, 7)
    with pytest.raises(InvariantError, match="4 different blocks"):
        erasure.decode(dict(enumerate(blocks(3, 5))), 4, 2)
    with pytest.raises(InvariantError):
        isal.combine(erasure.coefficients(2, 1), [blocks(1, 8)[0], blocks(1, 9)[0]], [np.zeros(8, np.uint8)])
    with pytest.raises(InvariantError, match="read-only"):
        isal.combine(erasure.coefficients(1, 1), [blocks(1, 8)[0]], [memoryview(bytes(8))])


def test_pyeclib_encodes_the_same_parity():
    """An independent user of the library: its fragments carry our parity behind their headers."""
    driver = pytest.importorskip("pyeclib.ec_iface")
    code = driver.ECDriver(k=4, m=2, ec_type="isa_l_rs_cauchy")
    raw = blocks(1, 4 * 1024, seed=3)[0]
    fragments = code.encode(raw.tobytes())
    head = len(fragments[0]) - 1024
    data = [np.frombuffer(f[head:], np.uint8) for f in fragments[:4]]
    assert (np.concatenate(data) == raw).all(), importlib.metadata.version("pyeclib")
    for i, want in enumerate(erasure.encode(data, 2)):
        assert fragments[4 + i][head:] == want.tobytes()
