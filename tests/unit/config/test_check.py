"""Layouts and kinds of training that do not fit are refused at the start, with alternatives that do fit."""

import pytest
from pydantic import ValidationError

from sirara.config.check import check_layout, frozen_names
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError, LayoutError
from sirara.pure.families import ModelShape, unit_specs

LLAMA = ModelShape(
    family="llama", layers=6, hidden=48, heads=12, kv_heads=4, head_dim=4, ffn=96, vocab=300, max_seq=32
)


def run_config(*, mesh: dict | None = None, train: dict | None = None, seq_len: int = 32) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"preset": "gpt2"},
            "data": {"train": [{"path": "x"}], "seq_len": seq_len},
            "train": {"steps": 1, "global_batch": 12, "micro_batch": 3, **(train or {})},
            "mesh": mesh or {},
        }
    )


def refused(shape: ModelShape = LLAMA, **sections) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_layout(run_config(**sections), shape)
    return caught.value


def alternatives(error: ConfigError, key: str) -> list[int]:
    return [int(t.partition("=")[2]) for t in error.try_ if t.startswith(f"{key}=")]


@pytest.mark.parametrize(
    "mesh",
    [
        *(
            {"pp": pp, "tp": tp, "zero": zero}
            for pp in (1, 4, 8)
            for tp in (1, 2, 4, 12)
            for zero in range(4)
        ),
        *({"pp": pp, "schedule": s} for pp in (1, 2, 4) for s in ("gpipe", "1f1b", "zb-h1", "zb-v")),
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 4},
        {"pp": 4, "split": [1, 2, 2, 1]},
        {"pp": 4, "split": [0, 3, 3, 0]},
        {"pp": 2, "schedule": "zb-v", "split": [1, 2, 2, 1]},
        {"zero": 3, "gather": "step"},
        {"tp": 4, "sequence_parallel": True},
    ],
)
def test_layout_that_fits_is_accepted(mesh):
    check_layout(run_config(mesh=mesh), LLAMA)


def test_chunks_follow_the_schedule_unless_told():
    def stages(**mesh) -> tuple[int, int]:
        config = run_config(mesh=mesh)
        return config.mesh.chunks, config.mesh.stages

    assert stages(pp=3) == (1, 3)
    assert stages(pp=3, schedule="interleaved") == (2, 6)
    assert stages(pp=3, schedule="zb-v") == (2, 6)
    assert stages(pp=3, schedule="interleaved", virtual_stages=4) == (4, 12)


@pytest.mark.parametrize("tp", [d for d in range(1, 25) if d not in (1, 2, 4, 12)])
def test_tp_that_the_model_cannot_be_split_by_names_degrees_that_can(tp):
    error = refused(mesh={"tp": tp})
    assert isinstance(error, LayoutError)
    assert error.where == "mesh.tp"
    assert error.what.startswith(f"mesh.tp={tp} ")
    assert "valid degrees for this model: 1, 2, 4, 12" in error.why
    valid = alternatives(error, "mesh.tp")
    assert valid
    for degree in valid:
        check_layout(run_config(mesh={"tp": degree}), LLAMA)


def test_tp_is_told_by_heads_kv_heads_and_ffn_each():
    assert "model.heads=12" in refused(mesh={"tp": 8}).what
    kv = ModelShape(family="llama", layers=1, hidden=48, heads=12, kv_heads=4, ffn=96, vocab=9, max_seq=8)
    assert "model.kv_heads=4" in refused(kv, mesh={"tp": 3}).what
    ffn = ModelShape(family="llama", layers=1, hidden=48, heads=12, ffn=90, vocab=9, max_seq=8)
    assert "model.ffn=90" in refused(ffn, mesh={"tp": 4}).what


@pytest.mark.parametrize(
    ("mesh", "most"), [({"pp": 9}, 8), ({"pp": 5, "schedule": "zb-v"}, 4), ({"pp": 100}, 8)]
)
def test_more_stages_than_units_names_the_most_that_fit(mesh, most):
    error = refused(mesh=mesh)
    assert isinstance(error, LayoutError)
    assert "8 units: the embedding, 6 layers and the head" in error.why
    assert alternatives(error, "mesh.pp") == [most]
    check_layout(run_config(mesh=mesh | {"pp": most}), LLAMA)


