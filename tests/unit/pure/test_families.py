import itertools
import math

import numpy as np
import pytest

from sirara.errors import ConfigError
from sirara.pure.families import FAMILIES, PRESETS, ModelShape, init_slice, parameter_count, unit_specs
from sirara.pure.placement import Shard, held_ranges

PUBLISHED = {  # the counts on the models' own pages
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_one(name):
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


def test_mt_nlg_has_530_and_gpt3_175_billion_parameters():
    assert round(parameter_count(PRESETS["mt-nlg-530b"]) / 1e9) == 530
    assert round(parameter_count(PRESETS["gpt3-175b"]) / 1e9) == 175


def tiny(family: str, **changes: object) -> ModelShape:
    sizes = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 97, "max_seq": 32}
    return ModelShape(family=family, **(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_embed_blocks_head_and_names_are_unique(family):
    units = unit_specs(tiny(family))
    assert [u.name for u in units] == ["embed", "block.0", "block.1", "block.2", "head"]
    names = [t.name for u in units for t in u.tensors]
    assert len(set(names)) == len(names)
    assert all(len({t.local for t in u.tensors}) == len(u.tensors) for u in units)


def test_llama_names_shapes_and_order_of_a_block():
    shape = tiny("llama", kv_heads=2, ffn=96)
    block = unit_specs(shape)[2]
    assert [(t.name, t.local, t.shape) for t in block.tensors] == [
        ("model.layers.1.input_layernorm.weight", "norm1.weight", (64,)),
        ("model.layers.1.self_attn.q_proj.weight", "attn.q_proj.weight", (64, 64)),
        ("model.layers.1.self_attn.k_proj.weight", "attn.k_proj.weight", (32, 64)),
        ("model.layers.1.self_attn.v_proj.weight", "attn.v_proj.weight", (32, 64)),
        ("model.layers.1.self_attn.o_proj.weight", "attn.o_proj.weight", (64, 64)),
        ("model.layers.1.post_attention_layernorm.weight", "norm2.weight", (64,)),
        ("model.layers.1.mlp.gate_proj.weight", "mlp.gate_proj.weight", (96, 64)),
        ("model.layers.1.mlp.up_proj.weight", "mlp.up_proj.weight", (96, 64)),
        ("model.layers.1.mlp.down_proj.weight", "mlp.down_proj.weight", (64, 96)),
    ]


def test_weights_with_one_input_are_neighbours_and_so_are_their_biases():
    locals_ = [t.local for t in unit_specs(tiny("llama", attention_bias=True, mlp_bias=True))[1].tensors]
    for group in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]):
        for kind in ("weight", "bias"):
            parent = "attn" if "q_proj" in group else "mlp"
            wanted = [f"{parent}.{g}.{kind}" for g in group]
            at = locals_.index(wanted[0])
            assert locals_[at : at + len(wanted)] == wanted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_points_to_the_embedding_and_counts_once(family, tied):
    shape = tiny(family, tie_embeddings=tied)
    head = unit_specs(shape)[-1].tensors[-1]
    assert head.name == "lm_head.weight"
    assert head.shape == (97, 64)
    assert head.tied_to == (unit_specs(shape)[0].tensors[0].name if tied else None)
    other = tiny(family, tie_embeddings=not tied)
    assert parameter_count(shape) - parameter_count(other) == (-97 * 64 if tied else 97 * 64)


