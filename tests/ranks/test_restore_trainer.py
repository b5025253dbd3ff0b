"""A trainer that dies goes on from the memory of its node; weights of another run go into a larger model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sirara.checkpoint.reader import Snapshot
from sirara.config.load import weights_folder
from sirara.config.schema import RunConfig
from sirara.errors import CheckpointError
from sirara.train.own_loop import Trainer
from tests.harness import run_ranks
from tests.parity import layouts
from tests.parity.layouts import PLAIN, make_run, make_store, open_trainer

BASE = PLAIN | {"family": "llama", "microbatches": 4, "precision": "fp32"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_store(folder)
    return folder


class Tiers:
    """While it is entered, trainers are opened with these settings."""

    def __init__(self, **changes: Any) -> None:
        self.changes, self.plain = changes, layouts.config_of

    def __enter__(self) -> None:
        def config_of(*args: Any) -> RunConfig:
            fields = self.plain(*args).model_dump(mode="json", by_alias=True)
            for section, values in self.changes.items():
                fields[section] = fields[section] | values
            return RunConfig.model_validate(fields)

        layouts.config_of = config_of

    def __exit__(self, *_: object) -> None:
        layouts.config_of = self.plain


def memory(home: str) -> dict[str, Any]:
    tiers = [{"tier": "memory", "every": 1, "path": f"{home}/shm-{{node}}"}, {"tier": "disk", "every": 2}]
    return {"checkpoint": {"tiers": tiers, "every": 2, "async": True}}


def die_at_3(case: Any, stores: str, home: str) -> list[str]:
    with Tiers(**memory(home)):
        trainer = open_trainer(case, Path(stores), 4, home=Path(home), attempt=1)
    trainer.start()
    digests = []
    while trainer.step < 3:
        trainer.train_step()
        trainer.saves.begin(patient=True)
        trainer.saves.wait()
        digests.append(str(trainer.digest()))
    trainer.batches.close()
    trainer.manager.close(clean=False)
    return digests


def go_on(case: Any, stores: str, home: str, attempt: int) -> tuple[int, str, list[str]]:
    with Tiers(**memory(home)):
        trainer = open_trainer(case, Path(stores), 4, home=Path(home), attempt=attempt)
    restored = trainer.resume()
    digest = str(trainer.digest())
    trainer.batches.close()
    trainer.manager.close(clean=False)
    return restored.step, digest, [str(row) for row in restored.table]


@pytest.mark.parametrize("zero", [1, 3])
def test_processes_that_die_lose_no_step_that_memory_has(stores: Path, tmp_path: Path, zero: int) -> None:
    make_run(tmp_path)
    case = BASE | {"dp": 2, "zero": zero}
    digests = run_ranks(2, die_at_3, case, str(stores), str(tmp_path), deadline_s=120)[0]
    committed = [p.name for p in (tmp_path / "parity-00000000" / "checkpoints").iterdir() if p.name[0] == "s"]
    assert committed == ["step-000000002"]
    step, digest, table = run_ranks(2, go_on, case, str(stores), str(tmp_path), 2, deadline_s=120)[0]
    assert (step, digest) == (3, digests[2]), table
    assert any("memory" in row and "taken" in row for row in table)


def take_weights(case: Any, stores: str, home: str, source: str, options: dict[str, Any]) -> Any:
    trainer: Trainer = open_trainer(case, Path(stores), 4, home=Path(home))
    trainer.start()
    before = tensors(trainer)
    try:
        report = trainer.load_weights(source, **options)
    except CheckpointError as error:
        return error.what
    finally:
        trainer.batches.close()
    trainer.state.check_replicas()
    after = tensors(trainer)
    changed = sorted(n for n in after if not (after[n] == before[n]).all())
    return report, changed, str(trainer.digest())


def tensors(trainer: Trainer) -> dict[str, Any]:
    return {f"{r.tensor}{r.boxes}": r.data.clone() for r in trainer.state.ranges()}


def save_one(case: Any, stores: str, home: str) -> str:
    trainer = open_trainer(case, Path(stores), 4, home=Path(home))
    trainer.start()
    trainer.train_step()
    trainer.save()
    trainer.batches.close()
    return str(trainer.run.path)


def test_a_run_can_be_what_a_model_begins_from(stores: Path, tmp_path: Path) -> None:
    make_run(tmp_path)
    run = Path(save_one(BASE, str(stores), str(tmp_path)))
    step = run / "checkpoints" / "step-000000001"
    assert weights_folder(run) == weights_folder(step) == step
    assert weights_folder(tmp_path) == tmp_path
    with Tiers(model={"from": str(run)}):
        trainer = open_trainer(BASE, stores, 4)
    trainer.start()
    saved = Snapshot(step)
    assert all(
        torch.equal(r.data.view(-1), saved.read(r.tensor).view(-1))
        for r in trainer.state.ranges()
        if "/" not in r.tensor
    )
    trainer.batches.close()


def test_weights_of_a_run_are_taken_by_another_layout_strictly(stores: Path, tmp_path: Path) -> None:
    home, other = tmp_path / "a", tmp_path / "b"
    for folder in (home, other):
        folder.mkdir()
        make_run(folder)
    source = save_one(BASE, str(stores), str(home))
    case = BASE | {"dp": 2, "zero": 2}
    for report, changed, _ in run_ranks(2, take_weights, case, str(stores), str(other), source, {}):
        assert report.missing == report.unexpected == report.left == ()
        assert changed and all("/" not in name for name in changed)
    layer = {"names": ["model.layers.0.*"]}
    answers = run_ranks(2, take_weights, case, str(stores), str(other), source, layer)
    assert all(name.startswith("model.layers.0.") for _, changed, _ in answers for name in changed)
    assert len(answers[0][0].left) > 0
    untied = case | {"tied": False, "family": "qwen3"}
    said = run_ranks(2, take_weights, untied, str(stores), str(other), source, {})
    assert all("the weights do not match" in what and "missing: " in what for what in said)
