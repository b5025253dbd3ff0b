"""`run`, `resume`, `stop`, `save`: what they print, make, refuse and end with."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.config.run_folder import RunFolder
from sirara.events import read
from tests.project import alive, until


@pytest.fixture(scope="module")
def finished(project):
    """A run of 12 steps on two workers, and how its command ended."""
    done = project.sirara(
        "run", "toy.yaml", "--train.steps=12", "--set", "launch.nproc=2", "name=two", "--json"
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture
def sirara(project, monkeypatch):
    """The command line in this process."""
    monkeypatch.chdir(project.folder)
    return lambda *words: CliRunner().invoke(cli, [str(word) for word in words])


def test_the_last_line_is_one_json_object_and_progress_goes_to_stderr(project, finished):
    assert len(finished.out.splitlines()) == 1
    result = finished.result
    assert set(result) >= {
        "run",
        "step",
        "loss",
        "loss_hex",
        "digest",
        "tokens",
        "grade",
        "attempt",
        "checkpoint",
    }
    assert (result["step"], result["reason"], result["exit_code"], result["grade"]) == (
        12,
        "done",
        0,
        "exact",
    )
    assert float.fromhex(result["loss_hex"]) == result["loss"]
    assert "[rank 0] step 12/12" in finished.err and "[rank 1]" not in finished.err


def test_the_run_folder_holds_everything(project, finished):
    run = RunFolder.find(finished.result["run"], run_dir=project.folder / "runs")
    assert json.loads((run.path / "env.json").read_text())["argv"][1:3] == ["run", "toy.yaml"]
    assert "nproc: 2" in run.config.read_text()
    assert run.config.read_text() == (run.logs(1) / "config.yaml").read_text()
    assert run.record()["threads"] == 1
    assert run.committed_steps() == [10, 12]
    for name in ("rank-00000.log", "rank-00001.log", "rank-00000.jsonl"):
        assert (run.logs(1) / name).exists()
    kinds = [event["kind"] for event in read(run.events)]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("save") == 2
    assert not any((run.path / "crash").iterdir())


def test_resume_of_more_steps_goes_on_in_the_same_folder_with_the_overrides_kept(project, finished):
    name = finished.result["run"]
    done = project.sirara("resume", name, "train.steps=15", "launch.nproc=1", "--json")
    assert done.code == 0, done.err
    assert (done.result["run"], done.result["attempt"], done.result["step"]) == (name, 2, 15)
    run = RunFolder.find(name, run_dir=project.folder / "runs")
    assert "steps: 15" in run.config.read_text()
    assert "steps: 12" in (run.logs(1) / "config.yaml").read_text()


def test_a_dry_run_says_the_plan_and_makes_nothing(project, sirara):
    before = project.runs()
    result = sirara("run", "toy.yaml", "launch.nproc=2", "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert (plan["nproc"], plan["threads"], plan["steps"]) == (2, 1, 60)
    assert plan["layout"] == "pp 1 dp 2 tp 1 zero 1 1f1b"
    assert [run.id for run in project.runs()] == [run.id for run in before]
    assert "steps        60" in sirara("run", "toy.yaml", "--dry-run").stdout


def test_a_dry_resume_says_from_which_step(sirara, finished):
    plan = json.loads(sirara("resume", finished.result["run"], "--dry-run", "--json").stdout)
    assert plan["resume_from"] >= 12


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_a_run_that_is_not_running_takes_no_requests(sirara, finished, verb):
    result = sirara(verb, finished.result["run"])
    assert result.exit_code == 2
    assert "is not running" in result.stderr and f"sirara resume {finished.result['run']}" in result.stderr


def test_a_running_run_takes_save_and_stop_and_refuses_a_second_owner(project, sirara):
    known = len(project.runs())
    process = project.start("run", "toy.yaml", "name=live", "train.steps=100000", "--json")
    run = project.wait_for_step(2, process, more_than=known)
    assert "dry run" in sirara("stop", run.id, "--dry-run").stdout

    assert sirara("save", run.id).exit_code == 0
    until(lambda: any(step % 10 for step in run.committed_steps()))

    second = project.sirara("resume", run.id, "--json")
    assert second.code == 2
    assert f"{run.id} is running (attempt 1)" in second.err and f"process {process.pid} " in second.err
    assert second.result["exit_code"] == 2

    assert json.loads(sirara("stop", run.id, "--wait", "--json").stdout)["requested"] == "stop"
    assert alive(run, 1) == []
    done = project.finish(process)
    assert done.code == 75, done.err
    assert done.result["step"] in run.committed_steps()


def test_an_error_of_a_worker_is_told_once_with_its_code(project):
    known = len(project.runs())
    process = project.start("run", "toy.yaml", "launch.nproc=2", "train.steps=100000", "--json")
    run = project.wait_for_step(2, process, more_than=known)
    # As a resume on another host would, which cannot reach the processes of this one.
    (run.control / "attempts" / "0002.jsonl").write_text("")
    done = project.finish(process)
    assert done.code == 2
    assert done.err.count("error[") == 1 and "attempt 2 owns the run" in done.err
    assert (done.result["run"], done.result["exit_code"]) == (run.id, 2)


def test_a_worker_refuses_step_0_in_a_run_with_checkpoints(project, finished):
    run = RunFolder.find(finished.result["run"], run_dir=project.folder / "runs")
    attempt = run.attempt()
    words = ["worker", run.path, "--attempt", attempt, "--agent", "0", "--fresh"]
    done = project.sirara(*words, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert done.code == 2


def test_starting_needs_no_torch_until_it_trains():
    program = "import sys, sirara.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_blocks_have_equal_bits_in_any_layout_with_evaluation_recompute_and_resume(project, dropout):
    # One process compiles more versions of what its blocks share than the compiler allows by default, each stage fewer.
    fixed = (
        *(
            "train.compile=true",
            "model.layers=4",
            f"model.dropout={dropout}",
            f"model.attention_dropout={dropout}",
        ),
        *("train.lr_schedule.name=constant", "launch.max_restarts=0", "--json"),
    )

    def run(*words):
        done = project.sirara("run", "toy.yaml", *fixed, *words, timeout_s=140)
        assert done.code == 0, done.err
        return done

    def bits(done):
        return [done.result[k] for k in ("loss_hex", "digest")]

    stages = ("launch.nproc=2", "mesh.pp=2", "mesh.zero=3", "train.recompute=full")
    evaluated = run("train.steps=6", "train.eval_every=2", "data.eval=[{path: store, name: same}]")
    begun = run("train.steps=3", *stages)
    resumed = project.sirara("resume", begun.result["run"], "train.steps=6", "--json", timeout_s=140)
    assert resumed.code == 0, resumed.err
    assert resumed.result["grade"] == "exact" and bits(resumed) == bits(evaluated)
