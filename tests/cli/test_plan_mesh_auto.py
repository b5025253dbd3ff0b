"""`mesh: auto`: the planner's choice is used, and kept in the run folder."""

import json

import pytest
import yaml


@pytest.fixture(scope="module")
def run(project):
    done = project.sirara(
        "run", "toy.yaml", "mesh=auto", "launch.nproc=2", "train.steps=2", "name=auto", "--json"
    )
    assert done.code == 0, done.err
    return project.runs()[0], done


def test_the_layout_that_was_chosen_is_the_runs_configuration(run):
    folder, done = run
    mesh = yaml.safe_load(folder.config.read_text())["mesh"]
    assert mesh["pp"] * mesh["dp"] * mesh["tp"] == 2
    assert "mesh auto: " in done.err


def test_the_decision_is_in_the_run_folder(run):
    folder, _ = run
    (entry,) = json.loads((folder.path / "plan.json").read_text())["attempts"]
    kept = entry["search"]
    mesh = yaml.safe_load(folder.config.read_text())["mesh"]
    assert kept["asked"] == "mesh: auto" and kept["machine"]["devices"] == 2
    assert kept["best_now"]["plan"]["layout"]["dp"] == mesh["dp"]
    assert kept["best_now"]["plan"]["runs_now"] and kept["best_now"]["plan"]["fits"]
    assert kept["legal"] >= kept["fitting"] >= 1
    # What is graded is the plan of the layout that was chosen.
    assert entry["attempt"] == 1 and entry["plan"]["layout"]["dp"] == mesh["dp"]


def test_what_bits_hang_on_is_not_chosen(run, project):
    folder, _ = run
    before, after = (yaml.safe_load(p.read_text()) for p in (project.folder / "toy.yaml", folder.config))
    for key in ("global_batch", "micro_batch"):
        assert after["train"][key] == before["train"][key]


def test_a_run_that_fits_nowhere_is_refused_with_3(project):
    huge = [
        "model.hidden=65536",
        "model.heads=512",
        "model.kv_heads=512",
        "model.layers=100",
        "model.ffn=262144",
    ]
    done = project.sirara("run", "toy.yaml", "mesh=auto", "launch.nproc=2", *huge, "--dry-run")
    assert done.code == 3, done.err
    assert "SR215" in done.err
