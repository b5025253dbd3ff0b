"""What a person reads: bars, tables, timeline; and that figures in them are the plan's."""

import re
from dataclasses import replace

import pytest

from sirara.plan.exact import configured
from sirara.plan.explain import (
    bar,
    changes_text,
    played,
    shown_stages,
    terms_of,
    text,
    timeline,
    verdict_of,
)
from sirara.plan.verdict import GIB, Change


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
        keys="train.micro_batch=2", step_s=piped.step_s / 2, device_bytes=GIB, fits=True, runs=False
    )
    bad = Change(
        keys="x=1", step_s=float("nan"), device_bytes=float("nan"), fits=False, runs=False, error="no key x"
    )
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
