import json
import os
import subprocess
import sys
import time

import pytest

from sirara.checkpoint.arena import (
    OLD_S,
    Arena,
    ArenaState,
    arena_head,
    arena_name,
    claim,
    memory_root,
    reap,
    withdraw,
)
from sirara.checkpoint.image import BLOCK
from sirara.checkpoint.steps import step_name
from sirara.errors import CheckpointError, InvariantError, RunBusyError, StorageError


def arena(folder, name="arena-0-0", size=3 * BLOCK):
    return Arena.create(folder, name, size, run="run-1")


def filled(folder, step, uuid, name="arena-0-0"):
    made = arena(folder, name)
    made.mark_writing(step, uuid)
    made.data[:4] = b"data"
    made.mark_ready()
    return made


def test_what_one_process_marks_ready_another_one_reads(tmp_path):
    made = filled(tmp_path / "new" / "folder", 7, "u" * 36)
    program = (
        "import sys; from pathlib import Path; from sirara.checkpoint.arena import Arena; "
        "a = Arena.open(Path(sys.argv[1])); print(a.head.step, a.head.state.name, bytes(a.data[:4]), len(a.data))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, made.path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7", "READY", "b'data'", str(3 * BLOCK)]
    head = arena_head(made.path)
    assert (head.run, head.uuid, head.pid, head.size) == ("run-1", "u" * 36, os.getpid(), 3 * BLOCK)


def test_an_image_begins_on_a_page_of_its_own(tmp_path):
    made = arena(tmp_path)
    made.data[:1] = b"x"
    assert made.path.read_bytes()[BLOCK : BLOCK + 1] == b"x"


def test_an_image_counts_as_torn_from_the_first_byte_to_the_last(tmp_path):
    made = filled(tmp_path, 1, "a" * 36)
    made.mark_writing(2, "b" * 36)
    assert arena_head(made.path).state is ArenaState.WRITING and arena_head(made.path).step == 2
    made.mark_ready()
    with pytest.raises(InvariantError, match="was not being written"):
        made.mark_ready()
    # Made again, of another size, it holds nothing.
    again = arena(tmp_path, size=BLOCK)
    assert again.head.state is ArenaState.EMPTY and again.path.stat().st_size == 2 * BLOCK


def test_shared_memory_that_is_full_is_known_before_anything_is_copied(tmp_path, monkeypatch):
    def full(fd, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="no room in shared memory") as caught:
        arena(tmp_path)
    assert f"{4 * BLOCK} bytes asked" in caught.value.why and "checkpoint.async=false" in caught.value.try_[0]


