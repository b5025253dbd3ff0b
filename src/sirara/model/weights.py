"""Holders of parameters, shaped by their `TensorSpec`s; what is done with them stands where it is done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from sirara.model.ops import layer_norm, rms_norm
from sirara.model.split import Remake, Wiring
from sirara.pure.families import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What the modules of one unit are made from: its tensors by local name, where, in which dtype, and its wiring."""

    specs: Mapping[str, TensorSpec]
    device: torch.device
    dtype: torch.dtype
    wiring: Wiring = field(default_factory=Wiring)


class Weights(nn.Module):
    """The weight of one layer and its bias, if the family has one."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, path: str, making: Making) -> None:
        super().__init__()
        self.weight = _parameter(making.specs[f"{path}.weight"], making)
        bias = making.specs.get(f"{path}.bias")
        self.bias = None if bias is None else _parameter(bias, making)


class Norm(Weights):
    """Layer norm where there is a bias, else RMS norm."""

    def __init__(self, path: str, making: Making, eps: float) -> None:
        super().__init__(path, making)
        self.eps = eps
        self._wiring = making.wiring

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def remake(self, x: Tensor) -> Remake | None:
        """How the backward of what reads the output makes it again, if it is not to be kept."""
        if self.bias is None:
            return self._wiring.remake("norm", partial(rms_norm, eps=self.eps), x, self.weight)
        return self._wiring.remake("norm", partial(layer_norm, eps=self.eps), x, self.weight, self.bias)


def _parameter(spec: TensorSpec, making: Making) -> nn.Parameter:
    return nn.Parameter(torch.empty(spec.shape, dtype=making.dtype, device=making.device))
