"""Another attempt only where it can help."""

import pytest

from sirara.launch.crash import Failure
from sirara.launch.restart import Lost, decide


def lost(code=1, kind="ValueError", message="boom", step=0):
    return Lost(cause=Failure(rank=0, code=code, moment=0.0, kind=kind, message=message), committed_step=step)


def killed(step=0):
    return lost(code=-9, kind="", message="", step=step)


@pytest.mark.parametrize(
    ("history", "max_restarts", "stop", "restart", "why"),
    [
        ([killed()], 3, False, True, "restart 1 of 3"),
        ([killed(), killed()], 3, False, True, "restart 2 of 3"),
        ([killed()] * 4, 3, False, False, "all 3 restarts are used"),
        ([killed()], 0, False, False, "launch.max_restarts=0"),
        ([killed()], 3, True, False, "a stop was requested"),
        ([lost()], 3, False, True, "restart 1 of 3"),
        ([lost(), lost()], 3, False, False, "the same failure twice"),
        ([lost(step=10), lost(step=20)], 3, False, True, "restart 2 of 3"),
        ([lost(message="a"), lost(message="b")], 3, False, True, "restart 2 of 3"),
        ([lost(code=2, kind="ConfigError")], 3, False, False, "the configuration is wrong"),
        ([lost(code=65, kind="CheckpointError")], 3, False, False, "data or checkpoint are corrupt"),
        ([lost(code=17, kind="NumericError")], 3, False, False, "a numeric check failed"),
        ([lost(code=74, kind="StorageError")], 3, False, True, "restart 1 of 3"),
        ([lost(code=124, kind="CommTimeout")], 3, False, True, "restart 1 of 3"),
        ([lost(code=2, kind="")], 3, False, True, "restart 1 of 3"),
    ],
)
def test_decide(history, max_restarts, stop, restart, why):
    decision = decide(history, max_restarts=max_restarts, stop_requested=stop)
    assert decision.restart is restart
    assert why in decision.why
