"""What a model is: its family (traits and Hugging Face names, as data) and its sizes.

A family is a row of choices (`Family`), a model is a family with sizes (`ModelShape`). Everything else about
a model, its tensors, placements, FLOPs, config.json, is computed from these two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sirara.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear` divides all by factor; `llama3` only the slow ones."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The traits of one family. Names map a module of ours to Hugging Face's; `{i}` is the layer."""

    norm: Literal["layer", "rms"]
    positions: Literal["learned", "rope", "alibi"]
    mlp: Literal["gelu", "swiglu"]
    qkv: Literal["packed", "per_head", "separate"]
    """packed: one tensor [q | k | v]; per_head: [q | k | v] of each head in turn; separate: three tensors."""
    conv1d: bool = False
    """Linear weights are stored [in, out]."""
    biases: frozenset[str] = frozenset()
    """Which linear layers always have a bias: of "qkv", "o", "mlp"."""
    optional_biases: frozenset[str] = frozenset()
    """Which may have one: "attention" (q, k, v and o), "mlp"."""
    own_head_dim: bool = False
    """head_dim need not be hidden / heads."""
    own_ffn: bool = True
    """ffn need not be 4 * hidden."""
    grouped_query: bool = False
    sliding_window: bool = False
    qk_norm: bool = False
    embed_norm: bool = False
    tied: bool = False
    norm_eps: float = 1e-5
    names: Mapping[str, str] = field(hash=False)
    base_prefix: str


