"""A step written anew holds the same state, in the files that were asked for."""

import pytest
import torch
from safetensors.torch import load_file

from sirara.checkpoint.compare import compare
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.reshard_files import deal, reshard_step
from sirara.checkpoint.scrub import scrub
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.manifest import TensorEntry
from tests.checkpoints import even, flip_bit, save, small_state


@pytest.fixture
def step(tmp_path):
    state = small_state(5)
    hf = {"config.json": b'{"a": 1}\n', "tokenizer.json": b"{}\n"}
    return save(tmp_path / "run", 7, state, even(state, 3), hf_files=hf)


@pytest.mark.parametrize(
    "nodes, file_bytes, piece_bytes", [(1, 2 << 30, 16 << 20), (3, 4096, 64), (40, 5000, 8)]
)
def test_the_state_stays_and_the_files_are_new(step, tmp_path, nodes, file_bytes, piece_bytes):
    source, out = Snapshot(step), tmp_path / "out"
    done = reshard_step(source, out, nodes=nodes, file_bytes=file_bytes, piece_bytes=piece_bytes)
    made = Snapshot(out, run="run-1", step=7)
    assert scrub(made) == []
    assert compare(source, made).equal
    assert made.manifest.record == source.manifest.record and made.manifest.aliases == source.manifest.aliases
    assert made.manifest.uuid != source.manifest.uuid and made.manifest.uuid[:9] == source.manifest.uuid[:9]
    assert sorted(p.name for p in out.iterdir()) == sorted(done.files)
    assert int(made.manifest.pieces.length.max()) <= piece_bytes
    held = {f.name.split("-")[1] for f in made.manifest.files if f.name.startswith("optim-")}
    assert len(held) == min(nodes, len(held)) and (nodes == 1 or len(held) > 1)


def test_weights_load_with_safetensors(step, tmp_path):
    reshard_step(Snapshot(step), tmp_path / "out", nodes=2, file_bytes=4096)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1 or (tmp_path / "out" / "model.safetensors").exists()
    found = {}
    for file in files or [tmp_path / "out" / "model.safetensors"]:
        found |= load_file(file)
    weights = {n: t for n, t in small_state(5).items() if "/" not in n}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[n], t) for n, t in weights.items())


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 100])
def test_tensors_are_dealt_in_equal_stretches_without_gap_or_overlap(nodes):
    entries = [
        TensorEntry(name="a", dtype="F32", shape=(5, 3)),
        TensorEntry(name="b", dtype="BF16", shape=(7,)),
        TensorEntry(name="c", dtype="F64", shape=()),
        TensorEntry(name="none", dtype="F32", shape=(0, 4)),
        TensorEntry(name="d", dtype="U8", shape=(2, 2, 2)),
    ]
    item = {"F32": 4, "BF16": 2, "F64": 8, "U8": 1}
    load = [0] * nodes
    for t, planned in zip(entries, deal(entries, nodes), strict=True):
        seen = torch.zeros(t.shape, dtype=torch.int32)
        for rank, boxes in planned.boxes.items():
            for box in boxes:
                seen[box.slices] += 1
                load[rank] += box.volume * item[t.dtype]
        assert bool((seen == 1).all())
    assert max(load) - sum(load) / nodes <= 8


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(step, tmp_path):
    dry = reshard_step(Snapshot(step), tmp_path / "out", nodes=2, dry_run=True)
    assert not (tmp_path / "out").exists()
    wet = reshard_step(Snapshot(step), tmp_path / "out", nodes=2)
    assert dry == wet
    assert wet.total_bytes <= sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("file", ["model.safetensors", "optim-0-0.safetensors", "config.json"])
def test_damage_is_named_and_nothing_is_left(step, tmp_path, file):
    flip_bit(step / file, -1)
    with pytest.raises(CheckpointError) as error:
        reshard_step(Snapshot(step), tmp_path / "out", nodes=2)
    assert file in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nodes": 0}, "cannot be cut for 0 nodes"),
        ({"file_bytes": 100}, "files of 100 bytes are too small"),
        ({"piece_bytes": 32 << 20}, "a piece cannot have"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(step, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        reshard_step(Snapshot(step), tmp_path / "out", **options)


def test_a_folder_that_exists_is_left_alone(step, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ConfigError, match="exists already"):
        reshard_step(Snapshot(step), tmp_path / "out")
