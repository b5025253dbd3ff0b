"""One shard of a build: some parts of the input become one token file, in any process, in any order.

A shard is a pure function of its parts and the tokenizer; its record, written last and durably, says what it
made. A build that is begun again keeps every shard whose record fits the plan and whose bytes are sound.
"""

import ctypes
import json
import os
import signal
import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import xxhash

from sirara.data.pieces import PIECE_BYTES, PieceHasher, StoredFile, write_durably
from sirara.data.readers import Document, Part, PartReader
from sirara.data.store import token_dtype
from sirara.data.tokenizer import TextTokenizer
from sirara.errors import DataError, StorageError

MAX_FAULTS = 1000
"""Faults of one shard that are kept with their reason; more are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What goes into one token file; `digest` names the whole input of the work."""

    number: int
    parts: tuple[Part, ...]
    field: str
    tokenizer: str
    eot: int
    vocab: int

    @property
    def bytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @property
    def token_file(self) -> str:
        return f"tokens-{self.number:05d}.bin"

    @property
    def ends_file(self) -> str:
        return f"ends-{self.number:05d}.part"

    @property
    def record_file(self) -> str:
        return f"shard-{self.number:05d}.part"

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFault:
    """One fault, by the number of its part in the shard; `line` counts from 1 in that part."""

    part: int
    line: int
    reason: str
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """What a shard made.  `ends` holds, as int64, the token after each document that ends in the shard."""

    number: int
    digest: str
    tokens: StoredFile
    ends: StoredFile
    empty: int
    bad: int
    faults: tuple[ShardFault, ...]
    lines: tuple[int, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> "ShardRecord":
        parsed = json.loads(raw)
        parsed["tokens"], parsed["ends"] = StoredFile(**parsed["tokens"]), StoredFile(**parsed["ends"])
        parsed["faults"] = tuple(ShardFault(**fault) for fault in parsed["faults"])
        return cls(**{**parsed, "lines": tuple(parsed["lines"])})


class Stopped(Exception):
    """The build was interrupted; the shard is left unfinished."""


def make_shard(
    folder: Path, shard: Shard, tokenizer: TextTokenizer, made: Callable[[int], bool]
) -> ShardRecord:
    """Tokenises the shard into `folder` and returns its record, which is on disk then.

    `made` is told the tokens of each document; when it returns true the shard is given up with Stopped.
    """
    maker = _Maker(shard, tokenizer, made)
    try:
        with open(folder / shard.token_file, "wb") as file:
            for number in range(len(shard.parts)):
                maker.add_part(number, file.write)
            file.flush()
            os.fsync(file.fileno())
        ends = np.array(maker.ends, dtype="<i8").tobytes()
        write_durably(folder / shard.ends_file, ends)
        record = maker.record(ends)
        write_durably(folder / shard.record_file, record.to_json())
    except OSError as error:
        raise StorageError(
            f"cannot write shard {shard.number} to {folder}: {error.strerror or error}",
            code="SR602",
            try_=("make room or choose another folder", "the same command again: finished shards are kept"),
        ) from error
    return record


def finished_shard(folder: Path, shard: Shard) -> ShardRecord | None:
    """The record of a shard that an earlier build finished, if it is the same work and sound."""
    try:
        record = ShardRecord.from_json((folder / shard.record_file).read_bytes())
        fits = record.digest == shard.digest and all(
            _file_hashes(folder / stored.name) == stored for stored in (record.tokens, record.ends)
        )
    except (OSError, ValueError, KeyError, TypeError):
        # A torn or foreign record is no record: the shard is made again.
        return None
    return record if fits else None


class _Maker:
    """Collects tokens, document ends and faults of one shard."""

    def __init__(self, shard: Shard, tokenizer: TextTokenizer, made: Callable[[int], bool]) -> None:
        self.shard = shard
        self.tokenizer = tokenizer
        self.made = made
        self.dtype = np.dtype(token_dtype(shard.vocab)).newbyteorder("<")
        self.hasher = PieceHasher()
        self.tokens = 0
        self.ends = array("q")
        self.empty = 0
        self.bad = 0
        self.faults: list[ShardFault] = []
        self.lines: list[int] = []

    def add_part(self, number: int, write: Callable[[bytes], int]) -> None:
        part = self.shard.parts[number]
        reader = PartReader(part=part, field=self.shard.field)
        for found in reader:
            if isinstance(found, Document):
                self._add_document(found, part, write)
                continue
            self.bad += 1
            if found.whole or len(self.faults) < MAX_FAULTS:
                fault = ShardFault(part=number, line=found.line, reason=found.reason, whole=found.whole)
                self.faults.append(fault)
        self.lines.append(reader.lines)

    def record(self, ends: bytes) -> ShardRecord:
        hashed_ends = PieceHasher()
        hashed_ends.update(ends)
        return ShardRecord(
            number=self.shard.number,
            digest=self.shard.digest,
            tokens=self.hasher.stored(self.shard.token_file),
            ends=hashed_ends.stored(self.shard.ends_file),
            empty=self.empty,
            bad=self.bad,
            faults=tuple(self.faults),
            lines=tuple(self.lines),
        )

    def _add_document(self, document: Document, part: Part, write: Callable[[bytes], int]) -> None:
        begins_here = part.file.kind != "text" or part.start == 0
        if begins_here and document.ends and not document.text.strip():
            self.empty += 1
            return
        ids = self.tokenizer.encode(document.text) if document.text else np.empty(0, dtype=np.int64)
        if document.ends:
            ids = np.append(ids, self.shard.eot)
        raw = ids.astype(self.dtype).tobytes()
        write(raw)
        self.hasher.update(raw)
        self.tokens += len(ids)
        if document.ends:
            self.ends.append(self.tokens)
        if self.made(len(ids)):
            raise Stopped


class WorkerState:
    """What a worker process keeps between shards: a pool hands tasks to functions, not to objects."""

    folder: Path
    tokenizer: TextTokenizer
    made: Callable[[int], bool]


def start_worker(folder: Path, end_token: str, stop: Event, total: "Synchronized[int]", parent: int) -> None:
    """First thing in each worker: the tokenizer, and an end together with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: a worker that waits for work does not see that its parent was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    WorkerState.folder = folder
    WorkerState.tokenizer = TextTokenizer.load(folder, end_token=end_token)
    WorkerState.made = staticmethod(_counting_into(total, stop))


def work(shard: Shard) -> ShardRecord | None:
    """One shard in a worker process; None when the build was stopped meanwhile."""
    try:
        return make_shard(WorkerState.folder, shard, WorkerState.tokenizer, WorkerState.made)
    except Stopped:
        return None
    except (DataError, StorageError):
        raise
    except Exception as error:
        places = ", ".join(sorted({part.file.path for part in shard.parts})[:3])
        raise DataError(
            f"shard {shard.number} failed: {type(error).__name__}: {error}", code="SR330", where=places
        ) from error


def _counting_into(total: "Synchronized[int]", stop: Event) -> Callable[[int], bool]:
    """Adds to the shared `total`, but rarely: its lock costs more than a short document."""
    open_tokens = 0

    def made(tokens: int) -> bool:
        nonlocal open_tokens
        open_tokens += tokens
        if open_tokens < 10_000:
            return False
        with total.get_lock():
            total.value += open_tokens
        open_tokens = 0
        return stop.is_set()

    return made


def _file_hashes(path: Path) -> StoredFile:
    hasher = PieceHasher()
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            hasher.update(data)
    return hasher.stored(path.name)
