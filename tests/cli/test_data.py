"""`sirara data` as a user meets it: text in, exit codes and messages out."""

import json

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from sirara.data.store import TokenStore


def sirara(*args):
    return CliRunner().invoke(cli, ["data", *map(str, args)])


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The state of the union is strong.\n" * 20)
    (folder / "b.md").write_text("# Title\n\nAnother document of the union.\n" * 20)
    (folder / "c.csv").write_text("1,2\n")
    return folder


def test_build_then_show_then_check(tmp_path, texts):
    out = tmp_path / "store"
    built = sirara("build", out, "--input", texts, "--train-bpe", 300)
    assert built.exit_code == 0, built.output
    assert "402 tokens in 2 documents, vocabulary 295" in built.stdout
    assert "passed over 1 files" in built.stderr
    assert "pairs for 295 of the 300 tokens" in built.stderr
    shown = sirara("show", out, "--document", 1, "--tokens", 30)
    assert shown.exit_code == 0
    assert "# Title" in shown.stdout
    checked = sirara("check", out)
    assert checked.exit_code == 0
    assert "sound" in checked.stdout


def test_json_ends_with_one_object_on_stdout(tmp_path, texts):
    out = tmp_path / "store"
    built = sirara("build", out, "--input", texts, "--bytes", "--json")
    facts = json.loads(built.stdout)
    assert (facts["documents"], facts["vocabulary"], facts["fresh"]) == (2, 257, True)
    shown = json.loads(sirara("show", out, "--json", "--tokens", 9).stdout)
    assert shown["tokens"] == facts["tokens"] == TokenStore.open(out).tokens
    assert shown["sample"]["text"] == "The state"
    assert json.loads(sirara("check", out, "--json").stdout)["sound"]


def test_dry_run_writes_nothing(tmp_path, texts):
    said = sirara("build", tmp_path / "store", "--input", texts, "--bytes", "--dry-run")
    assert said.exit_code == 0
    assert "2 files" in said.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]
    facts = json.loads(
        sirara("build", tmp_path / "s", "--input", texts, "--bytes", "--dry-run", "--json").stdout
    )
    assert (facts["files"], facts["passed_over"], facts["dry_run"]) == (2, 1, True)


def test_dry_run_refuses_what_the_build_would_refuse(tmp_path, texts):
    sirara("build", tmp_path / "store", "--input", texts, "--bytes")
    args = ("build", tmp_path / "store", "--dry-run", "--input", texts)
    assert "is there" in sirara(*args, "--bytes").stdout
    assert sirara(*args, "--train-bpe", 300).exit_code == 2


def test_check_of_a_damaged_store_names_the_piece_and_ends_with_65(tmp_path, texts):
    out = tmp_path / "store"
    sirara("build", out, "--input", texts, "--bytes")
    file = out / "tokens-00000.bin"
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    file.write_bytes(raw)
    checked = sirara("check", out)
    assert checked.exit_code == 65
    assert f"piece 0 of {file} is not what was written" in checked.stderr
    facts = json.loads(sirara("check", out, "--json").stdout)
    assert not facts["sound"]
    assert facts["faults"][0]["code"] == "SR350"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", "{out}", "--bytes"], "Missing option '--input'"),
        (["build", "{out}", "--input", "{texts}"], "no tokenizers are chosen"),
        (["build", "{out}", "--input", "{texts}", "--bytes", "--train-bpe", "300"], "2 tokenizers"),
        (["build", "{out}", "--input", "{texts}/missing.txt", "--bytes"], "does not exist"),
        (["build", "{out}", "--input", "{texts}/c.csv", "--bytes"], "ending that is not read"),
        (["build", "{out}", "--input", "{texts}", "--tokenizer", "none.json"], "cannot read the tokenizer"),
        (["build", "{texts}", "--input", "{texts}", "--bytes"], "exists already"),
        (["show", "{texts}"], "no token store"),
        (["check", "{texts}/missing"], "no token store"),
    ],
)
def test_what_cannot_work_is_said_in_one_message_with_exit_2(tmp_path, texts, args, message):
    said = sirara(*(arg.format(out=tmp_path / "store", texts=texts) for arg in args))
    assert said.exit_code == 2
    assert message in said.stderr
    assert "Traceback" not in said.output


def test_a_document_beyond_the_last_is_named(tmp_path, texts):
    sirara("build", tmp_path / "store", "--input", texts, "--bytes")
    said = sirara("show", tmp_path / "store", "--document", 2)
    assert said.exit_code == 2
    assert "beyond the last document, 1" in said.stderr


def test_skipped_lines_are_shown_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{bad\n')
    said = sirara("build", tmp_path / "store", "--input", tmp_path / "a.jsonl", "--bytes")
    assert said.exit_code == 0
    assert f"skipped  {tmp_path / 'a.jsonl'}:2: no JSON" in said.stderr
    assert json.loads(sirara("show", tmp_path / "store", "--json").stdout)["skipped"] == 1
