"""Exact resume: any data-parallel degree and ZeRO stage, killed between any two steps, continued in any other layout.

The oracle is one process that trains without interruption; a batch has 12 microbatches, so that 1, 2, 3 and 4 ranks
all have different shares.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from sirara.comm.world import World
from sirara.config.load import load
from sirara.config.run_folder import RunFolder
from sirara.data.store import write_store
from sirara.errors import CheckpointError
from sirara.train.own_loop import Trainer
from tests.harness import run_ranks

VOCAB, STEPS, CUT = 67, 5, 2
LAYOUTS = [(dp, zero) for dp in (1, 2, 3, 4) for zero in (0, 1)]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("data") / "store"
    # So short that the run crosses epochs and meets short last samples.
    write_store(folder, [rng.integers(1, VOCAB, n) for n in (150, 3, 88, 260)], vocab=VOCAB, eot=0)
    return folder


def settings(home: Path, store: Path, **changes: Any) -> dict[str, Any]:
    return {
        "home": str(home),
        "store": str(store),
        "precision": "fp32",
        "optimizer": "adamw",
        "dropout": 0.1,
        "family": "llama",
        "tie": True,
    } | changes


def open_trainer(given: dict[str, Any], zero: int, attempt: int) -> Trainer:
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    home = Path(given["home"])
    file = home / f"{rank}-{attempt}.yaml"
    file.write_text(f"""
schema: 1
name: exact
run_dir: {home}
model:
  family: {given["family"]}
  layers: 2
  hidden: 32
  heads: 4
  vocab: {VOCAB}
  max_seq: 16
  dropout: {given["dropout"]}
  tie_embeddings: {str(given["tie"]).lower()}
data: {{train: [{{path: {given["store"]}}}], seq_len: 8}}
train:
  steps: {STEPS}
  global_batch: 24
  micro_batch: 2
  precision: {given["precision"]}
  optimizer: {{name: {given["optimizer"]}, lr: 1e-2}}
  lr_schedule: {{name: cosine, warmup_steps: 2}}
