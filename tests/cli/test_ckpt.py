"""`sirara ckpt`, `export` and `import` as a user meets them: output, exit codes, messages."""

import json
import os
import shutil
import time

import pytest
import torch
from click.testing import CliRunner

from sirara.checkpoint.hf import HfReader
from sirara.checkpoint.steps import save_uuid, step_name
from sirara.cli.main import cli
from tests.checkpoints import equal_bits, even, flip_bit, save, small_state
from tests.models import tiny_shape, write_model


def sirara(*args):
    return CliRunner().invoke(cli, list(map(str, args)))


@pytest.fixture
def run(tmp_path):
    """A run folder with steps 8, 9 and 10, a save that did not end, and a step without manifest."""
    path = tmp_path / "runs" / "demo-12345678"
    for step in (8, 9, 10):
        save(path / "checkpoints", step, small_state(step), even(small_state(step), 2), run="demo-12345678")
    (path / "run.json").write_text(json.dumps({"format": 1, "run": "demo-12345678", "created": "2026"}))
    (path / "checkpoints" / f".{step_name(11)}.tmp-{save_uuid('r', 1, 11, 0)}").mkdir()
    (path / "checkpoints" / step_name(12)).mkdir()
    return path


def test_ls_lists_committed_steps_newest_first_and_names_the_incomplete(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    outputs = {sirara("ckpt", "ls", target).stdout for target in ("demo", run, "latest", run / "checkpoints")}
    assert len(outputs) == 1
    lines = sirara("ckpt", "ls", "demo").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["10", "9", "8"]
    assert all("read back 20" in line and line.endswith("; sizes agree") for line in lines[1:4])
    assert lines[4].startswith("incomplete: .step-000000011.tmp-")
    assert lines[5].startswith("incomplete: step-000000012 ")


def test_ls_json_has_one_object_with_every_step(run):
    shown = json.loads(sirara("ckpt", "ls", run, "--json").stdout)
    assert [s["step"] for s in shown["steps"]] == [10, 9, 8]
    assert shown["steps"][0]["tokens"] == 1000
    assert all(s["read_back"].startswith("20") and s["changed"] == [] for s in shown["steps"])
    assert len(shown["incomplete"]) == 2


@pytest.mark.parametrize("how", ["written", "older file moved in"])
def test_a_file_swapped_for_one_of_equal_size_is_no_step_that_was_read(run, tmp_path, how):
    step = run / "checkpoints" / step_name(9)
    path = step / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    told = path.stat()
    if how == "written":
        path.write_bytes(raw)
        os.utime(path, ns=(told.st_atime_ns, time.time_ns() + 10**9))
    else:
        other = tmp_path / "other"
        other.write_bytes(raw)
        os.utime(other, ns=(told.st_atime_ns, told.st_mtime_ns))  # as `cp -p` and a backup do
        other.rename(path)
    line = sirara("ckpt", "ls", run).stdout.splitlines()[2]
    assert line.split()[0] == "9" and "WRITTEN SINCE: model.safetensors, `sirara ckpt verify` reads" in line
    assert "WRITTEN" not in "".join(sirara("ckpt", "ls", run).stdout.splitlines()[3:4])
    shown = json.loads(sirara("ckpt", "show", f"{run}@9", "--json").stdout)
    assert shown["changed"] == ["model.safetensors"] and shown["read_back"]
    assert sirara("ckpt", "verify", run, "--step", 9).exit_code == 65


def test_a_step_that_was_never_read_back_says_so_and_a_copied_one_is_not_suspected(run, tmp_path):
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")  # keeps times, as cp -a does
    for mark in (tmp_path / "copy").rglob("verified.json"):
        os.utime(mark, ns=(mark.stat().st_atime_ns, mark.stat().st_mtime_ns - 60 * 10**9))
        for other in mark.parent.iterdir():
            os.utime(other, ns=(other.stat().st_atime_ns, mark.stat().st_mtime_ns - 10**9 * (other != mark)))
    (tmp_path / "copy" / "checkpoints" / step_name(8) / "verified.json").unlink()
    lines = sirara("ckpt", "ls", tmp_path / "copy").stdout.splitlines()[1:4]
    assert [("never read back" in line, "WRITTEN" in line) for line in lines] == [(False, False)] * 2 + [
        (True, False)
    ]


def test_ls_of_a_damaged_step_says_so_and_lists_the_others(run):
    (run / "checkpoints" / step_name(9) / "model.safetensors").unlink()
    (run / "checkpoints" / step_name(8) / "manifest.json").write_text("{")
    result = sirara("ckpt", "ls", run)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "model.safetensors is missing" in lines[2] and "is torn" in lines[3]


def test_a_step_in_the_folder_of_another_is_no_good_step(run):
    (run / "checkpoints" / step_name(10)).rename(run / "checkpoints" / step_name(30))
    first = sirara("ckpt", "ls", run).stdout.splitlines()[1]
    assert first.split()[0] == "30" and "holds step 10: it was renamed or copied over" in first
    result = sirara("ckpt", "verify", run)
    assert result.exit_code == 65
    assert "manifest.json: is of step 10: the folder was renamed or copied over" in result.stdout


def test_show_tells_what_a_step_holds(run):
    result = sirara("ckpt", "show", run, "--step", 9, "--tensors")
    assert result.exit_code == 0
    assert "step      9" in result.stdout and "run       demo-12345678" in result.stdout
    assert "optim-0-0.safetensors" in result.stdout and "13x8" in result.stdout
    shown = json.loads(
        sirara("ckpt", "show", run / "checkpoints" / step_name(8), "--json", "--tensors").stdout
    )
    assert shown["step"] == 8 and shown["record"]["tokens"] == 800
    assert {t["name"] for t in shown["tensors"]} == small_state().keys()
    assert shown["piece_count"] >= shown["tensor_count"] - 1 and shown["pinned"] is False
    # Two ranks share row 6, so each of them has whole rows and a part of one.
    embed = next(t for t in shown["tensors"] if t["name"] == "embed.weight")
    assert (embed["bytes"], embed["pieces"], embed["files"]) == (13 * 8 * 4, 4, ["model.safetensors"])
    assert sirara("ckpt", "show", f"{run}@9", "--tensors").stdout == result.stdout


def test_verify_of_a_good_run_is_exit_0(run):
    result = sirara("ckpt", "verify", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(": good, ") == 3
    assert json.loads(sirara("ckpt", "verify", run, "--json").stdout)["ok"] is True


def test_verify_names_what_is_bad_with_exit_65(run):
    flip_bit(run / "checkpoints" / step_name(9) / "model.safetensors", 4100)
    (run / "checkpoints" / step_name(8) / "optim-0-0.safetensors").unlink()
    result = sirara("ckpt", "verify", run)
    assert result.exit_code == 65
    assert "step-000000010: good" in result.stdout
    assert "  model.safetensors: embed.weight[0:" in result.stdout
    assert "  optim-0-0.safetensors: is missing" in result.stdout
    shown = json.loads(sirara("ckpt", "verify", run, "--json").stdout)
    assert [len(s["faults"]) > 0 for s in shown["steps"]] == [False, True, True]
    assert shown["steps"][1]["faults"][0]["tensor"] == "embed.weight"
    assert sirara("ckpt", "verify", run, "--step", 10).exit_code == 0
    assert sirara("ckpt", "verify", run / "checkpoints" / step_name(9)).exit_code == 65


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["ckpt", "ls", "nothing-here"], 2, "there is no run 'nothing-here'"),
        (["ckpt", "show", "RUN", "--step", "77"], 2, "step 77 has no committed checkpoint"),
        (["ckpt", "show", "STEP", "--step", "8"], 2, "is one step's folder already"),
        (["export", "RUN", "RUN"], 2, "exists already"),
        (["export", "RUN", "x", "--dtype", "int4"], 2, "'int4' is not one of"),
        (["import", "nothing-here", "x"], 2, "there is no config.json"),
    ],
)
def test_wrong_arguments_are_answered_with_one_clear_line(run, args, code, message):
    places = {"RUN": run, "STEP": run / "checkpoints" / step_name(8)}
    result = sirara(*(places.get(a, a) for a in args))
    assert result.exit_code == code, result.output
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_run_without_checkpoints_has_nothing_to_show_or_verify(run):
    shutil.rmtree(run / "checkpoints")
    assert sirara("ckpt", "ls", run).exit_code == 0
    for verb in ("show", "verify"):
        result = sirara("ckpt", verb, run)
        assert result.exit_code == 65 and "has no committed checkpoint" in result.stderr


