"""Steps that stay for another reason than being the last: pinned ones and the best one, over attempts as well."""

from types import SimpleNamespace
from typing import Any

from sirara.checkpoint.pins import pin, unpin
from sirara.checkpoint.steps import step_name
from sirara.config.run_folder import RunFolder
from sirara.events import JsonLines
from sirara.train.own_loop import Trainer
from tests.checkpoints import even, manager, plan_of, ranges_of, save, small_state

METRIC = "eval/held/loss"


def save_by(m, step: int) -> None:
    state = small_state(step)
    boxes = even(state, 1)
    m.save(
        step,
        plan=plan_of(state, boxes),
        ranges=ranges_of(state, boxes, 0),
        record={"step": step},
        hf_files={},
        aliases={},
    )


def test_the_best_step_stays_until_a_better_one_is_verified(tmp_path):
    m = manager(tmp_path, keep_last=1, keep_best=METRIC)
    kept = []
    for step, score in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.0), (5, float("nan")), (6, 1.0)):
        m.scores[step] = score
        save_by(m, step)
        kept.append(m.newest())
    assert kept == [[1], [2], [3, 2], [4], [5, 4], [6]]


def test_a_pinned_step_stays_until_it_is_unpinned(tmp_path):
    save(tmp_path, 1, small_state(1), keep_last=1)
    pin(tmp_path / step_name(1), note="for the paper")
    for step in (2, 3):
        save(tmp_path, step, small_state(step), keep_last=1)
    assert manager(tmp_path).newest() == [3, 1]
    unpin(tmp_path / step_name(1))
    save(tmp_path, 4, small_state(4), keep_last=1)
    assert manager(tmp_path).newest() == [4]


def test_a_resumed_run_remembers_the_scores_of_the_steps_that_it_goes_on_from(tmp_path):
    run = RunFolder(tmp_path)
    with JsonLines(run.events, attempt=1) as events, JsonLines(run.metrics, attempt=1) as metrics:
        events.append({"kind": "start"})
        for step, score in ((1, 3.0), (2, 1.5), (3, None), (4, 2.0)):
            metrics.append({"step": step, **({METRIC: score} if score else {})})
    with JsonLines(run.events, attempt=2) as events, JsonLines(run.metrics, attempt=2) as metrics:
        events.append({"kind": "resume", "from_step": 2})
        metrics.append({"step": 3, METRIC: 1.75})

    def remembered(*, rank: int = 0, keep_best: str | None = METRIC) -> dict[int, float]:
        trainer: Any = SimpleNamespace(
            config=SimpleNamespace(checkpoint=SimpleNamespace(keep_best=keep_best)),
            world=SimpleNamespace(rank=rank),
            run=run,
            manager=SimpleNamespace(scores={}),
        )
        Trainer._remember_scores(trainer)
        return trainer.manager.scores

    assert remembered() == {1: 3.0, 2: 1.5, 3: 1.75}  # step 4 belonged to a branch that was left
    assert remembered(rank=1) == remembered(keep_best=None) == {}
