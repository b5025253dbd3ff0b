"""What ends before a deadline is chosen by what saves have taken so far."""

import json

import pytest

from sirara.checkpoint.deadline import Bandwidth, Pace, choose, why_not
from sirara.checkpoint.job import SaveOutcome, TierResult
from sirara.errors import StorageError

GB = 10**9
SIZES = {"memory": GB, "disk": GB, "object": 2 * GB}


@pytest.fixture
def measured(tmp_path):
    """1 GB takes about 0.1 s to memory, 2 s to disk; the store takes 20 s for its 2 GB."""
    bandwidth = Bandwidth(tmp_path / "bandwidth.json")
    bandwidth.note("memory", size=GB, seconds=0.15)
    bandwidth.note("disk", size=GB, seconds=2.05)
    bandwidth.note("object", size=GB, seconds=10.05)
    return bandwidth


def test_a_time_is_what_the_slowest_of_the_last_saves_took_and_a_margin(measured):
    assert measured.seconds("disk", GB) == pytest.approx(1.25 * 2.05)
    assert measured.seconds("disk", 2 * GB) == pytest.approx(1.25 * 4.05)
    measured.note("disk", size=GB, seconds=8.05)
    assert measured.seconds("disk", GB) == pytest.approx(1.25 * 8.05)
    for _ in range(5):
        measured.note("disk", size=GB, seconds=1.05)
    assert measured.seconds("disk", GB) == pytest.approx(1.25 * 1.05)


def test_small_saves_measure_costs_that_are_not_per_byte(tmp_path):
    bandwidth = Bandwidth(tmp_path / "bandwidth.json")
    bandwidth.note("disk", size=1000, seconds=0.04)
    assert bandwidth.seconds("disk", 1000) == pytest.approx(1.25 * 0.054)
    bandwidth.note("memory", size=0, seconds=0.04)
    assert bandwidth.rate("memory") is None


def test_without_a_deadline_every_tier_is_taken_in_the_order_of_the_configuration(measured):
    assert choose(SIZES, None, measured) == ["memory", "disk", "object"]


@pytest.mark.parametrize(
    ("left", "chosen"),
    [
        (60.0, ["memory", "disk", "object"]),
        (20.0, ["memory", "disk"]),
        (2.6, ["memory"]),  # the disk needs 2.6 s and memory comes first
        (2.76, ["memory", "disk"]),
        (0.18, []),
        (0.0, []),
        (-5.0, []),
    ],
)
def test_the_fastest_tier_that_fits_comes_first_and_a_save_that_cannot_end_is_not_started(
    measured, left, chosen
):
    assert choose(SIZES, left, measured) == chosen


def test_a_slow_tier_that_does_not_fit_does_not_keep_a_later_one_out(measured):
    assert choose({"object": 2 * GB, "disk": GB}, 5.0, measured) == ["disk"]


def test_a_tier_that_was_never_measured_is_tried_when_the_fastest_ones_are_safe(tmp_path, measured):
    assert choose(SIZES, 5.0, Bandwidth(tmp_path / "none")) == ["memory", "disk", "object"]
    assert choose({"peer": GB, **SIZES}, 5.0, measured) == ["memory", "disk", "peer"]
    assert choose({"disk": GB, "peer": GB}, 1.0, measured) == ["peer"]
    assert choose({"disk": GB, "peer": GB}, 0.0, measured) == []


def test_what_is_left_out_is_told_with_numbers(measured):
    assert why_not(SIZES, 5.0, measured, choose(SIZES, 5.0, measured)) == "5.0 s left; object needs 25.1 s"
    said = why_not({"peer": GB, **SIZES}, -1.0, measured, [])
    assert said == "0.0 s left; peer, memory needs 0.2 s, disk needs 2.6 s, object needs 25.1 s"
    assert why_not(SIZES, 60.0, measured, list(SIZES)) == ""


