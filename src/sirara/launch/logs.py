"""Logging of one worker: people read the console and `rank-NNNNN.log`, programs read `rank-NNNNN.jsonl`.

                        console                    logs/attempt-NNNN/rank-NNNNN.log
    rank 0              INFO and above             everything: log lines, prints, what C++ says when it dies
    other ranks         WARNING and above          the same

A worker that shares the console with others sends its stdout and stderr into its log file, so that lines of
two ranks never mix and the last words of a crash are found; only log lines reach the console, with the rank
before them. A process alone keeps its stdout and stderr (a debugger works).
"""

import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sirara.config.run_folder import RunFolder
from sirara.events import JsonLines

FILE_ONLY = "sirara.file"
"""Name of the logger whose lines do not go to the console."""

WARNINGS = "py.warnings"
log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What stdout and stderr were before they went into the log file."""

    stdout_fd: int
    stderr_fd: int


def log_file(run: RunFolder, attempt: int, rank: int) -> Path:
    return run.logs(attempt) / f"rank-{rank:05d}.log"


@contextmanager
def worker_logs(run: RunFolder, *, attempt: int, rank: int, world: int) -> Iterator[Streams]:
    """Sets up logging of this process for one attempt; on exit everything is as before."""
    path = log_file(run, attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    streams = Streams(stdout_fd=os.dup(1), stderr_fd=os.dup(2))
    file_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    if world > 1:
        _redirect(file_fd)
    records = JsonLines(path.with_suffix(".jsonl"), patient=True, rank=rank)
    console_stream = os.fdopen(os.dup(streams.stderr_fd), "w", buffering=1)
    file_stream = os.fdopen(file_fd, "w", buffering=1)
    console = logging.StreamHandler(console_stream)
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(LineFormatter(rank=rank if world > 1 else None))
    # A warning of Python is the same on all ranks.
    silent = (FILE_ONLY,) if rank == 0 else (FILE_ONLY, WARNINGS)
    console.addFilter(lambda record: record.name not in silent)
    file = _PatientHandler(file_stream)
    file.setFormatter(LineFormatter(rank=None))
    handlers: list[logging.Handler] = [console, file, _RecordHandler(records)]
    root, level, root_level = logging.getLogger(), log.level, logging.getLogger().level
    for handler in handlers:
        root.addHandler(handler)
    log.setLevel(logging.INFO)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield streams
    finally:
        logging.captureWarnings(False)
        for handler in handlers:
            root.removeHandler(handler)
        log.setLevel(level)
        root.setLevel(root_level)
        if world > 1:
            _flush_standard()
            os.dup2(streams.stdout_fd, 1)
            os.dup2(streams.stderr_fd, 2)
        console_stream.close()
        with suppress(OSError):  # a full disk does not take the last lines; that must not hide why we end
            file_stream.close()
        records.close()
        os.close(streams.stdout_fd)
        os.close(streams.stderr_fd)


@contextmanager
def agent_logs() -> Iterator[None]:
    """Logging of the agent: our lines to the console; those of the library that starts processes are silent,
    because every failure is reported once, by us.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(rank=None))
    elastic = logging.getLogger("torch.distributed.elastic")
    levels = log.level, elastic.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    elastic.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(levels[0])
        elastic.setLevel(levels[1])


class LineFormatter(logging.Formatter):
    """`12:03:04 [rank 3] WARNING text`: the rank where several share a console, the level when it is not
    INFO."""

    def __init__(self, *, rank: int | None) -> None:
        super().__init__()
        self._prefix = "" if rank is None else f"[rank {rank}] "

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = record.getMessage()
        if record.name == WARNINGS:
            message = message.partition("\n")[0]  # without the source line
        text = f"{clock} {self._prefix}{level}{message}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _PatientHandler(logging.StreamHandler[io.TextIOWrapper]):
    """While the disk is full, lines wait in the buffer of the stream; nobody is told of each."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _RecordHandler(logging.Handler):
    def __init__(self, records: JsonLines) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        try:
            self._records.append(fields)
        except OSError:
            self.handleError(record)


def _redirect(fd: int) -> None:
    _flush_standard()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
