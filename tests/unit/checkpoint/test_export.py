import json
import os
from math import prod

import pytest
import torch

from sirara.checkpoint.export import export_step
from sirara.checkpoint.hf import HfReader, hf_config
from sirara.checkpoint.reader import Snapshot
from sirara.data.tokenizer import byte_tokenizer
from sirara.errors import CheckpointError, ConfigError
from tests.checkpoints import (
    State,
    equal_bits,
    even,
    flip_bit,
    in_ranks,
    manager,
    plan_of,
    ranges_of,
    small_state,
)
from tests.models import tiny_shape, weights_of


def saved(folder, *, dtype=torch.float32, tie=True, tokenizer=True, world=2) -> tuple[Snapshot, State]:
    """A step of a tiny llama as the trainer saves it, with masters when the dtype is bf16."""
    shape = tiny_shape(vocab=257, tie_embeddings=tie)
    full = weights_of(shape)
    state: State = {name: t.to(dtype) for name, t in full.items()}
    if dtype != torch.float32:
        state |= {f"{name}/master": t for name, t in full.items()}
    state |= {f"{name}/exp_avg": torch.zeros_like(t) for name, t in full.items()}
    files = {"config.json": json.dumps(hf_config(shape, dtype)).encode()}
    if tokenizer:
        files["tokenizer.json"] = byte_tokenizer()
    boxes = even(state, world)

    def one(rank):
        return manager(folder, rank=rank, world=world).save(
            7,
            plan=plan_of(state, boxes),
            ranges=ranges_of(state, boxes, rank),
            record={"step": 7},
            hf_files=files,
            aliases={"lm_head.weight": "model.embed_tokens.weight"} if tie else {},
        )

    return Snapshot(in_ranks(world, one)[0]), state


def weights_in(folder):
    reader = HfReader(folder)
    return {n: reader.read_slice(n, 0, prod(t.shape)).reshape(t.shape) for n, t in reader.tensors.items()}


@pytest.mark.parametrize("link", [False, True])
def test_an_exported_folder_holds_the_weights_bit_for_bit(tmp_path, link):
    snapshot, state = saved(tmp_path / "run")
    done = export_step(snapshot, tmp_path / "out", link=link)
    found = weights_in(tmp_path / "out")
    assert found and all(equal_bits(t, state[name]) for name, t in found.items())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(done.files)
    assert not any(name.startswith(("optim", "manifest")) for name in done.files)
    assert done.total_bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    same = os.path.samefile(tmp_path / "out" / "model.safetensors", snapshot.path / "model.safetensors")
    assert same == link


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_it_with_its_tokenizer_and_generates(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    snapshot, _ = saved(tmp_path / "run", tie=tie)
    export_step(snapshot, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 256
    ids = tokenizer("my fellow citizens", return_tensors="pt")
    text = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert text.shape == (1, ids["input_ids"].shape[1] + 4) or text[0, -1] == 256
    # The step folder itself loads too, while training goes on.
    again = transformers.AutoModelForCausalLM.from_pretrained(snapshot.path)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_wider_dtype_comes_from_the_masters_and_a_narrower_one_is_rounded(tmp_path):
    snapshot, state = saved(tmp_path / "run", dtype=torch.bfloat16)
    export_step(snapshot, tmp_path / "wide", dtype=torch.float32)
    for name, t in weights_in(tmp_path / "wide").items():
        assert equal_bits(t, state[f"{name}/master"])
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    export_step(snapshot, tmp_path / "half", dtype=torch.float16)
    for name, t in weights_in(tmp_path / "half").items():
        assert equal_bits(t, state[f"{name}/master"].half())


def test_what_exists_is_not_overwritten_and_a_dry_run_writes_nothing(tmp_path):
    snapshot, _ = saved(tmp_path / "run")
    dry = export_step(snapshot, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert export_step(snapshot, tmp_path / "out") == dry
    with pytest.raises(ConfigError, match="out exists already"):
        export_step(snapshot, tmp_path / "out")
    with pytest.raises(ConfigError, match="hard link cannot change the dtype"):
        export_step(snapshot, tmp_path / "x", dtype=torch.float16, link=True)


@pytest.mark.parametrize("link", [False, True])
def test_a_bad_piece_stops_the_export_and_leaves_nothing(tmp_path, link):
    snapshot, _ = saved(tmp_path / "run")
    flip_bit(snapshot.path / "model.safetensors", 9000)
    with pytest.raises(CheckpointError, match=r"model.*weight\[.*model.safetensors|model.safetensors: model"):
        export_step(snapshot, tmp_path / "out", link=link)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_step_without_weights_cannot_be_exported(tmp_path):
    state = {n: t for n, t in small_state().items() if "/" in n}
    path = manager(tmp_path / "run").save(
        1,
        plan=plan_of(state, even(state, 1)),
        ranges=ranges_of(state, even(state, 1), 0),
        record={},
        hf_files={},
        aliases={},
    )
    with pytest.raises(CheckpointError, match="holds no weights"):
        export_step(Snapshot(path), tmp_path / "out")
