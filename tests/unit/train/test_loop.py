"""The order of things between two steps: what a kill in between must not lose."""

from types import SimpleNamespace
from typing import Any

import pytest

from sirara.train.loop import _run


class Killed(BaseException):
    pass


def test_a_kill_right_after_a_commit_leaves_the_record_of_the_step() -> None:
    # The resumed run begins behind that step: nobody would write its loss a second time.
    written: list[int] = []
    trainer: Any = SimpleNamespace(step=0)

    def train_step(*, request: int) -> Any:
        trainer.step += 1
        return SimpleNamespace(skipped=False, request=request)

    def save() -> Any:
        raise Killed

    trainer.train_step, trainer.save = train_step, save
    journal: Any = SimpleNamespace(step=lambda result, evals: written.append(trainer.step))
    config: Any = SimpleNamespace(
        train=SimpleNamespace(steps=9, eval_every=None), checkpoint=SimpleNamespace(every=2)
    )
    with pytest.raises(Killed):
        _run(config, trainer, journal, lambda: "")
    assert written == [1, 2]
