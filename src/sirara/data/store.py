"""Token store: a folder of raw little-endian token files, document offsets and one JSON index.

    index.json           sizes, dtype, vocabulary, eot id, tokenizer digest, xxh3-128 of every piece
    tokens-00000.bin     uint16 (uint32 when the vocabulary is larger than 65,536), nothing else
    documents.bin        int64: first token of every document, then the number of all tokens
    tokenizer.json       the tokenizer that made the ids

The token files are one stream cut anywhere; every document ends with the end-of-text token. Reading maps
the files, touches the asked slice only and works beyond 2^32 tokens. A piece is at most 16 MiB of one file.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sirara.data.pieces import (
    PIECE_BYTES,
    MappedFiles,
    PieceHasher,
    StoredFile,
    check_pieces,
    check_size,
    hash_bytes,
    write_durably,
)
from sirara.errors import CorruptDataError, DataError, StorageError

FORMAT = "sirara token store"
VERSION = 1
INDEX = "index.json"
DOCUMENTS = "documents.bin"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """What index.json says."""

    dtype: str
    tokens: int
    documents: int
    vocab: int
    eot: int
    tokenizer: str
    """Digest of the tokenizer; empty when the store was made without one."""
    files: tuple[StoredFile, ...]
    offsets: StoredFile
    extra: tuple[StoredFile, ...] = ()
    """Files beside the stream that `check` verifies: the tokenizer."""
    origin: dict[str, object] = field(default_factory=dict)
    """How the store was made: for people, not part of the digest."""

    @property
    def digest(self) -> str:
        """Names the content, wherever the store lies: equal digests mean equal tokens and documents."""
        content = [self.dtype, self.tokens, self.documents, self.vocab, self.eot, self.tokenizer]
        pieces = [[f.bytes, f.hashes] for f in (*self.files, self.offsets)]
        return xxhash.xxh3_128_hexdigest(_canonical([content, pieces]))


class TokenStore:
    """A store opened for reading; sizes are checked here, hashes by `faults`.  Safe to use from threads."""

    def __init__(self, path: Path, index: StoreIndex, maps: MappedFiles | None = None) -> None:
        self.path = path
        self.index = index
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        ends = np.cumsum([0, *(f.bytes // self._dtype.itemsize for f in index.files)])
        self._starts: np.ndarray = ends[:-1]
        self._maps = maps or MappedFiles()

    @classmethod
    def open(cls, path: Path | str, *, maps: MappedFiles | None = None) -> "TokenStore":
        """Raises DataError when `path` is no store, CorruptDataError when files are missing or cut short.

        Stores that share `maps` share its limit of open files.
        """
        store = cls(Path(path), read_index(Path(path)), maps)
        for stored in store._all_files():
            check_size(store.path, stored)
        return store

    @classmethod
    def unchecked(cls, path: Path | str) -> "TokenStore":
        """The same without a look at the files, for `faults` to find all that is wrong."""
        return cls(Path(path), read_index(Path(path)))

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64."""
        if not 0 <= start <= stop <= self.tokens:
            raise DataError(
                f"tokens [{start}, {stop}) asked of {self.path}, which has {self.tokens}", code="SR301"
            )
        out = np.empty(stop - start, dtype=np.int64)
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            mapped = self._maps.get(self.path, self.index.files[number], self._dtype)
            low = at - int(self._starts[number])
            taken = mapped[low : low + stop - at]
            out[at - start : at - start + len(taken)] = taken
            at += len(taken)
            number += 1
        if out.size and int(out.max()) >= self.index.vocab:
            raise self._beyond_vocabulary(start, out)
        return out

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """The number of the document that each of the tokens [start, stop) belongs to, int64."""
        offsets = self.offsets()
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        last = int(np.searchsorted(offsets, max(start, stop - 1), side="right"))
        bounds = np.clip(offsets[first : last + 1], start, stop)
        return np.repeat(np.arange(first, first + len(bounds) - 1), np.diff(bounds))

    def offsets(self) -> np.ndarray:
        """First token of every document, then the number of all tokens; mapped, int64."""
        return self._maps.get(self.path, self.index.offsets, np.dtype("<i8"))

    def faults(self) -> Iterator[CorruptDataError | int]:
        """Reads everything: yields the size of every sound piece and one error per faulty piece or file."""
        for stored in self._all_files():
            try:
                check_size(self.path, stored)
            except CorruptDataError as fault:
                yield fault
                continue
            yield from check_pieces(self.path, stored)
        yield from self._check_offsets()

    def _all_files(self) -> tuple[StoredFile, ...]:
        return (*self.index.files, self.index.offsets, *self.index.extra)

    def _beyond_vocabulary(self, start: int, tokens: np.ndarray) -> CorruptDataError:
        at = start + int((tokens >= self.index.vocab).argmax())
        number = int(np.searchsorted(self._starts, at, side="right")) - 1
        piece = (at - int(self._starts[number])) * self._dtype.itemsize // PIECE_BYTES
        return CorruptDataError(
            f"token {at} of {self.path} is {int(tokens.max())}, beyond its vocabulary of {self.index.vocab}",
            code="SR354",
            where=f"{self.path / self.index.files[number].name}, piece {piece}",
            try_=(f"sirara data check {self.path}", "restore the file from a copy or build the store again"),
        )

    def _check_offsets(self) -> Iterator[CorruptDataError]:
        path = self.path / DOCUMENTS
        if not path.exists() or path.stat().st_size != (self.documents + 1) * 8:
            return
        previous = np.int64(0)
        for low in range(0, self.documents + 1, 1 << 20):
            part = np.asarray(self.offsets()[low : low + (1 << 20)])
            steps = np.diff(part, prepend=previous)
            if (steps[1 if low == 0 else 0 :] <= 0).any() or (low == 0 and part[0] != 0):
                yield CorruptDataError(
                    f"the document offsets of {self.path} do not rise from 0",
                    code="SR355",
                    where=str(path),
                    try_=("build the store again",),
                )
                return
            previous = part[-1]
        if int(previous) != self.tokens:
            yield CorruptDataError(
                f"the documents of {self.path} end at token {int(previous)}, the stream at {self.tokens}",
                code="SR355",
                where=str(path),
                try_=("build the store again",),
            )


