"""Our decoder and the real transformers give the same logits, from either one's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sirara.checkpoint.hf_model import load_decoder, save_decoder
from sirara.model.decoder import Decoder
from sirara.pure.families import ModelShape, RopeScaling, unit_specs

transformers = pytest.importorskip("transformers")

LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=16
)
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"},
    "gpt2 untied, narrow ffn": {"family": "gpt2", "tie_embeddings": False, "ffn": 96},
    "bloom": {"family": "bloom"},
    "bloom 6 heads": {"family": "bloom", "heads": 6, "hidden": 48},
    "llama": {"family": "llama"},
    "llama tied, grouped, llama3 rope": {
        "family": "llama",
        "tie_embeddings": True,
        "kv_heads": 2,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3,
    },
    "llama linear rope, biases, own head_dim": {
        "family": "llama",
        "rope_scaling": RopeScaling(kind="linear", factor=2.0),
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 32,
    },
    "mistral": {"family": "mistral", "kv_heads": 2},
    "mistral window 7": {"family": "mistral", "kv_heads": 1, "sliding_window": 7},
    "qwen2": {"family": "qwen2", "kv_heads": 2},
    "qwen2 tied": {"family": "qwen2", "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_dim": 32},
    "qwen3 tied, biases": {"family": "qwen3", "tie_embeddings": True, "attention_bias": True},
}


def shape_of(case: str) -> ModelShape:
    sizes: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 131, "max_seq": 48}
    return ModelShape(**(sizes | CASES[case]))


def random_decoder(shape: ModelShape) -> Decoder:
    """Every parameter random, biases and norms as well, so that none can be mixed up unseen."""
    decoder = Decoder(shape, device="cpu")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for unit, spec in zip(decoder.units(), unit_specs(shape), strict=True):
            for tensor in spec.tensors:
                if tensor.tied_to is None:
                    mean = 1.0 if tensor.init.kind == "ones" else 0.0
                    values = torch.randn(tensor.shape, generator=draw) * 0.15 + mean
                    unit.get_parameter(tensor.local).copy_(values)
    return decoder


def tokens(shape: ModelShape) -> torch.Tensor:
    return torch.randint(0, shape.vocab, (2, 33), generator=torch.Generator().manual_seed(5))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def from_pretrained(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_our_folder_and_gives_our_logits(case, max_shard_bytes, tmp_path):
    decoder = random_decoder(shape_of(case))
    save_decoder(decoder, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs = from_pretrained(tmp_path)
    ids = tokens(decoder.shape)
    with torch.no_grad():
        close(decoder(ids), theirs(ids).logits)


@pytest.mark.parametrize("case", CASES)
def test_we_load_the_folder_of_transformers_and_give_its_logits(case, tmp_path):
    # Their config from our folder, their model and its random weights by itself, their own save.
    save_decoder(random_decoder(shape_of(case)), tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    torch.manual_seed(9)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    decoder = load_decoder(tmp_path / "theirs")
    assert decoder.shape == shape_of(case)
    ids = tokens(decoder.shape)
    with torch.no_grad():
        close(decoder(ids), theirs(ids).logits)
