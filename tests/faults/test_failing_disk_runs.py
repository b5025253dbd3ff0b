"""Whole runs with keepers on a device that fails: every write beneath the run's checkpoints gets EIO or EDQUOT from
the system (fault_shim.c), in the trainer and in its keeper alike. A device that is full is in test_space.py.

    fails for a time   the training goes on, each failure is told, a retry keeps the step
    fails for good     checkpoint.max_failures in a row, a save into memory, exit code 74; resumed with equal bits
"""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirara.checkpoint.steps import incomplete_steps
from sirara.events import read
from tests.faults.campaign import FULL, Cases, Shim, compiled
from tests.faults.test_space import EQUAL, Heard
from tests.project import Project, until

pytestmark = pytest.mark.timeout(600)

# As long as the faults take; the learning rate does not hang on the last step.
LONG = ("train.steps=100000", "checkpoint.every=10", "checkpoint.keep_last=1", "checkpoint.retry=0.05s")
STEADY = ("train.lr_schedule.name=constant", "checkpoint.async=true", "checkpoint.max_failures=5")
FAILED = "could not be written ("
SAYS = {
    errno.EIO: ("SR602", "EIO"),
    errno.EDQUOT: ("SR601", "the quota for "),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    folder = tmp_path_factory.mktemp("shim")
    library = compiled(folder)
    if library is None:
        pytest.skip("there is no C compiler for fault_shim.c")
    return Shim(library, folder)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Cases]:
    cases = Cases()
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nruns on a failing device: {cases}")


@pytest.mark.parametrize("error", SAYS, ids=errno.errorcode.get)
def test_a_run_goes_on_while_its_device_fails_and_ends_with_74_when_it_does_for_good(
    project, shim, case, tmp_path: Path, error
):
    known = len(project.runs())
    tiers = f"checkpoint.tiers=[{{tier: memory, path: {tmp_path / 'shm'}}}, disk]"
    words = (*LONG, *STEADY, tiers, f"name=on-{errno.errorcode[error]}".lower())
    process = project.start("run", "toy.yaml", *words, env=shim.environment)
    heard = Heard(process)

    def committed() -> list[int]:
        runs = project.runs()
        return runs[-1].committed_steps() if len(runs) > known else []

    def ends_or(what) -> None:
        until(lambda: process.poll() is not None or what(), timeout_s=200)
        assert process.poll() is None, heard.end()

    ends_or(committed)
    run, kept = project.runs()[-1], committed()[0]
    shim.arm(run.checkpoints, FULL, 0, error)  # not one byte more
    ends_or(lambda: heard.count(FAILED) >= 2)
    case(f"{errno.errorcode[error]} for a time", shim.fired)
    shim.disarm()
    ends_or(lambda: committed() and committed()[0] > kept)
    told = heard.count(FAILED)
    shim.arm(run.checkpoints, FULL, 0, error)
    code = process.wait(timeout=200)
    case(f"{errno.errorcode[error]} for good", shim.fired)
    shim.disarm()
    err = heard.end()
    assert code == 74, err
    code, says = SAYS[error]
    assert f"error[{code}]" in err and says in err and "Traceback" not in err
    assert err.count(FAILED) >= told + 5
    assert "5 saves in a row have failed" in err and "is kept in memory" in err
    kept = run.committed_steps()[0]
    assert incomplete_steps(run.checkpoints) == []
    failures = [e for e in read(run.events) if e["kind"] == "save_failed"]
    assert [e["in_a_row"] for e in failures][-5:] == [1, 2, 3, 4, 5]

    # Memory holds the step at which the run gave up; a run in peace comes to the same state.
    takes = project.sirara("ckpt", "why", str(run.path), "--json").result["takes"]
    last = f"train.steps={takes + 5}"
    done = project.sirara("resume", str(run.path), last, "--json", timeout_s=200)
    assert done.code == 0, done.err
    assert next(e["from_step"] for e in read(run.events) if e["kind"] == "resume") == takes > kept
    peace = project.sirara("run", "toy.yaml", "name=peace", last, *STEADY, "--json", timeout_s=400)
    assert peace.code == 0, peace.err
    assert [done.result[name] for name in EQUAL] == [peace.result[name] for name in EQUAL]
