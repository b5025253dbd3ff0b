"""A keeper as a process: it starts without torch, says why it cannot work, and goes when nobody needs it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from sirara.checkpoint.arena import Arena
from sirara.checkpoint.image import image_plan
from sirara.checkpoint.job import (
    JobEnd,
    KeeperSettings,
    SaveJob,
    TierResult,
    fault_fields,
    fault_from,
)
from sirara.checkpoint.keeping import KeeperProcess
from sirara.checkpoint.stage import Stager
from sirara.checkpoint.steps import save_uuid
from sirara.config.processes import ProcessId, wait_for_processes
from sirara.errors import CheckpointError, InvariantError, RunBusyError, StorageError
from sirara.pure.saveplan import plan_save
from tests.checkpoints import differing, even, load, manager, plan_of, ranges_of, small_state

UUID = save_uuid("run-1", 1, 5, 0)


@pytest.fixture
def plan():
    state = small_state()
    return plan_save(plan_of(state, even(state, 1)), node_of=lambda rank: 0)


@pytest.fixture
def keeper(tmp_path, plan):
    (tmp_path / "shm" / "run-1").mkdir(parents=True)
    settings = KeeperSettings(
        folder=str(tmp_path / "checkpoints"),
        run="run-1",
        run_folder=None,
        rank=0,
        world=1,
        node=0,
        ranks_per_node=1,
        attempt=1,
        plan=str(tmp_path / "shm" / "run-1" / "plan-0"),
        memory=str(tmp_path / "shm" / "run-1"),
        keep_last=3,
        keep_every=None,
        tiers=[{"tier": "disk"}],
    )
    process = KeeperProcess(settings, plan=plan.to_bytes, log=tmp_path / "writer.log")
    yield process
    process.close(wait_s=10)


def image(tmp_path, plan, *, ready=True):
    layout = image_plan(plan, 0)
    arena = Arena.create(tmp_path / "shm" / "run-1", "arena-0-0", layout.total, run="run-1")
    arena.mark_writing(5, UUID)
    Stager(plan, layout, ranges_of(small_state(), even(small_state(), 1), 0)).copy(arena.data)
    if ready:
        arena.mark_ready()
    return arena


def job(arena, **changes):
    made = SaveJob(
        step=5,
        uuid=UUID,
        attempt=1,
        arena=str(arena.path),
        tiers=("disk",),
        deadline_s=20.0,
        record={"step": 5},
        hf_files={"config.json": b"{}"},
    )
    return replace(made, **changes)


def end_of(keeper, made):
    keeper.give(made)
    end = keeper.poll(timeout_s=30)
    assert end is not None and not keeper.busy
    return end


def test_the_keeper_and_all_that_it_imports_do_without_torch():
    program = "import sys, sirara.checkpoint.keeper; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_job_is_done_and_the_next_one_by_the_same_keeper(tmp_path, keeper, plan):
    keeper.start()
    arena = image(tmp_path, plan)
    end = end_of(keeper, job(arena))
    assert end.fault is None and end.path.endswith("step-000000005")
    assert end.tiers["disk"].ok and end.total_bytes == plan.total_bytes
    assert {"write", "commit", "verify"} <= end.seconds.keys()
    assert end_of(keeper, job(arena)).fault is None
    assert keeper.starts == 1
    snapshot = manager(tmp_path / "checkpoints").open(5)
    assert differing(small_state(), load(snapshot, small_state())) == []
    assert (snapshot.path / "config.json").read_bytes() == b"{}"  # sent with the first job alone


def test_an_image_that_is_torn_or_of_another_save_is_not_written(tmp_path, keeper, plan):
    keeper.start()
    arena = image(tmp_path, plan, ready=False)
    end = end_of(keeper, job(arena))
    assert isinstance(end.fault, InvariantError) and f"it is WRITING with save {UUID}" in end.fault.why
    arena.mark_ready()
    other = save_uuid("run-1", 1, 5, 1)
    end = end_of(keeper, job(arena, uuid=other))
    assert end.fault is not None and f"the arena does not hold save {other}" in end.fault.what
    assert manager(tmp_path / "checkpoints").newest() == []
    assert end_of(keeper, job(arena)).fault is None


def test_a_keeper_is_modest_and_in_a_process_group_of_its_own(keeper):
    keeper.start()
    keeper.hello()
    assert os.getpgid(keeper.pid) == keeper.pid
    assert os.getsid(keeper.pid) == os.getsid(0)  # niceness counts within a session
    assert os.getpriority(os.PRIO_PROCESS, keeper.pid) == 19


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_keeper_that_ended_while_it_had_no_job_is_started_again(tmp_path, keeper, plan, number, caplog):
    keeper.start()
    keeper.hello()
    first = ProcessId.of(keeper.pid)
    os.kill(first.pid, number)
    assert wait_for_processes([first], wait_s=10) == []
    keeper.start()
    assert end_of(keeper, job(image(tmp_path, plan))).fault is None
    assert keeper.starts == 2
    assert f"process {first.pid}" in caplog.text and "started again" in caplog.text


def test_a_keeper_that_cannot_start_says_why(tmp_path, keeper):
    keeper._plan = lambda: b"no plan at all, only some bytes"
    keeper.start()
    with pytest.raises(InvariantError, match="a save plan did not arrive as it was sent"):
        keeper.hello()
    # Nor when it dies before it can speak.
    keeper._plan, keeper._settings = lambda: b"", replace(keeper._settings, nice="low")  # type: ignore[arg-type]
    keeper.start()
    with pytest.raises(StorageError, match="ended with exit code 1") as caught:
        keeper.hello()
    assert "TypeError" in caught.value.why
    assert str(tmp_path / "writer.log") in caught.value.where


def test_a_keeper_that_left_before_it_is_given_a_job_has_said_why(tmp_path, keeper, plan):
    keeper._plan = lambda: b"no plan at all, only some bytes"
    keeper.start()
    assert wait_for_processes([ProcessId.of(keeper.pid)], wait_s=20) == []
    with pytest.raises(InvariantError, match="a save plan did not arrive as it was sent"):
        end_of(keeper, job(image(tmp_path, plan)))


def test_a_keeper_goes_with_its_trainer_and_leaves_no_arena(tmp_path, keeper, plan):
    keeper.start()
    keeper.hello()
    image(tmp_path, plan)
    process = ProcessId.of(keeper.pid)
    keeper.close(wait_s=0)
    assert wait_for_processes([process], wait_s=10) == []
    assert not (tmp_path / "shm" / "run-1").exists()


def test_errors_travel_with_their_own_words():
    sent = RunBusyError("attempt 2 owns the run", code="SR802", where="there", why="5 bytes", try_=["a", "b"])
    got = fault_from(fault_fields(sent))
    assert type(got) is RunBusyError and str(got) == str(sent)
    try:
        _ = 1 // 0
    except ZeroDivisionError as error:
        got = fault_from(fault_fields(error))
    assert isinstance(got, InvariantError)
    assert got.what.startswith("ZeroDivisionError: ") and "test_keeper.py:" in got.where
    assert isinstance(fault_from({**fault_fields(sent), "class": "Exit"}), InvariantError)


def test_jobs_and_their_ends_arrive_as_they_were_sent():
    made = SaveJob(
        step=5, uuid=UUID, attempt=2, arena="/a", tiers=("memory", "disk"), deadline_s=1.5, ended=("x",),
        addresses=("h:1", ""), record={"lr": 0.1}, hf_files={"t.json": b"\x00\xff"}, aliases={"a": "b"},
        scores={5: 2.5},
    )  # fmt: skip
    assert SaveJob.from_fields(json.loads(made.to_line())) == made
    end = JobEnd(
        step=5, uuid=UUID, digest="d", path="/p", total_bytes=9, seconds={"write": 0.5},
        tiers={"peer": TierResult(ok=False, fault="gone", bytes=1, seconds=2.0)},
    )  # fmt: skip
    assert JobEnd.from_fields(json.loads(end.to_line())) == end
    failed = JobEnd.from_fields(json.loads(replace(end, fault=CheckpointError("torn")).to_line()))
    assert isinstance(failed.fault, CheckpointError) and failed.fault.what == "torn"
