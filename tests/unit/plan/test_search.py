"""The search finds what enumeration finds, quickly, and says why the rest is left out."""

import os
from dataclasses import replace

import numpy as np
import pytest

from sirara.config.schema import RunConfig
from sirara.errors import PlanError, SiraraError
from sirara.plan.constants import fitted
from sirara.plan.exact import configured
from sirara.plan.explain_search import search_record, search_text
from sirara.plan.from_config import cluster_of
from sirara.plan.hardware import find, table
from sirara.plan.layouts import NEEDED, Space, inner, outers, overrides_of, runnable_space, whole_space
from sirara.plan.residuals import memory_margins
from sirara.plan.search import search
from sirara.plan.table import evaluated
from sirara.plan.verdict import Setting, plan
from sirara.pure.families import PRESETS

SHAPE = PRESETS["llama2-7b"]


def config(**train) -> RunConfig:
    numerics = train.pop("numerics", "exact")
    return RunConfig.model_validate(
        {
            "numerics": numerics,
            "model": {"preset": "llama2-7b"},
            "data": {"train": [{"path": "none"}], "seq_len": 2048},
            "train": {"steps": 10, "global_batch": 64, "micro_batch": 1, "precision": "bf16", **train},
        }
    )


def setting(gpus: int, gpu: str = "a100-80gb", **more) -> Setting:
    accelerator = find(gpu)
    return Setting(
        cluster=cluster_of(accelerator, gpus=gpus), table=table([accelerator]), constants=fitted(), **more
    )


SMALL = Space(
    gpus=8, pp=(1, 2, 4), tp=(1, 2, 4), zero=(0, 1, 3), micro_batch=(1, 2), sequence_parallel=(0, 1),
    recompute=((0, 1.0), (64, 1.0)),
)  # fmt: skip


def test_the_best_is_what_one_by_one_finds():
    found = search(config(), SHAPE, setting(8), SMALL)
    inside, times = inner(SMALL), []
    for outer in outers(SMALL):
        for i in range(len(inside)):
            words = overrides_of(SMALL, outer, inside, i, layers=SHAPE.layers, block=None)
            try:
                one = plan(configured(config(), tuple(words)), SHAPE, setting(8), dp=outer.dp)
            except SiraraError:
                continue
            if one.fits:
                times.append(one.step_s)
    assert found.best.step_s == pytest.approx(min(times), rel=2e-3)
    assert found.best.fits and found.layouts >= found.legal >= found.fitting > 50


def test_memory_is_the_objective_within_a_quarter_of_the_fastest_time():
    fast = search(config(), SHAPE, setting(8), SMALL)
    small = search(config(), SHAPE, setting(8), SMALL, objective="memory")
    assert small.best.device_bytes < fast.best.device_bytes
    assert small.best.step_s <= 1.3 * fast.best.step_s


def test_what_runs_is_near_the_fastest_that_runs_when_memory_is_the_objective():
    # fp8, which does not run, is so fast here that nothing that runs is within a quarter of it.
    space = replace(SMALL, precision=("bf16", "fp8"))
    found = search(config(), SHAPE, setting(8, "b200"), space, objective="memory")
    runs = search(config(), SHAPE, setting(8, "b200"), SMALL, objective="memory")
    assert found.best_words["precision"] == "fp8" and found.best_now is not None
    assert found.best_now.step_s > 1.25 * found.best.step_s
    assert found.best_now.device_bytes == runs.best.device_bytes


def test_a_ceiling_binds():
    low = search(config(), SHAPE, setting(8, ceiling_bytes=30 * 2.0**30), SMALL)
    assert low.best.device_bytes <= 30 * 2**30


def test_every_value_of_every_knob_has_a_time_or_a_reason():
    found = search(config(), SHAPE, setting(8), whole_space(config(), SHAPE, find("a100-80gb"), 8))
    assert {s.knob for s in found.sensitivity} == {
        "pp", "tp", "cp", "ep", "zero", "schedule", "micro_batch", "recompute", "sequence_parallel", "offload",
        "precision",
    }  # fmt: skip
    for s in found.sensitivity:
        assert np.isfinite(s.step_s) != bool(s.reason)
    assert sum(found.reasons.values()) == found.layouts - found.fitting


