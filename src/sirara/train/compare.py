"""The plan of an attempt, made and stored when it begins, beside what the attempt then measures.

Rank 0 plans in a thread of its own, so that no step waits for it, and whatever goes wrong there is written down
instead of a plan and ends nothing.  What is compared is plan/grading.py's matter, what is measured train/meter.py's.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sirara.config.schema import RunConfig
from sirara.errors import SiraraError
from sirara.plan.grading import Measured, RunGrade, grade, size_text, time_text
from sirara.plan.profile import Here
from sirara.plan.setting import setting_here
from sirara.plan.stored import Expected, How, add, expected_of, hardware_record, plan_record
from sirara.plan.verdict import Plan, plan
from sirara.pure.families import ModelShape

_log = logging.getLogger("sirara")

PATIENCE_S = 2.0
"""How long the end of an attempt waits for a plan that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a plan is made of.  device: its model.  dp, block: as they are, where the configuration says auto."""

    folder: Path
    number: int
    config: RunConfig
    shape: ModelShape
    kind: Literal["cpu", "cuda"]
    device: str
    ranks: int
    ranks_per_node: int
    dp: int
    block: int


class Comparison:
    """The plan of one attempt, and its grade.  On rank 0 alone.

    Args:  measured: what is known now.
    """

    def __init__(self, attempt: Attempt, measured: Callable[[], Measured]) -> None:
        self._attempt, self._measured = attempt, measured
        self._expected: Expected | None = None
        self._thread = threading.Thread(target=self._predict, name="plan of the attempt", daemon=True)
        self._thread.start()

    def grade(self, *, wait_s: float = 0.0) -> RunGrade | None:
        """How right the plan is so far; None while there is no plan.

        Args:  wait_s: how long to wait for the plan.
        """
        self._thread.join(wait_s)
        expected = self._expected
        return None if expected is None or expected.reason else grade(expected, self._measured())

    def close(self) -> None:
        """Lets the planning end, so that nothing is written after it."""
        self._thread.join(PATIENCE_S)

    def _predict(self) -> None:
        a = self._attempt
        try:
            fields = _foretold(a)
        except SiraraError as error:
            fields = _reason(a, error.what)
        except Exception as error:  # noqa: BLE001 - a run needs no plan
            fields = _reason(a, f"{type(error).__name__}: {error}")
        if "reason" in fields:
            _log.warning("this attempt has no plan to be held against: %s", fields["reason"])
        try:
            add(a.folder, a.number, **fields)
        except OSError as error:
            _log.warning("the plan of this attempt could not be stored: %s", error)
        self._expected = expected_of({"attempt": a.number, **fields})


def _foretold(a: Attempt) -> dict[str, Any]:
    """The fields of the attempt's entry in plan.json."""
    setting, here = setting_here(a.kind, workers=a.ranks, per_node=min(a.ranks, a.ranks_per_node))
    # What auto stands for is known by now; the planner must not choose again.
    mesh = a.config.mesh.model_copy(update={"dp": a.dp, "block": a.block})
    found = plan(a.config.model_copy(update={"mesh": mesh}), a.shape, setting, dp=a.dp)
    _tell(found, here)
    return {
        "hardware": hardware_record(a.device, here.accelerator.name, how_of(here), here.why),
        "plan": plan_record(found),
    }


def how_of(here: Here) -> How:
    """Whether figures are of this machine, of its kind, or of another one."""
    if here.how == "profile":
        return "profile"
    return "placeholder" if here.stand_in else "shipped"


def _reason(a: Attempt, why: str) -> dict[str, Any]:
    return {"hardware": hardware_record(a.device, "", "placeholder", ""), "reason": why}


def _tell(found: Plan, here: Here) -> None:
    busiest, capacity = found.held.busiest, found.setting.capacity_bytes
    if not found.fits:
        _log.warning(
            "the planner expects %s on stage %d, and the device has %s",
            size_text(found.device_bytes),
            busiest.rank,
            size_text(capacity),
        )
    _log.info(
        "planned: at most %s allocated, on stage %d; a step in %s (%s: %s)",
        size_text(found.allocated_bytes),
        busiest.rank,
        time_text(found.step_s),
        here.accelerator.name,
        here.why,
    )
