"""A build gives the same bytes with any number of processes and after any interruption, or says why not."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sirara.data import build_plan, readers, shards, tokenise
from sirara.data.build_plan import TokenizerChoice, plan_build
from sirara.data.store import TokenStore
from sirara.data.tokenise import build
from sirara.data.tokenizer import TextTokenizer, byte_tokenizer
from sirara.errors import DataError, Exit, StorageError

BYTES = TokenizerChoice(as_bytes=True)
BPE = TokenizerChoice(train_bpe=300)


@pytest.fixture
def small_shards(monkeypatch):
    """Many shards out of little text, so that parts, shards and processes come into play."""
    monkeypatch.setattr(build_plan, "MIN_SHARD_BYTES", 600)
    monkeypatch.setattr(readers, "PART_BYTES", 400)


def write_texts(folder, n=12):
    folder.mkdir(exist_ok=True)
    for number in range(n):
        (folder / f"{number:02d}.txt").write_text(
            f"document {number}: the state\nof the union\n" * (number + 1)
        )
    lines = [json.dumps({"text": f"line {number} of the states"}) for number in range(60)]
    (folder / "lines.jsonl").write_text("\n".join([*lines[:30], "{broken", *lines[30:]]))
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def contents(store):
    return {file.name: file.read_bytes() for file in sorted(store.iterdir())}


def plan_of(tmp_path, inputs, choice=BYTES, name="store", **options):
    return plan_build(tmp_path / name, [inputs], choice, **options)


def decoded(store, document):
    start, stop = (int(at) for at in store.offsets()[document : document + 2])
    ids = store.read(start, stop)
    assert ids[-1] == store.index.eot
    return TextTokenizer.load(store.path, end_token=store.index.eot).decode(ids[:-1])


@pytest.mark.parametrize("choice", [BYTES, BPE], ids=["bytes", "bpe"])
def test_every_document_comes_back_in_order(tmp_path, small_shards, choice):
    texts = write_texts(tmp_path / "in")
    store = build(plan_of(tmp_path, texts, choice), workers=1).store
    wanted = [(texts / f"{n:02d}.txt").read_text() for n in range(12)]
    wanted += [f"line {n} of the states" for n in range(60)] * 2
    assert [decoded(store, n) for n in range(store.documents)] == wanted
    assert len(store.index.files) > 5
    assert list(TokenStore.open(store.path).faults())


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    one = build(plan_of(tmp_path, texts, BPE, "one"), workers=1).store
    three = build(plan_of(tmp_path, texts, BPE, "three"), workers=3).store
    assert contents(one.path) == contents(three.path)


def test_a_document_larger_than_a_part_stays_one_document(tmp_path, small_shards):
    (tmp_path / "a.txt").write_text("a line of text\n" * 300)
    (tmp_path / "b.txt").write_text("short")
    store = build(plan_build(tmp_path / "s", [tmp_path / "a.txt", tmp_path / "b.txt"], BYTES)).store
    assert len(store.index.files) > 3
    assert store.offsets().tolist() == [0, 4501, 4507]
    assert decoded(store, 0) == "a line of text\n" * 300


def test_a_large_text_without_a_place_to_cut_is_one_document(tmp_path, small_shards):
    (tmp_path / "a.txt").write_text("x" * 3000)
    store = build(plan_of(tmp_path, tmp_path / "a.txt")).store
    assert store.offsets().tolist() == [0, 3001]


def test_bad_lines_are_listed_with_file_and_line_and_the_rest_is_there(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    report = build(plan_of(tmp_path, texts), workers=1)
    (line,) = report.skipped()
    assert line.startswith(f"{texts / 'lines.jsonl'}:31: no JSON")
    assert report.store.index.origin["skipped"] == 1


class Interrupted(Exception):
    pass


def test_an_interrupted_build_goes_on_and_gives_the_same_bytes(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    whole = build(plan_of(tmp_path, texts, BPE, "whole"), workers=1).store
    plan, done = plan_of(tmp_path, texts, BPE), []

    def interrupt(now):
        done.append(now.done_bytes)
        if now.done_bytes > 3000:
            raise Interrupted

    with pytest.raises(Interrupted):
        build(plan, workers=1, on_progress=interrupt)
    assert not plan.out.exists()
    report = build(plan_of(tmp_path, texts, BPE), workers=1)
    assert report.kept_shards > 2
    assert contents(report.store.path) == contents(whole.path)
    assert not plan.building.exists()


def test_a_shard_whose_bytes_were_damaged_meanwhile_is_made_again(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    whole = build(plan_of(tmp_path, texts, BYTES, "whole"), workers=1).store
    plan = plan_of(tmp_path, texts)

    def interrupt(now):
        if now.done_bytes > 3000:
            raise Interrupted

    with pytest.raises(Interrupted):
        build(plan, workers=1, on_progress=interrupt)
    kept = len(list(plan.building.glob("shard-*.part")))
    first = plan.building / "tokens-00000.bin"
    first.write_bytes(b"\0" + first.read_bytes()[1:])
    (plan.building / "shard-00001.part").write_text("{torn")
    report = build(plan, workers=1)
    assert report.kept_shards == kept - 2
    assert contents(report.store.path) == contents(whole.path)


def test_changed_input_is_read_again_where_it_changed(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    plan = plan_of(tmp_path, texts)

    def interrupt(now):
        if now.phase == "joining":
            raise Interrupted

    with pytest.raises(Interrupted):
        build(plan, workers=1, on_progress=interrupt)
    records = len(list(plan.building.glob("shard-*.part")))
    (texts / "11.txt").write_text("other text of the last file, same number of shards" * 9)
    report = build(plan_of(tmp_path, texts), workers=1)
    assert 0 < report.kept_shards < records
    assert "other text" in decoded(report.store, 11)


def test_input_that_changes_while_it_is_read_is_noticed(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")

    def meddle(now):
        if now.done_bytes > 3000:
            (texts / "00.txt").write_text("grown" * 100)

    with pytest.raises(DataError, match="changed while they were read"):
        build(plan_of(tmp_path, texts), workers=1, on_progress=meddle)


def test_the_same_build_again_does_nothing_and_another_is_refused(tmp_path):
    texts = write_texts(tmp_path / "in")
    first = build(plan_of(tmp_path, texts), workers=1)
    before = contents(first.store.path)
    assert first.fresh
    assert not build(plan_of(tmp_path, texts), workers=1).fresh
    with pytest.raises(DataError, match="exists already"):
        build(plan_of(tmp_path, texts, BPE), workers=1)
    assert contents(first.store.path) == before


def test_a_second_build_of_the_same_store_is_refused_while_one_runs(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    refused = []

    def meddle(now):
        if not refused:
            with pytest.raises(DataError, match="another build") as caught:
                build(plan_of(tmp_path, texts), workers=1)
            refused.append(caught.value)

    build(plan_of(tmp_path, texts), workers=1, on_progress=meddle)
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("empty.txt", b"", "every document is empty"),
        ("blank.txt", b" \n\n", "every document is empty"),
        ("empty.jsonl", b"", "every document is empty"),
        ("other.jsonl", b'{"body": "x"}\n', "no field 'text' (it has body)"),
    ],
)
def test_an_empty_data_set_is_an_error_that_says_why(tmp_path, name, raw, reason):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match="the data set is empty") as caught:
        build(plan_of(tmp_path, tmp_path / name), workers=1)
    assert reason in caught.value.why
    assert caught.value.exit_code == Exit.USAGE
    assert not (tmp_path / "store").exists()


def test_empty_documents_are_counted_and_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n{"text": " "}\n')
    store = build(plan_of(tmp_path, tmp_path / "a.jsonl"), workers=1).store
    assert (store.documents, store.index.origin["empty"]) == (1, 2)


def test_unreadable_text_stops_the_build_and_can_be_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("good")
    (tmp_path / "in" / "b.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"b\.txt cannot be read: byte 0xe9 at 3 is not UTF-8") as caught:
        build(plan_of(tmp_path, tmp_path / "in"), workers=1)
    assert caught.value.exit_code == Exit.USAGE
    assert "--skip-unreadable" in str(caught.value)
    report = build(plan_of(tmp_path, tmp_path / "in"), workers=1, skip_unreadable=True)
    assert report.store.documents == 1
    assert report.skipped()[0].startswith(f"{tmp_path / 'in' / 'b.txt'}:1: ")


def test_a_disk_that_takes_no_more_is_a_storage_error_that_keeps_what_is_done(tmp_path, monkeypatch):
    texts = write_texts(tmp_path / "in")

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_durably", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        build(plan_of(tmp_path, texts), workers=1)
    assert caught.value.exit_code == Exit.STORAGE
    monkeypatch.undo()
    assert build(plan_of(tmp_path, texts), workers=1).fresh


def test_a_build_killed_before_the_rename_leaves_nothing_of_the_building_in_the_store(
    tmp_path, small_shards, monkeypatch
):
    texts = write_texts(tmp_path / "in")
    whole = build(plan_of(tmp_path, texts, BYTES, "whole"), workers=1).store

    def killed(plan):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(tokenise, "_publish", killed)
        build(plan_of(tmp_path, texts), workers=1)
    assert list((tmp_path / ".store.building").glob("*.part"))
    assert contents(build(plan_of(tmp_path, texts), workers=1).store.path) == contents(whole.path)


def test_a_store_that_cannot_be_put_in_its_place_is_a_storage_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="cannot write the store"):
        build(plan_build(tmp_path / "file" / "store", [tmp_path / "a.txt"], BYTES), workers=1)


def test_a_tokenizer_file_is_kept_as_it_is(tmp_path):
    texts = write_texts(tmp_path / "in")
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer())
    choice = TokenizerChoice(file=tmp_path / "tokenizer.json")
    by_file = build(plan_of(tmp_path, texts, choice, "by_file"), workers=1).store
    by_name = build(plan_of(tmp_path, texts, BYTES, "by_name"), workers=1).store
    assert (by_file.path / "tokenizer.json").read_bytes() == byte_tokenizer()
    assert by_file.index.digest == by_name.index.digest


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TokenizerChoice(), "no tokenizers are chosen"),
        (TokenizerChoice(as_bytes=True, train_bpe=300), "2 tokenizers are chosen"),
        (TokenizerChoice(train_bpe=100), "too small"),
        (TokenizerChoice(file=Path("missing.json")), "cannot read the tokenizer"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_before_anything_is_written(tmp_path, choice, message):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        plan_of(tmp_path, tmp_path / "a.txt", choice)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_training_on_more_text_than_needed_takes_evenly_spread_parts(tmp_path, small_shards, monkeypatch):
    texts = write_texts(tmp_path / "in")
    monkeypatch.setattr(tokenise, "TRAINING_TEXT_CHARS", 2000)
    plan = plan_of(tmp_path, texts, BPE)
    taken = list(tokenise._training_texts(plan))
    assert 1000 < sum(map(len, taken)) < 4000
    assert build(plan, workers=1).store.index.vocab <= 300


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from sirara.data import build_plan, readers
from sirara.data.build_plan import TokenizerChoice, plan_build
from sirara.data.tokenise import build

def kill(now):
    # Once: the process that was killed may be gone at the next call.
    if now.phase == "tokenising" and now.done_bytes > 3000 and not Path(sys.argv[3]).exists():
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        Path(sys.argv[3]).write_text(" ".join(pids))
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    build_plan.MIN_SHARD_BYTES, readers.PART_BYTES = 600, 400
    plan = plan_build(Path(sys.argv[1]), [Path(sys.argv[2])], TokenizerChoice(train_bpe=300))
    build(plan, workers=2, on_progress=kill)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_build_killed_in_the_middle_leaves_no_process_and_goes_on(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in")
    whole = build(plan_of(tmp_path, texts, BPE, "whole"), workers=1).store
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    pids = tmp_path / "pids"
    source = str(Path(tokenise.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(texts), str(pids)],
        env={**os.environ, "PYTHONPATH": source},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in pids.read_text().split()]
    assert workers
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "worker processes outlive the build"
    report = build(plan_of(tmp_path, texts, BPE), workers=2)
    assert report.kept_shards > 0
    assert contents(report.store.path) == contents(whole.path)


def test_a_worker_that_is_killed_ends_the_build_with_a_message(tmp_path, small_shards):
    texts = write_texts(tmp_path / "in", n=60)
    script = tmp_path / "worker.py"
    script.write_text(
        KILLED.replace(
            "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(int(pids[0]), signal.SIGKILL)"
        ).replace("3000", "100")
    )
    source = str(Path(tokenise.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(texts), str(tmp_path / "pids")],
        env={**os.environ, "PYTHONPATH": source},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "a tokenising process was killed" in done.stderr
    assert build(plan_of(tmp_path, texts, BPE), workers=1).fresh


def test_tokenising_does_not_import_torch():
    code = "import sys, sirara.data.tokenise, sirara.cli.data; sys.exit('torch' in sys.modules)"
    source = str(Path(tokenise.__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, check=True, timeout=60
    )
