"""The public surface: which names there are, and that they cost nothing until used."""

import importlib
import subprocess
import sys

import pytest

import sirara
from sirara.cli.main import VERBS

NAMES = [
    *("PRESETS", "Batch", "Batches", "CheckpointError", "CheckpointManager", "CommError", "ConfigError"),
    *(
        "DataError",
        "Decoder",
        "EvalBatches",
        "Exit",
        "LayoutError",
        "ModelShape",
        "NumericError",
        "RunConfig",
    ),
    *(
        "RunFolder",
        "SiraraError",
        "StorageError",
        "Trainer",
        "__version__",
        "load_config",
        "model_shape",
        "train_run",
    ),
    "unit_specs",
]


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names_are_these():
    assert sirara.__all__ == NAMES
    assert dir(sirara) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_there(name):
    assert getattr(sirara, name) is not None


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'sirara' has no attribute 'nothing'"):
        getattr(sirara, "nothing")  # noqa: B009


def test_import_sirara_loads_none_of_its_rooms():
    assert {name for name in imported_by("import sirara") if name.startswith("sirara.")} == set()


@pytest.mark.parametrize(
    "room", ["errors", "events", "pure.families", "pure.order", "config.load", "config.run_folder"]
)
def test_rows_0_to_3_do_without_torch(room):
    assert "torch" not in imported_by(f"import sirara.{room}")


@pytest.mark.parametrize("verb", [verb for section in VERBS.values() for verb in section.values()])
def test_every_verb_is_where_the_command_line_looks_for_it(verb):
    module = importlib.import_module(f"sirara.cli.{verb.module}")
    assert hasattr(module, verb.attribute)
