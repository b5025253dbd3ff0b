"""An evaluation may take longer than the longest step that is allowed: it says that it goes on."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sirara.data.batches import EvalBatches
from sirara.data.store import write_store
from sirara.mesh import Mesh
from sirara.train.evaluate import evaluate


def test_every_batch_of_an_evaluation_is_a_sign_of_life(tmp_path) -> None:
    # A set of more than launch.hang_timeout was ended as a hang, with everything since the last checkpoint.
    write_store(tmp_path / "store", [np.arange(1, 30)], vocab=30, eot=0)
    batches = EvalBatches(tmp_path / "store", seq_len=4, micro_batch=2, vocab=30)
    zero = SimpleNamespace(device=torch.device("cpu"), wait_all=lambda: None, begin=lambda order: None)
    world = SimpleNamespace(gather_rows=lambda what, row: row[None])
    stage: Any = SimpleNamespace(
        zero=zero,
        comms=SimpleNamespace(world=world, pp=SimpleNamespace(size=1)),
        loss_rank=0,
        pipeline=SimpleNamespace(evaluate=lambda inputs: [torch.ones(i.targets_BL.shape) for i in inputs]),
    )
    signs: list[None] = []
    evaluate(stage, batches, mesh=Mesh(), alive=lambda: signs.append(None))
    assert len(signs) == len(batches) > 1
