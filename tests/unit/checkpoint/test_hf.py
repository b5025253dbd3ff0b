import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sirara.checkpoint.hf import HfReader, hf_config, index_json, load_tensors, plan_shards, write_hf
from sirara.errors import CheckpointError, InvariantError
from sirara.pure.families import FAMILIES, ModelShape, TensorSpec, init_slice, unit_specs


def tiny(family: str = "llama", **changes: object) -> ModelShape:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 97, "max_seq": 32}
    return ModelShape(family=family, **(sizes | changes))  # type: ignore[arg-type]


def owned(shape: ModelShape) -> dict[str, torch.Tensor]:
    specs = [t for u in unit_specs(shape) for t in u.tensors if t.tied_to is None]
    return {
        t.name: torch.from_numpy(init_slice(t, 3, 0, int(np.prod(t.shape)))).view(t.shape) + 0.01
        for t in specs
    }


def write(folder: Path, shape: ModelShape, **options: object) -> dict[str, torch.Tensor]:
    values = owned(shape)
    write_hf(folder, shape, values.items(), **({"dtype": torch.float32} | options))  # type: ignore[arg-type]
    return values


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_safetensors_itself_reads_what_was_written(tmp_path, family, max_shard_bytes):
    shape = tiny(family)
    values = write(tmp_path, shape, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes < 10**9)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
    read = {}
    for file in files:
        with safe_open(file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
        read |= load_file(file)
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(read[name], value)


def test_planned_bytes_equal_those_on_disk_for_writers_in_any_order(tmp_path):
    shape = tiny()
    values = owned(shape)
    write_hf(tmp_path, shape, reversed(list(values.items())), dtype=torch.bfloat16, max_shard_bytes=30_000)
    shards = plan_shards([t for u in unit_specs(shape) for t in u.tensors], torch.bfloat16, 30_000)
    assert [s.file for s in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    for shard in shards:
        content = (tmp_path / shard.file).read_bytes()
        assert len(content) == shard.nbytes
        assert content[: len(shard.header)] == shard.header
        for t in shard.tensors:
            stored = torch.frombuffer(bytearray(content[t.start : t.start + t.nbytes]), dtype=torch.bfloat16)
            assert torch.equal(stored.view(t.shape), values[t.name].bfloat16())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert index_json(shards) == (tmp_path / "model.safetensors.index.json").read_bytes()
    assert index["metadata"]["total_size"] == 2 * sum(v.numel() for v in values.values())
    assert index["weight_map"].keys() == values.keys()


def test_no_shard_exceeds_the_limit_unless_one_tensor_does():
    specs = [t for u in unit_specs(tiny()) for t in u.tensors]
    for shard in plan_shards(specs, torch.float32, 20_000):
        assert sum(t.nbytes for t in shard.tensors) <= 20_000 or len(shard.tensors) == 1


def test_a_tied_head_is_stored_once_and_read_from_its_owner(tmp_path):
    shape = tiny("gpt2")
    values = write(tmp_path, shape)
    reader = HfReader(tmp_path)
    assert "lm_head.weight" not in values and reader.shape.tie_embeddings
    assert torch.equal(
        reader.read_slice("lm_head.weight", 5, 70), values["transformer.wte.weight"].view(-1)[5:70]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_and_whole_loads_give_the_written_values(tmp_path, family):
    shape = tiny(family, tie_embeddings=False)
    values = write(tmp_path, shape)
    reader = HfReader(tmp_path)
    assert reader.shape == shape
    got: dict[str, torch.Tensor] = {}

    def target(spec: TensorSpec) -> torch.Tensor:
        return got.setdefault(spec.name, torch.zeros(spec.shape, dtype=torch.float64))

    load_tensors(reader, target, elements=1000)
    assert got.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(got[name], value.double())
        assert torch.equal(reader.read_slice(name, 3, 16), value.view(-1)[3:16])
        assert reader.dtype(name) == torch.float32


def test_names_without_the_base_models_prefix_and_stale_buffers_are_understood(tmp_path):
    """gpt2 and bloom on the hub were saved from the model without its head."""
    shape = tiny("gpt2")
    values = write(tmp_path, shape)
    bare = {name.removeprefix("transformer."): value for name, value in values.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    wte = values["transformer.wte.weight"].view(-1)
    assert torch.equal(reader.read_slice("transformer.wte.weight", 0, 9), wte[:9])


def test_a_tied_head_that_is_stored_too_must_be_equal(tmp_path):
    shape = tiny("llama", tie_embeddings=True)
    values = write(tmp_path, shape)
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    save_file(values, tmp_path / "model.safetensors")
    HfReader(tmp_path)
    values["lm_head.weight"][96, 63] += 1
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight have different values"
    ):
        HfReader(tmp_path)


def _save(folder: Path, values: dict[str, torch.Tensor]) -> None:
    save_file(values, folder / "model.safetensors")


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    values = write(tmp_path, tiny())
    name = "model.layers.1.mlp.up_proj.weight"
    _save(tmp_path, {k: v for k, v in values.items() if k != name})
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {name}"):
        HfReader(tmp_path)
    _save(tmp_path, {k: v for k, v in values.items() if k != "lm_head.weight"})
    with pytest.raises(CheckpointError, match="tie_word_embeddings=true"):
        HfReader(tmp_path)
    _save(tmp_path, values | {"model.layers.2.mlp.up_proj.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"1 tensors do not belong .* model\.layers\.2\.mlp"):
        HfReader(tmp_path)
    _save(tmp_path, values | {name: torch.ones(64, 192)})
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \[64, 192\], config.json asks for \[192, 64\]"
    ):
        HfReader(tmp_path)
    _save(tmp_path, values | {name: torch.ones(192, 64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=f"{name} is stored as I8"):
        HfReader(tmp_path)


def test_torn_and_missing_files_are_named(tmp_path):
    write(tmp_path, tiny(), max_shard_bytes=20_000)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=f"{file.name} is torn"):
        HfReader(tmp_path)
    file.write_bytes(content[:40])
    with pytest.raises(CheckpointError, match=f"{file.name} is torn"):
        HfReader(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{file.name} is torn"):
        HfReader(tmp_path)
    file.write_bytes((5).to_bytes(8, "little") + b"hello")
    with pytest.raises(CheckpointError, match=f"{file.name} is not a safetensors file"):
        HfReader(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"1 are missing: {file.name}"):
        HfReader(tmp_path)


def test_pickled_weights_are_refused_with_the_reason(tmp_path):
    write(tmp_path, tiny())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles: loading one runs whatever code it contains"):
        HfReader(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        HfReader(tmp_path)


def test_a_folder_without_config_or_with_a_broken_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        HfReader(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        HfReader(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        HfReader(tmp_path)


def test_a_write_that_misses_a_tensor_or_gives_one_twice_leaves_no_config(tmp_path):
    shape = tiny()
    values = list(owned(shape).items())
    with pytest.raises(CheckpointError, match=r"1 tensors were not given: lm_head\.weight"):
        write_hf(tmp_path, shape, values[:-1], dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is given twice"):
        write_hf(tmp_path, shape, [*values, values[0]], dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[3\]"):
        write_hf(tmp_path, shape, [("model.norm.weight", torch.ones(3))], dtype=torch.float32)
    assert not (tmp_path / "config.json").exists()


def test_elements_beyond_a_tensor_are_refused_not_read_from_its_neighbour(tmp_path):
    write(tmp_path, tiny())
    with pytest.raises(
        InvariantError, match=r"elements 60 to 65 were asked of model\.norm\.weight, which has 64"
    ):
        HfReader(tmp_path).read_slice("model.norm.weight", 60, 65)


def test_loading_reads_slices_of_the_asked_size_so_memory_grows_with_the_slice(tmp_path, monkeypatch):
    write(tmp_path, tiny())
    reader = HfReader(tmp_path)
    asked: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at: (asked.append(len(parts[0])), preadv(fd, parts, at))[1]
    )
    load_tensors(reader, lambda spec: torch.empty(spec.shape), elements=500)
    assert max(asked) == 500 * 4 and sum(asked) == 4 * sum(np.prod(t.shape) for t in reader.specs.values())


def test_config_says_dtype_and_special_tokens():
    config = hf_config(tiny(), torch.bfloat16, eos_token_id=7)
    assert (
        config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == 7 and config["bos_token_id"] is None
    )
