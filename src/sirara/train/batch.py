"""From the data room's batches to the stage's inputs on its device."""

import torch

from sirara.data.batches import Batch
from sirara.parallel.stage import Inputs


def to_inputs(batch: Batch, device: torch.device) -> Inputs:
    """The same integers on the device; pinned host memory makes the copy asynchronous on CUDA."""

    def move(x_BL: torch.Tensor) -> torch.Tensor:
        return x_BL.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x_BL

    return Inputs(
        tokens_BL=move(batch.tokens_BL),
        targets_BL=move(batch.targets_BL),
        positions_BL=move(batch.positions_BL),
        documents_BL=None if batch.documents_BL is None else move(batch.documents_BL),
    )
