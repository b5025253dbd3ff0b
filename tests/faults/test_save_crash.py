"""Saves that do not end: after each fault the newest committed step loads bit for bit, and the run saves on.

    kill          SIGKILL of the process at every mkdir, open, write, fsync, rename and unlink of a save, also
    in
                  the middle of every write
    power loss    the same points, but what was not fsynced is lost, all of it or any part of it
    full disk     ENOSPC at the n-th byte, EIO at every fsync
    flipped bit   in every piece and header of the newest step

Two ranks save one after the other in one process, which makes the points of a save countable.
"""

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sirara.checkpoint.steps import incomplete_steps, save_uuid, step_name
from sirara.checkpoint.storage import Disk
from sirara.errors import CommTimeout, StorageError
from tests.checkpoints import (
    State,
    differing,
    even,
    flip_bit,
    load,
    manager,
    plan_of,
    ranges_of,
    restore,
    save,
    small_state,
)

WORLD = 2
STATES = {step: small_state(step) for step in (1, 2, 3)}
REPLACED = small_state(22)  # what step 2 held before, in the runs that reach it again


def save_by_both_ranks(folder: Path, step: int, state: State, disk: Disk, *, attempt: int = 1) -> None:
    boxes = even(state, WORLD)
    plan = plan_of(state, boxes)
    for rank in reversed(range(WORLD)):
        m = manager(folder, rank=rank, world=WORLD, attempt=attempt, keep_last=1, disk=disk, deadline_s=0.2)
        m.save(
            step,
            plan=plan,
            ranges=ranges_of(state, boxes, rank),
            record={"step": step, "seed": int(state["scale/value"])},
            hf_files={"config.json": b"{}\n"},
            aliases={},
        )


@pytest.fixture(scope="module", params=["new step", "step reached again"])
def before(request, tmp_path_factory) -> Path:
    """A run with step 1 committed; in the second kind step 2 as well, in another state."""
    folder = tmp_path_factory.mktemp("before")
    save(folder, 1, STATES[1], record={"step": 1, "seed": 1})
    if request.param == "step reached again":
        save(folder, 2, REPLACED, record={"step": 2, "seed": 22})
    return folder


def restored(folder: Path, *, attempt: int = 2) -> State:
    """What the next attempt loads; it must be one of the states that were committed, whole."""
    m = manager(folder, attempt=attempt)
    got: State = {}
    found = restore(m, lambda snapshot: got.update(load(snapshot, STATES[1])))
    assert found is not None and found.skipped == ()
    known = [STATES[found.step]] if found.step != 2 else [STATES[2], REPLACED]
    assert any(differing(state, got) == [] for state in known)
    return got


def goes_on(folder: Path, *, attempt: int = 2) -> None:
    """The next attempt saves step 3 and leaves nothing behind."""
    save_by_both_ranks(folder, 3, STATES[3], Disk(), attempt=attempt)
    assert differing(STATES[3], restored(folder, attempt=attempt + 1)) == []
    assert incomplete_steps(folder) == []
    assert manager(folder, rank=1, world=2).newest() == [3]


