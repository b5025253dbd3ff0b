import os
import shutil

import numpy as np
import pytest
import torch

from sirara.checkpoint import copies
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, InvariantError
from sirara.pure.layout import Box, whole
from tests.checkpoints import differing, even, flip_bit, load, manager, ranges_of, restore, save, small_state


def one_range(tensor, like, data):
    return NamedRange(tensor=tensor, shape=tuple(like.shape), boxes=(whole(like.shape),), data=data)


def test_a_flipped_bit_is_reported_with_tensor_box_and_file(tmp_path):
    state = small_state()
    path = save(tmp_path, 5, state)
    snapshot = manager(tmp_path).open(5)
    m = snapshot.manifest
    for i in range(len(m.pieces)):
        file = path / m.files[int(m.pieces.file[i])].name
        name = m.tensors[int(m.pieces.tensor[i])].name
        flip_bit(file, int(m.pieces.position[i]))
        with pytest.raises(CheckpointError) as caught:
            load(manager(tmp_path).open(5), state)
        assert f"{name}{m.box(i)} in {file.name}: its bytes hash to" in str(caught.value)
        flip_bit(file, int(m.pieces.position[i]))
    assert differing(state, load(manager(tmp_path).open(5), state)) == []


def test_a_tensor_that_is_not_touched_is_not_read(tmp_path):
    state = small_state()
    path = save(tmp_path, 5, state)
    snapshot = manager(tmp_path).open(5)
    m = snapshot.manifest
    bad = m.pieces_of(m.tensor_index["embed.weight/exp_avg"])[0]
    flip_bit(path / m.files[int(m.pieces.file[bad])].name, int(m.pieces.position[bad]))
    assert torch.equal(snapshot.read("embed.weight"), state["embed.weight"])
    with pytest.raises(CheckpointError, match=r"embed.weight/exp_avg"):
        snapshot.read("embed.weight/exp_avg")


@pytest.mark.parametrize("size, word", [(-1, "is truncated: "), (+1, "is too long: "), (None, "is missing")])
def test_sizes_are_checked_before_anything_is_read(tmp_path, size, word):
    path = save(tmp_path, 5, small_state()) / "optim-0-0.safetensors"
    if size is None:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + size)
    with pytest.raises(CheckpointError, match=r"optim-0-0.safetensors " + word):
        manager(tmp_path).open(5)


def test_a_file_cut_after_opening_names_the_piece(tmp_path):
    path = save(tmp_path, 5, small_state())
    snapshot = manager(tmp_path).open(5)
    os.truncate(path / "model.safetensors", 4100)
    with pytest.raises(CheckpointError, match=r"embed.weight.* in model.safetensors: the file is truncated"):
        snapshot.read("embed.weight")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"in model.safetensors: the file is missing"):
        snapshot.read("embed.weight")


