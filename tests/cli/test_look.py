"""`status`, `metrics`, `logs` of a real run that was stopped once and resumed."""

import json

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from tests.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("project"))
    first = project.sirara("run", "toy.yaml", "train.steps=4", "checkpoint.every=2", "--json")
    assert first.code == 0, first.err
    # As if it had been killed after step 4: the checkpoint of step 2 is the newest.
    run = project.runs()[0]
    (run.checkpoints / "step-000000004" / "manifest.json").unlink()
    project.result = project.sirara("resume", "latest", "train.steps=6", "--json")
    assert project.result.code == 0, project.result.err
    yield project
    project.close()


def test_metrics_has_every_live_step_once_with_hex(look, project):
    said = json.loads(look("metrics", "latest", "--json"))
    assert [(row["step"], row["attempt"]) for row in said["steps"]] == [(1, 1), (2, 1)] + [
        (s, 2) for s in (3, 4, 5, 6)
    ]
    for row in said["steps"]:
        assert float.fromhex(row["loss_hex"]) == row["loss"]
        assert row["seconds"] > 0 and row["lr"] > 0 and row["grad_norm"] > 0
    assert said["steps"][-1]["loss_hex"] == project.result.result["loss_hex"]
    assert said["steps"][-1]["tokens"] == project.result.result["tokens"]


def test_metrics_to_a_pipe_are_plain_columns(look):
    lines = look("metrics").splitlines()
    assert lines[0].split() == ["step", "loss", "grad_norm", "lr", "tokens", "seconds"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert [line.split()[0] for line in look("metrics", "--last", 2).splitlines()[1:]] == ["5", "6"]


def test_metrics_draws_a_png(look, project):
    look("metrics", "--plot", "loss.png")
    assert (project.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_status_in_words_and_json(look, project):
    run = project.runs()[0]
    state = json.loads(look("status", "--json"))
    assert (state["run"], state["state"], state["attempt"], state["step"]) == (run.id, "done", 2, 6)
    assert (state["steps"], state["checkpoint"], state["grade"]) == (6, 6, project.result.result["grade"])
    assert state["loss_hex"] == project.result.result["loss_hex"]
    text = look("status", run.id)
    assert text.startswith(f"{run.id}  done") and "6/6  100 %" in text and "\x1b" not in text
    assert look("status", "--all").startswith(run.id)
    assert [s["run"] for s in json.loads(look("status", "--all", "--json"))] == [run.id]


def test_logs_of_an_attempt_in_words_and_json(look):
    assert "step 6/6" in look("logs")
    first = look("logs", "--attempt", 1)
    assert "step 4/4" in first and "step 6/6" not in first
    records = [json.loads(line) for line in look("logs", "--json").splitlines()]
    assert any(record["message"].startswith("step 6/6") for record in records)


def test_following_a_run_that_has_ended_prints_it_and_returns(look):
    assert look("logs", "--follow") == look("logs")


def test_a_rank_without_a_log_is_an_error_that_counts_those_there(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    result = CliRunner().invoke(cli, ["logs", "--rank", "5"])
    assert result.exit_code == 2 and "1 ranks have one" in result.stderr
