"""`sirara config`."""

import json

import pytest
from click.testing import CliRunner

from sirara.cli.init import starter
from sirara.cli.main import cli
from sirara.config.load import load


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "sirara.yaml"
    file.write_text(starter(name="tiny"))
    return file


def config(*words: object, env: dict[str, str] | None = None) -> str:
    result = CliRunner(env=env).invoke(cli, ["config", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["train.steps=70", "seed=3"],
        ["--train.steps=70", "--seed=3"],
        ["--set", "train.steps=70", "--set", "seed=3"],
        ["--set=train.steps=70", "--seed=3"],
    ],
)
def test_show_prints_what_a_run_would_use(path, tmp_path, words):
    text = config("show", path, *words)
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load(again).config == load(path, ["train.steps=70", "seed=3"]).config


def test_show_tells_where_each_value_was_given(path):
    lines = config("show", path, "seed=3", "--origins", env={"SIRARA_NUMERICS": "fast"}).splitlines()
    origins = {line.split(" = ")[0]: line.rpartition("  # ")[2] for line in lines}
    values = {line.split(" = ")[0]: line.split(" = ")[1].split("  ")[0] for line in lines}
    line_of_name = starter(name="tiny").splitlines().index("name: tiny") + 1
    assert (values["seed"], origins["seed"]) == ("3", "command line")
    assert (values["numerics"], origins["numerics"]) == ("fast", "environment SIRARA_NUMERICS")
    assert (values["name"], origins["name"]) == ("tiny", f"{path}:{line_of_name}")
    assert (values["launch.hang_timeout"], origins["launch.hang_timeout"]) == ("10m", "default")


def test_show_as_json_has_configuration_and_origins(path):
    shown = json.loads(config("show", path, "--json"))
    assert shown["config"]["train"]["optimizer"]["lr"] == 3e-4
    assert shown["origins"]["train.compile"] == "default"


def test_schema_is_json_that_knows_every_section(path):
    schema = json.loads(config("schema"))
    assert set(json.loads(config("show", path, "--json"))["config"]) == set(schema["properties"])
    assert schema["required"] == ["model", "data", "train"]