mesh: {{zero: {zero}}}
""")
    run = RunFolder(home / "exact-00000000")
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return Trainer(load(file).config, run, attempt=attempt, world=world)


def begin(home: Path) -> None:
    run = home / "exact-00000000"
    (run / "checkpoints").mkdir(parents=True)
    (run / "control" / "attempts").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"run": run.name}))


def part(given: dict[str, Any], zero: int, resume: bool, until: int, attempt: int = 0) -> dict[str, Any]:
    """Trains to step `until` on the ranks of the current group, saving there; then forgets everything."""
    trainer = open_trainer(given, zero, attempt)
    try:
        restored = trainer.resume().step if resume else trainer.start()
        losses = []
        while trainer.step < until:
            result = trainer.train_step()
            losses.append((trainer.step, result.loss.hex(), result.grad_norm.hex()))
        digest = str(trainer.save())
        return {
            "from": restored,
            "losses": losses,
            "digest": digest,
            "grade": str(trainer.grade),
            "samples": trainer.batches.ids_digest(trainer.state.counters.samples, 24),
        }
    finally:
        trainer.end(clean=True)


def on(dp: int, *args: Any) -> dict[str, Any]:
    if dp == 1:
        return part(*args)
    values = run_ranks(dp, part, *args)
    assert all(value == values[0] for value in values)
    return values[0]


@pytest.fixture(scope="session")
def oracle(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, dict[str, Any]] = {}

    def get(**changes: Any) -> dict[str, Any]:
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            home = tmp_path_factory.mktemp("oracle")
            begin(home)
            known[key] = part(settings(home, store, **changes), 0, False, STEPS)
        return known[key]

    return get


@pytest.mark.parametrize(("dp", "zero"), LAYOUTS)
def test_every_layout_and_its_resume_in_another_has_the_bits_of_one_process(
    dp: int, zero: int, store: Path, oracle: Any, tmp_path: Path
) -> None:
    given = settings(tmp_path, store)
    begin(tmp_path)
    expected = oracle()
    first = on(dp, given, zero, False, CUT)
    # The next layout in the list continues: another degree or another stage each time.
    other_dp, other_zero = LAYOUTS[(LAYOUTS.index((dp, zero)) + 3) % len(LAYOUTS)]
    second = on(other_dp, given, other_zero, True, STEPS)
    assert first["losses"] + second["losses"] == expected["losses"]
    assert second["digest"] == expected["digest"]
    assert (second["from"], second["grade"]) == (CUT, "exact")


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "fp64", "tie": False},
        {"optimizer": "lion", "precision": "bf16"},
        {"family": "gpt2"},
        {"family": "bloom"},
        {"family": "qwen3", "dropout": 0.0},
    ],
)
def test_other_precisions_optimizers_and_families_resume_exactly(
    changes: dict[str, Any], store: Path, oracle: Any, tmp_path: Path
) -> None:
    given = settings(tmp_path, store, **changes)
    begin(tmp_path)
    first = on(3, given, 1, False, CUT)
    second = on(2, given, 0, True, STEPS)
    expected = oracle(**changes)
    assert first["losses"] + second["losses"] == expected["losses"]
    assert second["digest"] == expected["digest"]


def withheld(given: dict[str, Any], what: str, checked: bool) -> dict[str, Any]:
    """A resume in which one restored item is put back to its initial value."""
    trainer = open_trainer(given, 1, 1)
    state, load = trainer.state, trainer.state.load

    def load_without(snapshot: Any, **options: Any) -> None:
        load(snapshot, **options)
        if what in ("updates", "samples", "step"):
            setattr(state.counters, what, 0)
        elif what == "weights":
            state.zero.groups[1].weights_P[:8] = 0.5
        else:
            state.zero.groups[1].state[what].zero_()

    # TrainState has slots; the trainer reaches it by attribute.
    trainer.state = _Withholding(state, load_without)  # type: ignore[assignment]
    if not checked:
        trainer.state.digest = lambda: trainer.manager.open(CUT).record["digest"]  # type: ignore[method-assign]
        trainer.manager.open(CUT)
    try:
        trainer.resume()
        losses = []
        while trainer.state.counters.step < STEPS and len(losses) < STEPS - CUT:
            result = trainer.train_step()
            losses.append(result.loss.hex())
        return {"losses": losses, "digest": str(state.digest())}
    finally:
        if hasattr(trainer, "batches"):
            trainer.end(clean=True)


class _Withholding:
    def __init__(self, state: Any, load: Any) -> None:
        self.__dict__.update(inner=state, load=load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("what", ["weights", "exp_avg", "exp_avg_sq", "updates", "samples"])
def test_a_resume_without_one_of_its_items_is_noticed(
    what: str, store: Path, oracle: Any, tmp_path: Path
) -> None:
    given = settings(tmp_path, store)
    begin(tmp_path)
    on(1, given, 1, False, CUT)
    if what in ("weights", "exp_avg", "exp_avg_sq"):
        # The digest of the live tensors, and with that check out of the way, the numbers themselves.
        with pytest.raises(CheckpointError, match="not the state that was saved"):
            withheld(given, what, True)
        broken = withheld(given, what, False)
    elif what == "samples":
        with pytest.raises(CheckpointError, match="the data state is that of sample 48"):
            withheld(given, what, True)
        return
    else:
        broken = withheld(given, what, True)
    expected = oracle()
    assert broken["digest"] != expected["digest"]
    assert broken["losses"] != [loss for _, loss, _ in expected["losses"][CUT:]]


def poisoned(trainer: Trainer) -> Any:
    """One step whose reduced gradient has a NaN."""
    zero = trainer.stepper.stage.zero
    reduce = zero.reduce

    def reduce_and_spoil() -> Any:
        shards = reduce()
        shards[0][0] = float("nan")
        return shards

    zero.reduce = reduce_and_spoil  # type: ignore[method-assign]
    try:
        return trainer.train_step()
    finally:
        zero.reduce = reduce  # type: ignore[method-assign]


def test_a_skipped_step_takes_samples_and_no_rate_and_a_resume_knows_it(store: Path, tmp_path: Path) -> None:
    given = settings(tmp_path, store)
    begin(tmp_path)
    trainer = open_trainer(given, 1, 0)
    trainer.start()
    # Beyond the warm-up, where the rate of every update differs.
    trainer.train_step()
    trainer.train_step()
    before, rate, pool = str(trainer.digest()), trainer.lr, trainer.stepper.stage.zero.pool
    assert poisoned(trainer).skipped
    counters = trainer.state.counters
    assert (counters.step, counters.updates, counters.skipped, counters.samples) == (3, 2, 1, 72)
    assert (str(trainer.digest()), trainer.lr) == (before, rate)
    assert sum(t.nbytes for buffers in pool.free.values() for t in buffers) == pool.bytes_made
    trainer.save()
    expected = [trainer.train_step().loss for _ in range(2)]
    digest = str(trainer.digest())
    trainer.end(clean=True)

    again = open_trainer(given, 1, 1)
    assert (again.resume().step, again.lr, again.state.counters.updates) == (3, rate, 2)
    assert [again.train_step().loss for _ in range(2)] == expected
    assert str(again.digest()) == digest
    again.end(clean=True)


def save_twice(given: dict[str, Any]) -> None:
    trainer = open_trainer(given, 1, 0)
    try:
        trainer.start()
        for _ in range(CUT):
            trainer.train_step()
            trainer.save()
    finally:
        trainer.end(clean=True)


def resume_while_rank_0_clears(given: dict[str, Any]) -> int:
    """A resume in which the other ranks listed the steps before rank 0 put back the newest one."""
    trainer = open_trainer(given, 1, 1)
    if trainer.world.rank > 0:
        trainer.manager.newest = lambda: [CUT - 1]  # type: ignore[method-assign]
    try:
        return trainer.resume().step
    finally:
        if hasattr(trainer, "batches"):
            trainer.end(clean=True)


def test_ranks_that_see_other_steps_resume_from_that_of_rank_0(store: Path, tmp_path: Path) -> None:
    # Each rank took the newest step of its own list, and the mixture was no state that had been saved.
    given = settings(tmp_path, store)
    begin(tmp_path)
    run_ranks(2, save_twice, given)
    assert run_ranks(2, resume_while_rank_0_clears, given) == [CUT, CUT]


def test_a_changed_recipe_is_graded_close_and_says_what_changed(store: Path, tmp_path: Path) -> None:
    given = settings(tmp_path, store)
    begin(tmp_path)
    on(1, given, 1, False, CUT)
    second = on(1, given | {"dropout": 0.2}, 1, True, STEPS)
    assert second["grade"] == "close (model.dropout 0.1 -> 0.2)"


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_precision_continues_from_the_full_precision_values(
    before: str, after: str, store: Path, tmp_path: Path
) -> None:
    given = settings(tmp_path, store, precision=before)
    begin(tmp_path)
    on(1, given, 1, False, CUT)
    second = on(2, given | {"precision": after}, 1, True, STEPS)
    assert second["grade"] == f"close (train.precision {before} -> {after})"
    assert second["from"] == CUT
