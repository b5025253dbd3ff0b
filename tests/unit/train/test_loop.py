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
    trainer: Any = SimpleNamespace(step=0, timings={})

    def train_step(*, request: int) -> Any:
        trainer.step += 1
        return SimpleNamespace(skipped=False, request=request)

    def save(**_: Any) -> Any:
        raise Killed

    trainer.train_step = train_step
    trainer.saves = SimpleNamespace(
        begin=save, wish=lambda **_: 0, ended=list, due=lambda **_: ("disk",) if trainer.step == 2 else ()
    )
    journal: Any = SimpleNamespace(
        step=lambda result, evals: written.append(trainer.step), saves=lambda outcomes: None
    )
    config: Any = SimpleNamespace(
        train=SimpleNamespace(steps=9, eval_every=None), checkpoint=SimpleNamespace(every=2)
    )
    with pytest.raises(Killed):
        _run(config, trainer, journal, lambda: "")
    assert written == [1, 2]
