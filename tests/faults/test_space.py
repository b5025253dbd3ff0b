"""Disks that are full, over quota or failing: training goes on, the old steps stay, the next save that can be is made.

    a disk of the test's own     ENOSPC at the n-th byte, EDQUOT and EIO at writes and fsyncs, for a time
    a small tmpfs                really full, of bytes and of inodes; saves beside it and whole runs inside it

A whole run inside the full file system has its metrics, events and logs there as well.
"""

import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirara.checkpoint.space import Need, check_before_save, check_before_training
from sirara.checkpoint.steps import incomplete_steps
from sirara.checkpoint.storage import Disk
from sirara.config.run_folder import list_runs
from sirara.errors import PlanError, StorageError
from sirara.events import read
from tests.checkpoints import (
    State,
    differing,
    even,
    load,
    manager,
    plan_of,
    ranges_of,
    restore,
    save,
    small_state,
)
from tests.project import Project, until

STATES = {step: small_state(step) for step in (1, 2, 3)}


def save_by(m, state: State, step: int) -> None:
    boxes = even(state, 1)
    m.save(
        step,
        plan=plan_of(state, boxes),
        ranges=ranges_of(state, boxes, 0),
        record={"step": step},
        hf_files={"config.json": b"{}\n"},
        aliases={},
    )


def found_in(folder: Path) -> int:
    """The step that the next attempt restores, which is bit for bit what was saved."""
    got: State = {}
    found = restore(manager(folder, attempt=9), lambda snapshot: got.update(load(snapshot, STATES[1])))
    assert found is not None and found.skipped == ()
    assert differing(STATES[found.step], got) == []
    return found.step


# ---- a disk that fails for a time


class Bad(Disk):
    """Fails with `error` at every `effect` while `bad`; a write lets `budget` bytes of the save through before."""

    def __init__(self, effect: str, error: int, *, budget: int = 0) -> None:
        super().__init__()
        self.effect, self.error, self.budget = effect, error, budget
        self.bad, self.fired = False, 0

    def touch(self, effect: str, path: Path) -> None:
        if self.bad and effect == self.effect and self.effect != "write":
            self._fail()

    def pwrite(self, fd, buffers, position):
        if not self.bad or self.effect != "write":
            return super().pwrite(fd, buffers, position)
        data = b"".join(buffers)[: self.budget]
        if not data:
            self._fail()
        self.budget -= len(data)
        return os.pwrite(fd, data, position)

    def _fail(self) -> None:
        self.fired += 1
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    ("effect", "error", "code"),
    [
        ("write", errno.ENOSPC, "SR601"),
        ("write", errno.EDQUOT, "SR601"),
        ("write", errno.EIO, "SR602"),
        ("fsync", errno.EIO, "SR602"),
        ("fsync", errno.ENOSPC, "SR601"),
        ("open", errno.EDQUOT, "SR601"),
        ("mkdir", errno.ENOSPC, "SR601"),
    ],
)
def test_a_disk_that_fails_for_a_time_costs_these_saves_and_the_same_manager_saves_on(
    tmp_path, effect, error, code
):
    for budget in (0, 1, 4096, 9000) if effect == "write" else (0,):
        folder = tmp_path / str(budget)
        disk = Bad(effect, error, budget=budget)
        m = manager(folder, keep_last=1, disk=disk)
        save_by(m, STATES[1], 1)
        disk.bad = True
        for tries in (1, 2):
            with pytest.raises(StorageError) as caught:
                save_by(m, STATES[2], 2)
            assert disk.fired >= tries
            assert caught.value.code == code and caught.value.exit_code == 74
            assert (" bytes free" in caught.value.why) or errno.errorcode[error] in caught.value.why
            assert m.newest() == [1]
        disk.bad = False
        save_by(m, STATES[2], 2)
        assert m.newest() == [2] and found_in(folder) == 2
        assert incomplete_steps(folder) == []


# ---- a file system that is really full


