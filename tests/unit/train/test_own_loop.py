"""The standard loop is a user of Trainer like any other, and the example of an own loop runs."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from sirara.data.store import write_store
from sirara.train import loop
from sirara.train.own_loop import Trainer

ROOT = Path(__file__).parents[3]


def test_the_loop_uses_only_what_the_trainer_offers_to_everybody() -> None:
    tree = ast.parse(Path(loop.__file__).read_text())
    imported = {n.module: {a.name for a in n.names} for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    of_train = {module for module in imported if module and module.startswith("sirara.train")}
    assert of_train == {"sirara.train.own_loop", "sirara.train.saving", "sirara.train.step"}
    assert imported["sirara.train.step"] == {"StepResult"}
    assert imported["sirara.train.saving"] == {"GIVE_UP", "SAVE", "STOP"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "trainer")
            or (isinstance(node.value, ast.Attribute) and node.value.attr == "trainer")
        )
    }
    documented = {name for name in dir(Trainer) if not name.startswith("_")}
    documented |= {
        "state",
        "world",
        "device",
        "grade",
        "timings",
        "loss",
        "saves",
        "shape",
        "eval_sets",
        "deal",
        "stepper",
    }
    assert len(used) > 8 and used <= documented


def test_the_example_of_an_own_loop_stops_and_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_store(tmp_path / "store", [rng.integers(1, 30, 500)], vocab=30, eot=0)
    config = tmp_path / "sirara.yaml"
    config.write_text(
        f"schema: 1\nname: own\nrun_dir: {tmp_path / 'runs'}\n"
        "model: {family: llama, layers: 1, hidden: 32, heads: 2, vocab: 30, max_seq: 16}\n"
        f"data: {{train: [{{path: {tmp_path / 'store'}}}], seq_len: 8}}\n"
        "train: {steps: 10, global_batch: 4, micro_batch: 2}\n"
    )
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), str(config)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "from step 0" in first and "from step 10, exact" in again
    assert first.splitlines()[-1] == again.splitlines()[-1]


def test_dropout_keys_differ_by_step_and_microbatch_and_are_absent_without_dropout() -> None:
    def keys(step: int, dropout: float) -> dict | None:
        model = SimpleNamespace(dropout=dropout, attention_dropout=0.0)
        config = SimpleNamespace(seed=7, model=model)
        trainer = SimpleNamespace(config=config, state=SimpleNamespace(counters=SimpleNamespace(step=step)))
        return Trainer._keys(trainer, [0, 3])  # type: ignore[arg-type]

    first, second = keys(1, 0.1), keys(2, 0.1)
    assert first is not None and second is not None and list(first) == [0, 3]
    streams = {key.stream(0, "mlp") for made in (first, second) for key in made.values()}
    assert len(streams) == 4
    assert keys(1, 0.0) is None
