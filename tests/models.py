"""Small Hugging Face models for tests, with random weights by seed."""

from pathlib import Path

import numpy as np
import torch

from sirara.checkpoint.hf import write_hf
from sirara.pure.families import ModelShape, init_slice, unit_specs


def tiny_shape(family: str = "llama", **changes: object) -> ModelShape:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 97, "max_seq": 32}
    return ModelShape(family=family, **(sizes | changes))  # type: ignore[arg-type]


def weights_of(shape: ModelShape) -> dict[str, torch.Tensor]:
    specs = [t for u in unit_specs(shape) for t in u.tensors if t.tied_to is None]
    return {
        t.name: torch.from_numpy(init_slice(t, 3, 0, int(np.prod(t.shape)))).float().view(t.shape) + 0.01
        for t in specs
    }


def write_model(
    folder: Path, shape: ModelShape, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A Hugging Face folder of the shape; returns the weights in it."""
    values = weights_of(shape)
    write_hf(folder, shape, values.items(), dtype=dtype, max_shard_bytes=100_000)
    return {name: value.to(dtype) for name, value in values.items()}
