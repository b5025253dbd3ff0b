"""One console for all ranks, one file per rank."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sirara.config.run_folder import RunFolder
from sirara.launch.logs import log_file

PROGRAM = """
import logging, os, sys, warnings
from sirara.config.run_folder import RunFolder
from sirara.launch.logs import FILE_ONLY, worker_logs
run, rank, world = RunFolder(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
log = logging.getLogger("sirara.train")
with worker_logs(run, attempt=1, rank=rank, world=world):
    log.info("step 1")
    log.warning("slow disk")
    logging.getLogger(FILE_ONLY).error("the whole traceback")
    logging.getLogger("other.library").info("chatter")
    warnings.warn("old call")
    print("printed")
    os.write(2, b"said by C\\n")
print("after")
"""


@dataclass(frozen=True)
class Named:
    run_dir: Path
    name: str = "demo"


@pytest.fixture
def said(tmp_path):
    def said(rank, world):
        run = RunFolder.create(Named(tmp_path), "")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", PROGRAM, str(run.path), str(rank), str(world)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr, log_file(run, 1, rank)

    return said


def test_rank_0_of_many_shows_its_log_lines_and_keeps_prints_in_its_file(said):
    out, err, file = said(0, 2)
    assert [line.split(" ", 1)[1] for line in err.splitlines()[:2]] == [
        "[rank 0] step 1",
        "[rank 0] WARNING slow disk",
    ]
    assert out == "after\n" and "traceback" not in err
    text = file.read_text()
    for words in ("step 1", "WARNING slow disk", "the whole traceback", "old call", "printed", "said by C"):
        assert words in text
    assert "chatter" not in text and "[rank" not in text


def test_other_ranks_only_show_warnings(said):
    out, err, file = said(1, 2)
    assert "step 1" not in err and "[rank 1] WARNING slow disk" in err
    assert out == "after\n"
    assert "step 1" in file.read_text()


def test_a_process_alone_keeps_its_stdout_and_has_no_prefix(said):
    out, err, file = said(0, 1)
    assert out == "printed\nafter\n"
    assert "step 1" in err and "[rank" not in err and "said by C" in err
    assert "step 1" in file.read_text()


def test_programs_read_the_same_as_json_lines(said):
    _, _, file = said(0, 1)
    records = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    assert [(r["level"], r["message"], r["rank"]) for r in records[:2]] == [
        ("INFO", "step 1", 0),
        ("WARNING", "slow disk", 0),
    ]
    assert logging.getLogger("sirara").handlers == []