@pytest.mark.parametrize(
    ("pp", "split", "numbers"),
    [
        (4, [1, 2, 2, 2], ("adds up to 7 layers", "has 6")),
        (4, [1, 1, 2, 1], ("adds up to 5 layers", "has 6")),
        (4, [3, 3], ("2 entries for 4 stages",)),
        (1, [3, 3], ("2 entries for 1 stages",)),
        (4, [3, 0, 2, 1], ("leaves a stage without a unit",)),
    ],
)
def test_split_that_does_not_add_up_shows_both_numbers_and_one_that_does(pp, split, numbers):
    error = refused(mesh={"pp": pp, "split": split})
    assert isinstance(error, LayoutError)
    assert all(number in error.what for number in numbers)
    valid = error.try_[1].removeprefix("mesh.split=[").removesuffix("]").split(", ")
    check_layout(run_config(mesh={"pp": pp, "split": [int(n) for n in valid]}), LLAMA)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [*((s, 2) for s in ("gpipe", "1f1b", "zb-h1")), ("interleaved", 1), ("zb-v", 1), ("zb-v", 3)],
)
def test_virtual_stages_that_a_schedule_does_not_run_name_schedules_that_do(schedule, chunks):
    error = refused(mesh={"pp": 2, "schedule": schedule, "virtual_stages": chunks})
    assert isinstance(error, LayoutError)
    assert f"mesh.virtual_stages={chunks} does not fit mesh.schedule={schedule}" in error.what
    run_config(mesh={"pp": 2, "schedule": schedule})
    others = [t.partition("=")[2] for t in error.try_ if t.startswith("mesh.schedule=")]
    assert others
    for other in others:
        run_config(mesh={"pp": 2, "schedule": other, "virtual_stages": chunks})


def test_compiled_blocks_decide_by_themselves_what_they_keep():
    error = refused(train={"compile": True, "recompute": "selective"})
    assert error.where == "train.recompute"
    run_config(train={"compile": True, "recompute": "full"})


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_compiled_blocks_have_no_split_backward(schedule):
    error = refused(mesh={"pp": 2, "schedule": schedule}, train={"compile": True})
    assert isinstance(error, LayoutError)
    (other,) = [t.partition("=")[2] for t in error.try_ if t.startswith("mesh.schedule=")]
    run_config(mesh={"pp": 2, "schedule": other}, train={"compile": True})


def test_tokens_that_cannot_be_shared_evenly_name_sizes_that_can():
    error = refused(mesh={"tp": 4, "sequence_parallel": True}, seq_len=30)
    assert "3 * data.seq_len=30 = 90 tokens" in error.why
    (micro,) = alternatives(error, "train.micro_batch")
    (seq_len,) = alternatives(error, "data.seq_len")
    mesh = {"tp": 4, "sequence_parallel": True}
    run_config(mesh=mesh, seq_len=30, train={"micro_batch": micro})
    run_config(mesh=mesh, seq_len=seq_len)


def test_a_degree_that_the_model_cannot_have_is_said_before_tokens_that_it_does_not_divide():
    error = refused(mesh={"tp": 7, "sequence_parallel": True}, seq_len=30)
    assert error.where.startswith("mesh.tp") and "model.heads" in error.what


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gathering_once_per_step_needs_weights_that_are_sharded(zero):
    assert "mesh.zero=3" in refused(mesh={"zero": zero, "gather": "step"}).try_


def test_sequence_parallelism_needs_tensor_parallelism():
    assert "mesh.tp=2" in refused(mesh={"sequence_parallel": True}).try_


def test_more_blocks_to_recompute_than_a_stage_has():
    assert "train.recompute=6" in refused(train={"recompute": 7}).try_
    assert "train.recompute=4" in refused(train={"recompute": 5}, mesh={"pp": 2, "split": [2, 4]}).try_
    four = {"pp": 2, "split": [2, 4]}
    assert "train.recompute=norm" in refused(train={"recompute": "norm:9"}, mesh=four).try_
    assert "train.recompute=mlp:3 norm" in refused(train={"recompute": "mlp:3 norm:2"}, mesh=four).try_
    for recompute in (6, "none", "selective", "full"):
        check_layout(run_config(train={"recompute": recompute}), LLAMA)