def test_what_is_shown_for_a_value_fits_when_it_is_planned_by_itself():
    c, space = config(), whole_space(config(), SHAPE, find("a100-40gb"), 16)
    found = search(c, SHAPE, setting(16, "a100-40gb"), space)
    shown = [(s.overrides, s.step_s, s.device_bytes) for s in found.sensitivity if not s.reason]
    shown += [(a.overrides, a.step_s, a.device_bytes) for a in found.alternatives]
    assert len(shown) > 30
    for overrides, step_s, device_bytes in shown:
        there = configured(c, overrides)
        one = plan(there, SHAPE, setting(16, "a100-40gb"), dp=int(there.mesh.dp))
        assert one.chosen, overrides
        assert (step_s, device_bytes) == pytest.approx((one.step_s, one.device_bytes), rel=1e-9), overrides


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_closed_forms_of_memory_are_near_what_the_executor_is_counted_to_hold(numerics):
    c, space, machines = (
        config(numerics=numerics),
        whole_space(config(), SHAPE, find("h100-sxm"), 32),
        setting(32, "h100-sxm"),
    )
    found, rng = evaluated(c, SHAPE, machines, space), np.random.default_rng(1)
    needed = [code == NEEDED for code, _ in space.recompute]
    ratios = []
    for at in rng.permutation(np.flatnonzero(np.isfinite(found.device.ravel())))[:400]:
        o, i = divmod(int(at), len(found.inside))
        if needed[found.inside.at["recompute"][i]]:
            continue
        block = 1 if found.one[o, i] else None
        words = overrides_of(space, found.outers[o], found.inside, i, layers=SHAPE.layers, block=block)
        try:
            one = plan(configured(c, tuple(words)), SHAPE, machines, dp=found.outers[o].dp, lower=False)
        except SiraraError:
            continue
        ratios.append(one.device_bytes / found.device.flat[at])
    assert len(ratios) > 200
    # What is planned for too much is left out for nothing, what is planned for too little is counted in vain.
    low, early, middle, late, high = np.percentile(ratios, [0, 5, 50, 95, 100])
    assert (0.98 < middle < 1.02) and early > 0.8 and late < 1.1
    assert low > 0.6 and high < 1.2


def test_alternatives_are_five_others():
    found = search(config(), SHAPE, setting(8), whole_space(config(), SHAPE, find("a100-80gb"), 8))
    keys = [tuple(a.words.items()) for a in found.alternatives]
    assert len(set(keys)) == 5 and tuple(found.best_words.items()) not in keys


def test_only_what_runs_is_chosen_for_a_run():
    accelerator = find("a100-80gb")
    found = search(config(), SHAPE, setting(16), runnable_space(config(), SHAPE, accelerator, 16))
    assert found.best_now is not None and not found.best_now.not_run
    assert found.now_words["cp"] == "1" and found.now_words["offload"] == "none"


def test_where_exact_sums_do_not_fit_fast_ones_are_named():
    space = Space(
        gpus=1, pp=(1,), tp=(1,), zero=(0,), micro_batch=(1,), sequence_parallel=(0,), recompute=((64, 1.0),)
    )
    exact = plan(configured(config(recompute="full"), ("mesh.dp=1",)), SHAPE, setting(1), dp=1)
    fast = plan(
        configured(config(recompute="full", numerics="fast"), ("mesh.dp=1",)), SHAPE, setting(1), dp=1
    )
    # One block of one microbatch at a time still keeps the binary counter of all of them.
    between = (fast.device_bytes + 1e9, exact.device_bytes)
    assert between[0] < between[1]
    roomy = setting(1, "b300", ceiling_bytes=between[0])
    found = search(config(recompute="full"), SHAPE, roomy, space)
    assert found.numerics == "fast" and found.best.config.numerics == "fast"


def test_nothing_fits_says_how_near_it_came():
    with pytest.raises(PlanError, match="fits") as error:
        search(config(), SHAPE, setting(8, ceiling_bytes=1e9), SMALL)
    assert error.value.code == "SR215" and error.value.try_[0] == "--gpus 16 or more"
    assert "the nearest needs" in error.value.why and " does not fit" in error.value.why


