"""The last line of a file that vouches for the rest of it."""

import json

import pytest
import xxhash

from sirara.errors import CheckpointError
from sirara.pure.sealed import open_sealed, seal

BODY = b'{"format":"x","n":[1,2]'


def test_a_sealed_object_is_json_that_opens_to_its_body():
    raw = seal(BODY)
    assert json.loads(raw) == {"format": "x", "n": [1, 2], "check": xxhash.xxh3_128_hexdigest(BODY)}
    assert open_sealed(raw, where="here", code="SR510") == BODY


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "here is torn: its last line"),
        (seal(BODY)[: len(BODY)], "here is torn: its last line"),
        (seal(BODY)[:-9], "here is torn or damaged: its bytes"),
        (seal(BODY).replace(b"1", b"7", 1), "here is torn or damaged: its bytes"),
    ],
)
def test_what_is_not_whole_is_named_with_the_code_of_the_caller(raw, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        open_sealed(raw, where="here", code="SR550")
    assert caught.value.code == "SR550"