def test_recipes_of_recompute():
    four = {"pp": 2, "split": [2, 4]}
    for recompute in ("norm+act", "full:1 mlp:3", [2, "mlp"], ["none", "full:3 attention"], [0, 4]):
        check_layout(run_config(train={"recompute": recompute}, mesh=four), LLAMA)
    assert "stage 0 has" in refused(train={"recompute": ["full:3", "none"]}, mesh=four).what
    assert "train.recompute=norm+act" in refused(train={"recompute": ["norm", "act"]}).try_
    assert "train.recompute=[full, full]" in refused(train={"recompute": ["full"]}, mesh=four).try_
    assert refused(train={"compile": True, "recompute": [2, "mlp"]}, mesh=four).where == "train.recompute"
    run_config(train={"compile": True, "recompute": ["full:1", 2]}, mesh=four)


@pytest.mark.parametrize(
    "recipe", ["", "all", "norm act", "norm:x", "full+norm", "norm+", -1, ["mlp", "nrom"]]
)
def test_words_that_are_no_recipe_are_refused(recipe):
    with pytest.raises(ValidationError, match="recompute"):
        run_config(train={"recompute": recipe})


def test_globs_name_tensors_to_freeze():
    units = unit_specs(LLAMA)
    assert frozen_names(["model.embed_tokens.*"], units) == {"model.embed_tokens.weight"}
    norms = frozen_names(["*norm.weight"], units)
    assert len(norms) == 2 * LLAMA.layers + 1
    assert frozen_names(["*norm.weight", "model.norm.weight"], units) == norms
    check_layout(run_config(train={"freeze": ["*.layers.[0-2].*"]}), LLAMA)


def test_glob_that_matches_nothing_is_refused_by_near_names():
    error = refused(train={"freeze": ["*norm.weight", "embed_tokens.weight"]})
    assert "embed_tokens.weight matches no tensor" in error.what
    assert "model.embed_tokens.weight" in error.try_


def test_tied_tensor_is_frozen_by_its_owner_s_name():
    tied = ModelShape(family="llama", layers=1, hidden=8, heads=2, vocab=9, max_seq=8, tie_embeddings=True)
    error = refused(tied, train={"freeze": ["lm_head.weight"]})
    assert error.try_ == ("model.embed_tokens.weight",)
    check_layout(run_config(train={"freeze": ["model.embed_tokens.weight"]}), tied)


def test_nothing_left_to_train_is_refused():
    assert "leaves nothing to train" in refused(train={"freeze": ["*"]}).what


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize(("key", "value"), [("momentum", 0.9), ("nesterov", False), ("ns_steps", 6)])
def test_keys_of_muon_are_refused_by_other_optimizers(name, key, value):
    error = refused(train={"optimizer": {"name": name, key: value}})
    assert error.where == f"train.optimizer.{key}"
    assert "train.optimizer.name=muon" in error.try_
    run_config(train={"optimizer": {"name": "muon", key: value}})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    "mesh",
    [
        *({"zero": zero} for zero in range(4)),
        {"zero": 3, "gather": "step"},
        {"tp": 4, "sequence_parallel": True, "zero": 2},
        *({"pp": 2, "schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")),
    ],
)
def test_muon_goes_with_every_layout(mesh, precision):
    train = {"optimizer": {"name": "muon"}, "precision": precision, "freeze": ["*norm.weight"]}
    check_layout(run_config(mesh=mesh, train=train), LLAMA)


def test_eps_is_refused_by_lion_alone():
    assert refused(train={"optimizer": {"name": "lion", "eps": 1e-6}}).where == "train.optimizer.eps"
    for name in ("adamw", "muon"):
        run_config(train={"optimizer": {"name": name, "eps": 1e-6}})


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_label_smoothing_is_a_share(value):
    with pytest.raises(ValueError, match="label_smoothing"):
        run_config(train={"label_smoothing": value})