@pytest.mark.timeout(240)
def test_sixteen_thousand_devices_are_searched_at_fifty_thousand_layouts_a_second():
    shape, accelerator = PRESETS["llama3-405b"], find("h100-sxm")
    there = config(global_batch=2048).model_copy(
        update={"model": config().model.model_copy(update={"preset": "llama3-405b"})}
    )
    space, machines = whole_space(there, shape, accelerator, 16_384), setting(16_384, "h100-sxm")

    def spent() -> float:
        # Of CPU time: other processes of the machine do not count.
        now = os.times()
        return now.user + now.system

    before = spent()
    evaluated(there, shape, machines, space)
    once = spent() - before
    found = search(there, shape, machines, space)
    whole = spent() - before - once
    assert found.legal > 200_000 and found.legal / once > 50_000, f"{found.legal:,} in {once:.1f} s"
    # With what is counted one by one of the best, and of each value of each knob.
    assert whole < 60, f"{whole:.1f} s"


def test_the_slowest_of_unlike_nodes_sets_the_pace_and_the_smallest_the_memory():
    a, h = find("a100-40gb"), find("h100-sxm")
    mixed = Setting(cluster=cluster_of(a, gpus=16), table=table([a, h]), counts=(8, 8), constants=fitted())
    there = configured(config(recompute="full"), ("mesh={dp: 16, zero: 3}",))
    slow = plan(there, SHAPE, setting(16, "a100-40gb"), dp=16)
    both = plan(there, SHAPE, mixed, dp=16)
    assert both.step_s == pytest.approx(slow.step_s, rel=0.02) and both.step_s >= slow.step_s
    assert both.setting.capacity_bytes == a.hbm_bytes
    assert both.mfu < slow.mfu
    found = search(config(), SHAPE, mixed, whole_space(config(), SHAPE, a, 16))
    assert found.best.device_bytes <= a.hbm_bytes


def test_nothing_that_is_shown_beside_the_best_is_better():
    for gpu, gpus in (("a100-40gb", 8), ("h100-sxm", 16)):
        space = whole_space(config(), SHAPE, find(gpu), gpus)
        found = search(config(), SHAPE, setting(gpus, gpu), space)
        least = min(
            [a.step_s for a in found.alternatives] + [s.step_s for s in found.sensitivity if not s.reason]
        )
        assert found.best.step_s <= least * 1.005


def test_what_is_chosen_leaves_the_mean_error_of_predicted_memory_free_and_a_ceiling_does_not():
    roomy = search(config(), SHAPE, setting(8), SMALL)
    # A device that the fastest layout would fill to the last thousandth.
    filled = replace(find("a100-80gb"), hbm_bytes=roomy.best.device_bytes * 1.001)
    there = Setting(cluster=cluster_of(filled, gpus=8), table=table([filled]), constants=fitted())
    capacity = there.capacity_bytes
    found = search(config(), SHAPE, there, SMALL)
    assert found.best.margin == memory_margins(found.best.point)[0] > 0
    assert found.best.device_bytes * (1 + found.best.margin) <= capacity and not found.tight
    hard = search(config(), SHAPE, replace(there, ceiling_bytes=capacity), SMALL)
    assert hard.best.device_bytes == roomy.best.device_bytes and hard.best.margin == 0
    assert hard.best.step_s <= found.best.step_s
    said = search_record(found)
    assert "published runs" in said["left_free"] and "GiB by choice" in said["left_free"]
    margin = said["best"]["plan"]["memory"]["margin"]
    assert margin["bytes"] == pytest.approx(capacity - capacity / (1 + found.best.margin))


def test_what_fits_by_less_than_its_error_bar_is_chosen_only_where_nothing_else_fits():
    space = Space(
        gpus=1, pp=(1,), tp=(1,), zero=(0,), micro_batch=(1,), sequence_parallel=(0,), recompute=((64, 1.0),)
    )
    there = config(recompute="full")
    one = plan(configured(there, ("mesh.dp=1",)), SHAPE, setting(1, "b300"), dp=1)
    small = replace(find("b300"), hbm_bytes=one.device_bytes * (1 + one.margin / 2))
    tight = Setting(cluster=cluster_of(small, gpus=1), table=table([small]), constants=fitted())
    found = search(there, SHAPE, tight, space)
    assert found.tight and found.best.fits and found.best.within_error and found.numerics == "exact"
    assert "because nothing else fits" in search_text(found)