def read_index(path: Path) -> StoreIndex:
    """What index.json of the store `path` says, checked against its own digest."""
    file = path / INDEX
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        found = "a file" if path.is_file() else "a folder without index.json" if path.is_dir() else "nothing"
        raise DataError(
            f"{path} is no token store: there is {found}",
            code="SR302",
            try_=(f"sirara data build {path} --input TEXT", "the path of a folder that `data build` made"),
        ) from None
    try:
        parsed = json.loads(raw)
        if parsed["format"] != FORMAT:
            raise KeyError("format")
        version = int(parsed["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{file} is not the index of a token store",
            code="SR351",
            why=f"{type(error).__name__}: {error}",
            try_=("restore it from a copy or build the store again",),
        ) from error
    if version != VERSION:
        raise DataError(
            f"{path} has store version {version}; this Sirara reads version {VERSION}",
            code="SR303",
            try_=("a newer Sirara",) if version > VERSION else ("build the store again",),
        )
    return _parse_index(file, parsed)


def write_index(folder: Path, index: StoreIndex) -> None:
    """Writes index.json so that it is there whole or not at all."""
    body = {"format": FORMAT, "version": VERSION, **asdict(index), "digest": index.digest}
    body["self"] = xxhash.xxh3_128_hexdigest(_canonical(body))
    write_durably(folder / INDEX, json.dumps(body, indent=1).encode())


def token_dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write_store(
    folder: Path,
    documents: Iterable[np.ndarray],
    *,
    vocab: int,
    eot: int,
    tokenizer: bytes = b"",
    digest: str = "",
) -> TokenStore:
    """A new store of these documents (token ids without the end-of-text token, which is added to each).

    For data that comes as arrays: everything passes through this process. `digest` is the tokenizer's.
    """
    if folder.exists():
        raise DataError(f"{folder} exists already", code="SR304", try_=("another folder", f"rm -r {folder}"))
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    partial.mkdir(parents=True)
    dtype = token_dtype(vocab)
    hasher, offsets = PieceHasher(), [0]
    try:
        with open(partial / "tokens-00000.bin", "wb") as file:
            for document in documents:
                ids = np.append(document, eot)
                if ids.min() < 0 or ids.max() >= vocab:
                    raise DataError(
                        f"document {len(offsets) - 1} has token ids from {ids.min()} to {ids.max()}",
                        code="SR305",
                        why=f"the vocabulary has {vocab}",
                    )
                raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
                file.write(raw)
                hasher.update(raw)
                offsets.append(offsets[-1] + len(ids))
        raw_offsets = np.array(offsets, dtype="<i8").tobytes()
        (partial / DOCUMENTS).write_bytes(raw_offsets)
        if tokenizer:
            (partial / TOKENIZER).write_bytes(tokenizer)
        index = StoreIndex(
            dtype=dtype,
            tokens=offsets[-1],
            documents=len(offsets) - 1,
            vocab=vocab,
            eot=eot,
            tokenizer=digest,
            files=(hasher.stored("tokens-00000.bin"),),
            offsets=hash_bytes(DOCUMENTS, raw_offsets),
            extra=(hash_bytes(TOKENIZER, tokenizer),) if tokenizer else (),
        )
        write_index(partial, index)
        os.rename(partial, folder)
    except OSError as error:
        raise StorageError(f"cannot write the token store {folder}: {error}", code="SR601") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenStore.open(folder)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _parse_index(file: Path, parsed: dict[str, Any]) -> StoreIndex:
    claimed = parsed.pop("self", None)
    if claimed != xxhash.xxh3_128_hexdigest(_canonical(parsed)):
        raise CorruptDataError(
            f"{file} was changed after it was written: its own digest does not match",
            code="SR352",
            try_=("restore it from a copy or build the store again",),
        )
    fields = {name: value for name, value in parsed.items() if name not in ("format", "version", "digest")}
    try:
        fields["files"] = tuple(StoredFile(**stored) for stored in parsed["files"])
        fields["offsets"] = StoredFile(**parsed["offsets"])
        fields["extra"] = tuple(StoredFile(**stored) for stored in parsed["extra"])
        return StoreIndex(**fields)
    except (KeyError, TypeError) as error:
        raise CorruptDataError(f"{file} lacks what version {VERSION} needs: {error}", code="SR351") from error
