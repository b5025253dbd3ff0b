import json
import time
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from sirara.errors import CheckpointError, InvariantError
from sirara.pure.layout import Box
from sirara.pure.manifest import FileEntry, Pieces, TensorEntry, parse_manifest
from tests.manifests import grid_manifest


def rewritten(raw: bytes, change) -> bytes:
    """The manifest with a change of its fields, sealed again, in another writer's spacing."""
    head = json.loads(raw)
    del head["check"]
    change(head)
    body = json.dumps(head)[:-1].encode()
    return body + b'\n,"check":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def test_a_manifest_comes_back_as_it_was_written():
    m = grid_manifest(40)
    back = parse_manifest(m.to_bytes(), where="here")
    assert back.record == m.record and back.aliases == m.aliases and back.layout == m.layout
    assert back.files == m.files and back.tensors == m.tensors
    assert [back.box(i) for i in range(40)] == [m.box(i) for i in range(40)]
    assert back.box(1) == Box((64, 0), (64, 4)) and back.pieces.hash(39) == m.pieces.hash(39)
    assert back.to_bytes() == m.to_bytes()


def test_it_is_plain_json_and_other_spacing_reads_the_same():
    raw = grid_manifest(40).to_bytes()
    assert json.loads(raw)["pieces"]["length"] == [1024] * 40
    assert parse_manifest(rewritten(raw, lambda head: None), where="here").to_bytes() == raw


def test_any_flipped_bit_or_cut_is_noticed():
    raw = grid_manifest(20, tensors=2).to_bytes()
    for i in range(len(raw) - 1):
        bad = raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :]
        with pytest.raises(CheckpointError, match=r"here is (torn|damaged)"):
            parse_manifest(bad, where="here")
    for i in range(0, len(raw) - 1, 7):
        with pytest.raises(CheckpointError, match=r"here is (torn|damaged)"):
            parse_manifest(raw[:i], where="here")


def scalar_pieces(head):
    head["tensors"]["shape"][0] = []


CHANGES = {
    "another version": (lambda h: h.update(version=2), "version 2"),
    "a missing field": (lambda h: h.pop("record"), "'record'"),
    "columns of different lengths": (lambda h: h["pieces"]["file"].pop(), "differ in length"),
    "a path for a file": (lambda h: h["files"]["name"].__setitem__(0, "../x"), "not a plain name"),
    "an unknown dtype": (lambda h: h["tensors"]["dtype"].__setitem__(0, "F7"), "dtype 'F7'"),
    "an unlisted tensor": (lambda h: h["pieces"]["tensor"].__setitem__(0, 99), "tensor that is not listed"),
    "an unlisted file": (lambda h: h["pieces"]["file"].__setitem__(0, -1), "file that is not listed"),
    "boxes of other dimensions": (scalar_pieces, "dimensions of their tensors"),
    "a wrong length": (lambda h: h["pieces"]["length"].__setitem__(0, 1), "length is not that of its box"),
    "a piece beyond its file": (lambda h: h["files"]["bytes"].__setitem__(0, 5000), "beyond the end"),
    "a hole in a tensor": (lambda h: h["tensors"]["shape"].__setitem__(0, [999, 4]), "hold 5120 of its 3996"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_contradicts_itself_is_refused(name):
    change, message = CHANGES[name]
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(rewritten(grid_manifest(200).to_bytes(), change), where="here")


def test_scalars_and_empty_tensors_have_their_place():
    m = replace(
        grid_manifest(0, tensors=1),
        tensors=tuple(
            TensorEntry(name=n, dtype="F32", shape=s) for n, s in [("s", ()), ("e", (0, 3)), ("v", (2,))]
        ),
        files=(FileEntry(name="f", size=5000, head=4096, hash="0" * 32),),
        pieces=Pieces(
            tensor=np.array([0, 2]),
            offset=np.array([0]),
            size=np.array([2]),
            file=np.array([0, 0]),
            position=np.array([4096, 4100]),
            length=np.array([4, 8]),
            hashes=bytes(32),
        ),
    )
    back = parse_manifest(m.to_bytes(), where="here")
    assert back.box(0) == Box((), ()) and back.box(1) == Box((0,), (2,))
    assert len(back.pieces_of(1)) == 0 and back.pieces_of(2).tolist() == [1]


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"x": {1, 2}}], ids=["nan", "set"])
def test_a_record_that_is_not_plain_json_is_refused_when_it_is_written(bad):
    with pytest.raises(InvariantError, match="record of step 12 is not plain JSON"):
        grid_manifest(10, record=bad).to_bytes()


@pytest.mark.parametrize("n, limit_s", [(100_000, 0.3), pytest.param(1_000_000, 1.0, marks=pytest.mark.long)])
def test_a_large_manifest_opens_quickly(n, limit_s):
    raw = grid_manifest(n, tensors=1000).to_bytes()
    took = []
    for _ in range(3):
        began = time.process_time()
        assert len(parse_manifest(raw, where="here").pieces) == n
        took.append(time.process_time() - began)
    assert min(took) < limit_s, f"{min(took):.2f} s for {n} pieces"
