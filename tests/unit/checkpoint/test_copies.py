"""A piece that is bad in one copy is taken from the next; only what no copy has is an error."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sirara.checkpoint.copies import Copy, FolderCopy
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, CommError, StorageError
from tests.checkpoints import State, differing, even, flip_bit, load, save, small_state


class Counted(FolderCopy):
    """A folder that counts reads, and fails every one with `fault`."""

    def __init__(self, path: Path, snapshot: Snapshot, *, name: str, fault: Exception | None = None) -> None:
        super().__init__(path, snapshot.manifest, name=name)
        self.fault, self.reads = fault, 0

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        super().read(key, buffers, position)


class Part(FolderCopy):
    """A folder that holds some pieces only."""

    def __init__(self, path: Path, snapshot: Snapshot, pieces: range, *, name: str) -> None:
        super().__init__(path, snapshot.manifest, name=name)
        self.held = pieces

    def locate(self, piece: int) -> tuple[str, int] | None:
        return super().locate(piece) if piece in self.held else None


@pytest.fixture
def two(tmp_path: Path) -> tuple[State, Path, Path, Snapshot]:
    state = small_state()
    first = save(tmp_path / "a", 5, state, even(state, 2))
    second = tmp_path / "b"
    shutil.copytree(first, second)
    return state, first, second, Snapshot(first)


def test_each_bad_piece_is_taken_from_the_next_copy_and_noted(two):
    state, first, second, opened = two
    m = opened.manifest
    for i in range(len(m.pieces)):
        file = m.files[int(m.pieces.file[i])].name
        flip_bit(first / file, int(m.pieces.position[i]))
        copies: list[Copy] = [FolderCopy(first, m, name="memory"), FolderCopy(second, m)]
        snapshot = Snapshot.over(m, copies)
        assert differing(state, load(snapshot, state)) == []
        (note,) = snapshot.notes
        assert (note.tensor, note.box) == (m.tensors[int(m.pieces.tensor[i])].name, str(m.box(i)))
        assert note.file == str(first / file) and note.taken_from == "disk"
        assert note.what.startswith("its bytes hash to ")
        flip_bit(first / file, int(m.pieces.position[i]))


def test_a_piece_that_is_bad_everywhere_names_every_copy(two):
    state, first, second, opened = two
    m = opened.manifest
    for folder in (first, second):
        flip_bit(folder / m.files[int(m.pieces.file[3])].name, int(m.pieces.position[3]))
    with pytest.raises(CheckpointError, match="it is good in none of 2 copies") as caught:
        load(Snapshot.over(m, [FolderCopy(first, m, name="memory"), FolderCopy(second, m)]), state)
    name = m.tensors[int(m.pieces.tensor[3])].name
    assert caught.value.what.startswith(f"{name}{m.box(3)} in ")
    assert "memory: " in caught.value.why and "disk: " in caught.value.why


def test_a_truncated_or_missing_file_costs_only_what_it_lost(two):
    state, first, second, opened = two
    m = opened.manifest
    os.truncate(first / "optim-0-0.safetensors", int(m.pieces.position[-1]))
    snapshot = Snapshot.over(m, [FolderCopy(first, m, name="memory"), FolderCopy(second, m)])
    assert differing(state, load(snapshot, state)) == []
    assert [note.what for note in snapshot.notes] == ["the file is truncated"]
    (first / "model.safetensors").unlink()
    snapshot = Snapshot.over(m, [FolderCopy(first, m, name="memory"), FolderCopy(second, m)])
    assert differing(state, load(snapshot, state)) == []
    missing = {note.tensor for note in snapshot.notes if note.what == "the file is missing"}
    assert missing == {n for n, t in state.items() if "/" not in n and t.numel()}


def test_copies_that_hold_parts_are_read_together(two):
    state, first, second, opened = two
    m = opened.manifest
    half = len(m.pieces) // 2
    parts = [Part(first, opened, range(half), name="a"), Part(second, opened, range(half, 10**6), name="b")]
    snapshot = Snapshot.over(m, parts)
    assert differing(state, load(snapshot, state)) == [] and not snapshot.notes
    with pytest.raises(CheckpointError, match="it is good in none of 1 copies") as caught:
        load(Snapshot.over(m, parts[:1]), state)
    assert "does not hold it" in caught.value.why


@pytest.mark.parametrize("error", [StorageError("EIO"), CommError("rank 3 on node 1 is gone")])
def test_a_lost_place_is_given_up_after_three_tries(two, error, monkeypatch):
    state, first, second, opened = two
    monkeypatch.setattr(FolderCopy, "batch_bytes", 64)
    lost = Counted(first, opened, name="peer on node 1", fault=error)
    snapshot = Snapshot.over(opened.manifest, [lost, FolderCopy(second, opened.manifest)])
    assert differing(state, load(snapshot, state)) == []
    assert lost.reads == 3
    assert len(snapshot.notes) == len(opened.manifest.pieces)
    with pytest.raises(type(error)):
        load(Snapshot.over(opened.manifest, [Counted(first, opened, name="x", fault=error)]), state)


def test_threads_read_the_same_and_stop_at_the_same_piece(two, monkeypatch):
    state, first, second, opened = two
    monkeypatch.setattr(FolderCopy, "batch_bytes", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    m = opened.manifest
    flip_bit(first / m.files[int(m.pieces.file[7])].name, int(m.pieces.position[7]))
    snapshot = Snapshot.over(m, [FolderCopy(first, m, name="memory"), FolderCopy(second, m)])
    assert differing(state, load(snapshot, state)) == []
    assert len(snapshot.notes) == 1
    with pytest.raises(CheckpointError, match="its bytes hash to"):
        load(Snapshot(first), state)
