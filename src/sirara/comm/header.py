"""The header that goes before each tensor of comm/mail.py: 16 int64 words.

0        1                2          3      4           5      6     7 - 11   15
number   letter | poison  gradient?  stage  microbatch  dtype  dims  sizes    address in the sender's memory
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sirara.errors import InvariantError

Tensor = torch.Tensor

WORDS = 16
NUMBER, ADDRESS = 0, WORDS - 1
MAX_DIMS = 5
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)

_LETTER, _POISON = 0x53697261_6D61696C, 0x53697261_64656164
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Tag(NamedTuple):
    """What a tensor is: the hidden state that `stage` made of a microbatch, or the gradient of that stage's input."""

    gradient: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return (
            f"{'gradient' if self.gradient else 'output'} of stage {self.stage}, microbatch {self.microbatch}"
        )


class Header(NamedTuple):
    """What a peer sent; `number` counts the letters from that peer to this rank, 1 is the first."""

    number: int
    poison: bool
    tag: Tag
    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int


def letter_words(tag: Tag, tensor: Tensor) -> list[int]:
    """Words 1 to 11 at most.

    Raises:  InvariantError for a tensor that cannot be sent.
    """
    if not tensor.is_contiguous() or tensor.dtype not in _CODES or tensor.dim() > MAX_DIMS:
        raise InvariantError(
            f"{tag} cannot be sent: {tensor.dtype}, {list(tensor.shape)}, strides {list(tensor.stride())}",
            why=f"a letter is contiguous, has at most {MAX_DIMS} dims and one of the dtypes {DTYPES}",
        )
    return [_LETTER, *tag, _CODES[tensor.dtype], tensor.dim(), *tensor.shape]


def poison_words(text: Tensor) -> list[int]:
    """The words before the text (uint8) of a failure."""
    return [_POISON, 0, 0, 0, _CODES[torch.uint8], 1, text.numel()]


def read_header(words: Sequence[int], *, sender: int, receiver: int) -> Header:
    """The header in 16 words.

    Raises:  InvariantError, which names the two ranks, when these words are none.
    """
    number, magic, gradient, stage, microbatch, dtype, dims = words[:7]
    if magic not in (_LETTER, _POISON) or not 0 <= dtype < len(DTYPES) or not 0 <= dims <= MAX_DIMS:
        raise InvariantError(
            f"what rank {sender} sent is no letter", where=f"rank {receiver}", why=f"header {list(words)}"
        )
    tag = Tag(bool(gradient), stage, microbatch)
    return Header(number, magic == _POISON, tag, DTYPES[dtype], tuple(words[7 : 7 + dims]), words[ADDRESS])
