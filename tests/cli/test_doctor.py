"""`sirara doctor`: judgements by numbers, the report, the exit code."""

import json
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner

from sirara.cli import doctor
from sirara.cli.main import cli

GIB = 1 << 30
HERE = Path("/somewhere")


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (doctor.judge_python((3, 10), "Linux"), "fail"),
        (doctor.judge_python((3, 11), "Darwin"), "warn"),
        (doctor.judge_python((3, 13), "Linux"), "ok"),
        (doctor.judge_cores(8, None, None), "ok"),
        (doctor.judge_cores(8, 2.0, None), "warn"),
        (doctor.judge_cores(8, None, "64"), "warn"),
        (doctor.judge_cores(8, 8.0, "8"), "ok"),
        (doctor.judge_memory(None), "warn"),
        (doctor.judge_memory(GIB), "warn"),
        (doctor.judge_memory(8 * GIB), "ok"),
        (doctor.judge_open_files(1024, 4096), "warn"),
        (doctor.judge_open_files(128, 4096), "fail"),
        (doctor.judge_open_files(65_536, 65_536), "ok"),
        (doctor.judge_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok"),
        (doctor.judge_shared_memory(64 << 20, 64 << 20), "warn"),
        (doctor.judge_shared_memory(8 * GIB, 8 * GIB), "ok"),
        (doctor.judge_space(HERE, 100 << 20), "fail"),
        (doctor.judge_space(HERE, 5 * GIB), "warn"),
        (doctor.judge_space(HERE, 500 * GIB), "ok"),
        (doctor.judge_inodes(HERE, 0, 0), "ok"),
        (doctor.judge_inodes(HERE, 50, 1000), "fail"),
        (doctor.judge_inodes(HERE, 5000, 10**6), "warn"),
        (doctor.judge_inodes(HERE, 10**6, 10**7), "ok"),
        (doctor.judge_write(HERE, 8.0, 8 << 20), "warn"),
        (doctor.judge_write(HERE, 0.02, 8 << 20), "ok"),
    ],
)
def test_number_is_judged_and_what_is_not_ok_says_what_to_do(finding, status):
    assert finding.status == status
    assert bool(finding.do) is (status != "ok")


def test_limits_of_the_control_group_count(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GIB >> 10} kB\n")
    assert doctor.cpu_quota(tmp_path) == 1.5
    assert doctor.available_memory_bytes(tmp_path / "meminfo", tmp_path) == 3 * GIB
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.cpu_quota(tmp_path) is None
    assert doctor.available_memory_bytes(tmp_path / "meminfo", tmp_path) == 64 * GIB
    assert doctor.available_memory_bytes(tmp_path / "nothing", tmp_path) is None


def test_report_covers_what_a_run_needs_and_leaves_nothing_behind(tmp_path):
    result = CliRunner().invoke(cli, ["doctor", "--run-dir", str(tmp_path / "runs"), "--json"])
    report = json.loads(result.output)
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "cpu", "memory", "open files", "shared memory", "disk space", "inodes"} <= names
    assert {"write and fsync", "file locks", "torch", "devices", "backends", "extras"} <= names
    assert result.exit_code == (0 if report["ok"] else 3)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_fails_with_3_and_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli, ["doctor", "--run-dir", str(tmp_path / "file" / "runs")])
    assert result.exit_code == 3
    assert "fail  write and fsync" in result.output
    assert "use another --run-dir" in result.output
    assert "Traceback" not in result.output


def test_missing_torch_is_a_finding_and_no_crash(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    result = CliRunner().invoke(cli, ["doctor", "--run-dir", str(tmp_path)])
    assert result.exit_code == 3
    assert "fail  torch" in result.output
    assert "pip install 'torch>=2.11'" in result.output
