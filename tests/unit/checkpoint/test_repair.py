"""Bad bytes become good again from a copy; what no copy has is named; nothing is written in place."""

import os
import shutil

import pytest

from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.repair import MENDING, rebuild_step, repair_manifest, repair_step
from sirara.checkpoint.retention import VERIFIED, is_verified
from sirara.checkpoint.scrub import scrub
from sirara.checkpoint.steps import committed_steps, incomplete_steps, step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import differing, even, flip_bit, load, save, small_state


@pytest.fixture
def step(tmp_path):
    """A step of three ranks and, beside it, step 8 of the same run and a replica of the first."""
    state = small_state(7)
    hf = {"config.json": b'{"a": 1}\n', "tokenizer.json": b"{}\n"}
    path = save(tmp_path / "run", 9, state, even(state, 3), hf_files=hf)
    save(tmp_path / "run", 8, small_state(8), even(state, 3), hf_files=hf)
    shutil.copytree(path, tmp_path / "replica")
    return path


def manifest_of(path):
    return Snapshot(path, check_sizes=False).manifest


def mend(step, *folders, others=(), **options):
    m = manifest_of(step)
    copies = [FolderCopy(path, m, name=path.name) for path in folders]
    return repair_step(step, m, copies, others=others, **options)


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


DAMAGE = {
    "a flipped bit in a weight": lambda s: flip_bit(s / "model.safetensors", 4100),
    "a flipped bit in a moment": lambda s: flip_bit(s / "optim-0-0.safetensors", -1),
    "a flipped bit in a header": lambda s: flip_bit(s / "model.safetensors", 30),
    "a missing weight file": lambda s: (s / "model.safetensors").unlink(),
    "a missing state file": lambda s: (s / "optim-0-0.safetensors").unlink(),
    "a truncated file": lambda s: os.truncate(s / "optim-0-0.safetensors", 5000),
    "a file of no bytes": lambda s: os.truncate(s / "model.safetensors", 0),
    "a file that is too long": lambda s: os.truncate(s / "model.safetensors", 100_000),
    "a small file": lambda s: (s / "config.json").write_text("{}"),
    "a missing index": lambda s: (s / "model.safetensors.index.json").unlink(),
    "a file of another step": lambda s: shutil.copy(s.parent / step_name(8) / "model.safetensors", s),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_mended_from_a_replica_byte_by_byte(step, tmp_path, damage):
    before = content(step)
    DAMAGE[damage](step)
    assert scrub(Snapshot(step, check_sizes=False)), "the damage did not happen"
    dry = mend(step, tmp_path / "replica", dry_run=True)
    assert dry.good and dry.mended and scrub(Snapshot(step, check_sizes=False))
    done = mend(step, tmp_path / "replica")
    assert done.good and done.mended == dry.mended
    assert content(step) == before
    assert is_verified(step, uuid=manifest_of(step).uuid)


def test_headers_and_small_files_need_no_replica(step):
    """A header follows from the manifest or from another step of the run."""
    before = content(step)
    for name in ("model.safetensors", "optim-0-0.safetensors"):
        flip_bit(step / name, 40)
    (step / "model.safetensors.index.json").unlink()
    (step / "tokenizer.json").unlink()
    done = mend(step, others=[step.parent / step_name(8)])
    assert done.good and content(step) == before
    assert {m.file: m.taken_from for m in done.mended} == {
        "model.safetensors": "the manifest",
        "optim-0-0.safetensors": "the manifest",
        "model.safetensors.index.json": "the manifest",
        "tokenizer.json": str(step.parent / step_name(8)),
    }


def test_a_header_that_the_manifest_cannot_give_comes_from_another_step(step, monkeypatch):
    monkeypatch.setattr("sirara.checkpoint.heads._entries", lambda m, f: iter(()))
    before = content(step)
    flip_bit(step / "optim-0-0.safetensors", 40)
    assert not mend(step, dry_run=True).good
    done = mend(step, others=[step.parent / step_name(8)])
    assert done.good and done.mended[0].taken_from.endswith(step_name(8)) and content(step) == before


def test_a_bad_piece_is_taken_from_the_first_copy_that_is_good(step, tmp_path):
    shutil.copytree(tmp_path / "replica", tmp_path / "second")
    for folder in (step, tmp_path / "replica"):
        flip_bit(folder / "model.safetensors", 4100)
    done = mend(step, tmp_path / "replica", tmp_path / "second")
    assert done.good and [m.taken_from for m in done.mended] == ["second"]
    assert done.mended[0].tensor == "embed.weight" and "embed.weight[0:" in str(done.mended[0])


def test_what_no_copy_has_is_named_and_the_rest_is_mended(step, tmp_path):
    for folder in (step, tmp_path / "replica"):
        flip_bit(folder / "model.safetensors", 4100)
    flip_bit(step / "model.safetensors", -1)
    (step / VERIFIED).unlink()
    done = mend(step, tmp_path / "replica")
    assert not done.good and [m.tensor for m in done.mended] == ["head.weight"]
    assert [fault.tensor for fault in done.lost] == ["embed.weight"]
    assert "no copy has it (replica: other bytes" in done.lost[0].what
    assert [f.tensor for f in scrub(Snapshot(step))] == ["embed.weight"]
    assert not (step / VERIFIED).exists()


def test_a_missing_file_that_cannot_be_completed_stays_missing(step, tmp_path):
    (step / "model.safetensors").unlink()
    flip_bit(tmp_path / "replica" / "model.safetensors", 4100)
    done = mend(step, tmp_path / "replica")
    assert not done.good and not (step / "model.safetensors").exists() and not done.mended
    assert any(fault.file == "model.safetensors" for fault in done.lost)


def test_a_copy_of_another_save_mends_nothing(step):
    flip_bit(step / "model.safetensors", 4100)
    done = mend(step, step.parent / step_name(8))
    assert not done.good and not done.mended
    assert "the file belongs to another save (step 8" in done.lost[0].what


def test_a_good_step_is_left_alone(step, tmp_path):
    before = {p.name: p.stat().st_mtime_ns for p in step.iterdir()}
    done = mend(step, tmp_path / "replica")
    assert done.good and not done.mended
    assert {p.name: p.stat().st_mtime_ns for p in step.iterdir()} == before


def test_a_foreign_file_is_named_not_touched(step, tmp_path):
    shutil.copy(step / "model.safetensors", step / "extra.safetensors")
    done = mend(step, tmp_path / "replica")
    assert [str(f) for f in done.lost] == ["extra.safetensors: is not part of this step"]
    assert (step / "extra.safetensors").exists()


@pytest.mark.parametrize("effect", ["open", "write", "fsync", "rename"])
def test_a_repair_that_fails_leaves_the_old_file_and_the_next_one_ends_it(step, tmp_path, effect):
    class Failing(Disk):
        fired = False

        def touch(self, what, path):
            if what == effect and path.name.endswith(MENDING):
                self.fired = True
                raise OSError(5, "Input/output error")

    good = (step / "model.safetensors").read_bytes()
    flip_bit(step / "model.safetensors", 4100)
    bad = (step / "model.safetensors").read_bytes()
    disk = Failing()
    with pytest.raises(StorageError):
        mend(step, tmp_path / "replica", disk=disk)
    assert disk.fired and (step / "model.safetensors").read_bytes() == bad
    assert mend(step, tmp_path / "replica").good
    assert (step / "model.safetensors").read_bytes() == good
    assert not [p for p in step.iterdir() if p.name.endswith(MENDING)]


# ---- manifests and whole steps


def test_a_torn_manifest_is_put_back_from_a_copy_of_this_very_save(step, tmp_path):
    good = (step / MANIFEST).read_bytes()
    right, other = manifest_of(tmp_path / "replica"), manifest_of(step.parent / step_name(8))
    (step / MANIFEST).write_bytes(good[:300])
    with pytest.raises(CheckpointError, match="cannot be repaired") as error:
        repair_manifest(step, [(other, "elsewhere")])
    assert "elsewhere: of save" in error.value.why and (step / MANIFEST).read_bytes() == good[:300]
    found = repair_manifest(step, [(other, "elsewhere"), (right, "replica")])
    assert found == (right, "replica") and (step / MANIFEST).read_bytes() == good
    assert mend(step).good


def test_a_step_that_is_gone_is_rebuilt_whole_or_not_at_all(step, tmp_path):
    state, before = small_state(7), content(step)
    m, folder = manifest_of(step), step.parent
    shutil.rmtree(step)
    copies = [FolderCopy(tmp_path / "replica", m, name="replica")]
    assert rebuild_step(folder, m, copies, dry_run=True).good and committed_steps(folder) == [8]
    done = rebuild_step(folder, m, copies)
    assert done.good and committed_steps(folder) == [9, 8]
    assert content(step) == before and differing(load(Snapshot(step), state), state) == []
    shutil.rmtree(step)
    flip_bit(tmp_path / "replica" / "model.safetensors", 4100)
    done = rebuild_step(folder, m, copies)
    assert not done.good and committed_steps(folder) == [8] and incomplete_steps(folder) == []
