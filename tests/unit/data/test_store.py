"""The token store says exactly what was written, or names the piece that is not as written."""

import json

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.data import pieces as pieces_module
from sirara.data.pieces import MappedFiles, PieceHasher, StoredFile, hash_bytes
from sirara.data.store import (
    DOCUMENTS,
    StoreIndex,
    TokenStore,
    token_dtype,
    write_index,
    write_store,
)
from sirara.errors import CorruptDataError, DataError, Exit

EOT = 99


def documents(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 90, size=length) for length in lengths]


def stream(docs):
    return np.concatenate([np.append(doc, EOT) for doc in docs])


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def test_any_slice_is_that_of_the_stream(tmp_path):
    docs = documents(5, 1, 80, 3)
    store = write_store(tmp_path / "s", docs, vocab=100, eot=EOT)
    whole = stream(docs)
    assert store.tokens == len(whole)
    assert store.documents == 4
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1, 7):
            found = store.read(start, stop)
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, whole[start:stop])


def test_slices_run_over_many_files_without_a_seam(tmp_path):
    docs = documents(7, 7, 7, 7)
    single = write_store(tmp_path / "one", docs, vocab=100, eot=EOT)
    folder = tmp_path / "many"
    folder.mkdir()
    whole, files = stream(docs).astype("<u2"), []
    for number, cut in enumerate(np.array_split(whole, [3, 4, 20, 25])):
        (folder / f"tokens-{number:05d}.bin").write_bytes(cut.tobytes())
        files.append(hash_bytes(f"tokens-{number:05d}.bin", cut.tobytes()))
    offsets = (tmp_path / "one" / DOCUMENTS).read_bytes()
    (folder / DOCUMENTS).write_bytes(offsets)
    index = single.index
    write_index(
        folder,
        StoreIndex(
            dtype="uint16",
            tokens=index.tokens,
            documents=4,
            vocab=100,
            eot=EOT,
            tokenizer="",
            files=tuple(files),
            offsets=index.offsets,
        ),
    )
    # With room for two maps of five files, files are mapped and dropped again.
    many = TokenStore.open(folder, maps=MappedFiles(limit=2))
    for start in range(len(whole)):
        np.testing.assert_array_equal(many.read(start, len(whole)), whole[start:])
        np.testing.assert_array_equal(many.read(start, start + 1), whole[start : start + 1])


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_document_ids_are_those_of_brute_force(tmp_path_factory, lengths, data):
    docs = documents(*lengths)
    store = write_store(tmp_path_factory.mktemp("s") / "s", docs, vocab=100, eot=EOT)
    ids = np.repeat(np.arange(len(docs)), [len(doc) + 1 for doc in docs])
    start = data.draw(st.integers(0, store.tokens))
    stop = data.draw(st.integers(start, store.tokens))
    np.testing.assert_array_equal(store.document_ids(start, stop), ids[start:stop])


