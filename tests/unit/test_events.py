"""Records survive kills, several writers and resumes."""

import errno
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.events import JsonLines, iterate, live, read


def test_records_come_back_in_order_with_time_and_common_fields(tmp_path):
    with JsonLines(tmp_path / "events.jsonl", attempt=3) as log:
        log.append({"kind": "start", "time": 1.5})
        log.append({"kind": "done", "step": 2}, durable=True)
    first, second = read(tmp_path / "events.jsonl")
    assert first == {"time": 1.5, "attempt": 3, "kind": "start"}
    assert second["attempt"] == 3 and second["step"] == 2 and second["time"] > 1e9


def test_a_missing_file_has_no_records(tmp_path):
    assert read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cut", range(2, 20))
def test_a_line_torn_by_a_kill_is_skipped_and_the_next_writer_starts_a_new_one(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as log:
        log.append({"time": 0, "step": 1})
        log.append({"time": 0, "step": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r["step"] for r in read(path)] == [1]
    with JsonLines(path) as log:
        log.append({"time": 0, "step": 3})
        log.append({"time": 0, "step": 4})
    assert [r["step"] for r in read(path)] == [1, 3, 4]


def test_a_whole_record_whose_newline_is_missing_counts_once_it_is_ended(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [r["step"] for r in read(path)] == [1]


def test_writers_side_by_side_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "events.jsonl"

    def write(writer):
        with JsonLines(path, writer=writer) as log:
            for i in range(200):
                log.append({"i": i, "pad": "x" * (i * 7 % 500)})

    threads = [threading.Thread(target=write, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read(path)
    assert len(records) == 800
    for writer in range(4):
        assert [r["i"] for r in records if r["writer"] == writer] == list(range(200))


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as log:
        log.append({"loss": float("nan"), "more": [1.0, float("inf")], "in": {"x": -float("inf")}})
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (record["loss"], record["more"], record["in"]) == (None, [1.0, None], {"x": None})


def test_a_full_disk_is_an_error_that_names_the_file():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with pytest.raises(OSError, match="/dev/full"):
        JsonLines("/dev/full").append({"step": 1})


def test_live_drops_what_an_older_attempt_wrote_beyond_the_resumed_step():
    metrics = [{"attempt": 1, "step": s} for s in (1, 2, 3, 4, 5)] + [
        {"attempt": 2, "step": s} for s in (4, 5, 6)
    ]
    events = [{"kind": "start", "attempt": 1}, {"kind": "resume", "attempt": 2, "from_step": 3}]
    assert [(r["attempt"], r["step"]) for r in live(metrics, events)] == [
        (1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6),
    ]  # fmt: skip


def test_live_counts_an_attempt_that_died_before_it_began():
    metrics = [{"attempt": 1, "step": 1}, {"attempt": 2, "step": 2}, {"attempt": 3, "step": 1}]
    events = [{"kind": "start", "attempt": 3}]
    assert live(metrics, events) == [{"attempt": 3, "step": 1}]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_live_steps_are_those_of_a_run_without_kills(lives):
    """Each life resumes from a step that exists and does some; the reference truncates a list and appends."""
    metrics, events, expected = [], [], []
    for attempt, (back, length) in enumerate(lives, start=1):
        start = max(0, len(expected) - back)
        events.append({"kind": "resume", "attempt": attempt, "from_step": start})
        steps = [{"attempt": attempt, "step": s} for s in range(start + 1, start + 1 + length)]
        metrics += steps
        expected = expected[:start] + steps
    assert live(metrics, events) == expected
    assert [r["step"] for r in live(metrics, events)] == list(range(1, len(expected) + 1))


def test_iterate_does_not_need_the_whole_file(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as log:
        for step in range(3):
            log.append({"step": step})
    assert next(iterate(path))["step"] == 0


class Failing:
    """os.write that fails while `fault` is set; ENOSPC lets the first bytes through, as a full disk does."""

    def __init__(self, monkeypatch):
        self.fault, self.fired = 0, 0
        self._write = os.write
        monkeypatch.setattr("sirara.events.os.write", self)

    def __call__(self, fd, data):
        if not self.fault:
            return self._write(fd, data)
        self.fired += 1
        if self.fault == errno.ENOSPC and self.fired == 1:
            return self._write(fd, data[:7])
        raise OSError(self.fault, os.strerror(self.fault))


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_patient_writer_keeps_its_records_while_the_disk_is_full(tmp_path, monkeypatch, caplog, fault):
    disk = Failing(monkeypatch)
    path = tmp_path / "m.jsonl"
    with JsonLines(path, patient=True) as log:
        log.append({"step": 1})
        disk.fault = fault
        for step in (2, 3, 4):
            log.append({"step": step})
        assert disk.fired == 3 and [r["step"] for r in read(path)] == [1]
        with pytest.raises(OSError, match=r"m\.jsonl"):
            log.append({"step": 5}, durable=True)
        disk.fault = 0
        log.append({"step": 6}, durable=True)
    assert [r["step"] for r in read(path)] == [1, 2, 3, 4, 5, 6]
    assert [r.getMessage().rpartition("; ")[2] for r in caplog.records] == [
        "records wait in memory",
        f"{path} takes records again: 4 had waited, 0 were lost",
    ]


def test_of_too_many_waiting_records_the_oldest_are_lost_and_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sirara.events.MOST_WAITING", 3)
    disk = Failing(monkeypatch)
    with JsonLines(tmp_path / "m.jsonl", patient=True) as log:
        disk.fault = errno.EIO
        for step in range(5):
            log.append({"step": step})
        disk.fault = 0
        log.append({"step": 5})
    assert [r["step"] for r in read(tmp_path / "m.jsonl")] == [2, 3, 4, 5]
    assert "3 had waited, 2 were lost" in caplog.text


def test_an_impatient_writer_and_a_fault_that_does_not_pass_raise(tmp_path, monkeypatch):
    disk = Failing(monkeypatch)
    disk.fault = errno.EIO
    with JsonLines(tmp_path / "m.jsonl") as log, pytest.raises(OSError, match=r"m\.jsonl"):
        log.append({"step": 1})
    disk.fault = errno.EBADF
    with JsonLines(tmp_path / "m.jsonl", patient=True) as log, pytest.raises(OSError, match=r"m\.jsonl"):
        log.append({"step": 1})
