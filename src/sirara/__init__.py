"""Sirara trains large models with PyTorch and goes on with the same numbers wherever a run is continued.

The public names are loaded on first use, so `import sirara` costs no torch. Everything else is reached
through its room (`sirara.train.loop`, `sirara.checkpoint.manager`, ...) and may change between versions.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sirara.checkpoint.manager import CheckpointManager
    from sirara.config.load import load as load_config
    from sirara.config.load import model_shape
    from sirara.config.run_folder import RunFolder
    from sirara.config.schema import RunConfig
    from sirara.data.batches import Batch, Batches, EvalBatches
    from sirara.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        DataError,
        Exit,
        LayoutError,
        NumericError,
        SiraraError,
        StorageError,
    )
    from sirara.model.decoder import Decoder
    from sirara.pure.families import PRESETS, ModelShape, unit_specs
    from sirara.train.loop import train as train_run
    from sirara.train.own_loop import Trainer

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Batch",
    "Batches",
    "CheckpointError",
    "CheckpointManager",
    "CommError",
    "ConfigError",
    "DataError",
    "Decoder",
    "EvalBatches",
    "Exit",
    "LayoutError",
    "ModelShape",
    "NumericError",
    "RunConfig",
    "RunFolder",
    "SiraraError",
    "StorageError",
    "Trainer",
    "__version__",
    "load_config",
    "model_shape",
    "train_run",
    "unit_specs",
]

# A function named `train` would be shadowed by the room `sirara.train` as soon as that is imported.
_HOMES = {
    "PRESETS": "pure.families:PRESETS",
    "Batch": "data.batches:Batch",
    "Batches": "data.batches:Batches",
    "CheckpointManager": "checkpoint.manager:CheckpointManager",
    "Decoder": "model.decoder:Decoder",
    "EvalBatches": "data.batches:EvalBatches",
    "ModelShape": "pure.families:ModelShape",
    "RunConfig": "config.schema:RunConfig",
    "Trainer": "train.own_loop:Trainer",
    "RunFolder": "config.run_folder:RunFolder",
    "load_config": "config.load:load",
    "model_shape": "config.load:model_shape",
    "train_run": "train.loop:train",
    "unit_specs": "pure.families:unit_specs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sirara' has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, f"errors:{name}").partition(":")
    value = getattr(import_module(f"sirara.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
