"""Which steps count for a time, whose parts are told, and whose memory is a stage's."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sirara.comm.world import Comms
from sirara.device import Device
from sirara.mesh import Mesh
from sirara.train.meter import COMPILED_WARM_STEPS, FACTS, PARTS, WARM_STEPS, Meter

CPU = Device(torch_device=torch.device("cpu"))
MIB = 1 << 20


def made(*, ranks: int = 1, pp: int = 1, compiled: bool = False, held: int = 0, device: Any = CPU) -> Meter:
    groups: Any = {f.name: SimpleNamespace(waited_s=0.0) for f in fields(Comms)}
    mesh = Mesh(pp=pp, dp=ranks // pp)
    return Meter(device, Comms(**groups), mesh, held_bytes=lambda: held, compiled=compiled)


def rows(meter: Meter, *others: dict[str, float]) -> np.ndarray:
    """This rank's facts, and those of others, which are alike but for what is given."""
    mine = dict(zip(FACTS, meter.facts, strict=True))
    return np.array([[{**mine, **changes}[name] for name in FACTS] for changes in ({}, *others)])


def play(
    meter: Meter, steps: int, *, step_s: Any = 1.0, data_s: float = 0.0, others: Any = (), work: Any = None
):
    """Steps in which nothing happens but what `work` does."""
    for n in range(steps):
        facts = rows(meter, *others)
        with meter.step():
            meter.lap()
            if work is not None:
                work()
            meter.lap()
            meter.hear(facts)
        meter.close_step(step_s=step_s(n + 1) if callable(step_s) else step_s, data_s=data_s)


@pytest.mark.parametrize(("compiled", "warm"), [(False, WARM_STEPS), (True, COMPILED_WARM_STEPS)])
def test_the_first_steps_and_those_that_are_watched_count_for_no_time(compiled: bool, warm: int) -> None:
    meter = made(compiled=compiled)
    # Steps are told apart by their time.
    play(meter, 20, step_s=float)
    assert meter.measured().steps == len([n for n in range(warm + 1, 21) if n not in (1, 2, 4, 8, 16)])


def test_a_step_beside_which_something_went_on_counts_for_no_time() -> None:
    meter = made()
    play(meter, 4)
    before = meter.measured().steps
    meter.disturb()
    play(meter, 1, step_s=100.0)
    assert (meter.measured().steps, meter.measured().step_s) == (before, 1.0)
    play(meter, 1)
    assert meter.measured().steps == before + 1


def test_a_step_that_waited_for_data_on_any_rank_counts_for_no_time() -> None:
    here = made()
    play(here, 7, data_s=0.5)
    assert here.measured().steps == 0
    there = made(ranks=2)
    play(there, 7, others=[{"data_s": 0.5}])
    # Of the last step the others have not told yet.
    assert there.measured().steps == 1


def test_the_time_is_the_median_of_the_steps_that_count() -> None:
    meter = made()
    play(meter, 12, step_s=lambda n: {3: 9.0, 5: 1.0, 6: 2.0, 7: 3.0}.get(n, 2.5))
    assert meter.measured().step_s == 2.5


def test_parts_are_those_of_the_rank_that_computed_longest() -> None:
    meter = made(ranks=2)
    slow = {"computation": 7.0, "tp": 0.5, "pipeline": 0.25, "dp": 0.125, "update": 1.0, "data_s": 0.0}
    play(meter, 12, others=[slow])
    assert meter.measured().parts_s == {name: slow[name] for name in PARTS}


def test_waits_are_taken_off_the_phase_that_they_are_in() -> None:
    meter = made()

    def work() -> None:
        meter._comms.tp.waited_s += 100.0
        meter._comms.pp.waited_s += 10.0
        meter._comms.dp.waited_s += 1.0

    play(meter, 1, work=work)
    found = dict(zip(FACTS, meter.facts, strict=True))
    assert found["tp"] == 100.0 and found["pipeline"] == 10.0
    assert found["computation"] == pytest.approx(-111.0, abs=0.5) and found["dp"] == pytest.approx(
        1.0, abs=0.5
    )


def test_a_stages_memory_is_that_of_its_rank_that_held_most() -> None:
    meter = made(ranks=4, pp=2)
    gib = float(1 << 30)
    own = {"peak_bytes": 1 * gib, "between_bytes": 0.5 * gib}
    others = [{**own, "peak_bytes": n * gib} for n in (3, 5, 4)]
    facts = rows(meter, *others)
    facts[0, :2] = gib, 0.5 * gib
    facts[:, FACTS.index("data_s")] = 0.0
    play(meter, 1)
    for _ in range(2):
        with meter.step():
            meter.lap()
            meter.lap()
            meter.hear(facts)
        meter.close_step(step_s=1.0, data_s=0.0)
    assert [(s.stage, s.rank, s.peak_bytes / gib) for s in meter.measured().stages] == [
        (0, 1, 3.0),
        (1, 2, 5.0),
    ]


def test_what_a_step_adds_is_seen_above_what_the_rank_is_known_to_hold() -> None:
    # What libraries and this test have allocated before is no part of the model.
    kept = torch.ones(3 * MIB)  # 12 MiB
    meter = made(held=12 * MIB)

    def work() -> None:
        x = torch.ones(8 * MIB)  # 32 MiB, long enough to be seen
        for _ in range(8):
            x = x.sqrt_()

    play(meter, 3, work=work)
    (stage,) = meter.measured().stages
    assert stage.between_bytes == pytest.approx(12 * MIB, abs=1 * MIB)
    assert stage.peak_bytes == pytest.approx(44 * MIB, abs=2 * MIB)
    assert kept.sum() == 3 * MIB


def test_a_device_that_does_not_count_has_no_memory_and_a_time_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sirara.train.meter._allocated_or_none", lambda device: None)
    meter = made()
    play(meter, 7)
    assert meter.measured().stages == () and meter.measured().step_s == 1.0
