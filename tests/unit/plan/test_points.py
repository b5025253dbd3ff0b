"""Columns are broadcast and checked; closed forms of sizes and splits are those of the tables of the executor."""

import numpy as np
import pytest

from sirara.errors import ConfigError
from sirara.plan.points import concatenate, points, sizes, stages
from sirara.pure.families import PRESETS, parameter_count


def model(shape):
    """The columns of a preset."""
    traits = shape.traits
    return {
        "layers": shape.layers, "hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab": shape.vocab, "seq": shape.max_seq,
        "gated": traits.mlp == "swiglu", "tied": shape.tie_embeddings, "learned": traits.positions == "learned",
        "layer_norm": traits.norm == "layer", "bias": "mlp" in traits.biases,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama2-70b", "llama3-8b", "llama3-70b"])
def test_closed_form_counts_the_parameters_that_the_tensor_tables_count(name):
    p = points(model(PRESETS[name]))
    assert sizes(p).total(p)[0] == parameter_count(PRESETS[name])


def test_mixtures_with_latent_attention_have_the_published_number_of_parameters():
    p = points(
        {"layers": 61, "hidden": 7168, "ffn": 18432, "heads": 128, "head_dim": 128, "vocab": 129280, "gated": 1,
         "experts": 256, "topk": 8, "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": 3, "dense_ffn": 18432,
         "q_rank": 1536, "kv_rank": 512, "rope_dim": 64}
    )  # fmt: skip
    assert sizes(p).total(p)[0] == pytest.approx(671e9, rel=2e-3)


def test_columns_and_scalars_are_broadcast():
    p = points({"layers": [2, 4, 8], "hidden": 64, "heads": 4})
    assert len(p) == 3
    assert p.head_dim.tolist() == [16, 16, 16] and p.kv_heads.tolist() == [4, 4, 4]
    assert len(p.take(p.layers > 2)) == 2
    assert concatenate([p, p.take([0])]).layers.tolist() == [2, 4, 8, 2]
    assert p.with_(tp=2).gpus.tolist() == [2, 2, 2]


def test_a_name_that_is_no_column_and_columns_of_unequal_length_are_refused():
    with pytest.raises(ConfigError, match="depth"):
        points({"depth": 3})
    with pytest.raises(ConfigError, match="length"):
        points({"layers": [1, 2], "hidden": [64, 64, 64]})


@pytest.mark.parametrize("ends", [0, 1])
def test_no_block_is_lost_or_held_twice_by_a_split(ends):
    layers, pp = (a.ravel() for a in np.meshgrid(np.arange(4, 100), np.arange(1, 17)))
    fits = layers + 2 * ends >= 3 * pp
    p = points({"layers": layers[fits], "pp": pp[fits], "split_counts_ends": ends, "hidden": 64, "heads": 1})
    s = stages(p)
    most = s.blocks.max(axis=1)
    held = (s.blocks * s.count).sum(axis=1)
    # Middle stages are counted as the fullest of them is: never fewer blocks than there are, less than a stage more.
    assert (held >= p.layers).all()
    assert (held - p.layers < np.maximum(1, p.pp)).all()
    assert (most <= np.ceil((p.layers + 2 * ends) / p.pp)).all()


def test_a_split_by_cost_fills_a_stage_until_its_share_is_reached_and_the_head_has_its_own():
    # Worked by hand: 16 blocks and a head of four are 20, ten to a stage; 80 and 1.1 over 16 are 5.07 to a stage.
    s = stages(
        points({"layers": [16, 80], "pp": [2, 16], "head_blocks": [4.0, 1.1], "hidden": 64, "heads": 1})
    )
    assert (s.blocks * (s.count > 0)).tolist() == [[10, 0, 6], [6, 6, 3]]


def test_embedding_and_head_that_count_as_layers_make_the_end_stages_shorter():
    s = stages(points({"layers": 70, "pp": 12, "split_counts_ends": 1, "hidden": 64, "heads": 1}))
    assert s.blocks[0].tolist() == [5, 6, 5]
