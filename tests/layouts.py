"""A small configuration for any mesh, for tests that assemble a rank without a run folder or data."""

from typing import Any

from sirara.config.load import model_shape
from sirara.config.schema import RunConfig
from sirara.pure.families import ModelShape

SIZES: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 101, "max_seq": 16}


def small(
    *,
    family: str = "gpt2",
    train: dict[str, Any] | None = None,
    mesh: dict[str, Any] | None = None,
    **top: Any,
) -> tuple[RunConfig, ModelShape]:
    """The configuration and the sizes of its model: 8 microbatches of 2 x 16 tokens."""
    config = RunConfig.model_validate(
        {
            "model": {"family": family, **SIZES},
            "data": {"train": [{"path": "no-such-folder"}], "seq_len": 16},
            "train": {"steps": 1, "global_batch": 16, "micro_batch": 2, **(train or {})},
            "mesh": mesh or {},
            **top,
        }
    )
    return config, model_shape(config, None)
