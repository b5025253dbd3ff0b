"""Sizes and times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.config.units import format_size, format_time, parse_size_bytes, parse_time_s


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512GiB", 512 << 30),
        ("1.5KiB", 1536),
        ("2 GB", 2_000_000_000),
        ("0B", 0),
        ("7tib", 7 << 40),
        ("0.1GiB", 107_374_182),
        # Ones that a float misses by a byte.
        ("1.1KB", 1100),
        ("4.35KB", 4350),
        # Beyond 2^53, where a float would lose the last bytes.
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_size_is_bytes_exactly(text, size_bytes):
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "time_s"), [("30m", 1800.0), ("1.5h", 5400.0), ("250ms", 0.25), ("2 d", 172_800.0)]
)
def test_time_is_seconds(text, time_s):
    assert parse_time_s(text) == time_s


@pytest.mark.parametrize("text", ["", "GiB", "12", "-1GiB", "1GiBs", "1e3GiB", "0.3B", "1 G i B"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"unit|less than one"):
        parse_size_bytes(text)


@pytest.mark.parametrize("text", ["", "m", "10", "10x", "-1s", "1:30"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="unit"):
        parse_time_s(text)


@given(st.integers(0, 1 << 62))
def test_size_survives_formatting(size_bytes):
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**7).map(lambda ms: ms / 4))
def test_time_survives_formatting(time_s):
    assert parse_time_s(format_time(time_s)) == time_s
