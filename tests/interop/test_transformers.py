"""Our decoder and the real transformers give the same logits, from either one's folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sirara.checkpoint.hf_model import load_decoder, named_parameters, save_decoder
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


@pytest.mark.parametrize("case", CASES)
def test_training_units_give_the_gradients_of_transformers(case, tmp_path):
    decoder = random_decoder(shape_of(case))
    save_decoder(decoder, tmp_path)
    theirs = from_pretrained(tmp_path)
    ids = tokens(decoder.shape)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    loss = torch.nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    want = {name: p.grad for name, p in theirs.named_parameters()}

    embed, *blocks, head = decoder.units()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    x = embed(ids, positions, None)
    for block in blocks:
        x = block(x, positions, None, None)
    objective, losses = head(x, labels, 1 / (labels != -100).sum().item())
    objective.backward()
    torch.testing.assert_close(losses.sum() / (labels != -100).sum(), loss.detach(), rtol=1e-6, atol=0)
    got = {name: p.grad for name, p in named_parameters(decoder)}
    if decoder.shape.tie_embeddings:
        # Two leaves on one storage: their gradients add up.
        got[next(iter(got))] += head.get_parameter("proj.weight").grad
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert (grad - want[name]).abs().max() <= 2e-5 * want[name].abs().max(), name


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama tied, grouped, llama3 rope"])
def test_a_folder_of_the_base_model_alone_is_understood(family, tmp_path):
    """gpt2 and bloom on the hub were saved from the model without its head: their names have no prefix."""
    decoder = random_decoder(shape_of(family))
    save_decoder(decoder, tmp_path / "ours")
    theirs = from_pretrained(tmp_path / "ours")
    theirs.base_model.save_pretrained(tmp_path / "base")
    ids = tokens(decoder.shape)
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "base")(ids), decoder(ids))


def test_a_bfloat16_folder_is_loaded_as_bfloat16_with_equal_bits(tmp_path):
    decoder = random_decoder(shape_of("qwen3")).bfloat16()
    save_decoder(decoder, tmp_path)
    theirs = dict(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters()
    )
    again = dict(named_parameters(load_decoder(tmp_path)))
    for name, p in named_parameters(decoder):
        assert p.dtype == theirs[name].dtype == again[name].dtype == torch.bfloat16
        assert torch.equal(p, theirs[name]) and torch.equal(p, again[name])
