"""The object tier without a server: who uploads what, what is found, what is refused; the store is a folder."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.checkpoint import bucket
from sirara.checkpoint.bucket import Bucket
from sirara.checkpoint.filecheck import FileCheck, checked_chunks
from sirara.checkpoint.multipart import Multiparts
from sirara.checkpoint.object import ObjectTier, deal
from sirara.checkpoint.reader import Snapshot
from sirara.config.check_tiers import STORE_SCHEMES
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.manifest import MANIFEST, parse_manifest
from tests.checkpoints import differing, even, flip_bit, load, save, small_state


@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 12))
def test_files_are_dealt_evenly_by_bytes(sizes, world):
    owners = deal(sizes, world)
    assert len(owners) == len(sizes)
    assert set(owners) <= set(range(world))
    loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(world)]
    unavoidable = max([-(-sum(sizes) // world), *sizes, 0])
    assert max(loads) <= unavoidable * 4 / 3 + 1


def test_equal_files_go_to_the_lowest_rank_first():
    assert deal([5, 5, 5, 9], 3) == [1, 2, 1, 0]
    assert deal([7], 4) == [0]
    assert deal([], 2) == []


def uploaded(tier: ObjectTier, folder: Path, world: int = 2):
    raw = (folder / MANIFEST).read_bytes()
    for rank in range(world):
        tier.upload_part(folder, parse_manifest(raw, where="here"), rank, world)
    return tier.commit(raw, world=world, deadline_s=5.0)


def test_of_a_step_that_was_saved_again_the_newest_save_is_opened(tmp_path):
    first, second = (
        save(tmp_path / f"attempt-{n}", 10, small_state(n), even(small_state(n), 2), attempt=n)
        for n in (1, 2)
    )
    url = f"file://{tmp_path}/store"
    tier = ObjectTier(url, {}, "run-1", attempt=2)
    # The save of the newer attempt counts, whichever came last.
    new, old = uploaded(tier, second), uploaded(tier, first)
    assert tier.steps() == [new, old]
    manifest, copy = tier.open(10)
    assert manifest.attempt == 2
    assert differing(load(Snapshot.over(manifest, [copy]), small_state(2)), small_state(2)) == []
    assert tier.open(old)[0].attempt == 1
    assert tier.retain(newest=10, keep_last=1, keep_every=None) == [old]
    assert tier.steps() == [new]
    tier.delete(10)
    assert tier.steps() == []
    assert tier.bucket.objects("run-1/") == []


def test_two_runs_in_one_place_do_not_see_each_other(tmp_path):
    step = save(tmp_path / "run", 10, small_state())
    url = f"file://{tmp_path}/store"
    uploaded(ObjectTier(url, {}, "run-1", attempt=1), step)
    other = ObjectTier(url, {}, "run-10", attempt=9)
    assert other.steps() == []
    assert other.clean().saves == ()
    with pytest.raises(CheckpointError, match=r"step 10 is not committed in .*/run-10"):
        other.open(10)
    assert len(ObjectTier(url, {}, "run-1", attempt=1).steps()) == 1


def test_a_store_without_a_list_of_unfinished_uploads_says_so(tmp_path):
    notes = ObjectTier(f"file://{tmp_path}/store", {}, "run-1", attempt=1).clean().notes
    assert len(notes) == 1
    assert "AbortIncompleteMultipartUpload" in notes[0]


def test_multiparts_need_keys_that_are_known_here(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert not Multiparts.possible({"bucket": "b"})
    assert Multiparts.possible({"access_key_id": "a", "secret_access_key": "b"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert Multiparts.possible({"bucket": "b"})


def test_ranges_are_filled_across_buffers_and_a_short_object_is_named(tmp_path):
    store = Bucket(f"file://{tmp_path}/store", {})
    raw = np.random.default_rng(0).integers(0, 256, 20 << 20, np.uint8).tobytes()
    store.upload("a/b", len(raw), lambda n: (memoryview(raw)[i : i + n] for i in range(0, len(raw), n)))
    assert store.get("a/b") == raw
    parts = [bytearray(7), bytearray(0), bytearray(18 << 20), bytearray(1)]
    store.read("a/b", [memoryview(p) for p in parts], 1000)
    assert b"".join(parts) == raw[1000 : 1000 + sum(map(len, parts))]
    with pytest.raises(CheckpointError, match="truncated"):
        store.read("a/b", [memoryview(bytearray(10))], len(raw) - 5)
    with pytest.raises(CheckpointError, match="missing"):
        store.read("a/c", [memoryview(bytearray(10))], 0)
    assert store.get("a/c") is None


@pytest.mark.parametrize("scheme", STORE_SCHEMES)
def test_the_schemes_that_a_configuration_may_name_are_known_to_the_store(tmp_path, scheme):
    place = {"file": str(tmp_path), "memory": "/"}.get(scheme, "place/runs")
    azure = scheme in ("az", "azure", "adl", "abfs", "abfss")
    Bucket(f"{scheme}://{place}", {"account_name": "a"} if azure else {})


@pytest.mark.parametrize("chunk", [1000, 4096, 1 << 20])
def test_a_flipped_bit_is_found_by_any_size_of_chunk(tmp_path, chunk):
    step = save(tmp_path, 10, small_state(), even(small_state(), 2))
    manifest = Snapshot(step).manifest
    for f, entry in enumerate(manifest.files):
        whole = b"".join(checked_chunks(step, manifest, f, chunk))
        assert whole == (step / entry.name).read_bytes()
        check = FileCheck(manifest, f)
        assert [
            x
            for at in range(0, len(whole), chunk)
            for x in check.feed(memoryview(whole)[at : at + chunk], at)
        ] == []
    model = next(f for f, entry in enumerate(manifest.files) if entry.name == "model.safetensors")
    flip_bit(step / "model.safetensors", manifest.files[model].size - 1)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*\[.*do not match their hash"):
        list(checked_chunks(step, manifest, model, chunk))
    flip_bit(step / "config.json", 0)
    small = next(f for f, entry in enumerate(manifest.files) if entry.name == "config.json")
    with pytest.raises(CheckpointError, match=r"config.json: its first 3 bytes do not match"):
        list(checked_chunks(step, manifest, small, chunk))


def test_what_cannot_be_configured_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match="an option of the object tier is unknown") as unknown:
        Bucket("s3://bucket/x", {"endpiont": "http://here"})
    assert "'endpiont'" in unknown.value.why
    with pytest.raises(ConfigError, match="ftp://here/x cannot be used"):
        Bucket("ftp://here/x", {})
    with pytest.raises(ConfigError, match="cannot be used"):
        Bucket("s3://bucket/x", {"timeout": "soon"})
    monkeypatch.setattr(bucket, "HAVE_OBSTORE", False)
    with pytest.raises(ConfigError, match="needs obstore") as missing:
        Bucket("s3://bucket/x", {})
    assert missing.value.try_ == ("pip install 'sirara[s3]'",)


def test_the_writer_process_needs_no_torch_for_it():
    code = "import sys, sirara.checkpoint.object; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
