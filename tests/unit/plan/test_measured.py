"""Steps made of measured times: sums that can be done by hand, and formulas where a unit was not measured."""

from dataclasses import replace

import pytest

from sirara.config.schema import OffloadConfig, RunConfig
from sirara.plan.exact import configured
from sirara.plan.hardware import find
from sirara.plan.layouts import NOTHING, SELECTIVE, Space, whole_space
from sirara.plan.profile import Move, Profile, Rate, signature_of, this_machine
from sirara.plan.search import search
from sirara.plan.setting import Setting, setting_here
from sirara.plan.verdict import FORMULA, RATES, UNITS, plan
from sirara.pure.shape import ModelShape
from tests.unit.plan.test_profile import profile, unit

SHAPE = ModelShape(family="llama", layers=4, hidden=64, heads=4, vocab=256, max_seq=128)


def config(**changed) -> RunConfig:
    mesh = changed.pop("mesh", {})
    train = {"steps": 1, "global_batch": 4, "micro_batch": 1, "precision": "fp32"} | changed
    return RunConfig.model_validate(
        {
            "schema": 1,
            "name": "x",
            "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "max_seq": 128},
            "data": {"train": [{"path": "none"}], "seq_len": 128},
            "train": {**train, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "mesh": {"dp": 1, "zero": 0} | mesh,
            "launch": {"threads": 1},
        }
    )


def measured(**changed) -> Profile:
    """Two cores; everything but units is so fast that it counts for nothing."""
    times = {"embed": (0.001, 0.002), "block": (0.01, 0.02), "head": (0.03, 0.001)}
    known = {"signature": signature_of(SHAPE)}
    fast = {"add fp32", "copy fp32", "norm fp32", "update adamw fp32"}
    found = profile(
        replace(this_machine("cpu"), cores=2),
        units=tuple(unit(n, forward=f, backward=b, **known) for n, (f, b) in times.items()),
        rates=tuple(Rate(kind=k, processes=1, per_s=1e15) for k in fast),
        moves=tuple(
            Move(kind=k, ranks=2, across=False, bytes=1 << 40, seconds=1e-9)
            for k in ("exchange", "rows", "letter")
        ),
        crowd={1: 1.0, 2: 1.0},
    )
    return replace(found, **changed)


def planned(c: RunConfig, p: Profile | None, workers: int = 1):
    setting, _ = setting_here("cpu", workers=workers, env={"SIRARA_PROFILE": "none"})
    there = Setting(cluster=setting.cluster, table=setting.table, constants=setting.constants, profile=p)
    return plan(c, SHAPE, there, dp=c.mesh.dp if isinstance(c.mesh.dp, int) else 1)


ONE = 4 * (0.001 + 0.002 + 4 * 0.03 + 0.031)
"""Seconds of four microbatches on one rank."""


def test_one_rank_takes_the_sum_of_its_units():
    found = planned(config(), measured())
    assert found.how == UNITS
    assert found.step_s == pytest.approx(ONE, abs=2e-3)
    assert sum(float(v[0]) for v in found.times.exposed().values()) == pytest.approx(found.step_s)


def test_full_recompute_adds_a_forward_of_each_block():
    found = planned(config(recompute="full"), measured())
    assert found.step_s == pytest.approx(ONE + 4 * 4 * 0.01, abs=2e-3)
    assert float(found.times.recompute[0]) == pytest.approx(0.16, rel=0.01)


def test_data_parallel_ranks_with_a_core_each_halve_the_step_and_beyond_the_cores_work_adds_up():
    two = planned(config(mesh={"dp": 2, "zero": 1}), measured(), 2).step_s
    four = planned(config(mesh={"dp": 4, "zero": 1}), measured(), 4).step_s
    assert two == pytest.approx(ONE / 2, abs=2e-3)
    assert four == pytest.approx(ONE / 2, abs=4e-3)


def test_a_pipeline_waits_for_its_slower_stage_and_on_one_core_for_both():
    c = config(mesh={"pp": 2, "split": [2, 2]})
    wide = planned(c, measured(), 2)
    assert ONE / 2 < wide.step_s < ONE and float(wide.times.bubble[0]) > 0
    narrow = planned(c, measured(crowd={1: 1.0, 2: 2.0}), 2)
    assert narrow.step_s == pytest.approx(ONE, rel=0.01)


def test_exchanges_and_updates_take_what_was_measured():
    slow = tuple(replace(m, seconds=2.0, bytes=1) for m in measured().moves if m.kind == "exchange")
    rest = tuple(m for m in measured().moves if m.kind != "exchange")
    c = config(mesh={"dp": 2, "zero": 1})
    found = planned(c, measured(moves=(*rest, *(replace(m, bytes=1 << 40) for m in slow))), 2)
    # A reduction and a publication of each group; each exchange takes two seconds whatever its bytes.
    groups = 2 * 4 + 3
    assert float(found.times.dp[0]) == pytest.approx(2 * 2.0 * groups, rel=0.01)


@pytest.mark.parametrize("changed", [{"micro_batch": 2}, {"precision": "bf16"}, {"recompute": "selective"}])
def test_what_was_not_measured_is_a_formula(changed):
    assert planned(config(**changed), measured()).how == RATES
    assert planned(config(**changed), None).how == FORMULA


def test_a_search_ranks_by_measured_times_where_there_are_some():
    # Formulas say that making things again costs time; here it was measured to save much.
    again = replace(
        unit("block", forward=0.01, backward=0.001, signature=signature_of(SHAPE)), recompute="selective"
    )
    p = measured()
    there = replace(p, units=(*p.units, again))
    setting, _ = setting_here("cpu", workers=2, env={"SIRARA_PROFILE": "none"})
    base = config(mesh={"dp": "auto"})
    space = Space(precision=("fp32",),
        gpus=2, pp=(1, 2), tp=(1,), zero=(0, 1), micro_batch=(1,), sequence_parallel=(0,),
        recompute=((0, 1.0), (SELECTIVE, 1.0), (64, 1.0)),
    )  # fmt: skip
    by_formula = search(base, SHAPE, setting, space)
    by_units = search(base, SHAPE, replace(setting, profile=there), space)
    assert by_formula.best_words["recompute"] == "none" and by_units.best_words["recompute"] == "selective"
    assert by_units.best.how == UNITS
    for other in by_units.alternatives:
        c = configured(base, other.overrides)
        exact = plan(c, SHAPE, replace(setting, profile=there), dp=c.mesh.dp)
        assert exact.how == UNITS and other.step_s == pytest.approx(exact.step_s)
        # Layouts that take the same time to a thousandth are ranked by memory.
        assert other.step_s >= by_units.best.step_s * 0.999


def test_a_search_for_a_cpu_offloads_nothing_to_itself():
    accelerator = find("cpu")
    assert whole_space(config(), SHAPE, accelerator, 2).offload == (NOTHING,)
    assert len(whole_space(config(), SHAPE, find("h100-sxm"), 2).offload) == 6
    there = config().model_copy(update={"offload": OffloadConfig(optimizer="host")})
    assert planned(there, measured()).how != UNITS


def test_formulas_beside_measured_times_are_as_far_off_as_those_were():
    # Units a thousand times as slow as the formulas' have them, for one size of microbatch.
    p = measured()
    slow = tuple(replace(u, forward_s=50 * u.forward_s, light_s=50 * u.light_s, backward_s=50 * u.backward_s,
                         input_s=50 * u.input_s, weight_s=50 * u.weight_s) for u in p.units)  # fmt: skip
    setting, _ = setting_here("cpu", workers=2, env={"SIRARA_PROFILE": "none"})
    there = replace(setting, profile=replace(p, units=slow))
    base = config(mesh={"dp": "auto"})
    space = Space(
        gpus=2,
        pp=(1, 2),
        tp=(1,),
        zero=(0, 1),
        micro_batch=(1, 2),
        sequence_parallel=(0,),
        precision=("fp32",),
    )
    found = search(base, SHAPE, there, space)
    formulas = [a for a in found.alternatives if a.words["micro_batch"] == "2"]
    assert formulas and not any(a.measured for a in formulas)
    assert all(0.2 < a.step_s / found.best.step_s < 5 for a in formulas)
    best = plan(configured(base, found.best_overrides), SHAPE, there, dp=2)
    assert found.best.how == best.how == UNITS or found.best.step_s > 20 * best.step_s
