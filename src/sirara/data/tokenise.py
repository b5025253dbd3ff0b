"""Text files into a token store: tokenise shards in parallel, join, rename.

    plan ─▶ tokenizer ─▶ shards ─▶ (processes) tokens-*.bin ─▶ join: documents.bin, index.json ─▶ rename
                                 └▶ records, kept for a build that is begun again

Everything happens in `.<name>.building` beside the store, which appears in one step at the end. The bytes of
the store depend on the plan alone: any number of processes and interruptions gives the same.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from sirara.data.build_plan import BuildPlan
from sirara.data.pieces import PieceHasher, StoredFile, hash_bytes, sync_folder, write_durably
from sirara.data.readers import Document, PartReader
from sirara.data.shards import Shard, ShardRecord, finished_shard, make_shard, start_worker, work
from sirara.data.store import (
    DOCUMENTS,
    INDEX,
    TOKENIZER,
    StoreIndex,
    TokenStore,
    read_index,
    token_dtype,
    write_index,
)
from sirara.data.tokenizer import TextTokenizer, byte_tokenizer, train_bpe
from sirara.errors import DataError, InvariantError, StorageError

SKIPPED = "skipped.txt"
TRAINED = "trained.part"
TRAINING_TEXT_CHARS = 256 << 20
POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a build stands."""

    phase: str
    done_bytes: int
    total_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """`fresh` is false when the store was there already, made by the same plan; counts are in its origin."""

    store: TokenStore
    fresh: bool
    kept_shards: int
    elapsed_s: float

    def skipped(self) -> list[str]:
        """What was left out, as `file:line: reason`."""
        return skipped_text(self.store)


def is_built(plan: BuildPlan) -> bool:
    """Whether the store is there already.  Raises DataError when something else is."""
    if _is_made_by(plan, plan.out):
        return True
    if plan.out.exists() and not (plan.out.is_dir() and not any(plan.out.iterdir())):
        raise DataError(
            f"{plan.out} exists already and was not made from this input by this tokenizer",
            code="SR334",
            try_=("another folder for the store", f"rm -r {plan.out}"),
        )
    return False