def test_import_then_verify_then_export_gives_the_same_weights(tmp_path):
    values = write_model(tmp_path / "hf", tiny_shape(), torch.bfloat16)
    dry = sirara("import", tmp_path / "hf", tmp_path / "step", "--dry-run")
    assert "would import" in dry.stdout and not (tmp_path / "step").exists()
    assert sirara("import", tmp_path / "hf", tmp_path / "step").exit_code == 0
    assert sirara("ckpt", "verify", tmp_path / "step").exit_code == 0
    result = sirara("export", tmp_path / "step", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["tensors"] == len(values)
    reader = HfReader(tmp_path / "out")
    for name, value in values.items():
        assert equal_bits(reader.read_slice(name, 0, value.numel()).reshape(value.shape), value)
    wide = sirara("export", tmp_path / "step", tmp_path / "wide", "--dtype", "float32")
    assert wide.exit_code == 0 and "float32" in wide.stdout
    assert HfReader(tmp_path / "wide").dtype("model.norm.weight") == torch.float32


def test_sample_refuses_a_damaged_step_like_every_other_reader(run):
    step = run / "checkpoints" / step_name(10)
    (step / "tokenizer.json").write_text("{}")
    flip_bit(step / "model.safetensors", -1)
    result = sirara("sample", step)
    assert result.exit_code == 65
    assert "model.safetensors" in result.stderr
