"""Which documents come out of files, and how what cannot be read is named."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.data import readers
from sirara.data.readers import Document, Fault, Part, PartReader, cut_into_parts, find_files
from sirara.errors import DataError


def read(path, field="text"):
    found = []
    for file in find_files([path])[0]:
        for part in cut_into_parts(file):
            found += list(PartReader(part=part, field=field))
    return found


def texts(found):
    return [one.text for one in found if isinstance(one, Document)]


def lines_of(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def compressed(raw, ending):
    return (
        gzip.compress(raw) if ending == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    )


def zstd_frames(raw, size):
    return b"".join(zstandard.compress(raw[low : low + size]) for low in range(0, len(raw), size))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".py"])
def test_a_text_file_is_one_document(tmp_path, kind, ending):
    raw = "first\r\n\r\nsecond ü\n".encode()
    path = tmp_path / f"a{kind}{ending}"
    path.write_bytes(compressed(raw, ending) if ending else raw)
    assert read(path) == [Document(text="first\r\n\r\nsecond ü\n")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_a_json_line_is_one_document(tmp_path, name):
    raw = lines_of({"text": "one\ntwo", "id": 3}, {"text": "ü 你"}, {"text": ""})
    ending = Path(name).suffix
    (tmp_path / name).write_bytes(compressed(raw, ending) if ending in (".gz", ".zst") else raw)
    assert texts(read(tmp_path / name)) == ["one\ntwo", "ü 你", ""]


def test_the_text_may_be_in_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of({"content": "x", "text": "no"}))
    assert texts(read(tmp_path / "a.jsonl", field="content")) == ["x"]


def test_a_parquet_row_is_one_document(tmp_path):
    pq.write_table(pa.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")
    assert texts(found) == ["one", "three"]
    assert found[1] == Fault(line=2, reason="no text in this row")


@pytest.mark.parametrize(("field", "reason"), [("n", "column 'n' is int64"), ("x", "it has text, n")])
def test_a_parquet_column_without_text_is_named(tmp_path, field, reason):
    pq.write_table(pa.table({"text": ["one"], "n": [1]}), tmp_path / "a.parquet")
    (fault,) = read(tmp_path / "a.parquet", field=field)
    assert fault.whole
    assert reason in fault.reason


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path):
    raw = (
        lines_of({"text": "good"})
        + b'{"text": "cut\n'
        + b"\n"
        + lines_of({"body": "x"}, ["text"], {"text": 3}, {"text": "\ud800"})
        + b'{"text": "\xff"}\n'
        + b'{"text": "last"}'
    )
    (tmp_path / "a.jsonl").write_bytes(raw)
    found = read(tmp_path / "a.jsonl")
    assert texts(found) == ["good", "last"]
    faults = [one for one in found if isinstance(one, Fault)]
    assert [fault.line for fault in faults] == [2, 4, 5, 6, 7, 8]
    for fault, reason in zip(
        faults,
        ["no JSON", "no field 'text' (it has body)", "a JSON list", "is int", "surrogate", "not UTF-8"],
        strict=True,
    ):
        assert reason in fault.reason
        assert not fault.whole


@pytest.mark.parametrize(
    ("raw", "line", "reason"),
    [
        ("a\nb\ncafé".encode("latin-1"), 3, "byte 0xe9 at 7 is not UTF-8"),
        ("text".encode("utf-16"), 1, "UTF-16"),
        (b"\x89PNG\0\0", 1, "binary"),
    ],
)
def test_text_in_another_encoding_is_named_by_line(tmp_path, raw, line, reason):
    (tmp_path / "a.txt").write_bytes(raw)
    (fault,) = read(tmp_path / "a.txt")
    assert (fault.line, fault.whole) == (line, True)
    assert reason in fault.reason


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of({"text": "y"}))
    assert texts(read(tmp_path / "a.txt")) == ["x"]
    assert texts(read(tmp_path / "a.jsonl")) == ["y"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_compressed_file_is_named_and_what_came_before_is_kept(tmp_path, ending, damage):
    raw = compressed(lines_of(*({"text": f"{n} " * 50} for n in range(3000))), ending)
    raw = raw[: len(raw) // 2] if damage == "cut" else raw[:500] + bytes([raw[500] ^ 0xFF]) + raw[501:]
    (tmp_path / f"a.jsonl{ending}").write_bytes(raw)
    found = read(tmp_path / f"a.jsonl{ending}")
    assert found[-1].whole
    assert "the compressed file is damaged" in found[-1].reason
    assert len(texts(found)) < 3000


def test_all_frames_of_a_zst_file_are_read(tmp_path):
    records = [{"text": f"line {n}"} for n in range(500)]
    raw = zstd_frames(lines_of(*records), 1000)
    (tmp_path / "a.jsonl.zst").write_bytes(raw)
    assert texts(read(tmp_path / "a.jsonl.zst")) == [record["text"] for record in records]
    # Cut exactly between two lines and inside a frame: nothing but the frame tells.
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines_of(*records))[:-3])
    assert read(tmp_path / "a.jsonl.zst")[-1].whole


def test_a_file_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (file,) = find_files([tmp_path])[0]
    (tmp_path / "a.txt").unlink()
    (fault,) = PartReader(part=Part(file=file, start=0, stop=1), field="text")
    assert (fault.reason, fault.whole) == ("the file is gone", True)


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet='ab é\n"', max_size=30), max_size=12),
    size=st.integers(1, 90),
    end=st.booleans(),
)
def test_cutting_a_file_of_lines_anywhere_gives_each_line_once(tmp_path_factory, lines, size, end):
    path = tmp_path_factory.mktemp("r") / "a.jsonl"
    raw = lines_of(*({"text": line} for line in lines))
    path.write_bytes(raw if end else raw.rstrip(b"\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PART_BYTES", size)
        assert texts(read(path)) == lines


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab é\n 你", max_size=120), size=st.integers(1, 40))
def test_cutting_a_text_anywhere_gives_the_text(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("r") / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PART_BYTES", size)
        found = read(path)
    assert "".join(texts(found)) == text
    assert [one.ends for one in found] == [False] * (len(found) - 1) + [True]


def test_the_lost_end_of_a_large_text_still_ends_its_document(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PART_BYTES", 20)
    (tmp_path / "a.txt").write_bytes(b"good line\n" * 4 + b"bad \xff\n")
    found = read(tmp_path / "a.txt")
    assert "".join(texts(found)) == "good line\n" * 4
    assert isinstance(found[-2], Fault)
    assert found[-1] == Document(text="", ends=True)


def test_lines_before_a_part_count_for_the_places_of_its_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PART_BYTES", 64)
    (tmp_path / "a.jsonl").write_bytes(lines_of(*({"text": "x" * 20} for _ in range(9))) + b"{\n")
    (file,) = find_files([tmp_path])[0]
    line = 0
    for part in cut_into_parts(file):
        reader = PartReader(part=part, field="text")
        places = [line + one.line for one in reader if isinstance(one, Fault)]
        line += reader.lines
    assert places == [10]


def test_folders_are_walked_in_one_order_without_hidden_files(tmp_path):
    for name in (
        "b/2.txt",
        "b/1.md",
        "a.txt",
        ".git/x.txt",
        "c/.hidden.txt",
        "c/x.csv",
        "b/__pycache__/p.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    files, passed = find_files([tmp_path])
    assert [file.path for file in files] == [str(tmp_path / name) for name in ("a.txt", "b/1.md", "b/2.txt")]
    assert passed == [str(tmp_path / "c/x.csv")]


def test_a_file_given_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    files, _ = find_files([tmp_path / "a.txt", tmp_path])
    assert [file.path for file in files] == [str(tmp_path / "a.txt")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist"),
        ("a.csv", "ending that is not read"),
        ("folder", "no file that can be read"),
    ],
)
def test_inputs_that_give_nothing_are_refused(tmp_path, name, message):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        find_files([tmp_path / name])


def test_formats_that_need_the_extra_say_so(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"x"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(readers, "zstandard", None)
    monkeypatch.setattr(readers.importlib.util, "find_spec", lambda name: None)
    for name in ("a.txt.zst", "a.parquet"):
        with pytest.raises(DataError, match="needs") as caught:
            find_files([tmp_path / name])
        assert "sirara[data]" in str(caught.value)
