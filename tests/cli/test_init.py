"""`sirara init`."""

import re

import pytest
from click.testing import CliRunner

from sirara.cli.init import starter
from sirara.cli.main import cli
from sirara.config.load import load, model_shape
from sirara.pure.families import PRESETS


def test_starter_loads_as_it_is_and_has_a_word_on_its_lines(tmp_path):
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "new" / "folder")])
    assert result.exit_code == 0
    path = tmp_path / "new" / "folder" / "sirara.yaml"
    config = load(path).config
    assert config.name == "folder"
    assert config.train.lr_schedule.name == "cosine"
    assert path.read_text().count("#") > 15
    assert "sirara data build" in result.output


@pytest.mark.parametrize("preset", PRESETS)
def test_starter_with_a_preset_loads_and_has_its_sizes(tmp_path, preset):
    path = tmp_path / "sirara.yaml"
    path.write_text(starter(name="x", preset=preset))
    shape = model_shape(load(path).config, 100)
    assert (shape.family, shape.layers, shape.vocab) == (PRESETS[preset].family, PRESETS[preset].layers, 100)


def test_next_commands_work_from_where_they_are_typed(tmp_path, monkeypatch):
    # data/tokens is looked for beside the file; built elsewhere, the run would not find it.
    monkeypatch.chdir(tmp_path)
    output = CliRunner().invoke(cli, ["init", "my run"]).output
    assert "cd 'my run' && sirara doctor" in output
    assert output.endswith("sirara run sirara.yaml\n")
    assert "cd " not in CliRunner().invoke(cli, ["init"]).output


def test_existing_file_is_left_alone(tmp_path):
    (tmp_path / "sirara.yaml").write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}/sirara.yaml exists and is left alone" in result.stderr
    assert (tmp_path / "sirara.yaml").read_text() == "mine"


def test_unknown_preset_names_near_ones_and_writes_nothing(tmp_path):
    result = CliRunner().invoke(cli, ["init", str(tmp_path), "--preset", "llama3-9b"])
    assert result.exit_code == 2
    assert "--preset llama3-8b" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "file" / "below")])
    assert result.exit_code == 74
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize("folder", ["with space", "ሲራራ", "latest", "-x", "a" * 100])
def test_any_folder_gives_a_name_that_the_schema_takes(tmp_path, folder):
    assert CliRunner().invoke(cli, ["init", "--", str(tmp_path / folder)]).exit_code == 0
    name = load(tmp_path / folder / "sirara.yaml").config.name
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
