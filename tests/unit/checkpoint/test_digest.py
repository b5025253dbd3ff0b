"""The state digest: equal for any cut, different for any flipped bit, moved element or swapped name."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sirara.checkpoint.digest import Digest, _on_device, digest_of, digest_slice
from sirara.pure.rng import key_of, words

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


def sample(n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n,), generator=generator, dtype=dtype)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)


def by_definition(name: str, data: torch.Tensor) -> Digest:
    """The formula of docs/numerics.md with Python's integers."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[data.element_size()]
    bits = data.view(torch.uint8).numpy().view(unsigned)
    sums = []
    for k in (1, 2):
        a = words(key_of("digest table", k), 0, 65_536)
        c = words(key_of("digest", k, name), 0, -(-len(bits) // 65_536))
        sums.append(
            sum(int(b) * (int(a[j % 65_536]) | 1) * (int(c[j // 65_536]) | 1) for j, b in enumerate(bits))
            % 2**64
        )
    return Digest(*sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_documented_formula(dtype: torch.dtype) -> None:
    data = sample(65_536 + 77, dtype)
    assert digest_slice("w", 0, data) == by_definition("w", data)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.integers(0, 140_000), max_size=4))
def test_any_cut_gives_the_same_digest(dtype: torch.dtype, cuts: list[int]) -> None:
    data = sample(140_000, dtype)
    bounds = sorted({0, 140_000, *cuts})
    parts = [("w", a, data[a:b]) for a, b in itertools.pairwise(bounds)]
    assert digest_of(reversed(parts)) == digest_slice("w", 0, data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_version_equals_the_host_version(dtype: torch.dtype) -> None:
    data = sample(70_001, dtype)
    assert _on_device("w", 12_345, data) == digest_slice("w", 12_345, data)


def test_a_flipped_bit_a_swap_and_another_name_are_seen() -> None:
    data = sample(1000, torch.float32)
    digest = digest_slice("w", 0, data)
    bits = data.clone().view(torch.int32)
    bits[500] ^= 1
    swapped = data.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    others = [bits.view(torch.float32), swapped]
    assert all(digest_slice("w", 0, other) != digest for other in others)
    assert digest_slice("v", 0, data) != digest
    assert digest_slice("w", 1, data) != digest


def test_negative_zero_is_not_zero() -> None:
    assert digest_slice("w", 0, torch.tensor([-0.0])) != digest_slice("w", 0, torch.tensor([0.0]))


def test_ranks_add_up_through_signed_words_and_text() -> None:
    a, b = digest_slice("a", 0, sample(99, torch.float32)), digest_slice("b", 0, sample(98, torch.float32))
    assert Digest.from_rows([a.signed(), b.signed()]) == a + b
    assert Digest.parse(str(a)) == a