class Small:
    """A tmpfs of its own."""

    def __init__(self, folder: Path, size: str, inodes: int = 0) -> None:
        self.folder = folder
        folder.mkdir()
        options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")

    @property
    def filler(self) -> Path:
        return self.folder / "filler"

    def fill(self, *, but: int = 0) -> None:
        """Leaves `but` bytes, whole pages."""
        with self.filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError as fault:
                assert fault.errno == errno.ENOSPC
            file.truncate(max(0, file.tell() - but))

    def free(self) -> None:
        self.filler.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def small(tmp_path) -> Iterator[Small]:
    disk = Small(tmp_path / "small", "2m", inodes=200)
    yield disk
    disk.close()


def test_a_file_system_that_is_full_after_any_number_of_pages_keeps_the_old_step(small, capsys):
    folder = small.folder / "checkpoints"
    save(folder, 1, STATES[1], record={"step": 1})
    pages = sum(-(-f.stat().st_size // 4096) for f in (folder / "step-000000001").iterdir())
    for free in range(pages + 2):
        small.fill(but=4096 * free)
        m = manager(folder, attempt=2, keep_last=1)
        try:
            save_by(m, STATES[2], 2)
        except StorageError as error:
            assert error.code == "SR601" and "bytes free" in error.why
            assert m.newest() == [1] and incomplete_steps(folder) == []
        else:
            break
        finally:
            small.free()
        assert found_in(folder) == 1
    assert 5 < free <= pages + 1
    assert found_in(folder) == 2
    with capsys.disabled():
        print(f"\n{free} full file systems, with 0 to {free - 1} pages left")


def test_a_file_system_without_inodes_keeps_the_old_step(small):
    folder = small.folder / "checkpoints"
    save(folder, 1, STATES[1], record={"step": 1})
    names = small.folder / "names"
    names.mkdir()
    with pytest.raises(OSError, match="No space left"):
        for n in range(300):
            (names / str(n)).touch()
    need = Need(tier="disk", folder=folder, times=1, each=1000, files=8)
    with pytest.raises(StorageError, match="no inodes left") as caught:
        check_before_save([need])
    assert "8 files asked, 0 inodes free" in caught.value.why
    with pytest.raises(StorageError, match="no inodes left"):
        save_by(manager(folder, attempt=2), STATES[2], 2)
    assert found_in(folder) == 1
    shutil.rmtree(names)
    check_before_save([need])
    save_by(manager(folder, attempt=3), STATES[2], 2)
    assert found_in(folder) == 2


def test_what_a_file_system_holds_is_known_before_training(small):
    need = Need(tier="disk", folder=small.folder / "checkpoints", times=4, each=400 << 10, files=8, last=3)
    check_before_training([need])
    small.fill(but=900 << 10)
    with pytest.raises(PlanError, match="no space left for checkpoints") as caught:
        check_before_training([need])
    assert f"{int(4 * (400 << 10) * 1.05)} bytes asked, {900 << 10} bytes free" in caught.value.why
    assert caught.value.try_[0] == "checkpoint.keep_last=1"


# ---- whole runs


STEPS = ("train.steps=80", "checkpoint.every=20", "checkpoint.keep_last=1", "checkpoint.retry=0.01s")
EQUAL = ("step", "loss_hex", "digest", "tokens")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture(scope="module")
def peace(project):
    done = project.sirara("run", "toy.yaml", "name=peace", *STEPS, "--json")
    assert done.code == 0, done.err
    return {name: done.result[name] for name in EQUAL}


@pytest.fixture(scope="module")
def device(tmp_path_factory) -> Iterator[Small]:
    disk = Small(tmp_path_factory.mktemp("device") / "small", "8m")
    yield disk
    disk.close()


class Heard:
    """The lines of a process' stderr as they come, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._stream = process.stderr
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._stream is not None
        for line in self._stream:
            self.lines.append(line)

    def count(self, text: str) -> int:
        return sum(text in line for line in list(self.lines))

    def end(self) -> str:
        self._thread.join()
        return "".join(self.lines)


def started(project: Project, device: Small, name: str, *words: str):
    """A run inside the small file system that has saved once and goes on."""
    process = project.start("run", "toy.yaml", f"name={name}", f"run_dir={device.folder}", *STEPS, *words)
    heard = Heard(process)

    def saved() -> bool:
        runs = [run for run in list_runs(device.folder) if run.id.startswith(name)]
        return process.poll() is not None or bool(runs and runs[0].committed_steps())

    until(saved)
    assert process.poll() is None, heard.end()
    run = next(run for run in list_runs(device.folder) if run.id.startswith(name))
    return process, heard, run


def ended(process, heard: Heard) -> tuple[int, str]:
    code = process.wait(timeout=90)
    return code, heard.end()


FAILED = "could not be written ("


@pytest.mark.parametrize("kind", ["inline", "async"])
def test_training_goes_on_while_the_disk_of_the_whole_run_is_full(project, peace, device, kind):
    settings = ("checkpoint.max_failures=100000", f"checkpoint.async={str(kind == 'async').lower()}")
    process, heard, run = started(project, device, kind, *settings)
    device.fill()
    until(lambda: process.poll() is not None or heard.count(FAILED) >= 2)
    kept = run.committed_steps()
    device.free()
    code, err = ended(process, heard)
    assert code == 0, err
    assert kept and "no space left" in err and "Traceback" not in err
    events = read(run.events)
    end = events[-1]
    assert end["kind"] == "end" and {name: end[name] for name in EQUAL} == peace
    assert sum(e["kind"] == "save_failed" for e in events) >= 2
    # Tried again at step boundaries of its own, not at the next multiple of checkpoint.every.
    assert any(e["step"] % 20 for e in events if e["kind"] == "save_failed")
    # No record was lost, though the disk took none for a while.
    assert "records wait in memory" in err and "takes records again" in err
    assert [m["step"] for m in read(run.metrics)] == list(range(1, peace["step"] + 1))
    shutil.rmtree(run.path)


def test_too_many_failures_in_a_row_end_the_run_with_74_and_resume_is_equal(project, peace, device, tmp_path):
    tiers = f"checkpoint.tiers=[{{tier: memory, path: {tmp_path / 'shm'}}}, disk]"
    process, heard, run = started(project, device, "memory", "checkpoint.max_failures=3", tiers)
    device.fill()
    code, err = ended(process, heard)
    assert code == 74, err
    assert err.count(FAILED) == 3 and "no space left" in err
    assert "3 saves in a row have failed" in err and "is kept in memory" in err
    kept = run.committed_steps()
    assert kept and 20 <= kept[-1] < peace["step"]
    # The disk is still full: nothing is started on it.
    refused = project.sirara("resume", str(run.path))
    assert refused.code == 3 and "error[SR260]: no space left for checkpoints (disk" in refused.err
    device.free()
    done = project.sirara("resume", str(run.path), "--json")
    assert done.code == 0, done.err
    assert {name: done.result[name] for name in EQUAL} == peace
    # Memory held the step at which the run gave up.
    assert next(e["from_step"] for e in read(run.events) if e["kind"] == "resume") > kept[-1]
    shutil.rmtree(run.path)


def test_without_a_memory_tier_the_run_ends_with_74_and_the_older_step(project, device):
    process, heard, run = started(project, device, "broken", "checkpoint.max_failures=2")
    device.fill()
    code, err = ended(process, heard)
    kept = run.committed_steps()
    device.free()
    assert code == 74, err
    assert err.count(FAILED) == 2 and "2 saves in a row have failed" in err
    assert "nothing of the last steps is kept" in err
    assert kept and incomplete_steps(run.checkpoints) == []
    shutil.rmtree(run.path)


def test_a_stop_on_a_full_disk_ends_with_74_and_says_so(project, device):
    process, heard, run = started(project, device, "stopped", "checkpoint.max_failures=100000")
    device.fill()
    process.send_signal(signal.SIGTERM)
    code, err = ended(process, heard)
    device.free()
    assert code == 74, err
    assert "no space left" in err and run.committed_steps()
    shutil.rmtree(run.path)


def test_a_run_whose_checkpoints_cannot_fit_does_not_start(project, device):
    words = ("run", "toy.yaml", "name=large", f"run_dir={device.folder}", "checkpoint.every=1")
    refused = project.sirara(*words, "checkpoint.keep_last=60")
    assert refused.code == 3, refused.err
    assert "error[SR260]: no space left for checkpoints (disk)" in refused.err
    assert "keep_last 60, one being written" in refused.err and "checkpoint.keep_last=" in refused.err
    assert list_runs(device.folder) == []
    fits = project.sirara(*words, "--dry-run")
    assert fits.code == 0, fits.err
