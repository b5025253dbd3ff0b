"""The first things to try on a GPU: the step, its bits after a resume, the digest on the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sirara.checkpoint.digest import digest_slice
from sirara.comm.world import World
from sirara.config.load import load
from sirara.config.run_folder import RunFolder
from sirara.data.store import write_store
from sirara.train.own_loop import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


def trainer(home: Path, precision: str, attempt: int) -> Trainer:
    file = home / f"{attempt}.yaml"
    file.write_text(f"""
schema: 1
name: gpu
run_dir: {home}
model: {{family: llama, layers: 2, hidden: 128, heads: 4, vocab: 97, max_seq: 64, dropout: 0.1}}
data: {{train: [{{path: {home / "store"}}}], seq_len: 32}}
train: {{steps: 6, global_batch: 8, micro_batch: 2, precision: {precision}}}
""")
    config = load(file).config
    if not (home / "store").exists():
        rng = np.random.default_rng(0)
        write_store(home / "store", [rng.integers(1, 97, 4000)], vocab=97, eot=0)
        run = RunFolder.create(config, file.read_text())
    else:
        run = next(RunFolder(p.parent) for p in home.glob("gpu-*/run.json"))
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=0)
    return Trainer(config, run, attempt=run.begin_attempt(), world=world)


def steps(t: Trainer, until: int) -> list[str]:
    losses = []
    while t.step < until:
        losses.append(t.train_step().loss.hex())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    def begin(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    def uninterrupted(home: Path) -> tuple[Any, str]:
        with trainer(home, precision, 0) as t:
            assert t.device.kind == "cuda"
            t.start()
            return steps(t, 6), str(t.digest())

    def killed(home: Path) -> tuple[Any, str]:
        with trainer(home, precision, 0) as t:
            t.start()
            first = steps(t, 3)
            t.save()
        with trainer(home, precision, 1) as t:
            t.resume()
            assert t.grade.name == "exact"
            return first + steps(t, 6), str(t.digest())

    assert killed(begin("killed")) == uninterrupted(begin("whole"))


def test_what_a_device_counts_of_a_run_is_graded(tmp_path: Path) -> None:
    with trainer(tmp_path, "bf16", 0) as t:
        t.start()
        steps(t, 6)
        found = t.plan_grade(wait=True)
    assert found is not None and found.peak is not None
    (stage,) = found.stages
    assert stage.between is not None and stage.reserved is not None and stage.device is not None
    assert stage.between.measured <= stage.reserved.measured <= stage.device.measured
    assert found.parts["computation"].measured > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_on_the_device_equals_the_digest_on_the_host(dtype: torch.dtype) -> None:
    data = torch.randn(200_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest_slice("w", 777, data.cuda()) == digest_slice("w", 777, data)