def test_the_default_of_tying_and_of_ffn_is_the_familys():
    assert tiny("gpt2").tie_embeddings is True and tiny("gpt2").ffn == 256
    assert tiny("llama").tie_embeddings is False and tiny("llama").ffn == 192


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_parts_hold_whole_heads(family):
    """A rank's slice of qkv must be the qkv of its heads, whatever the order of the family's tensor."""
    shape = tiny(family)
    dim = shape.head_dim
    for t in unit_specs(shape)[1].tensors:
        if not t.local.startswith("attn.") or "_proj.weight" not in t.local or "o_proj" in t.local:
            continue
        assert isinstance(t.placement, Shard)
        held = held_ranges(t.placement, t.shape, degree=2, rank=1)
        if t.local == "attn.qkv_proj.weight" and shape.traits.qkv == "packed":
            assert held == tuple((part * 64 + 2 * dim, part * 64 + 4 * dim) for part in range(3))
        elif t.local == "attn.qkv_proj.weight":
            assert held == ((2 * 3 * dim, 4 * 3 * dim),)
        else:
            assert held == ((2 * dim, 4 * dim),)


def test_block_flops_are_two_per_weight_plus_attention_over_the_keys_that_are_seen():
    shape = tiny("gpt2")
    keys = sum(t + 1 for t in range(32)) / 32
    assert unit_specs(shape)[1].flops_per_token == 2 * 12 * 64 * 64 + int(4 * 64 * keys)
    window = tiny("mistral", sliding_window=8)
    keys = sum(min(t + 1, 8) for t in range(32)) / 32
    assert unit_specs(window)[1].flops_per_token == 2 * (4 * 64 * 64 + 3 * 64 * 192) + int(4 * 64 * keys)
    assert unit_specs(shape)[-1].flops_per_token == 2 * 97 * 64
    assert unit_specs(shape)[0].flops_per_token == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_do_not_depend_on_the_slices_they_are_drawn_in(family):
    for unit in unit_specs(tiny(family)):
        for t in unit.tensors:
            n = math.prod(t.shape)
            whole = init_slice(t, 5, 0, n)
            cuts = [0, n // 3, n // 2, n]
            parts = [init_slice(t, 5, a, b) for a, b in itertools.pairwise(cuts)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
            assert whole.dtype == np.float32


def test_matrices_start_normal_residual_projections_smaller_norms_at_one_and_biases_at_zero():
    shape = ModelShape(family="gpt2", layers=8, hidden=256, heads=4, vocab=997, max_seq=64)
    std = {t.local: init_slice(t, 5, 0, math.prod(t.shape)).std() for t in unit_specs(shape)[1].tensors}
    assert std["attn.qkv_proj.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["attn.o_proj.weight"] == pytest.approx(0.02 / 4, rel=0.02)
    assert std["mlp.down_proj.weight"] == pytest.approx(0.02 / 4, rel=0.02)
    for t in unit_specs(shape)[1].tensors:
        if len(t.shape) == 1:
            start = 1.0 if t.local in ("norm1.weight", "norm2.weight") else 0.0
            assert set(init_slice(t, 5, 0, 4)) == {start} and not t.decay


def test_a_tied_head_starts_as_its_owner():
    embed, head = unit_specs(tiny("gpt2"))[0].tensors[0], unit_specs(tiny("gpt2"))[-1].tensors[-1]
    np.testing.assert_array_equal(init_slice(embed, 5, 100, 200), init_slice(head, 5, 100, 200))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, r"model\.heads=5 does not divide model\.hidden=64"),
        ({"kv_heads": 3}, r"model\.kv_heads=3 does not divide model\.heads=4"),
        ({"layers": 0}, r"model\.layers=0 is not a positive number"),
        ({"family": "lama"}, r"model\.family='lama' is not known"),
        ({"head_dim": 7}, r"model\.head_dim=7 is odd"),
        ({"family": "gpt2", "kv_heads": 2}, r"model\.kv_heads=2 does not exist in the family gpt2"),
        ({"family": "bloom", "ffn": 128}, r"model\.ffn=128 does not exist in the family bloom"),
        ({"family": "qwen2", "head_dim": 32}, r"model\.head_dim=32 does not exist in the family qwen2"),
        ({"sliding_window": 8}, r"model\.sliding_window=8 does not exist in the family llama"),
        ({"family": "mistral", "mlp_bias": True}, r"model\.mlp_bias=True does not exist"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**({"family": "llama"} | changes))
