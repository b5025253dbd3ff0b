"""Files, environment and command line to one checked configuration that knows where its values came from."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.config.load import NOT_CONFIG, load, model_shape, split_overrides
from sirara.config.schema import RunConfig, json_schema
from sirara.errors import ConfigError, LayoutError
from sirara.pure.families import PRESETS
from sirara.pure.hf_config import config_from_shape

STARTER = """\
schema: 1
name: tiny
model:
  family: llama
  layers: 2
  hidden: 64
  heads: 4
  vocab: 300
  max_seq: 32
data:
  train: [{path: tokens}]
  seq_len: 32
train:
  steps: 100
  global_batch: 8
  micro_batch: 2
  optimizer: {name: adamw, lr: 3e-4}
  lr_schedule:
    name: cosine
    warmup_steps: 10
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(STARTER)
    return file


def refusal(path, *overrides, env=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, env)
    return str(caught.value)


def test_command_line_wins_over_environment_over_file_over_default(path):
    env = {"SIRARA_TRAIN__STEPS": "200", "SIRARA_SEED": "5", "HOME": "/root"}
    loaded = load(path, ["train.steps=300"], env)
    config, origins = loaded.config, loaded.origins
    assert (config.train.steps, origins["train.steps"]) == (300, "command line")
    assert (config.seed, origins["seed"]) == (5, "environment SIRARA_SEED")
    assert (config.name, origins["name"]) == ("tiny", f"{path}:2")
    assert (config.train.optimizer.lr, origins["train.optimizer.lr"]) == (3e-4, f"{path}:17")
    assert (config.mesh.zero, origins["mesh.zero"]) == (1, "default")
    assert origins["train.optimizer.eps"] == "default"


@pytest.mark.parametrize(
    "words", [["train.steps=77"], ["--train.steps=77"], ["--set", "train.steps=77"], ["--set=train.steps=77"]]
)
def test_all_spellings_of_an_override_are_the_same(path, words):
    assert load(path, words).config.train.steps == 77


@pytest.mark.parametrize("words", [["train.steps"], ["=3"], ["a..b=3"], ["--set"], ["--jsonn"], [""]])
def test_word_that_is_no_override_is_refused(words):
    with pytest.raises(ConfigError, match="is not an override"):
        split_overrides(words)


def test_override_value_is_yaml_and_reaches_into_lists(path):
    config = load(path, ["data.train=[{path: a, weight: 2}, {path: b}]", "data.train.1.weight=3e0"]).config
    assert [(Path(s.path).name, s.weight) for s in config.data.train] == [("a", 2.0), ("b", 3.0)]
    assert "1 is no index of a list of 1" in refusal(path, "data.train.1.weight=1")


def test_value_may_contain_an_equals_sign(path):
    assert load(path, ["run_dir=/tmp/a=b"]).config.run_dir == "/tmp/a=b"


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["train.optimizer.name=lion", "train.lr_schedule={name: wsd}", "train.precision=bf16"],
        ["train.clip_grad_norm=null", "mesh=auto", "checkpoint.keep_every=50", "launch.stop_grace=90s"],
        ["data.eval=[{path: held/out}]", "data.tokenizer=t.json", "mesh.block=1", "mesh.dp=3", "name=3e-4x"],
        ["model={preset: llama3-8b, vocab: tokenizer}", "train.eval_every=3"],
    ],
)
def test_resolved_text_loads_as_the_same_configuration_from_any_folder(path, tmp_path, monkeypatch, extra):
    loaded = load(path, extra)
    again = tmp_path / "again.yaml"
    again.write_text(loaded.text)
    monkeypatch.chdir("/")
    assert load(again).config == loaded.config
    assert load(again).text == loaded.text


def test_paths_are_absolute_and_home_is_expanded(path):
    config = load(path, ["run_dir=~/runs", "data.tokenizer=/t.json"]).config
    assert config.run_dir == str(Path.home() / "runs")
    assert config.data.train[0].path == os.path.abspath("tokens")
    assert config.data.tokenizer == "/t.json"


def test_quoted_float_is_a_float_and_quoted_integer_is_not_an_integer(path):
    assert load(path, ["train.optimizer.lr='3e-4'"]).config.train.optimizer.lr == 3e-4
    assert "train.steps must be a whole number, found '10'" in refusal(path, "train.steps='10'")


