"""A stored plan is read back as it was, and graded by what was measured."""

import json
from dataclasses import replace

import pytest

from sirara.plan.grading import CALIBRATE_PCT, Measured, RunGrade, StageMeasured, grade, grade_lines
from sirara.plan.stored import (
    Expected,
    StageExpected,
    add,
    expected_of,
    hardware_record,
    plan_record,
    read_entries,
    read_expected,
)

GIB = float(1 << 30)


def expected(**changes) -> Expected:
    stages = tuple(
        StageExpected(
            stage=n, between_bytes=6 * GIB, peak_bytes=peak * GIB, reserved_bytes=11 * GIB, device_bytes=12 * GIB
        )
        for n, peak in enumerate((10, 8))
    )  # fmt: skip
    whole = Expected(
        attempt=3, accelerator="a100", how="shipped", why="the driver says so", stages=stages, step_s=2.0,
        exposed_s={"matmul": 1.2, "attention": 0.2, "bubble": 0.3, "pp": 0.1, "optimizer": 0.2},
    )  # fmt: skip
    return replace(whole, **changes)


def stage(number: int, peak: float, between: float = 6.0, **more) -> StageMeasured:
    return StageMeasured(
        stage=number, rank=2 * number + 1, peak_bytes=peak * GIB, between_bytes=between * GIB, **more
    )


def measured(**changes) -> Measured:
    whole = Measured(
        steps=20, step_s=2.0, parts_s={"computation": 1.4, "pipeline": 0.4, "update": 0.2},
        stages=(stage(0, 10), stage(1, 8)),
    )  # fmt: skip
    return replace(whole, **changes)


def test_what_was_promised_and_kept_has_no_error_and_needs_no_word():
    found = grade(expected(), measured())
    assert found.errors() == {"plan/peak_error_pct": 0.0, "plan/step_error_pct": 0.0}
    assert found.wrong == () and found.advice == ()
    assert {name: pair.error_pct for name, pair in found.parts.items()} == {
        "computation": pytest.approx(0.0, abs=1e-9),
        "pipeline": 0.0,
        "update": 0.0,
    }


def test_errors_are_signed_by_what_the_plan_said_over_what_was_measured():
    # Half as much memory as was needed, twice the time that it took.
    found = grade(expected(), measured(stages=(stage(0, 20), stage(1, 8)), step_s=1.0))
    assert found.errors() == {"plan/peak_error_pct": -50.0, "plan/step_error_pct": 100.0}
    assert found.busiest_rank == 1 and found.stages[0].peak is not None
    assert found.stages[0].peak.error_pct == -50.0


def test_the_busiest_device_is_compared_with_the_busiest_even_if_it_is_another_stage():
    found = grade(expected(), measured(stages=(stage(0, 5), stage(1, 16))))
    assert found.peak is not None and (found.peak.predicted, found.peak.measured) == (10 * GIB, 16 * GIB)
    assert found.busiest_rank == 3
    assert [s.peak.error_pct for s in found.stages if s.peak] == [100.0, -50.0]


@pytest.mark.parametrize(
    ("between", "name"),
    [(12.0, "weights, gradients and optimizer state"), (6.0, "activations and work of a step")],
)
def test_a_wrong_memory_is_laid_to_what_lives_on_or_to_what_a_step_adds(between, name):
    found = grade(expected(), measured(stages=(stage(0, 10), stage(1, 16, between))))
    assert len(found.wrong) == 1 and found.wrong[0].startswith(f"memory of stage 1: {name}, predicted ")


def test_a_wrong_time_is_laid_to_the_parts_that_are_off_the_largest_first():
    slow = measured(step_s=4.0, parts_s={"computation": 2.0, "pipeline": 1.8, "update": 0.2})
    names = [line.split(",")[0] for line in grade(expected(), slow).wrong]
    assert names == ["step time: pipeline", "step time: computation"]
    assert "parts were not measured" in grade(expected(), measured(step_s=4.0, parts_s={})).wrong[0]


def test_calibrating_is_advised_for_shipped_figures_that_are_far_off():
    off = measured(step_s=2.0 / (1 - (CALIBRATE_PCT + 1) / 100))
    near = measured(step_s=2.0 / (1 - (CALIBRATE_PCT - 1) / 100))
    assert "sirara plan calibrate" in grade(expected(), off).advice[0]
    assert grade(expected(how="placeholder"), off).advice
    assert grade(expected(), near).advice == ()
    assert grade(expected(how="profile"), off).advice == ()


def test_what_cannot_be_graded_is_left_out():
    found = grade(expected(step_s=None), measured())
    assert list(found.errors()) == ["plan/peak_error_pct"] and found.parts == {}
    assert "not predicted" in "\n".join(grade_lines(found))
    found = grade(expected(), Measured(steps=0, step_s=None, parts_s={}, stages=()))
    assert found.errors() == {}
    assert "no step yet" in "\n".join(grade_lines(found)) and "not measured" in grade_lines(found)[0]


def test_reserved_and_device_totals_are_graded_where_a_device_counts_them():
    found = grade(
        expected(),
        measured(stages=(stage(0, 10, reserved_bytes=22 * GIB, device_bytes=6 * GIB), stage(1, 8))),
    )
    first, second = found.stages
    assert first.reserved and first.reserved.error_pct == -50.0
    assert first.device and first.device.error_pct == 100.0
    assert second.reserved is None and second.device is None


def test_a_grade_goes_through_json_unchanged():
    found = grade(expected(), measured(step_s=4.0))
    assert RunGrade.from_record(json.loads(json.dumps(found.as_record()))) == found


