import json
import os
import shutil

import pytest
import torch
import xxhash

from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub import scrub
from tests.checkpoints import even, flip_bit, manager, save, small_state


@pytest.fixture
def step(tmp_path):
    return save(tmp_path, 5, small_state(), even(small_state(), 3))


def faults_of(step):
    return [str(fault) for fault in scrub(Snapshot(step, check_sizes=False))]


def test_a_good_step_has_no_fault(step):
    assert faults_of(step) == []


def test_every_flipped_bit_of_every_file_is_found_and_named(step):
    m = manager(step.parent).open(5).manifest
    for f in m.files:
        for position in range(0, f.size, max(1, f.size // 37)):
            flip_bit(step / f.name, position)
            found = faults_of(step)
            assert any(text.startswith(f.name) for text in found), (f.name, position)
            flip_bit(step / f.name, position)
    assert faults_of(step) == []


def test_a_bad_piece_is_named_with_tensor_box_file_and_bytes(step):
    m = manager(step.parent).open(5).manifest
    i = int(m.pieces_of(m.tensor_index["embed.weight"])[1])
    at, length = int(m.pieces.position[i]), int(m.pieces.length[i])
    flip_bit(step / "model.safetensors", at + length - 1)
    what = f"bytes {at} to {at + length} do not match their hash"
    assert faults_of(step) == [f"model.safetensors: embed.weight{m.box(i)} {what}"]


def test_missing_cut_and_foreign_files_are_named(step):
    os.truncate(step / "optim-0-0.safetensors", (step / "optim-0-0.safetensors").stat().st_size - 1)
    (step / "config.json").unlink()
    shutil.copy(step / "model.safetensors", step / "model-00002-of-00002.safetensors")
    found = faults_of(step)
    assert any(text.startswith("optim-0-0.safetensors: is truncated: ") for text in found)
    assert "config.json: is missing" in found
    assert "model-00002-of-00002.safetensors: is not part of this step" in found


def test_a_step_in_the_folder_of_another_is_named(step):
    step = step.rename(step.with_name("step-000000030"))
    assert faults_of(step) == ["manifest.json: is of step 5: the folder was renamed or copied over"]
    assert faults_of(step.rename(step.with_name("kept-for-a-friend"))) == []


def test_a_file_of_another_save_is_named_with_the_save_it_belongs_to(step):
    other = save(step.parent, 6, small_state(6), even(small_state(6), 3))
    shutil.copy(other / "optim-0-0.safetensors", step)
    first = faults_of(step)[0]
    assert first.startswith("optim-0-0.safetensors: its first "), first
    assert f"it belongs to another save (step 6, uuid {manager(step.parent).open(6).manifest.uuid})" in first


def sealed_again(step, change):
    """A manifest that lies, with a good check: what a bug of a writer would look like."""
    head = json.loads((step / "manifest.json").read_bytes())
    del head["check"]
    change(head)
    body = json.dumps(head)[:-1].encode()
    check = xxhash.xxh3_128_hexdigest(body).encode()
    (step / "manifest.json").write_bytes(body + b'\n,"check":"' + check + b'"}\n')


def test_pieces_that_overlap_and_leave_a_hole_elsewhere_are_found(tmp_path):
    state = {"w": torch.zeros(4, 3)}
    step = save(tmp_path, 5, state, even(state, 2))
    sealed_again(step, lambda head: head["pieces"].update(offset=[0, 0, 0, 0]))
    assert "model.safetensors: w[0:2,0:3] overlaps [0:2,0:3]" in faults_of(step)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{}", "cannot be read: KeyError"),
        (b'{"weight_map": {}}', "names 0 weights, the manifest 5"),
        (None, "is missing"),
    ],
)
def test_the_index_of_the_weights_must_agree_with_the_manifest(step, content, message):
    index = step / "model.safetensors.index.json"
    index.unlink() if content is None else index.write_bytes(content)
    assert any(f"{index.name}: {message}" in text for text in faults_of(step))


def test_weights_that_safetensors_cannot_read_are_named(step):
    raw = bytearray((step / "model.safetensors").read_bytes())
    raw[:8] = (1 << 40).to_bytes(8, "little")
    (step / "model.safetensors").write_bytes(raw)
    assert any(text.startswith("model.safetensors: safetensors cannot read it") for text in faults_of(step))
