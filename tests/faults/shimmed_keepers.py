"""Keepers whose system calls go through fault_shim.c: a process that is started once under LD_PRELOAD and forks a
child for each line that it reads. The child does the jobs of all ranks, one after the other, as keepers do.

    stdin    {"settings": [...], "jobs": [...]}           one line per case
    stdout   {"status": wait status, "ends": [...]}       what became of it

It imports no torch, as keepers do not.
"""

import json
import logging
import os
import sys
import traceback

from sirara.checkpoint.job import KeeperSettings, SaveJob
from sirara.checkpoint.phases import Keeper


def work(case: dict, out: int) -> None:
    """Every job to its end; rank 0's, which is the last one, commits."""
    for settings, job in zip(case["settings"], case["jobs"], strict=True):
        keeper = Keeper(KeeperSettings.from_fields(settings))
        os.write(out, keeper.keep(SaveJob.from_fields(job)).to_line())
        keeper.close()


def main() -> None:
    logging.disable()
    for line in sys.stdin:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(ours)
                work(json.loads(line), theirs)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            ends = [json.loads(said) for said in pipe]
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"status": status, "ends": ends}), flush=True)


if __name__ == "__main__":
    main()
