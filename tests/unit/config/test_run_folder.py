"""A run folder is made whole, found by name, and owned by one attempt."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.run_folder import RunFolder, list_runs, write_durably
from sirara.errors import CheckpointError, ConfigError, RunBusyError, StorageError
from sirara.events import JsonLines

OWNER = """
import signal, sys
from sirara.config.run_folder import RunFolder
run = RunFolder(sys.argv[1])
print(run.begin_attempt(), flush=True)
signal.pause()
"""
WORKER = """
import signal, sys
from sirara.config.run_folder import RunFolder
run = RunFolder(sys.argv[1])
run.record_process(int(sys.argv[2]), role="worker", rank=0)
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""

WRITER = """
import signal, sys
from sirara.config.run_folder import RunFolder
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run = RunFolder(sys.argv[1])
run.record_process(1, role="writer", rank=0)
print("ready", flush=True)
if sys.argv[2] == "endless":
    signal.pause()
while next(iter(run.processes(1, role="worker"))).alive:  # it fed this one, so it is ended first
    pass
run.check_attempt(1)
(run.path / "committed").write_text("by attempt 1")
"""


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(Named(tmp_path / "runs"), "schema: 1\n")


@pytest.fixture
def start():
    started = []

    def start(program, *args):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, args)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_create_makes_a_named_folder_with_identity_configuration_and_environment(run):
    assert run.id.startswith("demo-") and len(run.id) == len("demo-") + 8
    assert run.config.read_text() == "schema: 1\n"
    assert run.record()["run"] == run.id
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["versions"]["torch"] and environment["host"] and environment["argv"]
    assert run.attempt() == 0
    assert not list(run.path.rglob("*.tmp"))


def test_two_runs_of_one_name_are_two_folders(tmp_path):
    assert RunFolder.create(Named(tmp_path), "").path != RunFolder.create(Named(tmp_path), "").path


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        RunFolder.create(Named(tmp_path / "file"), "")


def test_find_takes_a_path_a_name_a_beginning_and_latest(tmp_path):
    first, second = (RunFolder.create(Named(tmp_path, name), "") for name in ("alpha", "beta"))
    assert RunFolder.find(first.path).path == first.path
    assert RunFolder.find(first.id, run_dir=tmp_path).id == first.id
    assert RunFolder.find("be", run_dir=tmp_path).id == second.id
    assert RunFolder.find("latest", run_dir=tmp_path).id == second.id
    assert [run.id for run in list_runs(tmp_path)] == [first.id, second.id]


def test_find_looks_where_the_environment_says(tmp_path, monkeypatch):
    run = RunFolder.create(Named(tmp_path / "elsewhere"), "")
    monkeypatch.setenv("SIRARA_RUN_DIR", str(tmp_path / "elsewhere"))
    assert RunFolder.find("demo").id == run.id


def test_find_names_the_candidates_when_a_beginning_fits_several_runs(tmp_path):
    runs = [RunFolder.create(Named(tmp_path), "") for _ in range(2)]
    with pytest.raises(ConfigError, match="beginning of 2 runs") as caught:
        RunFolder.find("demo", run_dir=tmp_path)
    assert all(run.id in str(caught.value) for run in runs)


@pytest.mark.parametrize("asked", ["demi", "", "latest"])
def test_find_says_what_there_is_when_nothing_fits(tmp_path, asked):
    with pytest.raises(ConfigError, match="no run"):
        RunFolder.find(asked, run_dir=tmp_path / "none")
    run = RunFolder.create(Named(tmp_path), "")
    if asked != "latest":
        with pytest.raises(ConfigError, match=run.id):
            RunFolder.find(asked, run_dir=tmp_path)


def test_a_folder_whose_creation_was_killed_is_no_run(tmp_path):
    (tmp_path / "demo-00000000" / "logs").mkdir(parents=True)
    assert list_runs(tmp_path) == []


def test_a_new_attempt_has_the_next_number_and_is_fenced_from_older_ones(run):
    assert run.begin_attempt() == 1
    run.check_attempt(1)
    run.release()
    newer = RunFolder(run.path)
    assert newer.begin_attempt() == 2
    with pytest.raises(RunBusyError, match=r"attempt 1 of demo-.* is over: attempt 2 owns"):
        run.check_attempt(1)
    newer.check_attempt(2)
    with pytest.raises(RunBusyError, match="is over"):
        run.record_process(1, role="worker", rank=0)


def test_the_owner_may_begin_its_next_attempt_and_keeps_a_stop_request(run):
    assert run.begin_attempt() == 1
    (run.control / "stop").touch()
    assert run.begin_attempt() == 2
    assert (run.control / "stop").exists()


def test_requests_to_an_older_life_are_dropped(run):
    (run.control / "stop").touch()
    (run.control / "save").touch()
    run.begin_attempt()
    assert not (run.control / "stop").exists() and not (run.control / "save").exists()


def test_a_second_owner_is_refused_while_the_first_lives_and_may_follow_its_kill(run, start):
    owner, said = start(OWNER, run.path)
    assert said == "1"
    with pytest.raises(RunBusyError, match=rf"is running \(attempt 1\)[\s\S]*process {owner.pid} "):
        run.begin_attempt()
    assert run.attempt() == 1
    assert run.owner().pid == owner.pid and run.owner().alive
    owner.kill()
    owner.wait()
    assert not run.owner().alive
    assert run.begin_attempt() == 2


def test_waiting_for_the_owner_takes_over_when_it_ends(run, start):
    owner, _ = start(OWNER, run.path)
    owner.send_signal(signal.SIGTERM)
    assert run.begin_attempt(wait_s=10) == 2