class Counting(Disk):
    """Counts effects; `at` is the one at which `fault` happens, `torn` lets half of a write through
    before."""

    def __init__(self, at: int = -1, fault: Callable[[], None] = lambda: None, *, torn: bool = False) -> None:
        super().__init__()
        self.effects: list[tuple[str, str]] = []
        self._at, self._fault, self._torn = at, fault, torn

    def touch(self, effect: str, path: Path) -> None:
        self.effects.append((effect, path.name))
        if len(self.effects) - 1 == self._at and not self._torn:
            self._fault()

    def pwrite(self, fd, buffers, position):
        if len(self.effects) - 1 == self._at and self._torn:
            data = b"".join(buffers)
            os.pwrite(fd, data[: len(data) // 2], position)
            self._fault()
        return super().pwrite(fd, buffers, position)


def points_of_a_save(before: Path, tmp_path: Path) -> list[tuple[str, str]]:
    disk = Counting()
    folder = tmp_path / "counted"
    shutil.copytree(before, folder)
    save_by_both_ranks(folder, 2, STATES[2], disk)
    shutil.rmtree(folder)
    return disk.effects


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(body: Callable[[], None]) -> int:
    """The wait status of a forked process that runs `body`."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(17)
    return os.waitpid(pid, 0)[1]


def test_a_kill_at_any_point_of_a_save_leaves_the_newest_committed_step(before, tmp_path, capsys):
    effects = points_of_a_save(before, tmp_path)
    assert {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmtree"} <= {e for e, _ in effects}
    cases = [(n, False) for n in range(len(effects))]
    cases += [(n, True) for n, (effect, _) in enumerate(effects) if effect == "write"]
    steps = []
    for n, torn in cases:
        folder = tmp_path / f"{n}-{torn}"
        shutil.copytree(before, folder)
        disk = Counting(n, kill_me, torn=torn)
        status = in_child(lambda folder=folder, disk=disk: save_by_both_ranks(folder, 2, STATES[2], disk))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (n, effects[n])
        got = restored(folder)
        steps.append(int(got["scale/value"]))
        if n % 5 == 0:
            goes_on(folder)
        shutil.rmtree(folder)
    assert set(steps) == ({1, 2} if len(list(before.iterdir())) == 1 else {22, 2})
    with capsys.disabled():
        print(f"\n{len(cases)} kills at {len(effects)} points: {steps.count(2)} found the new step committed")


def test_a_rank_killed_in_its_part_costs_the_step_and_nothing_else(before, tmp_path):
    state, boxes = STATES[2], even(STATES[2], 2)
    plan = plan_of(state, boxes)

    def part(rank, disk, folder):
        m = manager(folder, rank=rank, world=2, keep_last=1, disk=disk, deadline_s=0.2)
        m.save(2, plan=plan, ranges=ranges_of(state, boxes, rank), record={"new": 1}, hf_files={}, aliases={})

    for n in (0, 5, 8):
        folder = tmp_path / str(n)
        shutil.copytree(before, folder)
        status = in_child(lambda n=n, folder=folder: part(1, Counting(n, kill_me), folder))
        assert os.WIFSIGNALED(status)
        with pytest.raises(CommTimeout, match="step 2 lacks 1 of 2 ranks: 1"):
            part(0, Disk(), folder)
        restored(folder)
        goes_on(folder)


# ---- power loss


class PowerLoss(Counting):
    """Remembers what is durable: contents of files at their fsync, names of a folder at its fsync.

    What came later may or may not survive: the contents of each file, and of each folder's changes the
    first few (a journal keeps their order, and a rename whole).
    """

    def __init__(self, root: Path, at: int = -1, fault: Callable[[], None] = lambda: None) -> None:
        super().__init__(at, fault)
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, list[dict[str, int]]] = {}  # the durable names of a folder, then later ones
        for folder, _, files in os.walk(root):
            for file in files:
                path = Path(folder) / file
                self.contents[path.stat().st_ino] = path.read_bytes()
        self._look()

    def touch(self, effect: str, path: Path) -> None:
        self._look()
        super().touch(effect, path)

    def fsync(self, fd: int, path: Path) -> None:
        super().fsync(fd, path)
        self.contents[path.stat().st_ino] = path.read_bytes()

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._look()
        inode = path.stat().st_ino
        self.names[inode] = self.names[inode][-1:]

    def _look(self) -> dict[int, Path]:
        """Notes the names of every folder; returns where every inode is."""
        where = {self.root.stat().st_ino: self.root}
        for folder, folders, files in os.walk(self.root):
            names = {name: (Path(folder) / name).stat().st_ino for name in (*folders, *files)}
            where |= {inode: Path(folder) / name for name, inode in names.items()}
            # A new folder is durably empty.
            seen = self.names.setdefault(Path(folder).stat().st_ino, [{}] if self.effects else [names])
            if seen[-1] != names:
                seen.append(names)
        return where

    def after(self, target: Path, rng: random.Random | None) -> None:
        """The tree that is found when the power is back; without `rng` nothing survives that was not
        durable."""
        self._build(self.root.stat().st_ino, target, self._look(), rng)

    def _build(self, folder: int, target: Path, now: dict[int, Path], rng: random.Random | None) -> None:
        target.mkdir()
        versions = self.names[folder]
        for name, inode in (rng.choice(versions) if rng else versions[0]).items():
            if inode in self.names:
                self._build(inode, target / name, now, rng)
                continue
            durable = self.contents.get(inode, b"")
            survives = rng is not None and inode in now and rng.random() < 0.5
            (target / name).write_bytes(now[inode].read_bytes() if survives else durable)


class Stop(BaseException):
    """Ends a save in the middle, without any of its own cleaning."""


def stop() -> None:
    raise Stop


@pytest.mark.parametrize("survives", ["nothing", "some"])
def test_a_power_loss_at_any_point_of_a_save_leaves_a_committed_step(before, tmp_path, capsys, survives):
    effects = points_of_a_save(before, tmp_path)
    rng = random.Random(7)
    steps = []
    rounds = 1 if survives == "nothing" else 4
    for n in range(len(effects)):
        folder = tmp_path / str(n)
        shutil.copytree(before, folder)
        disk = PowerLoss(folder, n, stop)
        with pytest.raises(Stop):
            save_by_both_ranks(folder, 2, STATES[2], disk)
        for k in range(rounds):
            target = tmp_path / f"{n}-{k}"
            disk.after(target, None if survives == "nothing" else rng)
            steps.append(int(restored(target)["scale/value"]))
            shutil.rmtree(target)
        shutil.rmtree(folder)
    assert 2 in steps and len(set(steps)) == 2
    with capsys.disabled():
        print(f"\n{len(steps)} power losses ({survives} survives): {steps.count(2)} found the new step")


def test_a_save_that_returned_survives_a_power_loss(before, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    disk = PowerLoss(folder)
    save_by_both_ranks(folder, 2, STATES[2], disk)
    disk.after(tmp_path / "after", None)
    assert differing(STATES[2], restored(tmp_path / "after")) == []


# ---- full and failing disks


class Full(Disk):
    """ENOSPC once `budget` bytes are written."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget, self.fired = budget, 0

    def pwrite(self, fd, buffers, position):
        data = b"".join(buffers)
        if not self.budget:
            self.fired += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = os.pwrite(fd, data[: self.budget], position)
        self.budget -= done
        return done


def test_a_disk_that_is_full_after_any_number_of_bytes_keeps_the_old_step(before, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    found = manager(folder).newest()
    large = Full(1 << 30)
    shutil.copytree(before, tmp_path / "counted")
    save_by_both_ranks(tmp_path / "counted", 2, STATES[2], large)
    note = (tmp_path / "counted" / step_name(2) / "verified.json").stat().st_size
    committing = (1 << 30) - large.budget - note
    budgets = sorted({0, 1, 4095, 4096, 4097, committing - 1, *(committing * i // 24 for i in range(24))})
    for budget in budgets:
        disk = Full(budget)
        with pytest.raises(StorageError, match="no space left for") as caught:
            save_by_both_ranks(folder, 2, STATES[2], disk)
        assert disk.fired
        assert " bytes asked, " in caught.value.why and " bytes free" in caught.value.why
        # Rank 1 leaves the cleaning to rank 0, which never came to its part here.
        assert manager(folder, attempt=2).newest() == found
        assert incomplete_steps(folder) == []
        restored(folder)
    goes_on(folder)
    with capsys.disabled():
        print(f"\n{len(budgets)} full disks, at bytes 0 to {committing - 1}")


def test_a_disk_that_is_full_after_the_commit_costs_only_the_note_that_it_was_verified(
    before, tmp_path, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    large = Full(1 << 30)
    shutil.copytree(before, tmp_path / "counted")
    save_by_both_ranks(tmp_path / "counted", 2, STATES[2], large)
    disk = Full((1 << 30) - large.budget - 1)
    save_by_both_ranks(folder, 2, STATES[2], disk)
    assert disk.fired and "this could not be noted" in caplog.text
    assert differing(STATES[2], restored(folder)) == []
    assert manager(folder).newest() == [2]
    goes_on(folder)


@pytest.mark.parametrize("effect", ["write", "fsync", "rename", "mkdir", "open"])
def test_an_io_error_names_path_and_cause_and_leaves_nothing_behind(before, tmp_path, effect):
    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    effects = points_of_a_save(before, tmp_path)
    committed = effects.index(("rename", f".{step_name(2)}.tmp-{save_uuid('run-1', 1, 2, 0)}"))
    points = [n for n, (e, _) in enumerate(effects) if e == effect]
    assert points
    for n in points:
        folder = tmp_path / str(n)
        shutil.copytree(before, folder)
        disk = Counting(n, fail)
        if n <= committed + 1:
            with pytest.raises(StorageError, match=r"cannot use .*: Input/output error") as caught:
                save_by_both_ranks(folder, 2, STATES[2], disk)
            assert "EIO" in caught.value.why
        else:
            save_by_both_ranks(folder, 2, STATES[2], disk)
            assert disk.effects[n][0] == effect
        restored(folder)
        goes_on(folder)


def test_writes_that_end_early_are_continued(tmp_path):
    class Short(Disk):
        fired = 0

        def pwrite(self, fd, buffers, position):
            data = b"".join(buffers)
            Short.fired += len(data) > 100
            return os.pwrite(fd, data[:100], position)

    save_by_both_ranks(tmp_path, 2, STATES[2], Short())
    assert Short.fired > 10
    assert differing(STATES[2], restored(tmp_path)) == []


def test_too_little_space_is_known_before_anything_is_written(before, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    names = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr("sirara.checkpoint.storage.free_bytes", lambda path: 10)
    with pytest.raises(StorageError, match="no space left") as caught:
        save_by_both_ranks(folder, 2, STATES[2], Disk())
    assert "10 bytes free" in caught.value.why
    assert sorted(p.name for p in folder.iterdir()) == names


# ---- rot


def test_any_flipped_bit_of_the_newest_step_sends_the_reader_to_the_older_one(tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path, step, STATES[step], even(STATES[step], 2))
    folder = tmp_path / step_name(2)
    m = manager(tmp_path).open(2).manifest
    places = [
        (m.files[f].name, p) for f, p in zip(m.pieces.file.tolist(), m.pieces.position.tolist(), strict=True)
    ]
    places += [("manifest.json", i) for i in range(0, (folder / "manifest.json").stat().st_size, 97)]
    for name, position in places:
        flip_bit(folder / name, position)
        got: State = {}
        found = restore(manager(tmp_path), lambda s, got=got: got.update(load(s, STATES[1])))
        assert found.step == 1 and found.skipped[0][0] == 2 and name in found.skipped[0][1]
        assert differing(STATES[1], got) == []
        flip_bit(folder / name, position)
    assert restore(manager(tmp_path), lambda s: None).step == 2
    with capsys.disabled():
        print(f"\n{len(places)} flipped bits, all named")