def test_without_room_in_shared_memory_an_arena_for_the_keeper_alone_is_memory_of_its_own(
    tmp_path, monkeypatch, caplog
):
    reserve, calls = os.posix_fallocate, []

    def full_at_first(fd, at, size):
        calls.append(size)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        reserve(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    made = Arena.create(tmp_path, "arena-0-0", 3 * BLOCK, run="run-1", outlives=False)
    assert calls == [4 * BLOCK, 4 * BLOCK] and "has no room for" in caplog.text
    made.mark_writing(7, "u" * 36)
    made.data[:4] = b"data"
    made.mark_ready()
    program = (
        "import sys; from pathlib import Path; from sirara.checkpoint.arena import Arena, arena_head; "
        "a = Arena.open(Path(sys.argv[1])); print(arena_head(a.path).step, bytes(a.data[:4]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, made.path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7", "b'data'"]
    again = Arena.create(tmp_path, "arena-0-0", BLOCK, run="run-1")
    assert not again.path.is_symlink() and again.path.stat().st_size == 2 * BLOCK


@pytest.mark.parametrize("raw", [b"", b"x" * 8192, b"sirarena" + b"\xff" * 8192])
def test_a_file_that_is_no_arena_is_refused(tmp_path, raw):
    (tmp_path / "arena-0-0").write_bytes(raw)
    with pytest.raises(CheckpointError, match="arena"):
        arena_head(tmp_path / "arena-0-0")
    with pytest.raises(CheckpointError, match="arena"):
        Arena.open(tmp_path / "arena-0-0")


def test_an_arena_that_was_cut_short_is_refused(tmp_path):
    made = arena(tmp_path)
    os.truncate(made.path, 2 * BLOCK)
    with pytest.raises(CheckpointError, match="no whole arena") as caught:
        Arena.open(made.path)
    assert f"{2 * BLOCK} bytes, {4 * BLOCK} expected" in caught.value.why


def test_nodes_on_one_machine_have_folders_of_their_own(tmp_path):
    assert memory_root(tmp_path / "node-{node}" / "shm", 3) == tmp_path / "node-3" / "shm"
    assert str(memory_root(None, 3)) == f"/dev/shm/sirara-{os.getuid()}"


# ---- what ended runs leave


def left(root, name, *, step=5, committed=None, alive=False, old=False):
    """A run's folder in memory, with an image of `step`; its newest committed step on the disk."""
    checkpoints = root.parent / f"{name}-checkpoints"
    checkpoints.mkdir()
    if committed is not None:
        (checkpoints / step_name(committed)).mkdir()
        (checkpoints / step_name(committed) / "manifest.json").touch()
    filled(root / name, step, "a" * 36)
    claim(root / name, "trainer-0", checkpoints=checkpoints)
    owner = root / name / "owner-trainer-0.json"
    fields = json.loads(owner.read_text())
    if not alive:
        fields["process"]["started"] += 1  # another process had this number then
    owner.write_text(json.dumps(fields))
    if old:
        os.utime(owner, (time.time() - OLD_S - 60,) * 2)
    return checkpoints


def test_only_what_no_restart_needs_is_removed_from_memory(tmp_path):
    root = tmp_path / "shm"
    root.mkdir()
    left(root, "running", committed=9, alive=True)
    left(root, "newer-in-memory", committed=4)
    left(root, "never-saved")
    left(root, "on-disk", committed=5)
    left(root, "yesterday", old=True)
    left(root, "gone").rmdir()
    left(root, "own", committed=9)
    (root / "just-made").mkdir()
    removed = reap(root, spare=root / "own")
    assert removed == ["gone", "on-disk", "yesterday"]
    assert sorted(p.name for p in root.iterdir()) == [
        "just-made", "never-saved", "newer-in-memory", "own", "running",
    ]  # fmt: skip
    assert reap(tmp_path / "nowhere") == []


def test_two_copies_of_one_run_do_not_share_a_nodes_memory(tmp_path):
    claim(tmp_path / "run-1", "trainer-0", checkpoints=tmp_path / "a" / "checkpoints")
    claim(tmp_path / "run-1", "trainer-1", checkpoints=tmp_path / "a" / "checkpoints")
    with pytest.raises(RunBusyError, match="another copy of this run") as caught:
        claim(tmp_path / "run-1", "trainer-0", checkpoints=tmp_path / "b" / "checkpoints")
    assert f"it saves to {tmp_path / 'a' / 'checkpoints'}" in caught.value.why


def test_the_last_rank_that_withdraws_takes_the_folder_away(tmp_path):
    for rank in (0, 1):
        arena(tmp_path / "run-1", arena_name(rank, 0))
        claim(tmp_path / "run-1", f"keeper-{rank}", checkpoints=tmp_path)
    withdraw(tmp_path / "run-1", ["arena-0-0", "arena-0-1"], who=["keeper-0", "trainer-0"])
    assert sorted(p.name for p in (tmp_path / "run-1").iterdir()) == ["arena-1-0", "owner-keeper-1.json"]
    withdraw(tmp_path / "run-1", ["arena-1-0"], who=["keeper-1"])
    assert not (tmp_path / "run-1").exists()
