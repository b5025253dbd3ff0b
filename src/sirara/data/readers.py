"""Documents out of text files: which files, which parts of them, and what cannot be read.

    .txt .md .py              one file is one document
    .jsonl .ndjson            one line is one document, in the field `text` unless told otherwise
    .parquet                  one row is one document (needs the `data` extra)
    ... + .gz or .zst         the same, compressed (.zst needs the `data` extra)

A large uncompressed file is cut into parts at line ends by its size alone, so that several processes read it
and the result does not depend on how many. Nothing here is fatal for the whole: a faulty line or file comes
out as a `Fault` with its place, the caller decides.
"""

import gzip
import importlib
import importlib.util
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from sirara.errors import DataError

try:
    import zstandard
except ImportError:
    zstandard = None

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "rows",
}
COMPRESSED = (".gz", ".zst")
PART_BYTES = 32 << 20
MAX_LINE_BYTES = 1 << 30

_LINE_END = re.compile(rb"\n")
# The safe cut of a document's text: see tokenizer.py.
_TEXT_CUT = re.compile(rb"[^\s]\n(?=[^\s])")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    path: str
    kind: str
    bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The documents (for one large text: the text) that begin in the bytes [start, stop) of a file."""

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Text of a document; `ends` is false when the next part of the file goes on with it."""

    text: str
    ends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What could not be read; `line` counts from 1 in this part.  `whole`: the rest of the part is lost."""

    line: int
    reason: str
    whole: bool = False


@dataclass(slots=True, kw_only=True)
class PartReader:
    """Iterates over one part.  `lines` then holds the number of its lines, for the places of later faults."""

    part: Part
    field: str
    lines: int = 0

    def __iter__(self) -> Iterator[Document | Fault]:
        kind = self.part.file.kind
        read = {"text": self._text, "lines": self._json_lines, "rows": self._rows}[kind]
        try:
            yield from read()
        except (EOFError, zlib.error, gzip.BadGzipFile, *_ZSTD_ERRORS) as error:
            yield Fault(line=self.lines + 1, reason=f"the compressed file is damaged: {error}", whole=True)
        except DataError as error:
            yield Fault(line=self.lines + 1, reason=error.what, whole=True)
        except FileNotFoundError:
            yield Fault(line=1, reason="the file is gone", whole=True)
        except PermissionError:
            yield Fault(line=1, reason="no permission to read the file", whole=True)

    def _text(self) -> Iterator[Document | Fault]:
        part = self.part
        with _opened(part.file.path) as file:
            start, stop = _bounds(file, part, _TEXT_CUT)
            raw = file.read() if part.file.bytes == stop else file.read(stop - start)
        self.lines = raw.count(b"\n")
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            yield Fault(line=line, reason=_not_utf8(raw, error, start), whole=True)
            if start == 0:
                return
            # Earlier parts of the text are documents' beginnings already: they need an end.
            text = ""
        if start < stop or part.start == 0:
            yield Document(text=text, ends=stop >= part.file.bytes)

    def _json_lines(self) -> Iterator[Document | Fault]:
        part = self.part
        with _opened(part.file.path) as file:
            at, stop = _bounds(file, part, _LINE_END)
            whole_file = stop >= part.file.bytes
            while whole_file or at < stop:
                raw = file.readline(MAX_LINE_BYTES)
                if not raw:
                    return
                at += len(raw)
                self.lines += 1
                if raw.strip():
                    yield self._json_line(raw.removeprefix(b"\xef\xbb\xbf") if self.lines == 1 else raw)

    def _json_line(self, raw: bytes) -> Document | Fault:
        try:
            record = json.loads(raw)
        except UnicodeDecodeError as error:
            return Fault(line=self.lines, reason=_not_utf8(raw, error, 0))
        except (ValueError, RecursionError) as error:
            return Fault(line=self.lines, reason=f"no JSON: {error}")
        if not isinstance(record, dict):
            return Fault(line=self.lines, reason=f"a JSON {type(record).__name__} instead of an object")
        text = record.get(self.field)
        if not isinstance(text, str):
            has = ", ".join(list(record)[:8]) or "nothing"
            reason = f"no field {self.field!r} (it has {has})"
            if self.field in record:
                reason = f"field {self.field!r} is {type(text).__name__}, not text"
            return Fault(line=self.lines, reason=reason)
        try:
            text.encode()
        except UnicodeEncodeError:
            return Fault(line=self.lines, reason="half a surrogate pair in the text")
        return Document(text=text)

    def _rows(self) -> Iterator[Document | Fault]:
        # Here and not above: pyarrow is heavy and optional.
        parquet = importlib.import_module("sirara.data.parquet")
        for text in parquet.column(self.part.file.path, self.field):
            self.lines += 1
            empty = Fault(line=self.lines, reason="no text in this row")
            yield empty if text is None else Document(text=text)


_ZSTD_ERRORS: tuple[type[Exception], ...] = () if zstandard is None else (zstandard.ZstdError,)


def find_files(inputs: Sequence[Path]) -> tuple[list[InputFile], list[str]]:
    """All readable files among the inputs, in the order given, folders by sorted path; and those passed over.

    Raises DataError for what does not exist, has no known ending or needs an extra that is not installed.
    """
    found: dict[str, InputFile] = {}
    passed: list[str] = []
    for path in inputs:
        if not path.exists():
            raise DataError(f"the input {path} does not exist", code="SR320", where="--input")
        if path.is_dir():
            inside = [file for file in _walk(path) if kind_of(file)]
            passed += [str(file) for file in _walk(path) if not kind_of(file)]
            if not inside:
                raise DataError(
                    f"the folder {path} has no file that can be read",
                    code="SR321",
                    why=f"{sum(1 for _ in _walk(path))} files; readable are {_endings()}",
                )
        else:
            inside = [path]
        for file in inside:
            found.setdefault(os.path.realpath(file), _described(file))
    return list(found.values()), passed


def cut_into_parts(file: InputFile) -> list[Part]:
    """The parts of one file; a function of its size and kind alone."""
    whole = file.kind == "rows" or file.path.endswith(COMPRESSED) or file.bytes <= PART_BYTES
    starts = [0] if whole else list(range(0, file.bytes, PART_BYTES))
    return [
        Part(file=file, start=start, stop=stop)
        for start, stop in zip(starts, [*starts[1:], file.bytes], strict=True)
    ]


def kind_of(path: Path) -> str:
    """text, lines or rows; empty for an ending that is not known."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        # Common Crawl's C4 and its likes call JSON lines .json.gz.
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        kind = "lines" if inner == ".json" else KINDS.get(inner, "")
        return "" if kind == "rows" else kind
    return KINDS.get(path.suffix, "")


