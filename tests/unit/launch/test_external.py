"""Under somebody else's launcher all ranks work on one run."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.cli.run import _under_launcher
from sirara.config.run_folder import RunFolder
from sirara.errors import ConfigError, Exit
from sirara.launch.external import Agreement, Refused, agree, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


class MemoryStore:
    """A launcher's store: `get` waits for the key."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=10)
            return self._values[key]

    def check(self, keys):
        return all(key in self._values for key in keys)


def test_a_person_is_no_launcher():
    assert detect({}) is None
    batch_script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert detect(batch_script) is None
    assert detect({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert detect({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}) is None


def test_torchrun_is_known_by_its_environment():
    found = detect(TORCHRUN)
    assert (found.kind, found.rank, found.world, found.local_rank, found.local_world, found.node) == (
        "torchrun", 3, 8, 1, 2, 1,
    )  # fmt: skip
    assert not found.serves and found.restart == 2
    assert f" {os.getppid()} " in found.identity
    assert found.environment()["MASTER_ADDR"] == "node0"


def test_srun_is_known_by_its_step_and_gives_torch_what_it_needs():
    found = detect(SRUN)
    assert (found.kind, found.rank, found.world, found.local_rank, found.local_world, found.node) == (
        "srun", 5, 7, 1, 3, 1,
    )  # fmt: skip
    assert found.host == "gpu003" and 20_000 <= found.port < 30_000
    first = detect({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first.serves and not found.serves
    assert (first.host, first.port, first.identity) == (found.host, found.port, found.identity)
    assert first.local_world == 4
    assert set(found.environment()) >= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("nodes", ["gpu003", "gpu003,cpu1", "gpu[003,009]", "gpu[003-005,9],cpu1"])
def test_the_first_host_of_a_slurm_list_is_the_master(nodes):
    assert detect({**SRUN, "SLURM_STEP_NODELIST": nodes}).host == "gpu003"


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"RANK": "x"}, {"MASTER_PORT": ""}, {"MASTER_ADDR": ""}])
def test_a_contradictory_environment_is_refused(change):
    with pytest.raises(ConfigError):
        detect({**TORCHRUN, **change})


def launcher(rank, **change):
    return detect({**TORCHRUN, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0", **change})


def test_all_ranks_agree_on_what_rank_0_made(tmp_path):
    store, made = MemoryStore(), Agreement(path=tmp_path, attempt=4, resume=True, port=7)
    heard = []
    waiter = threading.Thread(
        target=lambda: heard.append(agree(launcher(1), store, pytest.fail, run_dir=None))
    )
    waiter.start()
    assert agree(launcher(0), store, lambda earlier: made, run_dir=None) == made
    waiter.join()
    assert heard == [made]


def test_when_rank_0_is_refused_all_leave_with_its_exit_code():
    store = MemoryStore()

    def refuse(earlier):
        raise ConfigError("data.seq_len is 0")

    with pytest.raises(ConfigError):
        agree(launcher(0), store, refuse, run_dir=None)
    with pytest.raises(Refused, match="seq_len is 0") as caught:
        agree(launcher(2), store, pytest.fail, run_dir=None)
    assert caught.value.exit_code == Exit.USAGE


def test_a_restart_finds_its_run_in_the_store(tmp_path):
    store, seen = MemoryStore(), []

    def lead(earlier):
        seen.append(earlier and earlier.path)
        return Agreement(path=tmp_path / "run", attempt=1, resume=False, port=7)

    agree(launcher(0), store, lead, run_dir=None)
    agree(launcher(0, TORCHELASTIC_RESTART_COUNT="1"), store, lead, run_dir=None)
    assert seen == [None, tmp_path / "run"]


def test_a_requeued_slurm_job_finds_its_run_by_identity_and_another_job_does_not(tmp_path):
    first = detect({**SRUN, "SLURM_PROCID": "0"})
    run = RunFolder.create(Named(tmp_path), "", identity=first.identity)
    seen = []

    def lead(earlier):
        seen.append(earlier and earlier.id)
        return Agreement(path=tmp_path, attempt=1, resume=False, port=7)

    for change in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "78"}):
        requeued = detect({**SRUN, "SLURM_PROCID": "0", **change})
        agree(requeued, MemoryStore(), lead, run_dir=tmp_path)
    assert seen == [None, run.id, None]


def test_processes_that_another_launcher_has_started_are_not_the_configurations_to_count(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert _under_launcher(["mesh.pp=2"]) == ["mesh.pp=2", "launch.nproc=auto"]
    assert (
        _under_launcher(["launch.nproc=4"])[-1]
        == _under_launcher(["launch.nproc=2"])[-1]
        == "launch.nproc=auto"
    )
    with pytest.raises(ConfigError, match=r"launch.nproc=3, and .* has started 4 processes"):
        _under_launcher(["launch.nproc=3"])
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert _under_launcher(["launch.nproc=3"]) == ["launch.nproc=3"]
