"""Thinning out by hand: what stays and why, and that the last good step never goes."""

import json
import shutil

import pytest

from sirara.checkpoint.pins import is_pinned, pin, pinned, unpin
from sirara.checkpoint.prune import prune
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.retention import VERIFIED
from sirara.checkpoint.steps import committed_steps, incomplete_steps, step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST
from sirara.pure.retain import Rules
from tests.checkpoints import flip_bit, save, small_state


@pytest.fixture
def folder(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, small_state(step), keep_last=99)
    return tmp_path


def why(pruned):
    return {v.step: v.why for v in pruned.verdicts}


def test_the_rules_keep_the_last_the_multiples_the_best_and_the_pinned(folder):
    pin(folder / step_name(1), note="for the paper")
    scores = {1: 3.0, 2: 1.0, 3: 2.0}
    done = prune(folder, rules=Rules(last=1, every=4, best="eval/val/loss"), scores=scores)
    assert committed_steps(folder) == [6, 4, 2, 1] and done.gone == (5, 3)
    assert why(done)[4] == "a multiple of 4" and why(done)[1] == "pinned"
    assert why(done)[2] == "the lowest eval/val/loss"
    assert incomplete_steps(folder) == [] and done.relied_on == 6


def test_a_dry_run_says_the_same_and_deletes_nothing(folder):
    before = sorted(folder.rglob("*"))
    dry = prune(folder, rules=Rules(last=2), dry_run=True)
    assert sorted(folder.rglob("*")) == before
    freed = sum(f.stat().st_size for s in dry.gone for f in (folder / step_name(s)).iterdir())
    assert prune(folder, rules=Rules(last=2)) == dry and dry.freed == freed > 0
    assert committed_steps(folder) == [6, 5]


def test_damage_that_the_mark_does_not_know_is_found_before_anything_goes(folder):
    flip_bit(folder / step_name(6) / "model.safetensors", 4100)
    done = prune(folder, rules=Rules(last=1))
    assert done.relied_on == 5 and committed_steps(folder) == [6, 5]
    assert "it is newer than step 5; model.safetensors: embed.weight" in why(done)[6]


def test_with_no_good_step_nothing_goes(folder):
    for step in range(1, 7):
        flip_bit(folder / step_name(step) / "model.safetensors", -1)
    done = prune(folder, rules=Rules(last=1))
    assert done.relied_on is None and done.gone == () and len(committed_steps(folder)) == 6
    assert why(done)[3].startswith("no step is verified and whole; model.safetensors: ")


def test_torn_steps_take_no_place_and_go_when_enough_good_ones_are_newer(folder):
    (folder / step_name(2) / MANIFEST).write_text("{")
    (folder / step_name(6) / MANIFEST).write_text("{")
    (folder / step_name(5) / VERIFIED).unlink()
    done = prune(folder, rules=Rules(last=2))
    assert done.relied_on == 4 and committed_steps(folder) == [6, 5, 4, 3]
    assert "is torn" in why(done)[6] and why(done)[5].endswith("it is not verified")


def test_steps_of_another_run_stay(folder, tmp_path):
    other = save(tmp_path / "other", 2, small_state(2), run="run-2")
    shutil.rmtree(folder / step_name(2))
    shutil.copytree(other, folder / step_name(2))
    done = prune(folder, rules=Rules(last=1), run="run-1")
    assert committed_steps(folder) == [6, 2] and why(done)[2] == "it belongs to run 'run-2'"


def test_a_deletion_that_fails_leaves_no_step_that_looks_whole(folder):
    class Failing(Disk):
        def touch(self, effect, path):
            if effect == "rename":
                self.fired = True
                raise OSError(5, "Input/output error")

    disk = Failing()
    with pytest.raises(StorageError):
        prune(folder, rules=Rules(last=5), disk=disk)
    assert disk.fired and committed_steps(folder) == [6, 5, 4, 3, 2]
    assert incomplete_steps(folder) == [step_name(1)]


def test_an_empty_folder_has_nothing_to_prune(tmp_path):
    with pytest.raises(CheckpointError, match="has no committed checkpoint"):
        prune(tmp_path, rules=Rules(last=1))


def test_a_pin_is_set_and_taken_away_and_does_not_disturb_the_step(folder):
    step = folder / step_name(3)
    pin(step, note="baseline")
    assert is_pinned(step) and pinned(folder, [2, 3, 4]) == {3}
    assert (step / "pinned").read_text() == "baseline\n"
    assert json.loads((step / VERIFIED).read_bytes())["uuid"] == Snapshot(step).manifest.uuid
    unpin(step)
    unpin(step)
    assert not is_pinned(step)
    with pytest.raises(CheckpointError, match="is not a committed checkpoint"):
        pin(folder)