@pytest.mark.parametrize(("vocab", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(tmp_path, vocab, dtype):
    assert token_dtype(vocab) == dtype
    store = write_store(tmp_path / "s", [np.array([vocab - 1, 0])], vocab=vocab, eot=1)
    assert store.read(0, 3).tolist() == [vocab - 1, 0, 1]


def test_tokens_beyond_two_to_the_32_are_found(tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    tokens, at = 2**32 + 5000, 2**32 + 1234
    with open(folder / "tokens-00000.bin", "wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * at)
        file.write(np.array([11, 22, 33], dtype="<u2").tobytes())
    offsets = np.array([0, at + 1, tokens], dtype="<i8").tobytes()
    (folder / DOCUMENTS).write_bytes(offsets)
    pieces = -(-2 * tokens // pieces_module.PIECE_BYTES)
    write_index(
        folder,
        StoreIndex(
            dtype="uint16",
            tokens=tokens,
            documents=2,
            vocab=100,
            eot=EOT,
            tokenizer="",
            files=(StoredFile(name="tokens-00000.bin", bytes=2 * tokens, hashes="0" * 32 * pieces),),
            offsets=hash_bytes(DOCUMENTS, offsets),
        ),
    )
    store = TokenStore.open(folder)
    assert store.tokens == tokens
    assert store.read(at - 1, at + 4).tolist() == [0, 11, 22, 33, 0]
    assert store.document_ids(at - 1, at + 2).tolist() == [0, 0, 1]
    assert store.read(tokens - 1, tokens).tolist() == [0]


@given(cuts=st.lists(st.integers(1, 700), max_size=12))
@settings(max_examples=25)
def test_hashes_are_those_of_whole_pieces_however_the_file_was_written(cuts):
    raw = np.random.default_rng(1).bytes(sum(cuts))
    hasher, at = PieceHasher(), 0
    original, pieces_module.PIECE_BYTES = pieces_module.PIECE_BYTES, 256
    try:
        for cut in cuts:
            hasher.update(raw[at : at + cut])
            at += cut
        stored = hasher.stored("f")
    finally:
        pieces_module.PIECE_BYTES = original
    pieces = [raw[low : low + 256] for low in range(0, len(raw), 256)]
    assert stored.bytes == len(raw)
    assert stored.hashes == "".join(xxhash.xxh3_128_hexdigest(piece) for piece in pieces)


def test_a_sound_store_has_no_faults(tmp_path):
    store = write_store(tmp_path / "s", documents(50, 60), vocab=100, eot=EOT, tokenizer=b"{}")
    found = list(store.faults())
    assert sum(found) == 2 * 112 + 8 * 3 + 2


@pytest.mark.parametrize("name", ["tokens-00000.bin", DOCUMENTS, "tokenizer.json"])
def test_a_flipped_bit_is_found_and_named(tmp_path, name):
    store = write_store(tmp_path / "s", documents(50, 60), vocab=100, eot=EOT, tokenizer=b"{ }")
    flip(tmp_path / "s" / name, 1)
    faults = [found for found in store.faults() if isinstance(found, CorruptDataError)]
    assert name in faults[0].what
    assert "piece 0" in faults[0].what
    assert faults[0].exit_code == Exit.CORRUPT


def test_the_faulty_piece_of_a_large_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 64)
    store = write_store(tmp_path / "s", documents(200), vocab=100, eot=EOT)
    flip(tmp_path / "s" / "tokens-00000.bin", 2 * 64 + 3)
    faults = [found for found in store.faults() if isinstance(found, CorruptDataError)]
    assert [fault.what for fault in faults] == [
        f"piece 2 of {tmp_path / 's' / 'tokens-00000.bin'} is not what was written"
    ]


@pytest.mark.parametrize("name", ["tokens-00000.bin", DOCUMENTS])
def test_a_file_cut_short_or_missing_stops_the_opening(tmp_path, name):
    write_store(tmp_path / "s", documents(50), vocab=100, eot=EOT)
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CorruptDataError, match=rf"{name} has \d+ bytes instead of"):
        TokenStore.open(tmp_path / "s")
    path.unlink()
    with pytest.raises(CorruptDataError, match="is missing"):
        TokenStore.open(tmp_path / "s")


def test_check_goes_on_after_a_missing_file(tmp_path):
    write_store(tmp_path / "s", documents(50), vocab=100, eot=EOT)
    (tmp_path / "s" / "tokens-00000.bin").unlink()
    found = list(TokenStore.unchecked(tmp_path / "s").faults())
    assert isinstance(found[0], CorruptDataError)
    assert found[1:] == [16]


def test_an_id_beyond_the_vocabulary_is_an_error_and_no_wild_index(tmp_path):
    store = write_store(tmp_path / "s", documents(50), vocab=100, eot=EOT)
    flip(tmp_path / "s" / "tokens-00000.bin", 41)
    with pytest.raises(CorruptDataError, match=r"token 20 .* beyond its vocabulary of 100"):
        store.read(10, 30)


def test_an_edited_index_is_noticed(tmp_path):
    write_store(tmp_path / "s", documents(50), vocab=100, eot=EOT)
    index = tmp_path / "s" / "index.json"
    parsed = json.loads(index.read_text())
    index.write_text(json.dumps({**parsed, "eot": 3}))
    with pytest.raises(CorruptDataError, match="changed after it was written"):
        TokenStore.open(tmp_path / "s")
    index.write_text(index.read_text()[:40])
    with pytest.raises(CorruptDataError, match="is not the index"):
        TokenStore.open(tmp_path / "s")


def test_what_is_no_store_is_refused_with_the_way_to_make_one(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(DataError, match="is no token store") as caught:
            TokenStore.open(path)
        assert not isinstance(caught.value, CorruptDataError)
        assert "data build" in str(caught.value)


def test_the_digest_names_the_content_and_not_the_place(tmp_path):
    one = write_store(tmp_path / "a", documents(50), vocab=100, eot=EOT)
    same = write_store(tmp_path / "b", documents(50), vocab=100, eot=EOT)
    other = write_store(tmp_path / "c", documents(50, seed=1), vocab=100, eot=EOT)
    cut = write_store(tmp_path / "d", documents(20), vocab=100, eot=EOT)
    assert one.index.digest == same.index.digest
    assert len({one.index.digest, other.index.digest, cut.index.digest}) == 3


def test_ids_outside_the_vocabulary_are_not_written(tmp_path):
    with pytest.raises(DataError, match="document 1 has token ids"):
        write_store(tmp_path / "s", [np.array([1]), np.array([100])], vocab=100, eot=EOT)
    assert list(tmp_path.iterdir()) == []
