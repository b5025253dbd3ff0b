"""Batches are the order of samples made real: the same for every asker, resumed exactly, ready in time."""

import json
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.config.schema import DataConfig
from sirara.data import batches as batches_module
from sirara.data.batches import NO_TARGET, Batches, EvalBatches
from sirara.data.pieces import MAPPED_FILES
from sirara.data.store import write_store
from sirara.data.tokenizer import TextTokenizer, byte_tokenizer, tokenizer_digest
from sirara.errors import CheckpointError, ConfigError, CorruptDataError, DataError

EOT = 256
MICRO = 4
SEQ = 8


def make_store(folder, tokens, seed=0, documents=3, vocab=257):
    """A store of `tokens` random tokens, end-of-text tokens included."""
    rng = np.random.default_rng(seed)
    lengths = [len(part) - 1 for part in np.array_split(np.arange(tokens), documents)]
    return write_store(
        folder, [rng.integers(0, 256, size=length) for length in lengths], vocab=vocab, eot=EOT
    )


def config(*paths, weights=None, seq_len=SEQ, **more):
    weights = weights or [1.0] * len(paths)
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    return DataConfig.model_validate({"train": sources, "seq_len": seq_len, **more})


def batches_of(*paths, weights=None, seed=1, seq_len=SEQ, **options):
    return Batches(config(*paths, weights=weights, seq_len=seq_len), seed=seed, micro_batch=MICRO, **options)


def rows(batch):
    return [
        (tokens, targets)
        for tokens, targets in zip(batch.tokens_BL.tolist(), batch.targets_BL.tolist(), strict=True)
    ]


def equal(one, other):
    return torch.equal(one.tokens_BL, other.tokens_BL) and torch.equal(one.targets_BL, other.targets_BL)


@pytest.fixture
def two(tmp_path):
    make_store(tmp_path / "a", 200)
    make_store(tmp_path / "b", 77, seed=1)
    return tmp_path / "a", tmp_path / "b"


