"""`sirara plan` without --trace: what it prints, writes, refuses and ends with, and how long it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.plan.profile import text_of
from tests.unit.plan.test_profile import profile

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
GPUS = {
    "bloom-176b": "a100-80gb", "mt-nlg-530b": "a100-80gb", "gpt-1t": "a100-80gb", "llama3-8b": "h100-sxm",
    "llama3-70b": "h100-sxm", "llama3-405b": "h100-sxm", "finetune-13b": "a100-80gb", "laptop": "cpu",
}  # fmt: skip


def plan(*words: object, code: int = 0):
    result = CliRunner().invoke(cli, ["plan", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sirara.yaml"
    path.write_text(
        "schema: 1\nmodel: {preset: llama2-7b}\n"
        "data: {train: [{path: no-such-folder}], seq_len: 2048}\n"
        "train: {steps: 1000, global_batch: 64, micro_batch: 1, precision: bf16, recompute: full}\n"
        "mesh: {dp: 8, zero: 1, block: 1}\n"
    )
    return path


@pytest.mark.parametrize("recipe", GPUS)
def test_recipes_are_planned_and_fit(recipe: str):
    found = json.loads(plan(RECIPES / f"{recipe}.yaml", "--gpu", GPUS[recipe], "--json").stdout)
    assert found["fits"] and found["time"]["step_s"] > 0
    assert found["runs_now"] == (recipe != "finetune-13b")
    stages = found["memory"]["stages"]
    assert len(stages) == found["layout"]["pp"]
    assert set(stages[0]["phases"]) == {"start", "step", "checkpoint save", "resume", "evaluation"}


def test_every_recipe_is_tested():
    assert {p.stem for p in RECIPES.glob("*.yaml")} == set(GPUS)


@pytest.mark.timeout(60)
def test_one_layout_takes_less_than_two_seconds_of_cpu_from_the_start_of_the_process():
    words = [
        sys.executable,
        "-m",
        "sirara",
        "plan",
        str(RECIPES / "llama3-70b.yaml"),
        "--gpu",
        "h100-sxm",
        "--json",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and json.loads(text)["fits"]
    assert usage.ru_utime + usage.ru_stime < 2


def test_what_does_not_fit_ends_with_3_and_names_changes_that_do(config: Path):
    result = plan(config, "--gpu", "a100-40gb", "--train.micro_batch=8", "--train.recompute=none", code=3)
    assert "error[SR214]" in result.output and "stage 0 needs" in result.output
    advice = result.output.split("  try     ")[1].splitlines()[0]
    keys = advice.split("(")[0].split()
    assert keys
    overrides = [w for w in keys if not w.startswith("gpus=")]
    gpus = [f"--gpus={w.removeprefix('gpus=')}" for w in keys if w.startswith("gpus=")]
    free = ["mesh.dp=auto"] if gpus else []
    plan(
        config,
        "--gpu",
        "a100-40gb",
        "--train.micro_batch=8",
        "--train.recompute=none",
        *free,
        *overrides,
        *gpus,
    )


def test_what_if_is_answered_beside_the_plan(config: Path):
    asked = ["train.micro_batch=2", "gpus=16", "gpu=h100-sxm", "data.seq_len=1024", "mesh.zero=3",
             "offload.optimizer=host", "train.micro_batch=7", "train.recompute=full:1 norm mesh.zero=3"]  # fmt: skip
    words = [w for a in asked for w in ("--what-if", a)]
    found = json.loads(plan(config, "--gpu", "a100-80gb", "--json", *words).stdout)
    changes = {c["keys"]: c for c in found["what_if"]}
    assert list(changes) == asked
    assert changes["gpu=h100-sxm"]["step_s"] < found["time"]["step_s"]
    assert changes["gpus=16"]["step_s"] < found["time"]["step_s"]
    assert changes["mesh.zero=3"]["device_bytes"] < found["memory"]["device_bytes"]
    assert not changes["offload.optimizer=host"]["runs_now"]
    assert "does not divide" in changes["train.micro_batch=7"]["error"]
    recipe = changes[asked[-1]]
    assert not recipe["error"] and recipe["runs_now"] and recipe["device_bytes"] > 0


def test_nodes_of_one_kind_are_not_unlike(config: Path):
    parts = plan(config, "--gpu", "a100-80gb:4+a100-80gb:4", "--mesh.dp=auto", "--json").stdout
    whole = plan(config, "--gpu", "a100-80gb", "--gpus", 8, "--mesh.dp=auto", "--json").stdout
    assert json.loads(parts) == json.loads(whole)


def test_a_small_model_is_told_in_units_that_show_it(config: Path):
    small = "model={family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 256, max_seq: 64}"
    text = plan(config, small, "data.seq_len=64", "--gpu", "a100-80gb").stdout
    assert "memory, MiB per device" in text and "phase, MiB" in text and " parameters on " in text


def test_a_change_is_answered_by_the_plan_of_the_same_command_with_it(config: Path):
    asked = [
        "mesh.dp=8",
        "gpu=h100-sxm",
        "model.preset=llama2-13b mesh.zero=3",
        "mesh.tp=2",
        "gpus=0",
        "gpu=none-such",
    ]
    words = [w for a in asked for w in ("--what-if", a)]
    text = plan(config, "--gpu", "a100-80gb", "--json", *words).stdout
    assert "NaN" not in text
    found = json.loads(text)
    same, faster, larger, cut, none, unknown = found["what_if"]
    assert same["step_s"] == found["time"]["step_s"]
    assert same["device_bytes"] == found["memory"]["device_bytes"]
    for change, keys in (
        (faster, ["--gpu", "h100-sxm"]),
        (larger, ["model.preset=llama2-13b", "mesh.zero=3"]),
        (cut, ["mesh={tp: 2, dp: 4, zero: 1, block: 1}"]),
    ):
        alone = json.loads(plan(config, "--gpu", "a100-80gb", *keys, "--json").stdout)
        assert change["step_s"] == alone["time"]["step_s"], change
        assert change["device_bytes"] == alone["memory"]["device_bytes"], change
    assert larger["step_s"] > 1.5 * same["step_s"]
    assert "no number of devices" in none["error"] and "none-such" in unknown["error"]


def test_what_does_not_fit_on_unlike_nodes_is_not_sent_to_nodes_of_the_first_kind(config: Path):
    words = ("--gpu", "a100-80gb:4+v100-16gb:4", "--train.precision=fp32")
    assert "gpus=" not in plan(config, *words, code=3).output


def test_unlike_nodes_are_told_which_stages_to_take(config: Path):
    words = ("--gpu", "a100-80gb:4+h100-sxm:4", "--mesh.pp=2", "--mesh.dp=auto", "--mesh.tp=1")
    found = json.loads(plan(config, *words, "--json").stdout)["unlike_nodes"]
    staged = next(way for way in found if way["form"] == "stages" and way["runs"])
    assert {p["gpu"] for p in staged["parts"]} == {"a100-80gb", "h100-sxm"}
    assert "split: [" in staged["overrides"][0] and "unlike nodes" in plan(config, *words).stdout


def test_unlike_nodes_that_no_mesh_deals_out_are_told_why(config: Path):
    text = plan(config, "--gpu", "a100-80gb:3+h100-sxm:5", "mesh={pp: 4, dp: 2, zero: 1}").stdout
    assert "no way to deal them out" in text and "a stage is 2 devices" in text


def test_money_and_goodput_follow_price_and_failures(config: Path):
    cheap = json.loads(plan(config, "--gpu", "a100-80gb", "--price", 1, "--json").stdout)
    dear = json.loads(plan(config, "--gpu", "a100-80gb", "--price", 3, "--mtbf", 50, "--json").stdout)
    assert cheap["run"]["money"] == pytest.approx(cheap["run"]["gpu_hours"])
    assert dear["run"]["money"] == pytest.approx(3 * dear["run"]["gpu_hours"])
    assert dear["goodput"]["ratio"] < cheap["goodput"]["ratio"]


def test_a_search_prints_the_layout_as_keys_that_work(config: Path):
    found = json.loads(plan(config, "--gpu", "a100-80gb", "--search", "--json").stdout)
    now = found["best_now"]
    assert now["plan"]["fits"] and now["plan"]["runs_now"]
    again = json.loads(plan(config, "--gpu", "a100-80gb", "--json", *now["overrides"]).stdout)
    assert again["time"]["step_s"] == pytest.approx(now["plan"]["time"]["step_s"])


def test_keys_of_a_search_say_how_many_processes_where_the_configuration_says_another_number():
    words = (RECIPES / "laptop.yaml", "--gpu", "cpu")
    found = json.loads(plan(*words, "--gpus", 8, "--search", "--json").stdout)
    keys = found["best_now"]["overrides"]
    assert found["gpus"] == 8 and "launch.nproc=8" in keys
    again = json.loads(plan(*words, *keys, "--json").stdout)
    assert again["time"]["step_s"] == pytest.approx(found["best_now"]["plan"]["time"]["step_s"])
    two = json.loads(plan(*words, "--search", "--json").stdout)
    assert not any(k.startswith("launch.nproc") for k in two["best_now"]["overrides"])


def test_slow_nodes_that_are_better_left_out_are_said_to_be(config: Path):
    words = ("--gpu", "v100-32gb:8+h100-sxm:4+h100-sxm:4", "--search", "mesh.dp=auto")
    text = plan(config, *words).stdout
    assert "8 x h100-sxm alone, the others left out, is faster" in text
    found = json.loads(plan(config, *words, "--json").stdout)
    (fast,) = [a for a in found["one_kind_alone"] if a["gpu"] == "h100-sxm"]
    assert fast["step_s"] < found["best"]["plan"]["time"]["step_s"]
    again = json.loads(plan(config, "--gpu", "h100-sxm", "--json", *fast["overrides"]).stdout)
    assert again["gpus"] == 8 and again["time"]["step_s"] == pytest.approx(fast["step_s"])


def test_mesh_auto_is_searched(config: Path):
    text = plan(config, "--gpu", "a100-80gb", "--gpus", 8, "mesh=auto").stdout
    assert "searched" in text and "left out" in text


def test_cost_looks_at_fewer_devices_and_memory_at_less_memory(config: Path):
    words = [config, "--gpu", "a100-80gb", "--gpus", 16, "mesh.dp=auto", "--search", "--json"]
    text = plan(*words).stdout
    fast = json.loads(text)
    assert any(s["reason"] and s["step_s"] is None for s in fast["sensitivity"]) and "NaN" not in text
    cheap = json.loads(plan(*words, "--objective", "cost").stdout)
    small = json.loads(plan(*words, "--objective", "memory").stdout)
    assert cheap["best"]["plan"]["run"]["gpu_hours"] <= fast["best"]["plan"]["run"]["gpu_hours"]
    assert small["best"]["plan"]["memory"]["device_bytes"] < fast["best"]["plan"]["memory"]["device_bytes"]


def test_unlike_nodes_are_named_by_groups(config: Path):
    text = plan(config, "--gpu", "a100-80gb:8+h100-sxm:8", "mesh.dp=16").stdout
    assert "on 8 x a100-80gb + 8 x h100-sxm, 8 per node" in text and "16 x a100-80gb" not in text
    result = plan(config, "--gpu", "a100-80gb+h100-sxm", code=2)
    assert "how many of each" in result.output


def test_page_and_picture_are_written(config: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    plan(config, "--gpu", "a100-80gb", "mesh={pp: 4, dp: 2}", "--html", page, "--png", picture)
    assert page.read_text().startswith("<!doctype html>") and picture.read_bytes()[:4] == b"\x89PNG"


def test_a_machine_of_ones_own_is_a_file(config: Path, tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"big-a100": {"like": "a100-80gb", "hbm": 200}}))
    found = json.loads(plan(config, "--gpu", own, "--json").stdout)
    assert found["gpu"] == "big-a100" and found["memory"]["capacity_bytes"] == 200e9


def test_devices_that_the_mesh_does_not_ask_for_are_refused(config: Path):
    result = plan(config, "--gpus", 12, code=2)
    assert "SR216" in result.output and "--search" in result.output


def test_devices_that_leave_a_node_part_empty_are_planned_as_they_are(config: Path):
    for words in (("mesh.dp=12",), ("mesh.dp=12", "--gpus", 12), ("mesh.dp=auto", "--gpus", 12)):
        text = plan(config, "--gpu", "a100-80gb", "--train.global_batch=48", *words).stdout
        assert "12 x a100-80gb, 6 per node" in text and "dp 12" in text
    assert "--gpus 16" in plan(config, "--gpus", 13, "mesh.dp=13", "--train.global_batch=52", code=2).output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--price", -3], "--price"),
        (["--price", "nan"], "--price"),
        (["--mtbf", 0], "--mtbf"),
        (["--mtbf", "nan"], "--mtbf"),
        (["--ceiling", "much"], "needs a number and a unit"),
        (["--ceiling", "0GiB"], "--ceiling"),
        (["--gpu", "h100-sxm:many"], "how many of each"),
        (["--gpu", "a100-80gb:0+h100-sxm:8"], "how many of each"),
        (["--gpu", "a100-80gb:4+h100-sxm:4", "--gpus", 16], "is 8 devices, not 16"),
        (["--gpu", "h100-sxm:16"], "the mesh asks for 8"),
        (["--objective", "cost"], "--search"),
        (["--what-if", "gpu"], "gpu is no KEY=VALUE"),
        (["--what-if", "mesh.zero=2 mesh.tp="], "mesh.tp= is no KEY=VALUE"),
        (["--search", "--what-if", "mesh.zero=2"], "--what-if"),
        (["--trace", "--search"], "--search"),
        (["--rank", 0], "--trace"),
        (["--trace", "--gpus", 8, "--what-if", "mesh.zero=2"], "--gpus, --what-if"),
        (["--trace", "--objective", "cost"], "--objective"),
        (["--png", "plan.bmp"], ".png"),
        (["--html", "no-such-folder/plan.html"], "cannot be written"),
    ],
)
def test_an_option_that_says_nothing_is_refused(config: Path, words: list[object], says: str):
    result = plan(config, *words, code=2)
    assert "error[SR21" in result.output and says in result.output


def test_a_precision_that_an_accelerator_has_no_units_for_is_said(config: Path):
    assert "v100-32gb has no units for bf16: the rate of fp16" in plan(
        config, "--gpu", "v100-32gb", "mesh={dp: 8, zero: 3}"
    ).stdout  # fmt: skip
    assert "no units" not in plan(config, "--gpu", "a100-80gb").stdout
    assert "cannot compute in fp64" in plan(config, "--gpu", "tpu-v5p", "train.precision=fp64", code=2).output


def test_unlike_nodes_of_no_use_have_a_reason_in_json(config: Path):
    mixed = ("--gpu", "a100-80gb:3+h100-sxm:5", "mesh={pp: 4, dp: 2, zero: 1}", "--json")
    found = json.loads(plan(config, *mixed).stdout)
    assert found["unlike_nodes"] == [] and "a stage is 2 devices" in found["no_unlike_nodes"]
    assert found["machines"] == "3 x a100-80gb + 5 x h100-sxm"
    alike = json.loads(plan(config, "--gpu", "a100-80gb", "--json").stdout)
    assert alike["no_unlike_nodes"] == "all devices are alike"


def test_a_search_says_what_it_left_free_and_why(config: Path):
    words = (config, "--gpu", "a100-40gb", "--search")
    found = json.loads(plan(*words, "--json").stdout)
    memory = found["best"]["plan"]["memory"]
    assert memory["free_bytes"] >= memory["margin"]["bytes"] > 0
    assert f"left free     {found['left_free']}" in plan(*words).stdout
    hard = plan(*words, "--ceiling", "36GiB").stdout
    assert "a ceiling is taken as it is" in hard


def test_a_profile_that_is_missing_is_told(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIRARA_PROFILE", "/no/such")
    text = plan(RECIPES / "laptop.yaml", "--gpu", "here").stdout
    assert "SIRARA_PROFILE says /no/such, which is missing" in text


def test_a_configuration_for_one_cpu_is_planned_on_the_one_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sirara.cli.machines.count_gpus", lambda env: 0)
    monkeypatch.setenv("SIRARA_PROFILE", "none")
    first = plan(RECIPES / "laptop.yaml").stdout.splitlines()[0]
    assert first.startswith("assumed: h100-sxm (--gpu), though launch.nproc=2 is of one machine")
    file = tmp_path / "profile.yaml"
    file.write_text(text_of(profile()))
    monkeypatch.setenv("SIRARA_PROFILE", str(file))
    lines = plan(RECIPES / "laptop.yaml").stdout.splitlines()
    assert lines[0].startswith("assumed: this machine (--gpu), as launch.nproc=2 is of one: measured here")
    assert "on 2 x cpu" in lines[1]
    assert "h100-sxm" in plan(RECIPES / "laptop.yaml", "train.precision=bf16").stdout