def test_figures_outlive_an_attempt_and_damaged_ones_are_none(tmp_path, measured, caplog):
    measured.store()
    path = tmp_path / "bandwidth.json"
    again = Bandwidth(path)
    assert [again.rate(t) for t in SIZES] == [measured.rate(t) for t in SIZES]
    for text in ('{"disk": [1', '["disk"]', '{"disk": ["fast"]}'):
        path.write_text(text)
        assert Bandwidth(path).rate("disk") is None
    assert caplog.text.count("are not used") == 3
    assert Bandwidth(tmp_path / "never").rate("disk") is None
    path.write_text(json.dumps({"disk": [1.0, -3.0, 2.0]}))
    assert Bandwidth(path).rate("disk") == 1.0


def test_figures_that_cannot_be_stored_fail_nothing(tmp_path, caplog):
    bandwidth = Bandwidth(tmp_path / "no-folder" / "bandwidth.json")
    bandwidth.note("disk", size=GB, seconds=1.0)
    bandwidth.store()
    assert "could not be stored" in caplog.text


# ---- what a run asks


def pace(tmp_path, *, speaks: bool = True, tiers=("memory", "disk"), now: float = 1000.0) -> Pace:
    return Pace(tmp_path / "pace.json", tiers=tiers, total_bytes=GB, speaks=speaks, now=lambda: now)


def saved(**seconds) -> SaveOutcome:
    return SaveOutcome(
        kind="saved",
        step=1,
        total_bytes=GB,
        tiers={
            "memory": TierResult(ok=True, bytes=GB // 2, seconds=0.15),
            "disk": TierResult(ok=True, bytes=GB // 2, seconds=seconds.get("write", 0.0)),
            "object": TierResult(ok=False, fault="503", bytes=GB, seconds=0.1),
        },
        seconds=seconds,
    )


def test_times_are_learnt_from_saves_that_were_kept_by_the_rank_that_hears_of_them(tmp_path):
    one = pace(tmp_path)
    one.learn([saved(stall=9.0, write=1.0, commit=0.05, verify=1.0)])
    one.learn([SaveOutcome(kind="failed", step=2, total_bytes=GB, fault=StorageError("full"))])
    one.learn([SaveOutcome(kind="queued", step=3)])
    assert one.bandwidth.rate("disk") == pytest.approx(GB / 2.0)
    assert one.bandwidth.rate("memory") == pytest.approx(GB / 0.1)
    assert one.bandwidth.rate("object") is None
    other = pace(tmp_path / "other", speaks=False)
    other.learn([saved(write=1.0)])
    assert other.bandwidth.rate("disk") is None
    assert pace(tmp_path).bandwidth.rate("disk") == one.bandwidth.rate("disk")


def test_a_last_save_goes_to_the_tiers_that_end_in_time(tmp_path, caplog):
    one = pace(tmp_path, tiers=("memory", "disk", "object"))
    one.learn([saved(write=2.05)])
    assert one.tiers_in_time(None) == ("memory", "disk", "object")
    assert caplog.records == []
    assert one.tiers_in_time(1002.6) == ("memory", "object")
    assert caplog.messages == ["a save to all tiers would not end in time: 2.6 s left; disk needs 2.6 s"]
    assert one.tiers_in_time(1000.0) == ()
    error = one.too_late(7, 1000.0)
    assert error.code == "SR608" and error.exit_code == 74
    assert error.why == "0.0 s left; memory needs 0.2 s, disk needs 2.6 s, object"


def test_the_run_stops_by_itself_when_one_more_step_would_leave_too_little(tmp_path):
    one = pace(tmp_path)
    assert not one.must_stop(None, step_s=1.0)
    assert one.must_stop(1000.0 + 2 * 1.0 + 10.4, step_s=1.0)  # not measured: 3 s and 200 MB/s, and a margin
    assert not one.must_stop(1000.0 + 2 * 1.0 + 10.6, step_s=1.0)
    one.learn([saved(write=2.05)])
    assert one.must_stop(1000.0 + 2 * 1.0 + 3.0, step_s=1.0)
    assert not one.must_stop(1000.0 + 2 * 1.0 + 3.1, step_s=1.0)
    assert not pace(tmp_path, speaks=False).must_stop(1.0, step_s=1.0)
    assert one.must_stop(1000.0 + 2 * 4.0 + 3.0, step_s=4.0) and one.must_stop(
        1000.0 + 2 * 4.0 + 3.0, step_s=1.0
    )
