"""What a model is whose row names it: the shape that its columns leave out, and what no column says.

Shapes and traits are those of each model's config.json on the Hugging Face hub (of mixtures as in configs/models of
github.com/MooreThreads/SimuMax), of nanotron's `scripts/scaling_benchmarks.py`, of NVIDIA's NeMo launcher
for GPT-3 and of arXiv:2005.14165, table 2.1.
"""

import re

Traits = dict[str, float]


def _shape(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> Traits:
    return {
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab": vocab,
    }


def _experts(experts: int, topk: int) -> Traits:
    return {"experts": experts, "topk": topk}


_LATENT = {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "head_dim": 128}
_OSS = {"head_dim": 64, "bias": 1, "window": 128, "window_share": 0.5}
_MODELS: tuple[tuple[str, Traits], ...] = (
    (r"deepseek-?v3", {**_LATENT, **_shape(61, 7168, 2048, 128, 128, 129280), **_experts(256, 8), "shared_ffn": 2048,
                       "dense_layers": 3, "dense_ffn": 18432, "predict_ahead": 1, "node_limit": 4}),
    (r"deepseek-?v2(?!-?lite)", {**_LATENT, **_shape(60, 5120, 1536, 128, 128, 102400), **_experts(160, 6),
                                 "shared_ffn": 3072, "dense_layers": 1, "dense_ffn": 12288, "node_limit": 3}),
    (r"kimi-?k2", {**_LATENT, **_shape(61, 7168, 2048, 64, 64, 163840), **_experts(384, 8), "shared_ffn": 2048,
                   "dense_layers": 1, "dense_ffn": 18432}),
    (r"gpt-?oss-?20b", {**_OSS, **_shape(24, 2880, 2880, 64, 8, 201088), **_experts(32, 4)}),
    (r"gpt-?oss-?120b", {**_OSS, **_shape(36, 2880, 2880, 64, 8, 201088), **_experts(128, 4)}),
    (r"gpt-?oss", _OSS),
    (r"qwen-?3-?30b-?a3b", {**_shape(48, 2048, 768, 32, 4, 151936), **_experts(128, 8), "head_dim": 128}),
    (r"qwen-?3-?235b-?a22b", {**_shape(94, 4096, 1536, 64, 4, 151936), **_experts(128, 8), "head_dim": 128}),
    (r"qwen-?3", {"head_dim": 128}),
    (r"qwen-?2\.5-?7b", _shape(28, 3584, 18944, 28, 4, 152064)),
    (r"qwen-?2\.5-?14b", _shape(48, 5120, 13824, 40, 8, 152064)),
    (r"qwen-?2\.5-?32b", _shape(64, 5120, 27648, 40, 8, 152064)),
    (r"qwen-?2\.5-?72b", _shape(80, 8192, 29568, 64, 8, 152064)),
    (r"mixtral-?8x7b", {**_shape(32, 4096, 14336, 32, 8, 32000), **_experts(8, 2)}),
    (r"mixtral-?8x22b", {**_shape(56, 6144, 16384, 48, 8, 32768), **_experts(8, 2)}),
    (r"mistral-?7b", _shape(32, 4096, 14336, 32, 8, 32000)),
    (r"llama-?2-?7b", _shape(32, 4096, 11008, 32, 32, 32000)),
    (r"llama-?2-?13b", _shape(40, 5120, 13824, 40, 40, 32000)),
    (r"llama-?2-?70b", _shape(80, 8192, 28672, 64, 8, 32000)),
    (r"llama-?3(\.\d)?-?8b", _shape(32, 4096, 14336, 32, 8, 128256)),
    (r"llama-?3(\.\d)?-?70b", _shape(80, 8192, 28672, 64, 8, 128256)),
    (r"llama-?3(\.\d)?-?405b", _shape(126, 16384, 53248, 128, 8, 128256)),
    (r"llama-like-?1\.34b", _shape(16, 2048, 8192, 32, 32, 131072)),
    (r"llama-like-?3\.57b", _shape(28, 3072, 8192, 32, 32, 131072)),
    (r"llama-like-?8\.86b", _shape(32, 4096, 14336, 32, 32, 131072)),
    (r"llama-like-?80(\.0)?b", _shape(80, 8192, 28672, 64, 64, 131072)),
    (r"gpt-?3-?5b", _shape(24, 4096, 16384, 32, 32, 50304)),
    (r"gpt-?3-?20b", _shape(44, 6144, 24576, 48, 48, 50304)),
    (r"gpt-?3-?175b", _shape(96, 12288, 49152, 96, 96, 50304)),
)  # fmt: skip

SHAPE = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
"""What a row states of its own where it is another shape than the name's."""


def known(name: str) -> Traits:
    """What is published of the model that `name` means, whatever its spaces, dashes and case; {} of any other."""
    plain = re.sub(r"[ _-]+", "-", name.strip().lower())
    return next((dict(found) for pattern, found in _MODELS if re.search(pattern, plain)), {})
