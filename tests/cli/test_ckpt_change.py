"""`sirara ckpt diff`, `reshard`, `prune`, `pin` as a user meets them: output, exit codes, messages."""

import json
import shutil

import pytest
from click.testing import CliRunner

from sirara.checkpoint.steps import committed_steps, step_name
from sirara.cli.main import cli
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import even, flip_bit, save, small_state

CONFIG = """\
name: demo
model: {family: llama, layers: 1, hidden: 32, heads: 2, ffn: 64, vocab: 61, max_seq: 32}
data: {train: [{path: store}], seq_len: 32}
train: {steps: 9, global_batch: 2, micro_batch: 2, optimizer: {name: adamw, lr: 0.1}}
"""


def sirara(*args):
    return CliRunner().invoke(cli, list(map(str, args)))


@pytest.fixture
def run(tmp_path):
    """A run folder with steps 2, 4, 6, 8: equal states but for one tensor of step 8."""
    path = tmp_path / "runs" / "demo-12345678"
    for step in (2, 4, 6, 8):
        state = small_state(1)
        if step == 8:
            state["embed.weight"] = state["embed.weight"].clone()
            state["embed.weight"][2, 3] += 0.25
        record = {"step": 1, "tokens": 100, "layout": {"dp": step}}
        boxes = even(state, step // 2)
        save(path / "checkpoints", step, state, boxes, run="demo-12345678", record=record, keep_last=9)
    (path / "run.json").write_text(json.dumps({"format": 1, "run": "demo-12345678", "created": "2026"}))
    return path


def step_of(run, step):
    return run / "checkpoints" / step_name(step)


# ---- diff


def test_diff_of_one_state_in_two_layouts_is_exit_0(run):
    result = sirara("ckpt", "diff", f"{run}@2", step_of(run, 6))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "equal to the bit"
    assert json.loads(sirara("ckpt", "diff", f"{run}@2", f"{run}@4", "--json").stdout)["equal"] is True


def test_diff_names_the_tensor_and_how_far_it_is_off_with_exit_1(run):
    result = sirara("ckpt", "diff", f"{run}@6", run)  # a run alone: its newest step
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[2] == "  embed.weight  1 elements differ, max |a-b| 0.25, first at [2, 3]"
    assert lines[3] == "1 of 17 tensors differ"
    shown = json.loads(sirara("ckpt", "diff", f"{run}@6", run, "--json").stdout)
    assert shown["differing"] == 1 and not shown["equal"]
    embed = next(t for t in shown["tensors"] if t["name"] == "embed.weight")
    assert embed["what"] == "values" and embed["max_abs"] == 0.25 and embed["first"] == [2, 3]
    assert embed["a"] == {"dtype": "F32", "shape": [13, 8]}


def test_diff_can_leave_out_tensors_and_show_equal_ones(run):
    assert sirara("ckpt", "diff", f"{run}@6", run, "--only", "*/exp_avg").exit_code == 0
    shown = sirara("ckpt", "diff", f"{run}@2", f"{run}@4", "--all").stdout
    assert shown.count("  equal") == 17


def test_diff_tells_missing_shape_and_dtype_apart(run, tmp_path):
    state = small_state(1)
    state["embed.weight"] = state["embed.weight"].T.contiguous()
    state["head.weight"] = state["head.weight"].float()
    state["extra"] = state.pop("block.0.bias")
    other = save(tmp_path / "other", 2, state, record={"step": 1, "tokens": 90})
    result = sirara("ckpt", "diff", f"{run}@2", other)
    assert result.exit_code == 1
    out = result.stdout
    assert "shape [13, 8] and [8, 13]" in out and "dtype BF16 and F32, equal values" in out
    assert "only in A" in out and "only in B" in out and "record tokens: 100 and 90" in out


def test_diff_refuses_a_damaged_step_with_exit_65(run):
    flip_bit(step_of(run, 4) / "model.safetensors", 4100)
    result = sirara("ckpt", "diff", f"{run}@2", f"{run}@4")
    assert result.exit_code == 65 and "embed.weight" in result.stderr
    (step_of(run, 2) / MANIFEST).write_text("{")
    result = sirara("ckpt", "diff", f"{run}@2", f"{run}@6")
    assert result.exit_code == 65 and "is torn" in result.stderr


# ---- reshard


def test_reshard_writes_a_step_that_verifies_and_equals_the_first(run, tmp_path):
    out = tmp_path / "out"
    dry = sirara("ckpt", "reshard", f"{run}@8", out, "--nodes", 3, "--file-size", "4KiB", "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("would write step 8") and not out.exists()
    result = sirara("ckpt", "reshard", run, out, "--nodes", 3, "--file-size", "4KiB", "--json")
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)["files"]
    assert sum(name.startswith("optim-") for name in files) >= 3
    assert sirara("ckpt", "verify", out).exit_code == 0
    assert sirara("ckpt", "diff", run, out).exit_code == 0
    again = sirara("ckpt", "reshard", run, out)
    assert again.exit_code == 2 and "exists already" in again.stderr


def test_reshard_of_a_damaged_step_names_the_piece_and_leaves_nothing(run, tmp_path):
    flip_bit(step_of(run, 8) / "model.safetensors", 4100)
    result = sirara("ckpt", "reshard", run, tmp_path / "out")
    assert result.exit_code == 65 and "embed.weight" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


# ---- prune and pin


def test_prune_says_first_then_deletes_and_keeps_what_is_pinned(run):
    assert sirara("ckpt", "pin", f"{run}@2", "--note", "paper").exit_code == 0
    assert "sizes agree; pinned" in sirara("ckpt", "ls", run).stdout
    dry = sirara("ckpt", "prune", run, "--keep-last", 1, "--dry-run")
    assert (
        dry.exit_code == 0 and "would free" in dry.stdout and len(committed_steps(run / "checkpoints")) == 4
    )
    assert [line.split()[3] for line in dry.stdout.splitlines()[:4]] == ["stays", "goes", "goes", "stays"]
    result = sirara("ckpt", "prune", run, "--keep-last", 1, "--json")
    shown = json.loads(result.stdout)
    assert committed_steps(run / "checkpoints") == [8, 2]
    assert [(s["step"], s["stays"]) for s in shown["steps"]] == [(8, True), (6, False), (4, False), (2, True)]
    assert shown["freed"] > 0 and shown["relied_on"] == 8
    assert sirara("ckpt", "pin", f"{run}@2", "--undo").exit_code == 0
    assert sirara("ckpt", "prune", run, "--keep-last", 1).exit_code == 0
    assert committed_steps(run / "checkpoints") == [8]


def test_prune_works_in_a_copy_of_a_run_and_past_a_step_that_was_copied_over(run):
    copy = run.rename(run.with_name("another-name"))
    shutil.copytree(step_of(copy, 4), step_of(copy, 30))
    result = sirara("ckpt", "prune", copy, "--keep-last", 1)
    assert result.exit_code == 0, result.output
    assert committed_steps(copy / "checkpoints") == [30, 8]
    assert "holds step 4: it was renamed or copied over" in result.stdout.splitlines()[0]


def test_prune_takes_its_rules_from_the_run_and_its_scores_from_the_metrics(run):
    (run / "config.yaml").write_text(CONFIG + "checkpoint: {keep_last: 1, keep_every: 4}\n")
    result = sirara("ckpt", "prune", run, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [s["step"] for s in shown["steps"] if s["stays"]] == [8, 4]
    (run / "config.yaml").write_text(CONFIG + "checkpoint: {keep_lost: 1}\n")
    result = sirara("ckpt", "prune", run, "--dry-run")
    assert result.exit_code == 2 and "keep_lost" in result.stderr
    (run / "config.yaml").unlink()
    rows = [{"step": s, "eval/val/loss": loss} for s, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 4.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ("ckpt", "prune", run, "--keep-last", 1, "--keep-best")
    assert sirara(*args, "eval/val/loss").exit_code == 0
    assert committed_steps(run / "checkpoints") == [8, 4]
    result = sirara(*args, "eval/other/loss")
    assert result.exit_code == 2 and "has the metric 'eval/other/loss'" in result.stderr


def test_pin_of_nothing_is_refused(run):
    assert sirara("ckpt", "pin", run, "--dry-run").exit_code == 0
    assert not (step_of(run, 8) / "pinned").exists()
    shown = json.loads(sirara("ckpt", "pin", run, "--json").stdout)
    assert shown["step"] == 8 and shown["pinned"] and (step_of(run, 8) / "pinned").exists()


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["diff", "RUN@7", "RUN"], 2, "step 7 has no committed checkpoint"),
        (["diff", "nothing", "RUN"], 2, "there is no run 'nothing'"),
        (["diff", "RUN", "RUN", "--only", "zzz"], 2, "no tensor of either step fits zzz"),
        (["diff", "RUN"], 2, "Missing argument 'B'"),
        (["show", "RUN@4", "--step", "4"], 2, "names a step already"),
        (["reshard", "RUN", "OUT", "--file-size", "3 potatoes"], 2, "is not a size"),
        (["reshard", "RUN", "OUT", "--file-size", "10"], 2, "files of 10 bytes are too small"),
        (["reshard", "RUN", "OUT", "--nodes", "0"], 2, "cannot be cut for 0 nodes"),
        (["reshard", "RUN", "OUT", "--step", "5"], 2, "step 5 has no committed checkpoint"),
        (["prune", "RUN"], 2, "say --keep-last N"),
        (["prune", "RUN", "--keep-last", "0"], 2, "is not in the range"),
        (["prune", "STEP", "--keep-last", "1"], 2, "is one step; prune takes a run"),
        (["pin", "RUN", "--step", "5"], 2, "step 5 has no committed checkpoint"),
    ],
)
def test_wrong_arguments_are_answered_with_one_clear_line(run, tmp_path, args, code, message):
    places = {"RUN": str(run), "STEP": str(step_of(run, 2)), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        args = [a.replace(name, place) if a == name or a.startswith(f"{name}@") else a for a in args]
    result = sirara("ckpt", *args)
    assert result.exit_code == code, result.output
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_run_without_checkpoints_is_exit_65(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    for args in (
        ["diff", run, run],
        ["reshard", run, tmp_path / "out"],
        ["prune", run, "--keep-last", 1],
        ["pin", run],
    ):
        result = sirara("ckpt", *args)
        assert result.exit_code == 65 and "has no committed checkpoint" in result.stderr
