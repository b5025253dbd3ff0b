"""Published models by name: `model: {preset: llama3-8b}`."""

from sirara.pure.shape import ModelShape, RopeScaling


def _gpt2(layers: int, hidden: int, heads: int, *, vocab: int = 50_257, max_seq: int = 1024) -> ModelShape:
    return ModelShape(family="gpt2", layers=layers, hidden=hidden, heads=heads, vocab=vocab, max_seq=max_seq)


def _bloom(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family="bloom", layers=layers, hidden=hidden, heads=heads, vocab=250_880, max_seq=2048)


def _llama2(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 0) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32_000,
        max_seq=4096,
    )


def _llama3(
    layers: int, hidden: int, heads: int, ffn: int, *, stretch: float = 0.0, tied: bool = False
) -> ModelShape:
    scaling = RopeScaling(kind="llama3", factor=stretch) if stretch else None
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        max_seq=131_072 if stretch else 8192,
        rope_theta=500_000.0,
        rope_scaling=scaling,
        tie_embeddings=tied,
    )


def _smollm2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, theta: float) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=49_152,
        max_seq=8192,
        rope_theta=theta,
        tie_embeddings=True,
    )


def _mistral(*, vocab: int, window: int | None, theta: float) -> ModelShape:
    return ModelShape(
        family="mistral",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14_336,
        vocab=vocab,
        max_seq=32_768,
        sliding_window=window,
        rope_theta=theta,
    )


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, small: bool) -> ModelShape:
    return ModelShape(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=151_936 if small else 152_064,
        max_seq=32_768,
        rope_theta=1_000_000.0,
        tie_embeddings=small,
    )


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        family="qwen3",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=151_936,
        max_seq=40_960,
        rope_theta=1_000_000.0,
        tie_embeddings=tied,
    )


PRESETS: dict[str, ModelShape] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12_288, 96, max_seq=2048),
    "mt-nlg-530b": _gpt2(105, 20_480, 128, max_seq=2048),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-1b1": _bloom(24, 1536, 16),
    "bloom-1b7": _bloom(24, 2048, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14_336, 112),
    "llama2-7b": _llama2(32, 4096, 32, 11_008),
    "llama2-13b": _llama2(40, 5120, 40, 13_824),
    "llama2-70b": _llama2(80, 8192, 64, 28_672, kv_heads=8),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248, stretch=8.0),
    "llama3.1-8b": _llama3(32, 4096, 32, 14_336, stretch=8.0),
    "llama3.1-70b": _llama3(80, 8192, 64, 28_672, stretch=8.0),
    "llama3.1-405b": _llama3(126, 16_384, 128, 53_248, stretch=8.0),
    "llama3.2-1b": _llama3(16, 2048, 32, 8192, stretch=32.0, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 24, 8192, stretch=32.0, tied=True),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, 100_000.0),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, 100_000.0),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, 130_000.0),
    "mistral-7b": _mistral(vocab=32_000, window=4096, theta=10_000.0),
    "mistral-7b-v0.3": _mistral(vocab=32_768, window=None, theta=1_000_000.0),
    "qwen2-0.5b": _qwen2(24, 896, 14, 2, 4864, small=True),
    "qwen2-1.5b": _qwen2(28, 1536, 12, 2, 8960, small=True),
    "qwen2-7b": _qwen2(28, 3584, 28, 4, 18_944, small=False),
    "qwen2-72b": _qwen2(80, 8192, 64, 8, 29_568, small=False),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11_008, small=True),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13_824, small=False),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648, small=False),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600, tied=False),
}
