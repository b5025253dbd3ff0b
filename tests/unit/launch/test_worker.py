"""What surrounds a worker's training."""

import subprocess
import sys
from pathlib import Path

ASKED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from sirara.launch import worker

worker.stacks_file = lambda *_: Path(sys.argv[1])
with worker._stacks_on_demand(SimpleNamespace(run=None, attempt=1, rank=0)):
    os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGUSR2)
print("left by itself")
"""


def test_a_request_for_stacks_does_not_kill_a_worker_that_is_leaving(tmp_path: Path) -> None:
    # The survivor of a killed peer reports, leaves, and is asked for its stacks meanwhile.
    stacks = tmp_path / "crash" / "rank-00000.stacks"
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(stacks)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "left by itself\n"), done.stderr
    assert "most recent call first" in stacks.read_text()
