import json

import pytest

from sirara.errors import ConfigError
from sirara.pure.families import PRESETS, ModelShape
from sirara.pure.hf_config import config_from_shape, shape_from_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_way_through_config_json(name):
    text = json.dumps(config_from_shape(PRESETS[name], dtype="float32"))
    assert shape_from_config(json.loads(text)) == PRESETS[name]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_head_dim_of_its_own_survives(family):
    shape = ModelShape(
        family=family, layers=1, hidden=64, heads=4, kv_heads=2, head_dim=32, vocab=9, max_seq=8
    )
    assert shape_from_config(config_from_shape(shape, dtype="bfloat16")) == shape


def test_bloom_560ms_own_config_with_its_old_names():
    config = {
        "model_type": "bloom",
        "n_embed": 1024,
        "n_layer": 24,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "vocab_size": 250880,
        "n_inner": None,
        "layer_norm_epsilon": 1e-05,
        "apply_residual_connection_post_layernorm": False,
        "offset_alibi": 100,
    }
    assert shape_from_config(config) == PRESETS["bloom-560m"]


def test_both_spellings_of_rotary_settings_mean_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = shape_from_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = shape_from_config(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5 and old.rope_scaling is not None and old.rope_scaling.factor == 8.0


def test_a_qwen2_window_that_no_layer_uses_is_no_window():
    config = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 32}
    assert shape_from_config(config).sliding_window is None
    assert (
        shape_from_config(config | {"use_sliding_window": True, "max_window_layers": 2}).sliding_window
        is None
    )
    with pytest.raises(ConfigError, match="layers that differ in their attention"):
        shape_from_config(config | {"use_sliding_window": True, "max_window_layers": 1})


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"model_type": "mamba"}, "model_type='mamba' is not supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama"),
        (LLAMA, {"vocab_size": None}, "config.json has no vocab_size"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling has no 'factor'"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layers that differ"),
        (GPT2, {"activation_function": "relu"}, "activation_function='relu'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"n_head": 5}, "model.heads=5 does not divide model.hidden=64"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_its_key(base, changes, message):
    shape_from_config(base)
    with pytest.raises(ConfigError, match=message):
        shape_from_config(base | changes)