def skipped_text(store: TokenStore) -> list[str]:
    file = store.path / SKIPPED
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def build(
    plan: BuildPlan,
    *,
    workers: int | None = None,
    skip_unreadable: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> BuildReport:
    """Carries the plan out.  `workers` None: one process per usable core.

    Raises DataError for unreadable or empty input, StorageError when the disk does not take it. What was
    finished stays in the building folder for the same command again.
    """
    begun = time.monotonic()
    if is_built(plan):
        return BuildReport(store=TokenStore.open(plan.out), fresh=False, kept_shards=0, elapsed_s=0.0)
    kept = 0
    try:
        with _building_folder(plan):
            if not _is_made_by(plan, plan.building):
                kept = _Build(plan, skip_unreadable, on_progress).run(workers or _usable_cores())
            _publish(plan)
    except OSError as error:
        raise StorageError(
            f"cannot write the store {plan.out}: {error.strerror or error}",
            code="SR603",
            where=str(error.filename or plan.building),
            try_=("make room or choose another folder", "the same command again: finished shards are kept"),
        ) from error
    elapsed_s = time.monotonic() - begun
    return BuildReport(store=TokenStore.open(plan.out), fresh=True, kept_shards=kept, elapsed_s=elapsed_s)


class _Build:
    """One attempt to make everything in the building folder."""

    def __init__(
        self, plan: BuildPlan, skip_unreadable: bool, on_progress: Callable[[Progress], None]
    ) -> None:
        self.plan = plan
        self.folder = plan.building
        self.skip_unreadable = skip_unreadable
        self.on_progress = on_progress
        self.done_bytes = 0
        self.kept_tokens = 0
        self.records: dict[int, ShardRecord] = {}

    def run(self, workers: int) -> int:
        """Makes what is missing and returns the number of shards that were there already."""
        tokenizer = self._tokenizer()
        shards = self.plan.shards(tokenizer)
        for shard in shards:
            record = finished_shard(self.folder, shard)
            if record:
                self.kept_tokens += record.tokens.bytes // np.dtype(token_dtype(tokenizer.vocab)).itemsize
                self._add(shard, record, made=0)
        kept = len(self.records)
        missing = [shard for shard in shards if shard.number not in self.records]
        if workers > 1 and len(missing) > 1:
            self._in_processes(missing, tokenizer, min(workers, len(missing)))
        else:
            self._here(missing, tokenizer)
        changed = self.plan.changed_files()
        if changed:
            raise DataError(
                f"{len(changed)} input files changed while they were read: {', '.join(changed[:3])}",
                code="SR335",
                try_=("the same command again",),
            )
        self._join(shards, tokenizer)
        return kept

    def _tokenizer(self) -> TextTokenizer:
        choice = self.plan.choice
        if choice.file:
            tokenizer = TextTokenizer.load(choice.file, end_token=choice.end_token)
        elif choice.as_bytes:
            tokenizer = TextTokenizer(byte_tokenizer(), name="bytes")
        else:
            tokenizer = self._trained(choice.train_bpe or 0)
        write_durably(self.folder / TOKENIZER, tokenizer.raw)
        return tokenizer

    def _trained(self, vocab: int) -> TextTokenizer:
        mark = self.folder / TRAINED
        if mark.exists() and mark.read_text() == self.plan.digest:
            return TextTokenizer.load(self.folder / TOKENIZER)
        self._report("training the tokenizer", 0)
        tokenizer = TextTokenizer(train_bpe(_training_texts(self.plan), vocab), name="the trained tokenizer")
        write_durably(self.folder / TOKENIZER, tokenizer.raw)
        write_durably(mark, self.plan.digest.encode())
        return tokenizer

    def _here(self, shards: list[Shard], tokenizer: TextTokenizer) -> None:
        made = _Counter(lambda tokens: self._report("tokenising", tokens))
        for shard in shards:
            self._add(shard, make_shard(self.folder, shard, tokenizer, made), made=made.tokens)

    def _in_processes(self, shards: list[Shard], tokenizer: TextTokenizer, workers: int) -> None:
        # spawn: forking a process that runs threads (progress bars, tokenizers) can deadlock.
        context = get_context("spawn")
        stop, made = context.Event(), context.Value("q", 0)
        given = (self.folder, tokenizer.end_token, stop, made, os.getpid())
        pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=given)
        try:
            running = {pool.submit(work, shard): shard for shard in shards}
            while running:
                done, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    self._add(running.pop(future), _finished(future), made=made.value)
                self._report("tokenising", made.value)
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenising process was killed; finished shards are kept",
                code="SR336",
                why="often the system ended it because memory ran out",
                try_=("the same command with fewer --workers",),
            ) from error
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _add(self, shard: Shard, record: ShardRecord, *, made: int) -> None:
        lost = [fault for fault in record.faults if fault.whole]
        if lost and not self.skip_unreadable:
            file = shard.parts[lost[0].part].file
            other_field = ("--field NAME when the text is in another column",) if file.kind == "rows" else ()
            raise DataError(
                f"{file.path} cannot be read: {lost[0].reason}",
                code="SR333",
                where=", ".join(f"{shard.parts[fault.part].file.path}:{fault.line}" for fault in lost[:5]),
                try_=(
                    *other_field,
                    "--skip-unreadable to go on without such files",
                    "convert or remove it and run again: finished shards are kept",
                ),
            )
        self.records[shard.number] = record
        self.done_bytes += shard.bytes
        self._report("tokenising", made)

    def _report(self, phase: str, made: int) -> None:
        now = Progress(
            phase=phase,
            done_bytes=self.done_bytes,
            total_bytes=self.plan.bytes,
            tokens=self.kept_tokens + made,
        )
        self.on_progress(now)

    def _join(self, shards: list[Shard], tokenizer: TextTokenizer) -> None:
        """Writes what the whole store needs beside the tokens; the index last."""
        records = [self.records[shard.number] for shard in shards]
        size = np.dtype(token_dtype(tokenizer.vocab)).itemsize
        tokens = sum(record.tokens.bytes for record in records) // size
        self._report("joining", tokens - self.kept_tokens)
        skipped = _skipped_lines(shards, records)
        if not tokens:
            raise DataError(
                f"the data set is empty: {len(self.plan.files)} files hold no text",
                code="SR337",
                why="; ".join(skipped[:3]) or "every document is empty",
                try_=("--field NAME when the text of the records is under another name",),
            )
        offsets = _write_offsets(self.folder, records, tokens, size)
        extra = [hash_bytes(TOKENIZER, tokenizer.raw)]
        if skipped:
            listing = "".join(f"{line}\n" for line in skipped).encode()
            write_durably(self.folder / SKIPPED, listing)
            extra.append(hash_bytes(SKIPPED, listing))
        index = StoreIndex(
            dtype=token_dtype(tokenizer.vocab),
            tokens=tokens,
            documents=offsets.bytes // 8 - 1,
            vocab=tokenizer.vocab,
            eot=tokenizer.eot,
            tokenizer=tokenizer.digest,
            files=tuple(record.tokens for record in records if record.tokens.bytes),
            offsets=offsets,
            extra=tuple(extra),
            origin={
                "plan": self.plan.digest,
                "tokenizer": str(self.plan.choice),
                "field": self.plan.field,
                "files": len(self.plan.files),
                "bytes": self.plan.bytes,
                "skipped": sum(record.bad for record in records),
                "empty": sum(record.empty for record in records),
            },
        )
        write_index(self.folder, index)


