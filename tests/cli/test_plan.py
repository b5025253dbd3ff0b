"""`sirara plan --trace`, and the recipes of the largest models on paper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.pure.families import PRESETS, parameter_count

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
GIB = 1 << 30


def plan(*words: object) -> str:
    result = CliRunner().invoke(cli, ["plan", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def traced(recipe: str, rank: int) -> tuple[dict, float, int]:
    """(what it prints, CPU seconds, peak bytes) of a process of its own."""
    words = [sys.executable, "-m", "sirara", "plan", str(RECIPES / f"{recipe}.yaml"), "--trace", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*words, f"--rank={rank}"], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return json.loads(text), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def bytes_of_tp(batch: int, microbatches: int, hidden: int, tp: int, *, sums: int) -> int:
    """Sums of hidden states in bf16, by reduce-scatter and all-gather."""
    return microbatches * sums * 2 * (tp - 1) * batch * 2048 * hidden * 2 // tp


@pytest.mark.timeout(300)
def test_mt_nlg_530b_on_3360_ranks_is_traced_within_60_cpu_seconds_and_4_gib():
    found, seconds, peak = traced("mt-nlg-530b", 17)
    hidden, layers, rows = 20_480, 3, -(-50_257 // 8)
    # Of a block: four matrices, the biases of q, k, v and the first of the MLP cut; four norm vectors, two biases not.
    block = 12 * hidden**2 // 8 + 7 * hidden // 8 + 6 * hidden
    assert found["world"] == 3360
    assert found["parameters"] == parameter_count(PRESETS["mt-nlg-530b"]) == 529_581_506_560
    assert found["parameters_here"] == layers * block + (rows + 2048) * hidden
    assert found["stages"] == {"0": ["embed", "block.0", "block.1", "block.2"]}
    assert found["dealt"] == 160 and found["microbatches"] == 1920
    assert found["actions"] == {"F": 160, "SF": 160, "RB": 160, "B": 160}
    assert found["held"]["weights"] == 2 * (found["parameters_here"] + padding(found))
    assert found["held"]["optimizer"] == 2 * found["held"]["masters"] == 8 * shards(found)
    assert found["traffic"]["pp"]["bytes"] == 160 * 2048 * hidden * 2
    # Per block two sums forward, once more for recompute, two backward; the embedding adds one.
    assert found["traffic"]["tp"]["bytes"] == bytes_of_tp(1, 160, hidden, 8, sums=6 * layers + 1)
    assert found["traffic"]["dp"]["kinds"]["publish"]["bytes"] == 11 * 2 * shards(found)
    assert seconds < 60 and peak < 4 * GIB, f"{seconds:.1f} s of CPU, {peak / GIB:.2f} GiB"


@pytest.mark.timeout(300)
def test_bloom_176b_on_384_ranks_is_traced_within_60_cpu_seconds_and_4_gib():
    found, seconds, peak = traced("bloom-176b", 17)
    hidden, layers = 14_336, len(found["stages"]["0"]) - 1
    block = 12 * hidden**2 // 4 + 7 * hidden // 4 + 6 * hidden
    assert found["world"] == 384
    assert found["parameters"] == parameter_count(PRESETS["bloom-176b"]) == 176_247_271_424
    assert found["parameters_here"] == layers * block + 250_880 // 4 * hidden + 2 * hidden
    assert found["dealt"] == 128 and found["microbatches"] == 1024
    assert found["held"]["weights"] == 2 * (found["parameters_here"] + padding(found))
    assert found["held"]["optimizer"] == 2 * found["held"]["masters"] == 8 * shards(found)
    assert found["traffic"]["pp"]["bytes"] == 128 * 2 * 2048 * hidden * 2
    assert found["traffic"]["tp"]["bytes"] == bytes_of_tp(2, 128, hidden, 4, sums=6 * layers + 1)
    assert found["traffic"]["dp"]["kinds"]["publish"]["bytes"] == 7 * 2 * shards(found)
    assert seconds < 60 and peak < 4 * GIB, f"{seconds:.1f} s of CPU, {peak / GIB:.2f} GiB"


def padding(found: dict) -> int:
    return sum(group["padding"] for group in found["groups"])


def shards(found: dict) -> int:
    return sum(group["shard"] for group in found["groups"] if not group["guest"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sirara.yaml"
    path.write_text(
        "schema: 1\nmodel: {family: gpt2, layers: 4, hidden: 64, heads: 4, vocab: 101, max_seq: 16}\n"
        "data: {train: [{path: no-such-folder}], seq_len: 16}\n"
        "train: {steps: 1, global_batch: 16, micro_batch: 2}\nmesh: {pp: 2, dp: 2}\n"
    )
    return path


def test_text_names_the_rank_its_stage_groups_bytes_and_that_all_was_played(config: Path):
    text = plan(config, "--trace", "--rank", 3)
    assert "3 of 4: pp 1 of 2, dp 1 of 2, tp 0 of 1; zero 1, fp32" in text
    assert "units: block.2, block.3, head" in text
    assert "2 x block.*/decay" in text and "a copy" in text
    assert "1f1b" in text and "F 4" in text
    assert "all other figures were played, 4 of 4 microbatches" in text


def test_a_long_stage_is_named_by_its_ends(config: Path):
    text = plan(config, "mesh.pp=1", "--trace")
    assert "6 units: embed, block.0 to block.3, head" in text


def test_overrides_change_what_is_traced(config: Path):
    found = json.loads(plan(config, "mesh.tp=2", "--mesh.zero=3", "--trace", "--json"))
    assert found["mesh"]["tp"] == 2 and found["held"]["window"] > 0 and found["traffic"]["tp"]["bytes"] > 0


def test_without_trace_it_judges_the_layout_without_torch(config: Path):
    code = (
        "import sys; from click.testing import CliRunner; from sirara.cli.main import cli; "
        f"r = CliRunner().invoke(cli, ['plan', {str(config)!r}, '--gpu', 'cpu']); print(r.output); "
        "sys.exit(r.exit_code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pp 2  dp 2" in done.stdout and "fits" in done.stdout


def test_the_module_of_the_verb_does_not_import_torch():
    code = "import sys; import sirara.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