@pytest.mark.parametrize("kind", ["polite", "stubborn"])
def test_processes_that_an_older_attempt_left_alive_are_ended(run, start, kind):
    assert run.begin_attempt() == 1
    run.release()
    worker, said = start(WORKER, run.path, 1, kind)
    assert said == "ready"
    assert RunFolder(run.path).begin_attempt(grace_s=0.3) == 2
    assert worker.wait(timeout=5) == (-signal.SIGTERM if kind == "polite" else -signal.SIGKILL)


def test_a_writer_of_an_older_attempt_commits_what_it_has_before_the_next_attempt_begins(run, start):
    run.begin_attempt()
    worker, _ = start(WORKER, run.path, 1, "willing")
    start(WRITER, run.path, "ending")
    assert run.begin_attempt() == 2
    assert (run.path / "committed").read_text() == "by attempt 1"
    assert worker.wait(5) == -signal.SIGTERM


def test_a_writer_that_does_not_end_is_ended(run, start):
    run.begin_attempt()
    writer, _ = start(WRITER, run.path, "endless")
    assert run.begin_attempt(writers_s=0.2, grace_s=0.2) == 2
    assert writer.wait(5) == -signal.SIGKILL


def test_a_process_that_reused_a_recorded_pid_is_left_alone(run, start):
    run.begin_attempt()
    run.release()
    worker, _ = start(WORKER, run.path, 1, "polite")
    file = run.control / "attempts" / "0001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "started": line["started"] + 7}) + "\n" for line in lines))
    RunFolder(run.path).begin_attempt(grace_s=0.1)
    assert worker.poll() is None


def test_without_locks_two_beginners_still_get_different_attempts(run, monkeypatch):
    monkeypatch.setattr("sirara.config.ownership._flock", lambda fd: True)
    other = RunFolder(run.path)
    assert {run.begin_attempt(), other.begin_attempt()} == {1, 2}
    with pytest.raises(RunBusyError):
        run.check_attempt(1)


def test_committed_steps_are_numbers_and_only_those_with_a_manifest(run):
    for name in ("step-000000009", "step-000000010", ".step-11.tmp-ab", "step-000000012", "other"):
        (run.checkpoints / name).mkdir()
        if name != "step-000000012":
            (run.checkpoints / name / "manifest.json").touch()
    assert run.committed_steps() == [9, 10]


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(run):
    run.checkpoints.rmdir()
    run.checkpoints.write_text("")
    with pytest.raises(StorageError, match="cannot be read"):
        run.committed_steps()


def test_a_run_that_saved_but_has_no_checkpoint_left_does_not_start_from_0_silently(run):
    assert not run.resumes()
    with JsonLines(run.events) as events:
        events.append({"kind": "save", "step": 40})
    with pytest.raises(CheckpointError, match=r"are gone[\s\S]*step 40 was saved"):
        run.resumes()
    (run.checkpoints / "step-000000030").mkdir()
    (run.checkpoints / "step-000000030" / "manifest.json").touch()
    assert run.resumes()


def saved_in(run, *events) -> None:
    with JsonLines(run.events) as lines:
        for kind, step, tiers in events:
            lines.append({"kind": kind, "step": step, "tiers": dict.fromkeys(tiers, "kept")})


@pytest.mark.parametrize(
    "others",
    [[("upload", 40, ["object"])], [("save", 42, ["memory"])], [("save", 42, ["peer", "parity"])]],
    ids=["object store", "memory", "peer and parity"],
)
def test_a_run_that_lost_its_steps_asks_the_other_tiers_before_it_gives_up(run, others):
    saved_in(run, ("save", 40, ["disk"]), *others)
    assert run.resumes()
    with pytest.raises(CheckpointError, match=r"are gone[\s\S]*step 40 was saved"):
        run.check_nothing_kept()  # which the resume calls when nobody has a step


def test_an_upload_that_is_gone_as_well_is_a_loss_that_is_told(run):
    saved_in(run, ("save", 30, ["memory"]), ("upload", 20, ["object"]))
    with pytest.raises(CheckpointError, match=r"are gone[\s\S]*step 20 was saved"):
        run.check_nothing_kept()


def test_a_checkpoints_folder_that_somebody_removed_is_empty_and_made_again(run):
    run.checkpoints.rmdir()
    assert run.committed_steps() == []
    saved_in(run, ("upload", 40, ["object"]))
    assert run.resumes()
    run.begin_attempt()
    assert run.checkpoints.is_dir()


def test_a_link_to_a_disk_that_is_not_mounted_is_not_an_empty_folder(run):
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to("nowhere")
    with pytest.raises(StorageError, match="cannot be read"):
        run.committed_steps()


def test_a_run_is_named_so_that_the_next_command_finds_it(run, monkeypatch):
    monkeypatch.chdir(run.path.parent.parent)
    monkeypatch.setenv("SIRARA_RUN_DIR", str(run.path.parent))
    assert run.name_to_type == run.id
    monkeypatch.setenv("SIRARA_RUN_DIR", "elsewhere")
    assert run.name_to_type == str(run.path)
    assert RunFolder.find(run.name_to_type).path == run.path


def test_keep_adds_to_the_record_and_leaves_the_rest(run):
    run.keep(threads=2)
    assert run.record()["threads"] == 2 and run.record()["run"] == run.id


def test_a_durable_write_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    write_durably(tmp_path / "x", "old")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError):
        write_durably(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
