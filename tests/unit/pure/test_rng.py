import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.pure import rng


def test_key_of_is_stable_across_processes_and_versions():
    assert rng.key_of("normal", 1234, "lm_head.weight") == 0xAB4ABC3DE5892E32
    assert rng.key_of() == 0xB4B2797457A0A6E4


def test_key_of_tells_types_and_borders_apart():
    keys = [
        rng.key_of("ab", "c"),
        rng.key_of("a", "bc"),
        rng.key_of("abc"),
        rng.key_of(1),
        rng.key_of("1"),
        rng.key_of(-1),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_splitmix64_equals_the_published_stream_of_seed_1234567():
    stream = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert rng.words(1234567, 0, 5).tolist() == stream
    assert rng.words(1234567, 2, 5).tolist() == stream[2:]


@functools.cache
def _whole() -> np.ndarray:
    return rng.normal_slice(7, "w", 0, 3 * rng.BLOCK)


@given(st.integers(0, 3 * rng.BLOCK), st.integers(0, 3 * rng.BLOCK))
def test_normal_slice_is_a_slice_of_the_whole(a, b):
    start, stop = min(a, b), max(a, b)
    np.testing.assert_array_equal(rng.normal_slice(7, "w", start, stop), _whole()[start:stop])


def test_normals_are_standard_and_differ_by_seed_name_and_block():
    a = _whole()
    assert a.dtype == np.float32
    assert abs(a.mean()) < 0.01 and abs(a.std() - 1) < 0.01
    for other in (
        rng.normal_slice(8, "w", 0, rng.BLOCK),
        rng.normal_slice(7, "v", 0, rng.BLOCK),
        a[rng.BLOCK : 2 * rng.BLOCK],
    ):
        assert abs(np.corrcoef(a[: rng.BLOCK], other)[0, 1]) < 0.02


def test_normals_keep_their_values_between_versions():
    """A resume that has lost its checkpoint, or a comparison of two machines, relies on these very values."""
    drawn = rng.normal_slice(1234, "model.embed_tokens.weight", rng.BLOCK - 1, rng.BLOCK + 1)
    assert [x.hex() for x in drawn.tolist()] == ["0x1.3622f80000000p-2", "0x1.950dc80000000p-1"]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_asked_share_and_streams_differ(p):
    key = rng.DropoutKey(seed=1, step=2, microbatch=3)
    keep = rng.dropout_keep(key.stream(0, "attn"), p, 100_001)
    assert keep.shape == (100_001,)
    assert abs(keep.mean() - (1 - p)) < 0.005
    for other in (
        key.stream(1, "attn"),
        key.stream(0, "mlp"),
        rng.DropoutKey(seed=1, step=2, microbatch=4).stream(0, "attn"),
    ):
        agree = (keep == rng.dropout_keep(other, p, 100_001)).mean()
        assert abs(agree - (p * p + (1 - p) ** 2)) < 0.01


def test_dropout_of_zero_keeps_everything_and_a_prefix_is_a_prefix():
    assert rng.dropout_keep(5, 0.0, 1000).all()
    np.testing.assert_array_equal(rng.dropout_keep(5, 0.3, 1000)[:333], rng.dropout_keep(5, 0.3, 333))