def test_the_words_name_both_numbers_the_error_and_what_the_times_stand_on():
    lines = grade_lines(grade(expected(), measured(stages=(stage(0, 20), stage(1, 8)), step_s=1.0)))
    text = "\n".join(lines)
    assert lines[0] == "memory  predicted 10.00 GiB, measured 20.00 GiB: -50.0 %, rank 1 held most"
    assert "predicted 2.00 s, measured 1.00 s: +100.0 %, median of 20 (shipped figures of a100)" in text
    assert "which do not describe this device" in "\n".join(
        grade_lines(grade(expected(how="placeholder"), measured()))
    )


def test_of_many_stages_the_worst_are_shown():
    stages = tuple(replace(expected().stages[0], stage=n) for n in range(64))
    peaks = [10.0] * 64
    peaks[40] = 13.0
    found = grade(
        expected(stages=stages), measured(stages=tuple(stage(n, peak) for n, peak in enumerate(peaks)))
    )
    text = "\n".join(grade_lines(found))
    assert "stage 40 peak" in text and "and 58 stages with smaller errors" in text and "stage 63" not in text


# ---- plan.json


def test_a_plan_is_read_back_with_every_stage_as_the_planner_said(piped, tmp_path):
    add(tmp_path, 1, hardware=hardware_record("cpu", "cpu", "placeholder", "why"), plan=plan_record(piped))
    found = read_expected(tmp_path, 1)
    assert found is not None and found.reason == "" and found.how == "placeholder"
    # A plan for accelerators: what libraries keep is in their context, not in the stage.
    assert [(s.stage, s.peak_bytes, s.between_bytes) for s in found.stages] == [
        (s.rank, s.step, s.static) for s in piped.held.stages
    ]
    assert max(s.device_bytes for s in found.stages) == pytest.approx(piped.device_bytes)
    assert max(s.reserved_bytes for s in found.stages) == pytest.approx(piped.reserved_bytes)
    assert found.step_s == piped.step_s and sum(found.exposed_s.values()) == pytest.approx(piped.step_s)


def test_what_libraries_keep_is_no_part_of_a_stages_tensors(piped, tmp_path):
    record = plan_record(piped)
    for s in record["memory"]["stages"]:
        s["libraries"], s["step"] = 1000, s["step"] + 1000
    add(tmp_path, 1, hardware=hardware_record("cpu", "cpu", "shipped", "why"), plan=record)
    found = read_expected(tmp_path, 1)
    assert found is not None
    assert [s.peak_bytes for s in found.stages] == [s.step for s in piped.held.stages]


def test_a_later_attempt_adds_an_entry_and_leaves_the_others(tmp_path):
    add(tmp_path, 1, reason="no words for it")
    before = read_entries(tmp_path)
    add(tmp_path, 2, search={"legal": 4})
    add(tmp_path, 2, reason="nor for this")
    after = read_entries(tmp_path)
    assert after[:1] == before and [e["attempt"] for e in after] == [1, 2]
    assert after[1]["search"] == {"legal": 4} and after[1]["reason"] == "nor for this"


def test_numbers_that_json_lacks_become_null(tmp_path):
    add(tmp_path, 1, reason="", hardware={"x": float("nan"), "y": [float("inf"), 1.0]})
    assert json.loads((tmp_path / "plan.json").read_text())["attempts"][0]["hardware"] == {
        "x": None,
        "y": [None, 1.0],
    }


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 99, "attempts": [{"attempt": 1}]}'])
def test_a_file_that_says_something_else_is_no_plan(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert read_entries(tmp_path) == [] and read_expected(tmp_path, 1) is None


def test_an_entry_that_only_tells_of_a_search_is_no_plan(tmp_path):
    add(tmp_path, 1, search={"legal": 4})
    assert read_expected(tmp_path, 1) is None
    assert expected_of({"attempt": 1, "reason": "why not"}).reason == "why not"


def test_a_slow_step_on_a_busy_machine_is_laid_to_the_machine():
    slow = measured(
        step_s=4.0, load=12.3, cores=8, parts_s={"computation": 3.4, "pipeline": 0.4, "update": 0.2}
    )
    found = grade(expected(how="placeholder"), slow)
    assert "the machine was busy: load average 12.3 on 8 cores" in found.wrong[0] and len(found.wrong) == 1
    assert found.advice == ("measure again when nothing else computes on the machine",)
    assert RunGrade.from_record(json.loads(json.dumps(found.as_record()))) == found
    # The run's own processes are no others; a step that was as planned needs no excuse, nor one that was faster.
    for quiet in (replace(slow, ranks=16), replace(slow, load=7.9)):
        assert "computation" in grade(expected(), quiet).wrong[0]
    assert "busy" not in "".join(grade(expected(), replace(slow, step_s=1.0)).wrong)


def test_grades_of_runs_before_the_load_was_kept_are_read():
    record = grade(expected(), measured()).as_record()
    del record["load"], record["cores"]
    assert RunGrade.from_record(record).load is None


def test_memory_of_a_small_model_that_is_off_by_less_than_libraries_take_is_not_mispredicted():
    small = tuple(replace(s, peak_bytes=5 * 2**20, between_bytes=2 * 2**20) for s in expected().stages)
    found = replace(measured(), stages=tuple(stage(n, 1 / 1024, 0.5 / 1024) for n in (0, 1)))
    assert grade(expected(stages=small), found).wrong == ()
    # As far off in per cent, and by more.
    large = tuple(replace(s, peak_bytes=500 * 2**20, between_bytes=200 * 2**20) for s in expected().stages)
    found = replace(measured(), stages=tuple(stage(n, 0.1, 0.05) for n in (0, 1)))
    assert len(grade(expected(stages=large), found).wrong) == 1