def _described(path: Path) -> InputFile:
    kind = kind_of(path)
    if not kind:
        raise DataError(
            f"{path} has an ending that is not read", code="SR322", why=f"readable are {_endings()}"
        )
    if path.suffix == ".zst" and zstandard is None:
        raise DataError(
            f"reading {path} needs zstandard", code="SR323", try_=("pip install 'sirara[data]'", "unzstd it")
        )
    if kind == "rows" and importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"reading {path} needs pyarrow", code="SR323", try_=("pip install 'sirara[data]'",))
    status = path.stat()
    return InputFile(
        path=str(path.absolute()), kind=kind, bytes=status.st_size, modified_ns=status.st_mtime_ns
    )


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder`, without hidden ones, in an order that every machine gives."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _endings() -> str:
    return f"{' '.join(KINDS)}, text and lines also with {' or '.join(COMPRESSED)}"


def _opened(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(_ZstdFile(path), 1 << 20))
    return open(path, "rb")


class _ZstdFile(io.RawIOBase):
    """All frames of a .zst file; a file that ends inside a frame is an error, which the library hides."""

    def __init__(self, path: str) -> None:
        if zstandard is None:
            raise DataError(f"reading {path} needs zstandard", code="SR323")
        self._library = zstandard.ZstdDecompressor()
        self._frame = self._library.decompressobj()
        self._in_frame = False
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this object
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(1 << 17)
            if not self._input:
                if self._in_frame:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._output = memoryview(self._frame.decompress(self._input))
            self._in_frame, self._input = not self._frame.eof, self._frame.unused_data
            if self._frame.eof:
                self._frame = self._library.decompressobj()
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _bounds(file: IO[bytes], part: Part, cut: re.Pattern[bytes]) -> tuple[int, int]:
    """The part's real borders, the first cut at or after each planned one; the file stands at the first."""
    if part.start == 0 and part.stop == part.file.bytes:
        return 0, part.stop
    start, stop = (_next_cut(file, at, part.file.bytes, cut) for at in (part.start, part.stop))
    file.seek(start)
    return start, stop


def _next_cut(file: IO[bytes], at: int, size: int, cut: re.Pattern[bytes]) -> int:
    if at in (0, size):
        return at
    # Two bytes before and one after decide about a cut at `at`, hence the overlap.
    low = max(0, at - 2)
    while low < size:
        file.seek(low)
        block = file.read(1 << 16)
        for match in cut.finditer(block):
            if low + match.end() >= at:
                return low + match.end()
        if low + len(block) >= size:
            break
        low += len(block) - 2
    return size


def _not_utf8(raw: bytes, error: UnicodeDecodeError, base: int) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the text is UTF-16, not UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)"
    if b"\0" in raw[: 1 << 16]:
        return "the file is binary, not text"
    byte = raw[error.start]
    return (
        f"byte 0x{byte:02x} at {base + error.start} is not UTF-8"
        " (iconv -f LATIN1 -t UTF-8 converts Western text)"
    )
