"""Hugging Face `config.json` to `ModelShape` and back, without torch or transformers.

Reading accepts both spellings of rotary settings (`rope_theta` + `rope_scaling`, and `rope_parameters`) and
the old names of BLOOM. What would change the numbers and is not supported is refused by its key, never
ignored.
"""

from collections.abc import Mapping
from typing import Any

from sirara.errors import ConfigError
from sirara.pure.shape import FAMILIES, ModelShape, RopeScaling

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "bloom": "BloomForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Our field: the names it has had in config.json, newest first.
_SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("n_embd", "hidden_size"),
        "heads": ("n_head", "num_attention_heads"),
        "vocab": ("vocab_size",),
        "max_seq": ("n_positions", "n_ctx", "max_position_embeddings"),
    },
    "bloom": {
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("hidden_size", "n_embed"),
        "heads": ("n_head", "num_attention_heads"),
        "vocab": ("vocab_size",),
    },
    "llama": {
        "layers": ("num_hidden_layers",),
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "ffn": ("intermediate_size",),
        "vocab": ("vocab_size",),
        "max_seq": ("max_position_embeddings",),
    },
}

# Keys whose other values mean another computation: what is computed here (absent counts as the first).
_REQUIRED_VALUES: dict[str, dict[str, tuple[object, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "bloom": {"apply_residual_connection_post_layernorm": (False,)},
    "llama": {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0, None)},
}


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a `config.json` describes.

    Raises: ConfigError naming the key that is missing or whose value is not supported.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type={family!r} is not supported", try_=[f"one of {', '.join(FAMILIES)}"]
        )
    _refuse_other_computations(family, config)
    sizes = _SIZES.get(family, _SIZES["llama"])
    values: dict[str, Any] = {ours: _first(config, names) for ours, names in sizes.items()}
    tied = config.get("tie_word_embeddings")
    values["tie_embeddings"] = FAMILIES[family].tied if tied is None else tied
    if family in ("gpt2", "bloom"):
        values["norm_eps"] = config.get("layer_norm_epsilon", 1e-5)
        if family == "gpt2":
            values["ffn"] = config.get("n_inner") or 0
        else:
            values["max_seq"] = config.get("seq_length", 2048)
        return ModelShape(family=family, **values)

    theta, scaling = _rope(config)
    traits = FAMILIES[family]
    return ModelShape(
        family=family,
        **values,
        kv_heads=config.get("num_key_value_heads") or values["heads"],
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else 0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=config.get("sliding_window") if traits.sliding_window else None,
        attention_bias="attention" in traits.optional_biases and bool(config.get("attention_bias")),
        mlp_bias="mlp" in traits.optional_biases and bool(config.get("mlp_bias")),
    )


def config_from_shape(
    shape: ModelShape,
    *,
    dtype: str,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """A `config.json` that transformers (4.40 and later) loads; dtype as "float32", "bfloat16"."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "torch_dtype": dtype,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "use_cache": True,
        "initializer_range": 0.02,
    }
    if shape.family == "gpt2":
        return config | {
            "n_layer": shape.layers,
            "n_embd": shape.hidden,
            "n_head": shape.heads,
            "n_inner": None if shape.ffn == 4 * shape.hidden else shape.ffn,
            "n_positions": shape.max_seq,
            "layer_norm_epsilon": shape.norm_eps,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    if shape.family == "bloom":
        return config | {
            "n_layer": shape.layers,
            "hidden_size": shape.hidden,
            "n_head": shape.heads,
            "seq_length": shape.max_seq,
            "layer_norm_epsilon": shape.norm_eps,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    return config | _llama_like(shape)


def _llama_like(shape: ModelShape) -> dict[str, Any]:
    traits = shape.traits
    config: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.max_seq,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
    }
    if traits.own_head_dim:
        config["head_dim"] = shape.head_dim
    if "attention" in traits.optional_biases:
        config["attention_bias"] = shape.attention_bias
    if "mlp" in traits.optional_biases:
        config["mlp_bias"] = shape.mlp_bias
    if traits.sliding_window:
        config["sliding_window"] = shape.sliding_window
    elif shape.family.startswith("qwen"):
        config["use_sliding_window"] = False
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq,
            }
    return config


def _refuse_other_computations(family: str, config: Mapping[str, Any]) -> None:
    for key, allowed in _REQUIRED_VALUES.get(family, _REQUIRED_VALUES["llama"]).items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"config.json: {key}={config[key]!r} is not supported for {family}",
                why=f"only {key}={allowed[0]!r} is computed here",
            )
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config: quantized weights cannot be trained here",
            try_=["the unquantized model's folder"],
        )
    kinds = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") and config.get("layer_types") is None:
        full = config.get("max_window_layers", 28)
        if full < config.get("num_hidden_layers", 0):
            kinds.add("sliding_attention")
    if kinds != {"full_attention"} and not (family == "mistral" and kinds == {"sliding_attention"}):
        raise ConfigError(
            f"config.json: layers that differ in their attention are not supported for {family}",
            why=f"layer_types has {', '.join(sorted(kinds))}",
            try_=["use_sliding_window=false in config.json, which changes what the model computes"],
        )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ConfigError(f"config.json has no {names[0]}", why=f"model_type={config['model_type']!r} needs it")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not supported",
            why="only whole heads are rotated here",
        )
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=rope["factor"])
        if kind == "llama3":
            return theta, RopeScaling(
                kind="llama3",
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_seq=rope["original_max_position_embeddings"],
            )
    except KeyError as missing:
        raise ConfigError(f"config.json: rope_scaling has no {missing}", why=f"{kind} needs it") from missing
    raise ConfigError(
        f"config.json: rope_scaling of type {kind!r} is not supported", try_=["default, linear or llama3"]
    )