def test_an_epoch_has_every_token_but_the_first_as_a_target_once_with_the_token_before_it(tmp_path):
    store = make_store(tmp_path / "a", 203)
    stream = store.read(0, 203)
    with batches_of(tmp_path / "a") as batches:
        samples = batches.order.samples_per_epoch(0)
        found = [row for i in range(-(-samples // MICRO)) for row in rows(batches.microbatch(0, i))][:samples]
        pairs = sorted(
            (token, target)
            for tokens, targets in found
            for token, target in zip(tokens, targets, strict=True)
            if target != NO_TARGET
        )
        assert pairs == sorted(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
        assert batches.valid_targets(0, samples) == 202


def test_tokens_targets_and_positions_have_the_promised_form(two):
    with batches_of(*two) as batches:
        batch = batches.microbatch(0, 2)
    for tensor in (batch.tokens_BL, batch.targets_BL, batch.positions_BL):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (MICRO, SEQ)
        assert tensor.is_contiguous()
    assert batch.positions_BL.tolist() == [list(range(SEQ))] * MICRO
    assert batch.documents_BL is None


def test_padding_is_no_target_and_a_known_token(tmp_path):
    make_store(tmp_path / "a", 4, documents=1)
    with batches_of(tmp_path / "a") as batches:
        batch = batches.microbatch(0, 0)
    assert (batch.targets_BL[:, :3] >= 0).all()
    assert (batch.targets_BL[:, 3:] == NO_TARGET).all()
    assert (batch.tokens_BL[:, 3:] == 0).all()


def test_document_ids_come_when_asked_for(tmp_path):
    store = make_store(tmp_path / "a", 60, documents=5)
    with batches_of(tmp_path / "a", documents=True) as batches:
        batch = batches.microbatch(0, 0)
        located = batches.order.locate(0, MICRO)
    for row, index in enumerate(located.index.tolist()):
        start, count = batches.order.span(0, index)
        assert batch.documents_BL[row, :count].tolist() == store.document_ids(start, start + count).tolist()
        assert (batch.documents_BL[row, count:] == -1).all()


def test_microbatches_are_the_same_prefetched_or_not_in_any_order(two):
    with batches_of(*two) as ahead, batches_of(*two) as alone:
        ahead.prefetch(0, range(8))
        ahead.prefetch(32, range(8))
        for first, i in [(0, 5), (0, 1), (0, 7), (32, 6), (32, 0), (32, 11)]:
            assert equal(ahead.microbatch(first, i), alone.microbatch(first, i))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_the_same_global_batch(two, world):
    with batches_of(*two) as alone:
        whole = [alone.microbatch(48, i) for i in range(12)]
    found = {}
    for rank in range(world):
        with batches_of(*two) as batches:
            mine = range(rank, 12, world)
            batches.prefetch(48, mine)
            found.update({i: batches.microbatch(48, i) for i in mine})
    assert all(equal(found[i], whole[i]) for i in range(12))


def test_valid_targets_are_those_of_the_batches(two):
    with batches_of(*two) as batches:
        for first in (0, 16, 160):
            counted = sum(int((batches.microbatch(first, i).targets_BL != NO_TARGET).sum()) for i in range(8))
            assert batches.valid_targets(first, 8 * MICRO) == counted


@settings(max_examples=15, deadline=None)
@given(first=st.integers(0, 500))
def test_a_run_goes_on_anywhere_with_the_same_samples(tmp_path_factory, first):
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder / "a", 200)
    make_store(folder / "b", 77, seed=1)
    paths = (folder / "a", folder / "b")
    with batches_of(*paths) as batches:
        state = json.loads(json.dumps(batches.state_at(first)))
        digest = batches.ids_digest(first, 64)
        following = [batches.microbatch(first, i) for i in range(4)]
    with batches_of(*paths, state=state, first=first) as resumed:
        assert resumed.change == ""
        assert resumed.ids_digest(first, 64) == digest
        assert resumed.state_at(first) == state
        assert all(equal(resumed.microbatch(first, i), following[i]) for i in range(4))


def test_reading_ahead_does_not_change_what_a_checkpoint_stores(two):
    with batches_of(*two) as batches:
        before = batches.state_at(16)
        batches.prefetch(16, range(20))
        batches.microbatch(16, 0)
        assert batches.state_at(16) == before


def test_the_ids_digest_tells_samples_seeds_and_sources_apart(two):
    with batches_of(*two) as one, batches_of(*two, seed=2) as other, batches_of(two[0]) as alone:
        digests = [one.ids_digest(0, 8), one.ids_digest(8, 8), other.ids_digest(0, 8), alone.ids_digest(0, 8)]
        assert len(set(digests)) == 4
        assert one.ids_digest(0, 8) == digests[0]


def test_a_changed_blend_opens_a_segment_and_no_sample_of_an_epoch_repeats(two):
    with batches_of(*two, weights=[0.5, 0.5]) as batches:
        state = batches.state_at(10)
        past = batches.order.locate(0, 10)
    with batches_of(*two, weights=[0.9, 0.1], state=state, first=10) as changed:
        assert changed.change == f"from sample 10 on: {two[0]} 0.5 -> 0.9, {two[1]} 0.5 -> 0.1"
        assert changed.digest != state["digest"]
        future = changed.order.locate(10, 400)
        for source in (0, 1):
            size = changed.order.samples_per_epoch(source)
            indices = [
                index
                for part in (past, future)
                for k, index in zip(part.source.tolist(), part.index.tolist(), strict=True)
                if k == source
            ]
            assert sorted(indices[:size]) == list(range(size))
        again = changed.state_at(30)
    with batches_of(*two, weights=[0.9, 0.1], state=again, first=30) as resumed:
        assert resumed.change == ""
        assert resumed.ids_digest(30, 50) == changed.ids_digest(30, 50)
        assert len(again["segments"]) == 2


def test_sources_come_and_go_and_go_on_where_they_were(two, tmp_path):
    make_store(tmp_path / "c", 90, seed=5)
    with batches_of(*two) as batches:
        state = batches.state_at(10)
    with batches_of(two[0], tmp_path / "c", state=state, first=10) as without:
        assert f"{two[1]} 0.5 -> 0" in without.change
        assert f"{tmp_path / 'c'} 0 -> 0.5" in without.change
        middle = without.state_at(20)
    with batches_of(two[1], two[0], state=middle, first=20) as back:
        assert back.order.cursors(20) == (10, 5, 5)
        assert {back.order.sources[k].name for k in back.order.locate(20, 9).source} == {str(p) for p in two}


def test_a_store_that_moved_is_the_same_source(two, tmp_path):
    with batches_of(*two) as batches:
        state = batches.state_at(12)
        digest = batches.ids_digest(12, 20)
    two[0].rename(tmp_path / "elsewhere")
    with batches_of(tmp_path / "elsewhere", two[1], state=state, first=12) as moved:
        assert moved.change == ""
        assert moved.ids_digest(12, 20) == digest


def test_the_order_of_sources_in_the_file_does_not_matter_for_a_run_that_goes_on(two):
    with batches_of(*two, weights=[0.3, 0.7]) as batches:
        state = batches.state_at(12)
    with batches_of(*reversed(two), weights=[0.7, 0.3], state=state, first=12) as resumed:
        assert resumed.change == ""
        assert equal(resumed.microbatch(12, 0), batches.microbatch(12, 0))


def test_a_state_of_other_data_is_refused_and_the_difference_named(two, tmp_path):
    with batches_of(*two) as batches:
        state = batches.state_at(12)
    with pytest.raises(ConfigError, match="seed is 2, it was 1"):
        batches_of(*two, seed=2, state=state, first=12)
    with pytest.raises(ConfigError, match=r"data\.seq_len is 16, it was 8"):
        batches_of(*two, seq_len=16, state=state, first=12)
    with pytest.raises(CheckpointError, match="that of sample 12, the counters stand at 13"):
        batches_of(*two, state=state, first=13)
    two[1].rename(tmp_path / "old")
    make_store(two[1], 80, seed=9)
    with pytest.raises(ConfigError, match="b has other content: 80 tokens, it had 77"):
        batches_of(*two, state=state, first=12)


def test_a_state_of_another_tokenizer_is_refused(tmp_path):
    for name, digest in (("a", "t1"), ("b", "t2")):
        write_store(tmp_path / name, [np.arange(50)], vocab=257, eot=EOT, digest=digest)
    with batches_of(tmp_path / "a") as batches:
        state = batches.state_at(0)
    with pytest.raises(ConfigError, match="the tokenizer is t2, it was t1"):
        batches_of(tmp_path / "b", state=state, first=0)
    with pytest.raises(ConfigError, match="made by another tokenizer"):
        batches_of(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="made by another tokenizer"):
        given = config(tmp_path / "a", eval=[{"path": str(tmp_path / "b")}])
        Batches(given, seed=1, micro_batch=1)


def test_a_damaged_state_is_refused(two):
    with batches_of(*two) as batches:
        state = batches.state_at(12)
    state["cursors"][0] += 1
    with pytest.raises(CheckpointError, match="contradicts itself"):
        batches_of(*two, state=state, first=12)
    del state["segments"]
    with pytest.raises(CheckpointError, match="lacks"):
        batches_of(*two, state=state, first=12)


def test_data_tokenizer_must_be_the_one_of_the_stores(tmp_path):
    raw = byte_tokenizer()
    (tmp_path / "tokenizer.json").write_bytes(raw)
    digest = tokenizer_digest(raw, "bytes")
    write_store(tmp_path / "a", [np.arange(50)], vocab=257, eot=EOT, tokenizer=raw, digest=digest)
    given = config(tmp_path / "a", tokenizer=str(tmp_path / "tokenizer.json"))
    assert Batches.tokenizer_of(given) == (tmp_path / "tokenizer.json", 257)
    assert Batches.tokenizer_of(config(tmp_path / "a")) == (tmp_path / "a" / "tokenizer.json", 257)
    Batches(given, seed=1, micro_batch=1).close()
    other = json.loads(raw)
    other["added_tokens"][0]["content"] = "<end>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        Batches(given, seed=1, micro_batch=1)
    assert TextTokenizer.load(tmp_path, end_token="<end>").digest in caught.value.why


def test_a_vocabulary_larger_than_the_models_is_refused(two):
    with pytest.raises(ConfigError, match="has 257 tokens, the model only 256"):
        batches_of(*two, vocab=256)
    with pytest.raises(ConfigError, match="has 257 tokens, the model only 100"):
        EvalBatches(two[0], seq_len=SEQ, micro_batch=MICRO, vocab=100)


def test_a_blend_of_more_stores_than_files_may_be_open_is_read(tmp_path):
    import resource

    paths = [tmp_path / f"s{n}" for n in range(MAPPED_FILES + 60)]
    for n, path in enumerate(paths):
        make_store(path, 20 + n % 7, seed=n, documents=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAPPED_FILES + 30  # descriptors that are free: fewer than there are stores
    opened = {int(name) for name in os.listdir("/proc/self/fd")}
    most = next(n for n in range(limits[1]) if n - sum(number < n for number in opened) == room)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with batches_of(*paths) as batches:
            seen = set()
            for i in range(len(paths) // 2):
                batches.microbatch(0, i)
                seen.update(batches.order.locate(i * MICRO, MICRO).source.tolist())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen == set(range(len(paths)))


def test_a_store_without_a_target_is_refused(tmp_path):
    make_store(tmp_path / "a", 1, documents=1)
    with pytest.raises(DataError, match="nothing to predict"):
        batches_of(tmp_path / "a")
    with pytest.raises(DataError, match="nothing to predict"):
        EvalBatches(tmp_path / "a", seq_len=SEQ, micro_batch=MICRO)


def test_an_error_of_reading_ahead_comes_out_where_the_batch_is_asked_for(two):
    with batches_of(two[0]) as batches:
        (two[0] / "tokens-00000.bin").unlink()
        batches.prefetch(0, [0])
        with pytest.raises(CorruptDataError, match="is missing"):
            batches.microbatch(0, 0)


def test_reading_ahead_is_bounded(two, monkeypatch):
    monkeypatch.setattr(batches_module, "AHEAD_BYTES", 3 * MICRO * SEQ * 32)
    with batches_of(*two) as batches:
        batches.prefetch(0, range(100))
        assert len(batches._ahead._ready) == 3
        batches.microbatch(0, 0)
        assert sorted(batches._ahead._ready) == [(0, 1), (0, 2), (0, 3)]


def test_batches_left_behind_are_forgotten(two):
    with batches_of(*two) as batches:
        batches.prefetch(0, range(6))
        batches.prefetch(24, range(6))
        batches.microbatch(24, 0)
        assert all(first == 24 for first, _ in batches._ahead._ready)


def test_closing_ends_the_thread_even_with_much_to_read(two):
    before = set(threading.enumerate())
    batches = batches_of(*two)
    batches.prefetch(0, range(500))
    batches.close()
    assert set(threading.enumerate()) == before


def test_waiting_is_counted_once(two):
    with batches_of(*two) as batches:
        batches.microbatch(0, 0)
        assert batches.take_waited_s() > 0
        assert batches.take_waited_s() == 0


@pytest.mark.parametrize("tokens", [2, 9, 10, 200, 203])
def test_evaluation_has_each_target_in_exactly_one_batch(tmp_path, tokens):
    store = make_store(tmp_path / "a", tokens, documents=1)
    stream = store.read(0, tokens).tolist()
    walk = EvalBatches(tmp_path / "a", seq_len=SEQ, micro_batch=3)
    found = [row for i in range(len(walk)) for row in rows(walk.batch(i))]
    targets = [target for _, targets in found for target in targets if target != NO_TARGET]
    assert targets == stream[1:]
    assert walk.targets == tokens - 1
    assert {walk.batch(i).tokens_BL.shape for i in range(len(walk))} == {(3, SEQ)}
    with pytest.raises(IndexError):
        walk.batch(len(walk))


def test_batches_of_a_store_beyond_two_to_the_32_tokens(tmp_path):
    # Only the addresses matter here: a hole in a file, and one sample written at its end.
    from sirara.data.pieces import StoredFile, hash_bytes
    from sirara.data.store import DOCUMENTS, StoreIndex, write_index

    folder, tokens = tmp_path / "large", 2**32 + 4097
    folder.mkdir()
    tail = np.arange(1, 10, dtype="<u2")
    with open(folder / "tokens-00000.bin", "wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (tokens - 9))
        file.write(tail.tobytes())
    offsets = np.array([0, tokens], dtype="<i8").tobytes()
    (folder / DOCUMENTS).write_bytes(offsets)
    stored = StoredFile(name="tokens-00000.bin", bytes=2 * tokens, hashes="0" * 32 * 513)
    index = StoreIndex(
        dtype="uint16",
        tokens=tokens,
        documents=1,
        vocab=257,
        eot=EOT,
        tokenizer="",
        files=(stored,),
        offsets=hash_bytes(DOCUMENTS, offsets),
    )
    write_index(folder, index)
    walk = EvalBatches(folder, seq_len=SEQ, micro_batch=1)
    last = walk.batch(len(walk) - 1)
    assert last.tokens_BL.tolist() == [tail[:-1].tolist()]
    assert last.targets_BL.tolist() == [tail[1:].tolist()]
    with batches_of(folder) as batches:
        located = batches.order.locate(2**33, MICRO)
        assert located.epoch.tolist() == [2**33 // (2**29 + 512)] * MICRO
        assert batches.microbatch(2**33, 0).tokens_BL.shape == (MICRO, SEQ)
