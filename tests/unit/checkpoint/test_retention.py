import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.checkpoint.retention import expendable
from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError, InvariantError, StorageError
from tests.checkpoints import flip_bit, manager, save, small_state


@given(st.data())
def test_the_step_just_verified_and_the_last_ones_always_stay(data):
    committed = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1)))
    newest = data.draw(st.sampled_from(committed))
    verified = {newest, *data.draw(st.sets(st.sampled_from(committed)))}
    last, every = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 5]))
    gone = expendable(committed, verified, newest=newest, keep_last=last, keep_every=every)
    kept = [s for s in committed if s not in gone]
    past = sorted((s for s in verified if s <= newest), reverse=True)
    assert set(past[:last]) <= set(kept)
    assert all(s in kept for s in committed if s > newest)
    assert all(s in kept for s in committed if every and s % every == 0)
    # What is older than the last `keep_last` good ones goes, unless keep_every holds it.
    enough = len(past) >= last
    old = [s for s in committed if enough and s < past[last - 1] and not (every and s % every == 0)]
    assert gone == old


def test_nothing_is_deleted_on_behalf_of_a_step_that_is_not_verified():
    with pytest.raises(InvariantError, match="step 5 is not committed and verified"):
        expendable([1, 2, 5], {1, 2}, newest=5, keep_last=1, keep_every=None)


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