class _Counter:
    """Adds up tokens in this process and tells about every hundred thousand; never stops a build."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tokens = 0
        self.told = 0
        self.tell = tell

    def __call__(self, tokens: int) -> bool:
        self.tokens += tokens
        if self.tokens - self.told > 100_000:
            self.told = self.tokens
            self.tell(self.tokens)
        return False


def _finished(future: "Future[ShardRecord | None]") -> ShardRecord:
    record = future.result()
    if record is None:
        raise InvariantError("a shard was given up although the build goes on")
    return record


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_made_by(plan: BuildPlan, folder: Path) -> bool:
    return (folder / INDEX).exists() and read_index(folder).origin.get("plan") == plan.digest


@contextmanager
def _building_folder(plan: BuildPlan) -> Iterator[None]:
    """The building folder, locked: the lock is on the folder itself and ends with this process."""
    plan.building.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(plan.building, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(
            f"another build of {plan.out} is running", code="SR338", try_=("wait for it, or another folder",)
        ) from None
    finally:
        os.close(descriptor)


def _training_texts(plan: BuildPlan) -> Iterator[str]:
    """Text for training a tokenizer: all of it, or parts taken evenly up to 256 million characters."""
    parts = plan.parts()
    stride = -(-plan.bytes // TRAINING_TEXT_CHARS) or 1
    left = TRAINING_TEXT_CHARS
    for part in parts[::stride]:
        for found in PartReader(part=part, field=plan.field):
            if isinstance(found, Document):
                yield found.text
                left -= len(found.text)
            if left <= 0:
                return


def _skipped_lines(shards: list[Shard], records: list[ShardRecord]) -> list[str]:
    """`file:line: reason` of every fault; lines count from the beginning of the file."""
    lines_before: dict[str, int] = {}
    out = []
    for shard, record in zip(shards, records, strict=True):
        for number, part in enumerate(shard.parts):
            before = lines_before.get(part.file.path, 0)
            faults = (fault for fault in record.faults if fault.part == number)
            out += [f"{part.file.path}:{before + fault.line}: {fault.reason}" for fault in faults]
            lines_before[part.file.path] = before + record.lines[number]
        more = record.bad - len(record.faults)
        if more > 0:
            out.append(f"{shard.parts[-1].file.path}: {more} more lines of this shard")
    return out


def _write_offsets(folder: Path, records: list[ShardRecord], tokens: int, token_bytes: int) -> StoredFile:
    """documents.bin: 0 and the end of every document, counted from the beginning of the stream."""
    hasher = PieceHasher()
    base = 0
    with open(folder / DOCUMENTS, "wb") as file:
        for record in records:
            ends = np.fromfile(folder / record.ends.name, dtype="<i8") + base
            raw = (ends if hasher.bytes else np.insert(ends, 0, 0)).astype("<i8").tobytes()
            file.write(raw)
            hasher.update(raw)
            base += record.tokens.bytes // token_bytes
        file.flush()
        os.fsync(file.fileno())
    if base != tokens:
        raise InvariantError(f"the shards hold {base} tokens, the store {tokens}")
    return hasher.stored(DOCUMENTS)


def _publish(plan: BuildPlan) -> None:
    """Removes what only the building needed and gives the folder its name."""
    folder, index = plan.building, read_index(plan.building)
    kept = {INDEX, *(stored.name for stored in (*index.files, index.offsets, *index.extra))}
    for file in folder.iterdir():
        if file.name not in kept:
            file.unlink()
    sync_folder(folder)
    os.rename(folder, plan.out)
    sync_folder(plan.out.parent)
