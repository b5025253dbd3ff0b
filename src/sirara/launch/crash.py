"""From many failing ranks to one root cause, told so that a person can act.

Every worker that fails leaves a report in `crash/attempt-NNNN/` before it ends; a killed one leaves nothing,
its exit code speaks.  The cause is the first failure in time that is not secondary: a rank that only says
that its peer is gone (CommError) comes after the peer.  Survivors write their stacks (SIGUSR2), which shows
what they were waiting for.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sirara.config.run_folder import RunFolder, write_durably
from sirara.errors import CommError, Exit, SiraraError
from sirara.launch.logs import log_file

LOG_LINES = 12
TRACE_LINES = 40
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


class AttemptFailed(SiraraError):
    """The workers failed and are not started again: `what` is the whole report, `exit_status` may be
    128+n."""

    def __init__(self, report: str, *, exit_status: int) -> None:
        super().__init__(report, code="SR720")
        self.exit_status = exit_status

    def __str__(self) -> str:
        # The report of one of our own errors has its code already.
        return self.what if self.what.startswith("error[") else super().__str__()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended.  `code` is its exit code, -n when signal n killed it."""

    rank: int
    code: int
    moment: float
    kind: str = ""
    message: str = ""
    trace: str = ""
    secondary: bool = False
    host: str = ""
    pid: int = 0

    @property
    def summary(self) -> str:
        """One line: `ValueError: boom`, `CommError[SR701]: a peer left`, `killed by SIGKILL`."""
        if self.kind:
            first = self.message.partition("\n")[0]
            return (
                f"{self.kind}{first.removeprefix('error')}"
                if first.startswith("error[")
                else f"{self.kind}: {first}".rstrip(": ")
            )
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"ended with exit code {self.code} and left no report"

    @property
    def exit_code(self) -> int:
        """What the whole command ends with because of it."""
        return 128 - self.code if self.code < 0 else self.code or Exit.USER_CODE


def report_failure(run: RunFolder, *, attempt: int, rank: int, error: BaseException) -> Failure:
    """Writes this rank's report; the return value is what it says."""
    failure = Failure(
        rank=rank,
        code=exit_code_of(error),
        moment=time.time(),
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        secondary=isinstance(error, CommError),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    folder = run.crash(attempt)
    with contextlib.suppress(OSError):  # the disk may be what failed: the exit code speaks then
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / f"rank-{rank:05d}.json", json.dumps(asdict(failure), indent=1))
    return failure


def exit_code_of(error: BaseException) -> int:
    """What a process ends with because of an error."""
    if isinstance(error, AttemptFailed):
        return error.exit_status
    return int(error.exit_code) if isinstance(error, SiraraError) else int(Exit.USER_CODE)


def stacks_file(run: RunFolder, attempt: int, rank: int) -> Path:
    return run.crash(attempt) / f"rank-{rank:05d}.stacks"


def collect(run: RunFolder, attempt: int, ended: Sequence[Failure]) -> list[Failure]:
    """The failures with what their ranks have reported, and the reports of ranks that did not end by
    themselves."""
    found = {failure.rank: failure for failure in ended}
    for file in sorted(run.crash(attempt).glob("rank-*.json")):
        try:
            report = Failure(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # torn by the kill; the exit code speaks
        known = found.get(report.rank)
        found[report.rank] = replace(report, code=known.code) if known and known.code > 0 else report
    return [found[rank] for rank in sorted(found)]


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The first failure in time among those that are not the consequence of another one."""
    return min(failures, key=lambda failure: (failure.secondary, failure.moment, failure.rank))


def explain(
    run: RunFolder, *, attempt: int, world: int, failures: Sequence[Failure], advice: Sequence[str]
) -> str:
    """The report of a crash: the cause with its traceback and last log lines, its peers, what to do."""
    cause = root_cause(failures)
    if cause.kind and cause.code in (Exit.USAGE, Exit.PLAN):
        return cause.message  # the user's to correct; where in our code it was noticed helps nobody
    step = last_step(run)
    lines = [f"rank {cause.rank} of {world} failed first: {cause.summary}"]
    lines.append(
        f"  attempt {attempt} of {run.id}, after step {step}" + (f", on {cause.host}" if cause.host else "")
    )
    if cause.trace:
        lines += [
            "",
            f"--- traceback of rank {cause.rank}",
            *cause.trace.rstrip().splitlines()[-TRACE_LINES:],
        ]
    log = log_file(run, attempt, cause.rank)
    if tail := _tail(log, cause.trace):
        lines += ["", f"--- last lines of {_relative(log)}", *tail]
    others = [_peer(run, attempt, rank, failures) for rank in range(world) if rank != cause.rank]
    if others:
        lines += ["", "--- the other ranks", *others]
    if advice:
        lines += ["", "--- continue with", *(f"  {line}" for line in advice)]
    return "\n".join(lines)


def last_step(run: RunFolder) -> int:
    """The last step that the run has in its metrics; 0 if none."""
    try:
        with open(run.metrics, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            steps = re.findall(rb'"step":\s*(\d+)', file.read())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


def waiting_in(stacks: str) -> str:
    """What the main thread of a faulthandler dump was doing: its innermost frame, and the innermost one of
    ours."""
    # faulthandler writes one paragraph per thread, the oldest one (main) last.
    main = stacks.rstrip().rpartition("\n\n")[2]
    frames = [m.groupdict() for m in _FRAME.finditer(main)]
    if not frames:
        return ""
    own = next((frame for frame in frames if "/sirara/" in frame["file"]), frames[0])
    where = f"{Path(own['file']).name}:{own['line']} in {own['function']}"
    return where if own is frames[0] else f"{where} (in {frames[0]['function']})"


def _peer(run: RunFolder, attempt: int, rank: int, failures: Sequence[Failure]) -> str:
    own = next((failure for failure in failures if failure.rank == rank), None)
    if own is not None:
        return f"  rank {rank}  {own.summary}"
    try:
        waiting = waiting_in(stacks_file(run, attempt, rank).read_text(errors="replace"))
    except OSError:
        waiting = ""
    return f"  rank {rank}  was in {waiting}" if waiting else f"  rank {rank}  was ended with the others"


def _tail(path: Path, trace: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    # The log ends with the same traceback; twice helps nobody.
    told = set(trace.splitlines())
    lines = [line for line in lines if line not in told]
    fatal = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return lines[max(0, min(fatal, len(lines) - LOG_LINES)) :][:TRACE_LINES]


def _relative(path: Path) -> str:
    here = os.path.relpath(path)
    return here if len(here) < len(str(path)) else str(path)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
