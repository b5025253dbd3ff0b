"""The words that go before each tensor."""

import pytest
import torch

from sirara.comm.header import DTYPES, WORDS, Tag, letter_words, poison_words, read_header
from sirara.errors import InvariantError

TAG = Tag(True, 3, 17)


def full(words: list[int], number: int = 5, address: int = 99) -> list[int]:
    row = [number, *words]
    return [*row, *([0] * (WORDS - 1 - len(row))), address]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4), (1, 2, 3, 4, 5)])
def test_a_header_says_what_the_tensor_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    words = letter_words(TAG, torch.zeros(shape, dtype=dtype))
    header = read_header(full(words), sender=1, receiver=0)
    assert header == (5, False, TAG, dtype, shape, 99)


def test_poison_says_how_long_its_text_is() -> None:
    header = read_header(full(poison_words(torch.zeros(12, dtype=torch.uint8))), sender=1, receiver=0)
    assert header.poison and header.shape == (12,) and header.dtype == torch.uint8


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).T,
        torch.zeros(1, 1, 1, 1, 1, 1),
        torch.zeros(3, dtype=torch.complex64),
    ],
)
def test_a_tensor_that_a_header_cannot_describe_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(InvariantError, match="gradient of stage 3, microbatch 17 cannot be sent"):
        letter_words(TAG, tensor)


@pytest.mark.parametrize(("word", "value"), [(1, 7), (5, len(DTYPES)), (5, -1), (6, 6)])
def test_other_words_are_no_letter_and_both_ranks_are_named(word: int, value: int) -> None:
    words = full(letter_words(TAG, torch.zeros(2)))
    words[word] = value
    with pytest.raises(InvariantError, match="what rank 4 sent is no letter") as raised:
        read_header(words, sender=4, receiver=2)
    assert "rank 2" in str(raised.value)
