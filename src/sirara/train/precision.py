"""train.precision -> dtypes of weights, of gradient sums, masters and optimizer state."""

from dataclasses import dataclass

import torch

from sirara.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`weights`: what forward and backward see.  `sums`: gradient sums, masters, moments."""

    weights: torch.dtype
    sums: torch.dtype


_TABLE = {
    "fp64": Precision(weights=torch.float64, sums=torch.float64),
    "fp32": Precision(weights=torch.float32, sums=torch.float32),
    "bf16": Precision(weights=torch.bfloat16, sums=torch.float32),
}


def precision_of(name: str) -> Precision:
    """Raises:  ConfigError for a precision that does not run yet."""
    if name not in _TABLE:
        raise ConfigError(f"train.precision={name} does not run yet; use one of {', '.join(_TABLE)}")
    return _TABLE[name]
