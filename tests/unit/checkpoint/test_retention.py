import pytest

from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError, StorageError
from tests.checkpoints import flip_bit, manager, save, small_state


def test_old_steps_go_in_number_order_and_every_kth_stays(tmp_path):
    for step in (8, 9, 10, 11, 12, 100):
        save(tmp_path, step, small_state(), keep_last=2, keep_every=4)
    assert manager(tmp_path).newest() == [100, 12, 8]


def test_an_incomplete_or_temporary_folder_takes_no_place_from_a_good_one(tmp_path):
    save(tmp_path, 1, small_state(), keep_last=2)
    (tmp_path / step_name(2)).mkdir()
    save(tmp_path, 3, small_state(), keep_last=2)
    assert manager(tmp_path).newest() == [3, 1]


def test_a_step_whose_files_are_gone_takes_no_place_from_a_good_one(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, small_state(), keep_last=2)
    (tmp_path / step_name(2) / "model.safetensors").unlink()
    save(tmp_path, 3, small_state(), keep_last=2)
    assert manager(tmp_path).newest() == [3, 2, 1]  # 2 is no good, so 1 is the second one
    save(tmp_path, 4, small_state(), keep_last=2)
    assert manager(tmp_path).newest() == [4, 3]


def test_a_stale_higher_step_pins_no_slot(tmp_path):
    for step in (10, 20, 90, 30, 40):
        save(tmp_path, step, small_state(), keep_last=2)
    assert manager(tmp_path).newest() == [90, 40, 30]


def test_nothing_is_deleted_when_the_new_step_does_not_read_back(tmp_path, monkeypatch):
    save(tmp_path, 1, small_state(), keep_last=1)
    rename = manager(tmp_path)._disk.rename

    def rot(self, source, target):
        rename(source, target)
        if target.name == step_name(2):
            flip_bit(target / "model.safetensors", 5000)

    monkeypatch.setattr("sirara.checkpoint.storage.Disk.rename", rot)
    with pytest.raises(CheckpointError, match=r"model.safetensors: head.weight.*do not match"):
        save(tmp_path, 2, small_state(), keep_last=1)
    assert manager(tmp_path).newest() == [2, 1]
    monkeypatch.undo()
    save(tmp_path, 3, small_state(), keep_last=1)
    assert manager(tmp_path).newest() == [3]


def test_a_deletion_takes_the_manifest_first_and_is_finished_by_the_next_save(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, step, small_state(), keep_last=2)

    def stop(self, source, target):
        if ".gone-" in target.name:
            raise StorageError("stopped in the middle")
        source.rename(target)

    monkeypatch.setattr("sirara.checkpoint.storage.Disk.rename", stop)
    assert save(tmp_path, 3, small_state(), keep_last=2) == tmp_path / step_name(3)
    assert "older ones could not be deleted" in caplog.text and "stopped in the middle" in caplog.text
    assert manager(tmp_path, rank=1, world=2).newest() == [3, 2]
    assert (tmp_path / step_name(1) / "model.safetensors").exists()
    monkeypatch.undo()
    save(tmp_path, 4, small_state(), keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(3), step_name(4)]
