"""What a user may get wrong: each is answered by an exit code and one clear message, never by a traceback.

A message is clear when it names the key, file or number at fault; each case says which words it must hold.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sirara.cli.main import cli

Env = dict[str, str] | None

CONFIG = """\
schema: 1
name: tiny
model:
  family: llama
  layers: 1
  hidden: 32
  heads: 2
  vocab: 300
  max_seq: 16
data:
  train: [{path: tokens}]
  seq_len: 16
train:
  steps: 2
  global_batch: 4
  micro_batch: 2
launch: {nproc: 1}
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with text and a token store of bytes, made once."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 20)
    done = CliRunner().invoke(
        cli, ["data", "build", str(folder / "tokens"), "--input", str(folder / "text.txt"), "--bytes"]
    )
    assert done.exit_code == 0, done.output
    (folder / "run.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def work(template, tmp_path, monkeypatch) -> Path:
    """A copy of the template; the current folder."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: list[str], *, code: int, said: tuple[str, ...], env: Env = None) -> Result:
    result = CliRunner(env=env).invoke(cli, words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    # Progress may have been reported before.
    assert result.stderr.startswith("Usage:") or result.stderr.count("error[SR") == 1, result.stderr
    for words_of_message in said:
        assert words_of_message in result.stderr
    return result


def line_of(key: str) -> int:
    return next(
        n for n, line in enumerate(CONFIG.splitlines(), start=1) if line.strip().startswith(f"{key}:")
    )


YAML_CASES = {
    "unknown key": (
        CONFIG.replace("micro_batch:", "mikro_batch:"),
        ("train.mikro_batch", "nearest key: train.micro_batch", f"run.yaml:{line_of('micro_batch')}"),
    ),
    "key of another section": (
        CONFIG.replace("  steps: 2", "  steps: 2\n  lr: 1e-3"),
        ("unknown key train.lr", "train.optimizer.lr"),
    ),
    "key given twice": (
        CONFIG.replace("  steps: 2", "  steps: 2\n  steps: 3"),
        ("train.steps is given twice", "run.yaml:14 and run.yaml:15"),
    ),
    "section missing": (CONFIG.partition("train:\n")[0], ("train is missing", "train=...")),
    "key missing": (CONFIG.replace("  steps: 2\n", ""), ("train.steps is missing",)),
    "text for a number": (
        CONFIG.replace("steps: 2", "steps: many"),
        ("train.steps must be a whole number, found 'many'", "run.yaml:14"),
    ),
    "fraction for a count": (
        CONFIG.replace("steps: 2", "steps: 2.5"),
        ("train.steps must be a whole number, found 2.5",),
    ),
    "negative size": (
        CONFIG.replace("hidden: 32", "hidden: -32"),
        ("model.hidden must be at least 1 or null, found -32",),
    ),
    "word that is no choice": (
        CONFIG.replace("steps: 2", "steps: 2\n  precision: fp23"),
        ("must be fp64, fp32, bf16, fp16 or fp8", "train.precision=fp32"),
    ),
    "tab": (CONFIG.replace("  steps: 2", "\tsteps: 2"), ("is not YAML", "run.yaml:14:1")),
    "open bracket": (CONFIG.replace("tokens}]", "tokens}"), ("is not YAML", "run.yaml:1")),
    "list": ("- a\n- b\n", ("holds a list", "mapping of keys")),
    "empty": ("", ("is empty",)),
    "two documents": (CONFIG + "---\n" + CONFIG, ("single document", "run.yaml:18")),
    "code in YAML": (CONFIG.replace("steps: 2", "steps: !!python/name:os.system"), ("tag", "run.yaml:14")),
    "newer format": (CONFIG.replace("schema: 1", "schema: 7"), ("schema must be 1, found 7",)),
}


@pytest.mark.parametrize("case", YAML_CASES)
def test_file_that_is_wrong(work, case):
    text, said = YAML_CASES[case]
    (work / "run.yaml").write_text(text)
    refused(["config", "show", "run.yaml"], code=2, said=said)
    refused(["run", "run.yaml"], code=2, said=said)
    assert not (work / "runs").exists()


OVERRIDE_CASES = {
    "batch that does not divide": ("train.micro_batch=3", ("train.micro_batch=3", "train.global_batch=4")),
    "heads that do not divide": ("model.heads=3", ("model.heads=3", "model.hidden=32", "command line")),
    "KV heads that do not divide": ("model.kv_heads=3", ("model.kv_heads=3 does not divide model.heads=2",)),
    "odd head": ("model.hidden=34", ("model.head_dim=17 is odd",)),
    "sequence longer than the model's": ("data.seq_len=32", ("data.seq_len=32", "model.max_seq=16")),
    "warm-up longer than the run": ("train.lr_schedule.warmup_steps=9", ("warmup_steps=9", "train.steps=2")),
    "mesh larger than the processes": ("mesh.dp=2", ("mesh.dp=2 does not fit launch.nproc=1",)),
    "block that is no power of two": ("mesh.block=6", ("mesh.block=6 is not a power of two",)),
    "context parallelism": ("mesh.cp=2", ("mesh.cp=2 does not run yet", "mesh.cp=1")),
    "mesh that does not fill the processes": ("mesh.tp=2", ("mesh.tp=2", "launch.nproc=1", "launch.nproc=2")),
    "layers that are not there": ("mesh.split=[7]", ("mesh.split=[7] adds up to 7 layers", "mesh.split=[1]")),
    "stages that the schedule has not": ("mesh.virtual_stages=2", ("mesh.schedule=1f1b", "interleaved")),
    "tokens shared by one": ("mesh.sequence_parallel=true", ("mesh.sequence_parallel=true", "mesh.tp=2")),
    "gathers without ZeRO 3": ("mesh.gather=step", ("mesh.gather=step has no meaning", "mesh.zero=3")),
    "frozen tensor that is not there": ("train.freeze=[wte]", ("wte matches no tensor",)),
    "momentum of AdamW": ("train.optimizer.momentum=0.9", ("momentum=0.9 has no meaning for adamw", "muon")),
    "fp8": ("train.precision=fp8", ("train.precision=fp8 does not run yet", "bf16")),
    "unit": ("launch.stop_grace=10parsec", ("launch.stop_grace", "'parsec'")),
    "rate that is not a number": ("train.optimizer.lr=.nan", ("train.optimizer.lr", "finite")),
    "unknown family": ("model.family=lama", ("model.family='lama'", "llama")),
    "unknown preset": ("model={preset: llama-9b}", ("model.preset=llama-9b", "llama3-8b")),
    "no Hugging Face folder": ("model={from: nowhere}", ("nowhere", "config.json")),
    "no sources": ("data.train=[]", ("data.train",)),
    "weight 0": ("data.train.0.weight=0", ("data.train.0.weight must be above 0",)),
    "no such item": ("data.train.3.path=x", ("data.train.3.path", "3 is no index of a list of 1")),
    "name with a slash": ("name=a/b", ("name", "'a/b'")),
    "no value": ("train.steps", ("train.steps is not an override", "key=value")),
    "mistyped option": ("--jsonn", ("--jsonn is not an override",)),
}


@pytest.mark.parametrize("case", OVERRIDE_CASES)
def test_override_that_is_wrong(work, case):
    override, said = OVERRIDE_CASES[case]
    refused(["run", "run.yaml", override], code=2, said=said)
    assert not (work / "runs").exists()


MESH_CASES = {
    "heads that tp does not divide": ("mesh.tp=3", ("mesh.tp=3 does not divide", "mesh.tp=2")),
    "more stages than units": ("mesh.pp=9", ("mesh.pp=9 is more", "mesh.pp=3")),
}


@pytest.mark.parametrize("case", MESH_CASES)
def test_mesh_that_the_model_does_not_fit(work, case):
    override, said = MESH_CASES[case]
    refused(["run", "run.yaml", "launch.nproc=auto", override], code=2, said=said)
    assert not (work / "runs").exists()


def test_missing_file(work):
    refused(["run", "rum.yaml"], code=2, said=("there is no file rum.yaml", "sirara init"))


def test_missing_hugging_face_folder(work):
    refused(["import", "nowhere", "out"], code=2, said=("nowhere is no Hugging Face folder", "config.json"))
    # With every size given the folder is needed for the weights alone.
    refused(["run", "run.yaml", "model.from=nowhere"], code=2, said=("nowhere is no Hugging Face folder",))
    assert not (work / "runs").exists()


def test_file_that_is_no_text(work):
    (work / "run.yaml").write_bytes(b"name: \xff\xfe")
    refused(["run", "run.yaml"], code=2, said=("run.yaml is not UTF-8", "0xff", "offset 6"))


def test_variable_that_is_wrong(work):
    env = {"SIRARA_TRAIN__STEPS": "0"}
    refused(["run", "run.yaml"], code=2, env=env, said=("at least 1", "SIRARA_TRAIN__STEPS"))
    refused(["run", "run.yaml"], code=2, env={"SIRARA_TRIAN__STEPS": "1"}, said=("SIRARA_TRIAN__STEPS",))


def no_store(work: Path) -> None:
    shutil.rmtree(work / "tokens")


def text_for_a_store(work: Path) -> None:
    shutil.rmtree(work / "tokens")
    shutil.copy(work / "text.txt", work / "tokens")


def folder_for_a_store(work: Path) -> None:
    shutil.rmtree(work / "tokens")
    (work / "tokens").mkdir()


def torn_index(work: Path) -> None:
    index = work / "tokens" / "index.json"
    index.write_text(index.read_text()[:-40])


def short_tokens(work: Path) -> None:
    file = next((work / "tokens").glob("tokens-*.bin"))
    file.write_bytes(file.read_bytes()[:-2])


def missing_tokens(work: Path) -> None:
    next((work / "tokens").glob("tokens-*.bin")).unlink()


STORE_CASES = {
    no_store: (2, ("tokens",)),
    text_for_a_store: (2, ("tokens",)),
    folder_for_a_store: (2, ("tokens", "data build")),
    torn_index: (65, ("index.json",)),
    short_tokens: (65, ("tokens-00000.bin",)),
    missing_tokens: (65, ("tokens-00000.bin",)),
}


@pytest.mark.parametrize("spoil", STORE_CASES, ids=lambda spoil: spoil.__name__)
def test_token_store_that_is_wrong(work, spoil: Callable[[Path], None]):
    code, said = STORE_CASES[spoil]
    spoil(work)
    refused(["data", "show", "tokens"], code=code, said=said)
    refused(["run", "run.yaml"], code=code, said=said)
    assert not (work / "runs").exists()


def test_vocabulary_larger_than_the_model_s(work):
    refused(["run", "run.yaml", "model.vocab=100"], code=2, said=("257", "100", "model.vocab=tokenizer"))


def test_tokenizer_that_is_missing_or_none(work):
    refused(["run", "run.yaml", "data.tokenizer=t.json"], code=2, said=("t.json",))
    (work / "t.json").write_text("{}")
    refused(["run", "run.yaml", "data.tokenizer=t.json"], code=2, said=("t.json",))


def test_run_dir_that_is_a_file(work):
    refused(["run", "run.yaml", "run_dir=text.txt"], code=74, said=("text.txt", "is a file"))


BUILD_CASES = {
    "missing input": (["--input", "none.txt", "--bytes"], 2, ("none.txt",)),
    "no readable ending": (["--input", "image.png", "--bytes"], 2, ("image.png",)),
    "empty folder": (["--input", "empty", "--bytes"], 2, ("empty",)),
    "empty file": (["--input", "empty.txt", "--bytes"], 2, ("hold no text",)),
    "torn gzip": (["--input", "torn.jsonl.gz", "--bytes"], 2, ("torn.jsonl.gz",)),
    "lines without the field": (["--input", "lines.jsonl", "--bytes", "--field", "body"], 2, ("body",)),
    "two tokenizers": (["--input", "text.txt", "--bytes", "--train-bpe", "300"], 2, ("--train-bpe",)),
    "tokenizer missing": (["--input", "text.txt", "--tokenizer", "none.json"], 2, ("none.json",)),
    "BPE smaller than bytes": (["--input", "text.txt", "--train-bpe", "7"], 2, ("7", "256")),
    "output exists": (["--input", "text.txt", "--bytes"], 2, ("occupied",)),
    "unknown option": (["--input", "text.txt", "--bites"], 2, ("--bites", "--bytes")),
}


@pytest.mark.parametrize("case", BUILD_CASES)
def test_data_build_that_is_wrong(work, case):
    words, code, said = BUILD_CASES[case]
    (work / "empty").mkdir()
    (work / "empty.txt").write_text("")
    (work / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (work / "lines.jsonl").write_text('{"text": "a"}\n')
    (work / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "hello"}\n' * 100)[:-20])
    (work / "occupied").mkdir()
    (work / "occupied" / "mine").write_text("")
    refused(["data", "build", "occupied" if case == "output exists" else "out", *words], code=code, said=said)
    assert not (work / "out").exists()
    assert (work / "occupied" / "mine").exists()


@pytest.mark.parametrize(
    "words",
    [
        *(["resume", "nope"], ["resume", "latest"], ["stop", "nope"], ["save", "nope"], ["status", "nope"]),
        *(["metrics", "nope"], ["logs", "nope"], ["ckpt", "ls", "nope"], ["ckpt", "verify", "nope"]),
        *(["export", "nope", "out"], ["sample", "nope"]),
    ],
    ids=" ".join,
)
def test_run_that_does_not_exist(work, words):
    refused(words, code=2, said=(words[1] if words[0] != "ckpt" else words[2],))


@pytest.fixture(scope="module")
def trained(template, tmp_path_factory) -> Path:
    """The template after a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    env = {**os.environ, "SIRARA_DEVICE": "cpu"}
    command = [sys.executable, "-m", "sirara", "run", "run.yaml", "launch.threads=1"]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """The folder of a copy of that run; the current folder is the one around."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return next((tmp_path / "runs").iterdir())


RUN_CASES = {
    "other model": (["resume", "tiny", "model.hidden=64"], 2, ("model.hidden=64", "model.hidden=32")),
    "other seed": (["resume", "tiny", "seed=7"], 2, ("seed=7", "seed=1234")),
    "other length": (["resume", "tiny", "data.seq_len=8"], 2, ("data.seq_len=8", "data.seq_len=16")),
    "other optimizer": (["resume", "tiny", "train.optimizer.name=lion"], 2, ("lion", "adamw")),
    "other frozen tensors": (["resume", "tiny", "train.freeze=[*norm.weight]"], 2, ("train.freeze=",)),
    "unknown key": (["resume", "tiny", "train.stepz=3"], 2, ("train.stepz", "train.steps")),
    "run that does not run": (["stop", "tiny"], 2, ("is not running", "sirara resume")),
    "step that is not there": (["ckpt", "show", "tiny", "--step", "99"], 2, ("99",)),
    "export of such a step": (["export", "tiny", "out", "--step", "99"], 2, ("99",)),
    "export over a folder": (["export", "tiny", "tokens"], 2, ("tokens exists",)),
    "log that is not there": (["logs", "tiny", "--attempt", "9"], 2, ("attempt 9",)),
    "picture that cannot be": (["metrics", "tiny", "--plot", "no/where.png"], 74, ("no/where.png",)),
}


@pytest.mark.parametrize("case", RUN_CASES)
def test_run_that_is_used_wrongly_is_left_as_it_was(run, case):
    words, code, said = RUN_CASES[case]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(words, code=code, said=said)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("spoil", [flip_a_bit, cut, Path.unlink], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("pattern", ["model*.safetensors", "optim-*.safetensors"])
def test_checkpoint_that_is_spoilt_is_named_by_file(run, spoil: Callable[[Path], None], pattern):
    (step,) = (run / "checkpoints").glob("step-*")
    file = next(step.glob(pattern))
    spoil(file)
    result = CliRunner().invoke(cli, ["ckpt", "verify", run.name])
    assert result.exit_code == 65
    assert file.name in result.output
    assert "Traceback" not in result.output


def test_resume_that_cannot_load_does_not_change_what_the_next_one_does(run):
    (step,) = (run / "checkpoints").glob("step-*")
    cut(next(step.glob("optim-*.safetensors")))
    before = (run / "config.yaml").read_text()
    command = [sys.executable, "-m", "sirara", "resume", run.name, "train.steps=9"]
    done = subprocess.run(command, env={**os.environ, "SIRARA_DEVICE": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 65
    assert "step 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "config.yaml").read_text() == before


def test_manifest_that_is_cut_is_named(run):
    (step,) = (run / "checkpoints").glob("step-*")
    cut(step / "manifest.json")
    refused(["ckpt", "show", run.name], code=65, said=("manifest.json",))


def test_ambiguous_run_names_its_candidates(work):
    for name in ("tiny-00000001", "tiny-00000002"):
        (work / "runs" / name).mkdir(parents=True)
        (work / "runs" / name / "run.json").write_text(json.dumps({"format": 1, "run": name, "name": "tiny"}))
    refused(["status", "tiny"], code=2, said=("tiny-00000001", "tiny-00000002"))
