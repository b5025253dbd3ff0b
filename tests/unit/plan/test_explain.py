"""What a person reads: bars, tables, timeline; and that figures in them are the plan's."""

import re
from dataclasses import replace

import pytest

from sirara.plan.advice import Change
from sirara.plan.exact import configured
from sirara.plan.explain import (
    bar,
    changes_text,
    duration,
    played,
    shown_stages,
    terms_of,
    text,
    timeline,
    verdict_of,
)
from sirara.plan.residuals import MARGIN, bars
from sirara.plan.verdict import FOREVER_S, GIB, plan
from tests.unit.plan.test_search import setting


def test_a_bar_shows_shares_and_what_is_too_much():
    terms = dict.fromkeys(("weights", "gradients", "optimizer", "window", "activations", "work", "rest"), 0.0)
    half = bar({**terms, "weights": 50.0}, 100.0)
    assert half.count("w") == 23 and half.count(".") == 23 and half.endswith("|")
    assert "!" in bar({**terms, "weights": 120.0}, 100.0)
    assert bar({**terms, "weights": 25.0, "rest": 75.0}, 100.0).count(".") == 0


def test_terms_of_the_busiest_stage_are_the_device(piped):
    assert sum(terms_of(piped, piped.held.busiest).values()) == pytest.approx(piped.device_bytes)


def test_the_text_has_the_plans_figures(piped):
    said = text(piped, assumed=["h100-sxm (--gpu)"])
    assert "pp 4  dp 2" in said and "assumed: h100-sxm" in said
    assert f"device {piped.device_bytes / GIB:.1f} of" in said
    assert re.search(r"^step .*MFU .*HFU", said, re.M) and "goodput" in said and "checkpoint save" in said
    assert max(len(line) for line in said.splitlines()) <= 160


def test_many_stages_are_shown_by_their_ends_and_the_busiest():
    stages = [replace(s, rank=r) for r in range(32) for s in [_stage()]]
    shown = [s.rank for s in shown_stages(stages)]
    assert shown[:2] == [0, 1] and shown[-1] == 31 and len(shown) <= 8


def _stage():
    from sirara.plan.held import StageMemory

    return StageMemory(
        rank=0, blocks=1, units=(range(1),), weights=1, masters=1, optimizer=1, gradients=1, window=0,
        activations=1.0, loss=1.0, transient=1.0, alive=1.0,
    )  # fmt: skip


def test_the_timeline_has_a_row_per_rank_and_waits_where_the_schedule_does(piped):
    result = played(piped)
    assert result is not None
    rows = timeline(result, width=60)
    assert len(rows) == 4 and {len(r) for r in rows} == {60}
    # The last rank waits for the first microbatch, the first one does not.
    assert rows[0][0] == "0" and rows[3][0] == "."


def test_changes_are_shown_beside_the_plan(piped):
    change = Change(
        keys="train.global_batch=32", step_s=piped.step_s, tokens_per_s=2 * piped.tokens_per_s, device_bytes=GIB,
        fits=True, runs=False,
    )  # fmt: skip
    bad = Change(
        keys="x=1", step_s=float("nan"), tokens_per_s=float("nan"), device_bytes=float("nan"), fits=False, runs=False,
        error="no key x",
    )  # fmt: skip
    said = changes_text(piped, [change, bad], "what if")
    assert "+100.0%" in said and "predicted only" in said and "no key x" in said


def test_few_tokens_bytes_and_hours_are_not_rounded_to_none(piped):
    config = configured(piped.config, ("train.steps=1", "train.lr_schedule={name: constant}"))
    saved = replace(piped.saves, bytes=49_600_000)
    short = replace(piped, config=config, saves=saved, step_s=1.0)
    said = text(short)
    assert "checkpoint 49.6 MB" in said and "0.0 B tokens" not in said and " 0 device hours" not in said
    assert f"{config.train.global_batch * config.data.seq_len / 1e6:.2f} M tokens" in said


def test_a_step_without_waiting_names_no_wait(piped):
    zero = piped.times.step_s * 0
    waits = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "bubble", "offload", "launch"), zero)
    assert "next to no waiting" in verdict_of(replace(piped, times=replace(piped.times, **waits)))
    assert "most of the waiting" in verdict_of(piped)


def test_a_plan_that_fits_by_less_than_its_error_bar_says_so(piped):
    capacity = piped.setting.capacity_bytes
    tight = replace(piped, margin=capacity / piped.device_bytes - 1 + 1e-3)
    assert tight.fits and "but within the error bar of" in verdict_of(tight)
    record = tight.as_record()
    assert record["fits"] and record["memory"]["margin"]["within_error"]
    assert "error bar" not in verdict_of(piped) and not piped.within_error


def test_error_bars_of_published_runs_are_not_shown_on_a_cpu(piped):
    assert "published runs (one node)" in text(piped)
    config = configured(piped.config, ("mesh={dp: 2, zero: 1}", "train.precision=fp32"))
    there = plan(config, piped.shape, setting(2, "cpu"), dp=2)
    said = text(there)
    assert "published runs (" not in said and "+-" not in said
    assert "none known for step times and memory: published runs are of GPUs, and this is a CPU" in said
    record = there.as_record()
    assert record["memory"]["error"] is None and record["time"]["error"] is None and there.margin == MARGIN


def test_times_that_were_measured_have_no_bar_of_runs_that_were_not(piped):
    found = bars(piped.point, time=False)
    assert found.time is None and found.memory is not None
    assert found.why_none.startswith("none known for step times: this step stands on what was measured")
    assert bars(piped.point).why_none == ""


def test_seconds_keep_their_digits_up_to_a_thousand():
    assert [duration(s) for s in (0.0123, 1.234, 12.345, 138.24, 999.9, 1000.0)] == [
        "12.30 ms", "1.23 s", "12.3 s", "138.2 s", "999.9 s", "16.7 min",
    ]  # fmt: skip


def test_a_run_that_failures_never_let_end_says_never(piped):
    lost = replace(piped, goodput=replace(piped.goodput, ratio=0.0))
    long = replace(piped, step_s=FOREVER_S / piped.config.train.steps)
    for never in (lost, long):
        assert "never ends" in text(never)
        assert never.as_record()["run"] == {"ends": False, "wall_s": None, "gpu_hours": None, "money": None}
    assert piped.ends and "never" not in text(piped)