def test_a_file_of_another_step_is_called_stale_with_its_step(tmp_path):
    for step in (4, 5):
        save(tmp_path, step, small_state(step))
    shutil.copy(
        tmp_path / "step-000000004" / "optim-0-0.safetensors",
        tmp_path / "step-000000005" / "optim-0-0.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"the file belongs to another save \(step 4, uuid 00000001-"):
        load(manager(tmp_path).open(5), small_state(5))


def test_manifests_of_another_run_or_step_are_refused(tmp_path):
    path = save(tmp_path, 5, small_state(), run="other")
    with pytest.raises(CheckpointError, match="belongs to run 'other', this is run 'run-1'"):
        manager(tmp_path).open(5)
    shutil.copytree(path, tmp_path / "step-000000006")
    with pytest.raises(CheckpointError, match="holds step 5: it was renamed or copied over"):
        manager(tmp_path, run="other").open(6)


def test_a_manifest_swapped_in_from_another_step_is_refused(tmp_path):
    a, b = (save(tmp_path, step, small_state(step)) for step in (4, 5))
    shutil.copy(a / "manifest.json", b / "manifest.json")
    with pytest.raises(CheckpointError, match="holds step 4"):
        manager(tmp_path).open(5)
    assert restore(manager(tmp_path), lambda s: load(s, small_state(4)) and None).step == 4


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path):
    path = save(tmp_path, 5, small_state())
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not a committed checkpoint: it has no manifest.json"):
        Snapshot(path)


def test_a_tensor_that_is_not_there_is_named_with_its_nearest(tmp_path):
    save(tmp_path, 5, small_state())
    with pytest.raises(CheckpointError, match=r"no tensor 'embed.weigth'") as caught:
        manager(tmp_path).open(5).read("embed.weigth")
    assert "the nearest name is 'embed.weight'" in str(caught.value)


def test_another_shape_or_dtype_is_never_converted_silently(tmp_path):
    save(tmp_path, 5, small_state())
    snapshot = manager(tmp_path).open(5)
    for like in (torch.zeros(13, 9), torch.zeros(13, 8, dtype=torch.float64)):
        with pytest.raises(CheckpointError, match=r"embed.weight is F32 \[13, 8\] in step 5, the run wants"):
            snapshot.read_into([one_range("embed.weight", like, like.reshape(-1))])


def test_data_that_does_not_fit_its_boxes_is_refused(tmp_path):
    save(tmp_path, 5, small_state())
    like = torch.zeros(13, 8)
    for data in (torch.zeros(103), torch.zeros(13, 8), torch.zeros(208)[::2]):
        with pytest.raises(InvariantError, match="the 104 elements of its boxes"):
            manager(tmp_path).open(5).read_into([one_range("embed.weight", like, data)])


def test_boxes_in_any_order_and_overlapping_targets_are_filled(tmp_path):
    state = small_state()
    save(tmp_path, 5, state, even(state, 3))
    boxes = (Box((9, 2), (4, 3)), Box((0, 0), (13, 8)), Box((9, 0), (1, 8)))
    data = torch.empty(12 + 104 + 8)
    manager(tmp_path).open(5).read_into(
        [NamedRange(tensor="embed.weight", shape=(13, 8), boxes=boxes, data=data)]
    )
    w = state["embed.weight"]
    assert torch.equal(data, torch.cat([w[b.slices].reshape(-1) for b in boxes]))


def test_neighbouring_pieces_are_read_together_and_whole_ones_without_a_copy(tmp_path, monkeypatch):
    state = small_state()
    save(tmp_path, 5, state, even(state, 3))
    calls = []

    def counted(fd, path, buffers, position):
        calls.append([np.frombuffer(b, np.uint8).ctypes.data for b in buffers])
        read_at(fd, path, buffers, position)

    read_at = copies.read_at
    monkeypatch.setattr(copies, "read_at", counted)
    ranges = ranges_of(state, even(state, 1), 0, filled=False)
    snapshot = manager(tmp_path).open(5)
    snapshot.read_into(ranges)
    assert len(calls) == 2  # one per file
    whole_pieces = [
        r.data.data_ptr() for r in ranges if len(snapshot.manifest.pieces_of(snapshot.find(r.tensor))) == 1
    ]
    assert whole_pieces and set(whole_pieces) <= {address for call in calls for address in call}


def test_large_pieces_are_cut_and_many_batches_read(tmp_path, monkeypatch):
    monkeypatch.setattr(copies.FolderCopy, "batch_bytes", 64)
    state = small_state()
    save(tmp_path, 5, state, even(state, 2))
    assert differing(state, load(manager(tmp_path).open(5), state, even(state, 3))) == []


def test_a_tensor_of_many_pieces_comes_back(tmp_path):
    state = {"w": torch.arange(9 << 20, dtype=torch.int32).reshape(9, 1 << 20), "w/m": torch.ones(5)}
    save(tmp_path, 5, state, even(state, 2))
    snapshot = manager(tmp_path).open(5)
    assert len(snapshot.manifest.pieces_of(0)) > 3
    assert max(snapshot.manifest.pieces.length) <= 16 << 20
    assert torch.equal(snapshot.read("w"), state["w"])
