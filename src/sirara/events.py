"""Append-only JSONL records, shared by trainer, agent and monitor.

A record is one line, written by one `write` to a file opened with O_APPEND, so records of several processes
do not mix.  A process may be killed inside a write; the torn line it leaves is skipped by readers, and the
next writer starts a new line after it.  Nothing is ever deleted: readers drop what an older attempt wrote
beyond the step from which a later one went on (`live`).

    metrics.jsonl   attempt 1: step 1 2 3 4 5      attempt 2 (resumed from 3): step 4 5 6
    live            attempt 1: step 1 2 3          attempt 2:                  step 4 5 6
"""

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]

MOST_WAITING = 100_000
"""Records that wait for a disk; of more the oldest are lost."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Faults of a disk that may pass."""

_log = logging.getLogger("sirara")

BEGINNINGS = ("start", "resume")
"""Kinds of events that say from which step an attempt goes on (`from_step`, 0 when absent)."""


class JsonLines:
    """The writing end of one JSONL file.

    Args:  path: the file; made with its first record.
           patient: while the disk is full or fails, records wait in memory and are written with the next one that can
           be, so that who writes goes on; what nobody may lose (`durable`) raises all the same.
           common: fields that every record of this writer carries, like the attempt.
    """

    def __init__(self, path: Path | str, *, patient: bool = False, **common: object) -> None:
        self.path = Path(path)
        self._common = common
        self._fd = -1
        self._torn = False
        self._patient = patient
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._lost = 0

    def append(self, record: Mapping[str, object], *, durable: bool = False) -> None:
        """Adds one record (with the `time`, unless it has one); `durable` waits until it is on disk.

        Numbers that JSON does not know (nan, inf) become null.  Raises OSError, which names the file.
        """
        full = {"time": round(time.time(), 3), **self._common, **record}
        line = json.dumps(_finite(full), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self._write_waiting()
            self._write(line)
            if durable:
                os.fsync(self._fd)
        except OSError as error:
            named = OSError(error.errno, error.strerror, str(self.path))
            if not self._patient or error.errno not in PASSING:
                raise named from error
            self._wait(line, named)
            if durable:
                raise named from error

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            self._fd, self._torn = _open(self.path)
        line = b"\n" + line if self._torn else line
        written = os.write(self._fd, line)
        if written != len(line):
            # The rest would not be in the same write; the torn line is skipped by readers.
            self.close()
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a record could be written")
        self._torn = False

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        count, lost = len(self._waiting), self._lost
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()
        self._lost = 0
        _log.warning("%s takes records again: %d had waited, %d were lost", self.path, count, lost)

    def _wait(self, line: bytes, error: OSError) -> None:
        first = not self._waiting
        self._lost += len(self._waiting) == MOST_WAITING
        self._waiting.append(line)
        if first:  # said last: the line may come back here
            _log.error("%s; records wait in memory", error)

    def close(self) -> None:
        """Closes the file; the next `append` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: Path | str) -> list[Record]:
    """All whole records of a file in the order in which they were written; none if there is no file."""
    return list(iterate(path))


def iterate(path: Path | str) -> Iterator[Record]:
    """The records of `read`, one at a time."""
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        for line in file:
            record = parse(line)
            if record is not None:
                yield record


def parse(line: bytes) -> Record | None:
    """One record, or None for a line that a kill has torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def live(metrics: Iterable[Record], events: Iterable[Record]) -> list[Record]:
    """The metrics records that belong to the run as it stands, in their order.

    Drops what an attempt wrote beyond the step from which a later attempt started or resumed.
    """
    begun: dict[int, int] = {}
    for event in events:
        if event.get("kind") in BEGINNINGS and "attempt" in event:
            begun[int(event["attempt"])] = int(event.get("from_step") or 0)
    limits: dict[int, float] = {}
    limit = math.inf
    for attempt in sorted(begun, reverse=True):
        limits[attempt] = limit
        limit = min(limit, begun[attempt])
    kept = []
    for record in metrics:
        attempt = int(record.get("attempt", 0))
        bound = limits.get(attempt)
        if bound is None:  # an attempt without a beginning: bounded by all that came later
            bound = min((step for number, step in begun.items() if number > attempt), default=math.inf)
        if int(record.get("step", 0)) <= bound:
            kept.append(record)
    return kept


def _open(path: Path) -> tuple[int, bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size = os.fstat(fd).st_size
    return fd, size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
