import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sirara.checkpoint.hf import HfReader
from sirara.checkpoint.import_hf import import_folder
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub import scrub
from sirara.errors import CheckpointError, ConfigError
from tests.checkpoints import equal_bits, flip_bit
from tests.models import tiny_shape, write_model


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_imported_folder_is_a_verified_step_with_the_same_bits(tmp_path, family, dtype):
    values = write_model(tmp_path / "hf", tiny_shape(family), dtype)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    done = import_folder(tmp_path / "hf", tmp_path / "step")
    snapshot = Snapshot(tmp_path / "step", step=0)
    assert scrub(snapshot) == []
    assert {t.name for t in snapshot.manifest.tensors} == values.keys()
    assert all(equal_bits(snapshot.read(name), value) for name, value in values.items())
    assert snapshot.record["weights_only"] is True
    assert (tmp_path / "step" / "tokenizer.json").read_text() == "{}"
    names = {p.name for p in (tmp_path / "step").iterdir()}
    assert names == {*done.files, "verified.json"}
    again = HfReader(tmp_path / "step")
    assert again.shape == tiny_shape(family)


def test_tied_tensors_are_stored_once_and_known_by_both_names(tmp_path):
    shape = tiny_shape(tie_embeddings=True)
    values = write_model(tmp_path / "hf", shape)
    file = next((tmp_path / "hf").glob("*.safetensors"))
    extra = load_file(file)
    if "model.embed_tokens.weight" in extra:
        extra["lm_head.weight"] = extra["model.embed_tokens.weight"].clone()
        save_file(extra, file, metadata={"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "step")
    snapshot = Snapshot(tmp_path / "step")
    assert snapshot.manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert equal_bits(snapshot.read("lm_head.weight"), values["model.embed_tokens.weight"])


def test_pickled_weights_are_refused(tmp_path):
    write_model(tmp_path / "hf", tiny_shape())
    for file in (tmp_path / "hf").glob("*.safetensors*"):
        file.unlink()
    torch.save({}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, which is refused"):
        import_folder(tmp_path / "hf", tmp_path / "step")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_torn_folder_or_one_without_configuration_leaves_nothing(tmp_path):
    write_model(tmp_path / "hf", tiny_shape())
    file = max((tmp_path / "hf").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="is torn"):
        import_folder(tmp_path / "hf", tmp_path / "step")
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        import_folder(tmp_path / "hf", tmp_path / "step")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_what_exists_is_not_overwritten_and_a_dry_run_writes_nothing(tmp_path):
    write_model(tmp_path / "hf", tiny_shape())
    dry = import_folder(tmp_path / "hf", tmp_path / "step", dry_run=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert import_folder(tmp_path / "hf", tmp_path / "step") == dry
    with pytest.raises(ConfigError, match="exists already"):
        import_folder(tmp_path / "hf", tmp_path / "step")


def test_an_imported_step_can_be_imported_and_its_damage_is_named(tmp_path):
    write_model(tmp_path / "hf", tiny_shape())
    import_folder(tmp_path / "hf", tmp_path / "a")
    import_folder(tmp_path / "a", tmp_path / "b")
    assert (
        json.loads((tmp_path / "b" / "manifest.json").read_text())["files"]["name"].count("config.json") == 1
    )
    flip_bit(tmp_path / "b" / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: its bytes hash to"):
        Snapshot(tmp_path / "b").read("model.embed_tokens.weight")
