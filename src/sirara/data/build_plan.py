"""What a build of a token store will read and make, known before anything is written.

The plan depends on the input files and the choice of a tokenizer alone, never on the number of processes; so
do the shards, and so do the tokens.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from sirara.data.readers import InputFile, Part, cut_into_parts, find_files
from sirara.data.shards import Shard
from sirara.data.tokenizer import TextTokenizer
from sirara.errors import DataError

MIN_SHARD_BYTES = 1 << 20
MAX_SHARD_BYTES = 256 << 20
WANTED_SHARDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerChoice:
    """Exactly one of: a tokenizer.json, a BPE to be trained with so many tokens, bytes."""

    file: Path | None = None
    train_bpe: int | None = None
    as_bytes: bool = False
    end_token: str | None = None

    def __str__(self) -> str:
        if self.file:
            return str(self.file)
        return "bytes" if self.as_bytes else f"BPE of {self.train_bpe} tokens, trained on this text"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build will do."""

    out: Path
    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    choice: TokenizerChoice
    field: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def building(self) -> Path:
        """Where the store grows; beside `out`, so that it can be renamed."""
        return self.out.with_name(f".{self.out.name}.building")

    @property
    def digest(self) -> str:
        """Names everything that decides the tokens."""
        tokenizer = TextTokenizer.load(self.choice.file).digest if self.choice.file else ""
        choice = [tokenizer, self.choice.train_bpe, self.choice.as_bytes, self.choice.end_token]
        return xxhash.xxh3_128_hexdigest(repr([self.files, self.field, choice]).encode())

    def parts(self) -> list[Part]:
        return [part for file in self.files for part in cut_into_parts(file)]

    def shards(self, tokenizer: TextTokenizer) -> list[Shard]:
        """The parts of all files in order, gathered to about 256 shards of 1 to 256 MiB."""
        target = min(max(self.bytes // WANTED_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
        groups: list[list[Part]] = [[]]
        room = target
        for part in self.parts():
            size = part.stop - part.start
            if groups[-1] and size > room:
                groups.append([])
                room = target
            groups[-1].append(part)
            room -= size
        return [
            Shard(
                number=number,
                parts=tuple(parts),
                field=self.field,
                tokenizer=tokenizer.digest,
                eot=tokenizer.eot,
                vocab=tokenizer.vocab,
            )
            for number, parts in enumerate(groups)
        ]

    def changed_files(self) -> list[str]:
        """Input files that are no longer what the plan saw."""
        return [file.path for file in self.files if not _unchanged(file)]


def plan_build(
    out: Path, inputs: Sequence[Path], choice: TokenizerChoice, *, field: str = "text"
) -> BuildPlan:
    """Looks at the inputs and the tokenizer.  Raises DataError for what cannot work."""
    chosen = sum((choice.file is not None, choice.train_bpe is not None, choice.as_bytes))
    if chosen != 1:
        raise DataError(
            f"{chosen or 'no'} tokenizers are chosen, one is needed",
            code="SR331",
            try_=("--train-bpe 4096", "--tokenizer FILE", "--bytes"),
        )
    if choice.train_bpe is not None and choice.train_bpe < 257:
        raise DataError(
            f"a byte-level BPE of {choice.train_bpe} tokens is too small",
            code="SR312",
            why="256 bytes and the end of text need 257",
            try_=("--train-bpe 4096", "--bytes"),
        )
    if choice.file:
        TextTokenizer.load(choice.file, end_token=choice.end_token)
    files, passed = find_files(inputs)
    if not files:
        raise DataError("there is no input", code="SR332", try_=("--input PATH of a text file or a folder",))
    return BuildPlan(
        out=Path(os.path.abspath(out)),
        files=tuple(files),
        passed_over=tuple(passed),
        choice=choice,
        field=field,
    )


def _unchanged(file: InputFile) -> bool:
    try:
        status = os.stat(file.path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.bytes, file.modified_ns)
