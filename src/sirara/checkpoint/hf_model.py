"""A whole `Decoder` from a Hugging Face folder and back: for sampling, tests and small exports."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from sirara.checkpoint.hf import SHARD_BYTES, HfReader, load_tensors, write_hf
from sirara.model.decoder import Decoder
from sirara.pure.families import TensorSpec, unit_specs


def load_decoder(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Decoder:
    """The model of a folder, in `dtype` or that of its embedding; read slice by slice into its own memory."""
    reader = HfReader(folder)
    first = next(iter(reader.specs))
    decoder = Decoder(reader.shape, device=device, dtype=dtype or reader.dtype(first))
    places = dict(named_parameters(decoder))
    load_tensors(reader, lambda spec: places[spec.name])
    return decoder


def save_decoder(decoder: Decoder, folder: Path, *, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the model in its own dtype as a folder that transformers loads."""
    dtype = decoder.embed.tokens.weight.dtype
    write_hf(folder, decoder.shape, named_parameters(decoder), dtype=dtype, max_shard_bytes=max_shard_bytes)


def named_parameters(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, parameter) of every tensor, the second use of a tied one left out."""
    for unit, spec in zip(decoder.units(), unit_specs(decoder.shape), strict=True):
        for tensor in spec.tensors:
            if tensor.tied_to is None:
                yield tensor.name, _parameter(unit, tensor)


def _parameter(unit: nn.Module, tensor: TensorSpec) -> nn.Parameter:
    return unit.get_parameter(tensor.local)