_LLAMA_NAMES = {
    "embed.tokens": "model.embed_tokens",
    "block.norm1": "model.layers.{i}.input_layernorm",
    "block.attn.q_proj": "model.layers.{i}.self_attn.q_proj",
    "block.attn.k_proj": "model.layers.{i}.self_attn.k_proj",
    "block.attn.v_proj": "model.layers.{i}.self_attn.v_proj",
    "block.attn.q_norm": "model.layers.{i}.self_attn.q_norm",
    "block.attn.k_norm": "model.layers.{i}.self_attn.k_norm",
    "block.attn.o_proj": "model.layers.{i}.self_attn.o_proj",
    "block.norm2": "model.layers.{i}.post_attention_layernorm",
    "block.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
    "block.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
    "block.mlp.down_proj": "model.layers.{i}.mlp.down_proj",
    "head.norm": "model.norm",
    "head.proj": "lm_head",
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        norm="layer",
        positions="learned",
        mlp="gelu",
        qkv="packed",
        conv1d=True,
        biases=frozenset({"qkv", "o", "mlp"}),
        tied=True,
        base_prefix="transformer.",
        names={
            "embed.tokens": "transformer.wte",
            "embed.positions": "transformer.wpe",
            "block.norm1": "transformer.h.{i}.ln_1",
            "block.attn.qkv_proj": "transformer.h.{i}.attn.c_attn",
            "block.attn.o_proj": "transformer.h.{i}.attn.c_proj",
            "block.norm2": "transformer.h.{i}.ln_2",
            "block.mlp.up_proj": "transformer.h.{i}.mlp.c_fc",
            "block.mlp.down_proj": "transformer.h.{i}.mlp.c_proj",
            "head.norm": "transformer.ln_f",
            "head.proj": "lm_head",
        },
    ),
    "bloom": Family(
        norm="layer",
        positions="alibi",
        mlp="gelu",
        qkv="per_head",
        biases=frozenset({"qkv", "o", "mlp"}),
        own_ffn=False,
        embed_norm=True,
        tied=True,
        base_prefix="transformer.",
        names={
            "embed.tokens": "transformer.word_embeddings",
            "embed.norm": "transformer.word_embeddings_layernorm",
            "block.norm1": "transformer.h.{i}.input_layernorm",
            "block.attn.qkv_proj": "transformer.h.{i}.self_attention.query_key_value",
            "block.attn.o_proj": "transformer.h.{i}.self_attention.dense",
            "block.norm2": "transformer.h.{i}.post_attention_layernorm",
            "block.mlp.up_proj": "transformer.h.{i}.mlp.dense_h_to_4h",
            "block.mlp.down_proj": "transformer.h.{i}.mlp.dense_4h_to_h",
            "head.norm": "transformer.ln_f",
            "head.proj": "lm_head",
        },
    ),
    "llama": Family(
        norm="rms",
        positions="rope",
        mlp="swiglu",
        qkv="separate",
        optional_biases=frozenset({"attention", "mlp"}),
        own_head_dim=True,
        grouped_query=True,
        base_prefix="model.",
        names=_LLAMA_NAMES,
    ),
    "mistral": Family(
        norm="rms",
        positions="rope",
        mlp="swiglu",
        qkv="separate",
        own_head_dim=True,
        grouped_query=True,
        sliding_window=True,
        base_prefix="model.",
        names=_LLAMA_NAMES,
    ),
    "qwen2": Family(
        norm="rms",
        positions="rope",
        mlp="swiglu",
        qkv="separate",
        biases=frozenset({"qkv"}),
        grouped_query=True,
        norm_eps=1e-6,
        base_prefix="model.",
        names=_LLAMA_NAMES,
    ),
    "qwen3": Family(
        norm="rms",
        positions="rope",
        mlp="swiglu",
        qkv="separate",
        optional_biases=frozenset({"attention"}),
        own_head_dim=True,
        grouped_query=True,
        qk_norm=True,
        norm_eps=1e-6,
        base_prefix="model.",
        names=_LLAMA_NAMES,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A family with its sizes, complete: what is left out is filled in from the family when it is made.

    kv_heads: heads.  head_dim: hidden / heads.  ffn: 4 * hidden; for SwiGLU 8/3 * hidden, rounded up to 64.
    tie_embeddings, norm_eps: the family's.
    sliding_window: how many tokens a token sees, itself included (None: all before it).

    Raises: ConfigError naming the key for sizes that do not fit together.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    max_seq: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    tie_embeddings: bool | None = None
    norm_eps: float = 0.0
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"model.family={self.family!r} is not known", try_=[f"one of {', '.join(FAMILIES)}"]
            )
        self._check_positive()
        self._fill_in()
        self._check_fit()

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def qkv_bias(self) -> bool:
        return "qkv" in self.traits.biases or self.attention_bias

    @property
    def o_bias(self) -> bool:
        return "o" in self.traits.biases or self.attention_bias

    @property
    def ffn_bias(self) -> bool:
        return "mlp" in self.traits.biases or self.mlp_bias

    def _check_positive(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "max_seq"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"model.{name}={value} is not a positive number")
        for name in ("kv_heads", "head_dim", "ffn"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"model.{name}={value} is not a positive number")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"model.sliding_window={self.sliding_window} is not a positive number")

    def _fill_in(self) -> None:
        traits = self.traits
        if not self.head_dim and self.hidden % self.heads:
            divisors = [d for d in range(self.heads, 0, -1) if self.hidden % d == 0]
            raise ConfigError(
                f"model.heads={self.heads} does not divide model.hidden={self.hidden}",
                try_=[f"model.heads={divisors[0]}", f"model.hidden={self.hidden // self.heads * self.heads}"],
            )
        ffn = 4 * self.hidden if traits.mlp == "gelu" else -(-8 * self.hidden // (3 * 64)) * 64
        filled = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.hidden // self.heads,
            "ffn": self.ffn or ffn,
            "tie_embeddings": traits.tied if self.tie_embeddings is None else self.tie_embeddings,
            "norm_eps": self.norm_eps or traits.norm_eps,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    def _check_fit(self) -> None:
        traits = self.traits
        if self.heads % self.kv_heads:
            divisors = [d for d in range(1, self.heads + 1) if self.heads % d == 0]
            raise ConfigError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}",
                try_=[f"model.kv_heads={min(divisors, key=lambda d: abs(d - self.kv_heads))}"],
            )
        if traits.positions == "rope" and self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} is odd; rotary positions turn pairs of features",
                why=f"model.hidden={self.hidden} / model.heads={self.heads} = {self.head_dim}",
            )
        refused = {
            "model.kv_heads": not traits.grouped_query and self.kv_heads != self.heads,
            "model.head_dim": not traits.own_head_dim and self.head_dim * self.heads != self.hidden,
            "model.ffn": not traits.own_ffn and self.ffn != 4 * self.hidden,
            "model.sliding_window": not traits.sliding_window and self.sliding_window is not None,
            "model.rope_scaling": traits.positions != "rope" and self.rope_scaling is not None,
            "model.attention_bias": "attention" not in traits.optional_biases and self.attention_bias,
            "model.mlp_bias": "mlp" not in traits.optional_biases and self.mlp_bias,
        }
        for key, wrong in refused.items():
            if wrong:
                value = getattr(self, key.removeprefix("model."))
                raise ConfigError(
                    f"{key}={value} does not exist in the family {self.family}",
                    why=f"model.hidden={self.hidden}, model.heads={self.heads}",
                    try_=[f"leave {key} out", "another model.family, for instance llama"],
                )
