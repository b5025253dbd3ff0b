"""The fit finds constants that made the data; validation leaves projects out; published runs keep within the bounds."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.plan import constants as c
from sirara.plan.constants import Constants, fitted
from sirara.plan.cost import step_time
from sirara.plan.fit import fit
from sirara.plan.hardware import index_of, shipped_table
from sirara.plan.points import points
from sirara.plan.rows import from_records, read
from sirara.plan.validate import kendall_tau, left_out, project, resolve, sweeps, validate

ROWS = Path(__file__).resolve().parents[4] / "shared" / "validation" / "planner_rows.csv"
published = pytest.mark.skipif(not ROWS.is_file(), reason=f"published runs are not here: {ROWS}")


def made_points(n=120, seed=5):
    rng = np.random.default_rng(seed)
    return points(
        {
            "layers": rng.integers(2, 10, n) * 8, "hidden": rng.integers(2, 24, n) * 512, "ffn": 16384, "heads": 16,
            "vocab": 50000, "seq": rng.choice([1024, 4096], n), "tp": rng.choice([1, 4, 8], n),
            "pp": rng.choice([1, 4], n), "dp": rng.choice([1, 8, 32], n), "micro_batch": rng.choice([1, 4], n),
            "global_batch": 512, "attention": rng.integers(0, 3, n),
            "accelerator": rng.choice([index_of("a100-80gb"), index_of("h100-sxm")], n),
        }
    )  # fmt: skip


def test_fit_comes_near_to_the_constants_that_made_the_times():
    hardware, p = shipped_table(), made_points()
    truth = Constants(matmul=0.7, network=0.4, host_s=1.2e-3, attention=0.7)
    measured = step_time(p, hardware, truth).step_s
    groups = [f"source {i % 12}" for i in range(len(p))]
    found = fit(p, measured, groups, hardware, Constants())
    assert found.loss_after < 0.2 * found.loss_before
    error = np.abs(step_time(p, hardware, found.constants).step_s / measured - 1)
    assert error.mean() < 0.03
    assert found.constants.matmul == pytest.approx(0.7, rel=0.15)


def test_there_are_at_most_14_global_constants_and_two_per_accelerator():
    assert len(c.TIME) + len(c.MEMORY) <= 14
    assert all(len(factors) == 2 for factors in fitted().by_accelerator.values())
    assert set(fitted().by_accelerator) <= set(shipped_table().names)


ROW = {
    "model": "GPT", "layers": "24", "hidden": "2048", "ffn": "8192", "heads": "16", "vocab": "51200", "seq": "1024",
    "gpus": "8", "gpu_type": "A100-SXM-80GB", "pp": "1", "micro_batch": "2", "global_batch": "64",
    "recompute": "full", "schedule_or_impl": "Megatron-LM 1F1B", "precision": "fp16",
}  # fmt: skip


def made_rows():
    """Two projects of four layouts each; the second's machine is 30 % slower."""
    records = []
    for source, slow in (("Alpha one", 1.0), ("Beta two", 1.3)):
        for n, tp in enumerate((1, 2, 4, 8)):
            row = {**ROW, "core_id": f"{source[0]}{n}", "source": source, "tp": str(tp), "dp": str(8 // tp)}
            records.append(row)
        rows = from_records(records[-4:])
        for row, s in zip(
            records[-4:], step_time(rows.points, shipped_table(), fitted()).step_s, strict=True
        ):
            row["step_time_s"] = str(float(s) * slow)
    return from_records(records)


def test_report_has_errors_ranking_and_regret_of_each_source():
    v = validate(made_rows(), shipped_table(), fitted())
    alpha, beta = v.reports
    assert alpha.time.n == 4 and alpha.time.mean < 1e-9 and (alpha.tau, alpha.regret) == (1, 0)
    assert beta.time.bias == pytest.approx(1 / 1.3 - 1) and beta.tau == 1
    assert [r.id for r in v.rows] == ["A0", "A1", "A2", "A3", "B0", "B1", "B2", "B3"]


def test_a_project_that_is_left_out_teaches_nothing():
    rows = made_rows()
    p = resolve(rows, shipped_table(), fitted())
    without = left_out(rows, p, shipped_table(), Constants())
    # Alpha is predicted by Beta's slower machine and the other way round.
    alpha, beta = (without / rows.step_s)[:4], (without / rows.step_s)[4:]
    assert alpha.mean() > 1.1 and beta.mean() < 0.95
    assert project("Megatron-Bridge 26.06 NeMo Container") == project("Megatron-Bridge 25.09 NeMo Container")


def test_open_micro_batch_is_the_fastest_that_fits():
    rows = from_records(
        [{**ROW, "source": "Alpha", "tp": "1", "dp": "8", "micro_batch": "", "step_time_s": "1"}]
    )
    p = resolve(rows, shipped_table(), fitted())
    tried = [
        step_time(rows.points.with_(micro_batch=b), shipped_table(), fitted()).step_s[0] for b in (1, 2, 4, 8)
    ]
    assert step_time(p, shipped_table(), fitted()).step_s[0] == min(tried)


def test_sweep_is_of_one_source_model_accelerator_count_and_batch():
    rows = made_rows()
    assert [s.tolist() for s in sweeps(rows, range(8))] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_kendall_tau_is_that_of_a_sorted_a_reversed_and_a_swapped_order():
    a = np.array([1.0, 2, 3, 4])
    assert kendall_tau(a, a) == 1 and kendall_tau(a, -a) == -1
    assert kendall_tau(a, np.array([2.0, 1, 3, 4])) == pytest.approx(4 / 6)


def test_command_prints_tables_and_json(tmp_path):
    file = tmp_path / "rows.csv"
    names = [*ROW, "core_id", "source", "tp", "dp", "step_time_s"]
    good = {**ROW, "core_id": "7", "source": "Alpha", "tp": "2", "dp": "4", "step_time_s": "0.5"}
    body = [good, {**good, "core_id": "8", "layers": ""}]
    file.write_text("\n".join([",".join(names), *(",".join(r[n] for n in names) for r in body)]) + "\n")
    run = CliRunner().invoke(cli, ["plan", "validate", str(file)])
    assert run.exit_code == 0 and "Alpha" in run.output and "layers and hidden are not stated" in run.output
    said = json.loads(CliRunner().invoke(cli, ["plan", "validate", str(file), "--json"]).output)
    assert said["sources"][0]["time"]["n"] == 1 and said["refused"][0]["id"] == "8"
    assert said["rows"][0]["memory_bytes"] is None
    assert "all sweeps: none" in run.output and said["tau"] is None
    alone = CliRunner().invoke(cli, ["plan", "validate", str(file), "--leave-source-out"])
    assert alone.exit_code == 2 and "without Alpha no step time is left" in alone.output


@published
def test_memory_of_runs_that_state_all_is_within_three_percent_and_eight_at_most():
    v = validate(read(ROWS), shipped_table(), fitted())
    named = ("Zero Bubble", "SimuMax", "torchtitan")
    reports = [r for r in v.reports if r.source.startswith(named) and r.memory]
    assert len(reports) == 6
    for r in reports:
        assert r.memory.mean <= 0.03 and r.memory.largest <= 0.08, r.source
    # 82 layers of 14,336 on 12 stages did not run; 94 of 13,312, which hold as much, did, with 13 GB to spare.
    assert set(v.wrong_labels) <= {"144"}


@published
def test_step_times_and_first_choices_of_published_runs_keep_within_bounds_in_sample():
    """What docs/planner.md states; fits without a source's project are printed by benchmarks/fit_planner.py."""
    v = validate(read(ROWS), shipped_table(), fitted())
    assert v.regret <= 0.03 and v.tau >= 0.6
    rows = [r for r in v.rows if not np.isnan(r.step_s)]

    def mean_error(*starts):
        return np.mean([abs(r.predicted_s / r.step_s - 1) for r in rows if r.source.startswith(starts)])

    assert mean_error("Megatron-LM", "BLOOM") <= 0.09
    assert mean_error("vTrain") <= 0.12 and mean_error("NeMo AutoModel") <= 0.15
    assert mean_error("MosaicML") <= 0.15 and mean_error("torchtitan") <= 0.15
    assert mean_error("Megatron-Bridge") <= 0.2 and mean_error("Zero Bubble") <= 0.08