def test_unknown_key_names_file_line_nearest_key_and_section(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(STARTER.replace("  micro_batch: 2", "  micro_batch: 2\n  micro_bach: 2"))
    said = refusal(file)
    assert "unknown key train.micro_bach" in said
    assert f"{file}:17" in said
    assert "nearest key: train.micro_batch" in said
    assert "keys of train: steps, global_batch" in said


def test_unknown_key_is_found_in_the_section_where_it_belongs(path):
    assert "nearest key: train.optimizer.lr" in refusal(path, "train.lr=1")
    assert "nearest key: launch.nproc" in refusal(path, "nproc=2")


@pytest.mark.parametrize("name", ["SIRARA_TRAIN__STEPZ", "SIRARA_FOO", "SIRARA_TRAIN_STEPS"])
def test_unknown_variable_of_ours_is_refused_by_name(path, name):
    assert f"environment {name}" in refusal(path, env={name: "1"})


def test_variables_of_the_code_are_no_configuration(path):
    used = set()
    for file in Path(__file__).parents[3].joinpath("src").rglob("*.py"):
        for word in file.read_text().replace("'", '"').split('"'):
            if word.startswith("SIRARA_") and word.isupper() and word != "SIRARA_":
                used.add(word)
    settable = {f"SIRARA_{key.upper()}" for key in ("run_dir", "name", "seed", "numerics", "schema")}
    assert used - settable <= NOT_CONFIG
    load(path, env=dict.fromkeys(NOT_CONFIG, "anything"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=0", "train.steps must be at least 1, found 0"),
        ("train.steps=1e5", "train.steps=100000"),
        ("train.steps=null", "train.steps must be a whole number, found nothing (null)"),
        ("train=null", "train must be a section with keys"),
        ("numerics=exakt", "numerics must be exact or fast, found 'exakt'"),
        ("train.compile=yes", "train.compile=true"),
        ("mesh.dp=many", "mesh.dp must be a whole number or auto"),
        ("mesh.dp=-1", "mesh.dp must be at least 1"),
        ("mesh.block=3", "mesh.block=3 is not a power of two"),
        ("mesh.zero=4", "mesh.zero must be at most 3"),
        ("data.train=[]", "data.train"),
        ("data.train.0.weight=0", "data.train.0.weight must be above 0"),
        ("data.train.0.weight=.inf", "data.train.0.weight must be a finite number"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr must be a finite number"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas.1 is missing"),
        ("train.optimizer.betas=[0.9, 1.0]", "train.optimizer.betas.1 must be below 1"),
        ("launch.stop_grace=10parsecs", "unknown unit 'parsecs'"),
        ("launch.stop_grace=-1", "launch.stop_grace must be above 0"),
        ("name=../up", "name must be text like"),
        ("name=latest", "`latest` means the newest run"),
        ("seed=-1", "seed must be at least 0"),
        ("schema=2", "schema must be 1, found 2"),
        ("model.vocab=words", "model.vocab must be"),
        ("seed.x=1", "seed must be a whole number"),
    ],
)
def test_wrong_value_is_refused_by_key_and_limit(path, override, said):
    assert said in refusal(path, override)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.micro_batch=3"], "train.micro_batch=3 does not divide train.global_batch=8"),
        (["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=4"),
        (["model.heads=5"], "model.heads=5 does not divide model.hidden=64"),
        (["data.seq_len=64"], "data.seq_len=64 is longer than model.max_seq=32"),
        (["train.lr_schedule.warmup_steps=101"], "warmup_steps=101 does not fit into train.steps=100"),
        (
            ["train.lr_schedule={name: wsd, decay_steps: 95, warmup_steps: 6}"],
            "warmup_steps=6 + decay_steps=95",
        ),
        (["train.lr_schedule.decay_steps=5"], "decay_steps=5 has no meaning for cosine"),
        (["train.lr_schedule={name: constant, min_lr_ratio: 0.1}"], "has no meaning for constant"),
        (["train.optimizer={name: lion, eps: 1e-6}"], "train.optimizer.eps=1e-06 has no meaning for lion"),
        (["model.family=lama"], "model.family='lama' is not known"),
        (["model.family=gpt2", "model.kv_heads=2"], "model.kv_heads=2 does not exist in the family gpt2"),
        (["model.preset=llama3-8b"], "model.family=llama cannot be given beside model.preset"),
        (["model={preset: llama3-9b}"], "model.preset=llama3-9b is not known"),
        (["model={preset: gpt2, from: x}"], "exclude each other"),
        (["model={from: nowhere}"], "there is no config.json"),
        (["model={family: llama, layers: 1, hidden: 8, max_seq: 32}"], "model.heads is missing"),
        (["data.eval=[{path: a/x}, {path: b/x}]"], "data.eval.1.name=x is the name of data.eval.0 too"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_their_keys(path, overrides, said):
    assert said in refusal(path, *overrides)


def test_origin_of_the_key_at_fault_is_said(path):
    assert f"train.micro_batch ({path}:16)" in refusal(path, "train.global_batch=7")
    assert "model.heads (command line)" in refusal(path, "model.heads=5")


@pytest.mark.parametrize(
    "override",
    [
        *("mesh.cp=2", "mesh.ep=2", "train.precision=fp16", "train.precision=fp8"),
        *("offload.optimizer=host", "offload.params=disk"),
        *("offload.activations=host", "offload.path=/x", "offload.host_budget=1GiB"),
        *("launch.nodes=2", "log.sinks=[wandb]"),
    ],
)
def test_what_does_not_run_yet_is_refused_and_says_what_does(path, override):
    said = refusal(path, override)
    assert f"{override.partition('=')[0]}=" in said
    assert "does not run yet" in said
    assert re.search(rf"try +{re.escape(override.partition('=')[0])}=", said)


def test_mesh_that_is_not_the_processes_asked_for_is_a_layout_error(path):
    load(path, ["mesh.dp=3", "launch.nproc=3"])
    with pytest.raises(LayoutError, match=r"mesh\.dp=3 does not fit launch\.nproc=2"):
        load(path, ["mesh.dp=3", "launch.nproc=2"])


def test_several_errors_are_said_at_once(path):
    said = refusal(path, "train.steps=0", "numerics=x", "train.foo=1")
    assert said.startswith("error[SR105]: unknown key train.foo")
    assert "also: train.steps must be at least 1" in said or "also: numerics" in said


def test_auto_mesh_can_be_overridden(path):
    assert load(path, ["mesh=auto", "mesh.zero=0"]).config.mesh.zero == 0
    assert load(path, ["mesh=auto"]).config.mesh.dp == "auto"


def test_wsd_decays_over_its_last_fifth_unless_told(path):
    assert load(path, ["train.lr_schedule.name=wsd"]).config.train.lr_schedule.decay_steps == 20
    config = load(path, ["train.lr_schedule={name: wsd, decay_steps: 7}"]).config
    assert config.train.lr_schedule.decay_steps == 7


def test_lion_has_its_own_betas(path):
    assert load(path, ["train.optimizer.name=lion"]).config.train.optimizer.betas == (0.9, 0.99)
    assert load(path).config.train.optimizer.betas == (0.9, 0.95)


def test_eval_set_is_named_after_its_path(path):
    config = load(path, ["data.eval=[{path: a/held out/}, {path: b, name: other}]"]).config
    assert [source.name for source in config.data.eval] == ["held-out", "other"]


def test_vocabulary_may_be_smaller_than_the_model_s_but_not_larger(path):
    config = load(path).config
    assert model_shape(config, 300).vocab == 300
    assert model_shape(config, 100).vocab == 300
    with pytest.raises(ConfigError, match=r"the tokenizer has 301 tokens, the model only model\.vocab=300"):
        model_shape(config, 301)


def test_vocabulary_of_the_tokenizer(path):
    config = load(path, ["model.vocab=tokenizer"]).config
    assert model_shape(config, 4096).vocab == 4096
    with pytest.raises(ConfigError, match="no tokenizer"):
        model_shape(config, None)


def test_sizes_beside_a_preset_replace_its_own(path):
    config = load(path, ["model={preset: llama3-8b, layers: 2, hidden: 256, heads: 8, max_seq: 64}"]).config
    shape = model_shape(config, None)
    assert (shape.layers, shape.hidden, shape.head_dim, shape.kv_heads, shape.vocab) == (
        2,
        256,
        32,
        8,
        128_256,
    )
    assert shape.rope_theta == 500_000.0


def test_sizes_from_a_hugging_face_folder(path, tmp_path):
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 500,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = load(path, [f"model={{from: {tmp_path}}}"]).config
    shape = model_shape(config, 500)
    assert (shape.layers, shape.kv_heads, shape.ffn, shape.vocab, shape.max_seq) == (3, 2, 128, 500, 64)
    said = refusal(path, f"model={{from: {tmp_path}, layers: 4}}")
    assert "model.layers=4 is not what" in said and "says: 3" in said
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "model_type='t5' is not supported" in refusal(path, f"model={{from: {tmp_path}}}")
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(path, f"model={{from: {tmp_path}}}")


def test_run_from_a_folder_goes_on_without_the_folder(path, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    shape = PRESETS["llama3.2-1b"]
    (folder / "config.json").write_text(json.dumps(config_from_shape(shape, dtype="bfloat16")))
    begun = load(path, [f"model={{from: {folder}, dropout: 0.1}}"])
    stored = tmp_path / "stored.yaml"
    stored.write_text(begun.text)
    shutil.rmtree(folder)
    assert load(stored).config == begun.config
    assert model_shape(load(stored).config, None) == shape


def test_json_schema_knows_every_key_and_the_spelling_of_the_file():
    schema = json_schema()
    assert list(schema["properties"])[:3] == ["schema", "name", "run_dir"]
    assert {"const": "auto"} in schema["properties"]["mesh"]["anyOf"]
    assert "async" in schema["$defs"]["CheckpointConfig"]["properties"]
    assert "from" in schema["$defs"]["ModelConfig"]["properties"]
    assert all(not section.get("additionalProperties", True) for section in schema["$defs"].values())


_anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["train", "steps", "eval", "path", "kind", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    key=st.sampled_from(["train", "model.heads", "data", "data.train.0", "mesh", "log.sinks"]),
    value=_anything,
)
@settings(max_examples=200)
def test_any_value_anywhere_gives_a_configuration_or_a_config_error(tmp_path_factory, key, value):
    file = tmp_path_factory.getbasetemp() / "starter.yaml"
    file.write_text(STARTER)
    try:
        load(file, [f"{key}={json.dumps(value)}"])
    except ConfigError as error:
        assert str(error).startswith("error[SR1")


def test_configuration_made_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="does not run yet"):
        RunConfig.model_validate(
            {
                "model": {"preset": "gpt2"},
                "data": {"train": [{"path": "x"}], "seq_len": 8},
                "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
                "mesh": {"cp": 2},
            }
        )
