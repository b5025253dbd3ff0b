"""Nodes of unlike kinds: who takes what, by speed and by memory."""

from dataclasses import replace

import pytest

from sirara.plan.constants import fitted
from sirara.plan.exact import configured
from sirara.plan.from_config import cluster_of
from sirara.plan.hardware import find, table
from sirara.plan.unlike import arranged_text, arrangements
from sirara.plan.verdict import Setting, plan
from tests.unit.plan.test_search import SHAPE, config

GIB = 2.0**30


def mixed(*kinds: str, counts=(8, 8), **more) -> Setting:
    found = [find(kind) for kind in kinds]
    cluster = cluster_of(found[0], gpus=sum(counts))
    return Setting(cluster=cluster, table=table(found), constants=fitted(), counts=counts, **more)


def ways(there: Setting, mesh: str, **train):
    c = configured(config(global_batch=256, **train), (f"mesh={{{mesh}}}",))
    found = plan(c, SHAPE, there, dp=int(c.mesh.dp))
    return found, arrangements(found)


def staged(there: Setting, mesh: str, **train):
    return [w for w in ways(there, mesh, **train)[1] if w.form == "stages"]


def test_faster_nodes_take_more_blocks_and_the_step_is_shorter():
    found, all_ways = ways(mixed("a100-80gb", "h100-sxm"), "pp: 4, dp: 4, zero: 1")
    best = all_ways[0]
    assert best.form == "stages" and best.fits and best.runs and best.step_s < 0.8 * found.step_s
    by_kind = {p.gpu: p for p in best.parts}
    assert min(by_kind["h100-sxm"].blocks) > max(by_kind["a100-80gb"].blocks)
    assert sum(sum(p.blocks) for p in best.parts) == SHAPE.layers
    assert {(p.first, p.last) for p in best.parts} == {(0, 1), (2, 3)}
    assert "stages 0 to 1" in arranged_text(all_ways)


def test_alike_nodes_gain_nothing_and_take_the_same():
    found, all_ways = ways(mixed("a100-80gb", "a100-80gb"), "pp: 4, dp: 4, zero: 1")
    best = next(w for w in all_ways if w.form == "stages")
    assert best.step_s == pytest.approx(found.step_s, rel=0.02)
    assert all(7 <= n <= 9 for p in best.parts for n in p.blocks)


def test_the_split_is_what_the_configuration_spells_and_fits_each_kind():
    there = mixed("a100-40gb", "h100-sxm")
    for way in staged(there, "pp: 4, dp: 4, zero: 1"):
        again = configured(config(global_batch=256), way.overrides)
        split = [n for p in sorted(way.parts, key=lambda p: p.first) for n in p.blocks]
        assert again.mesh.split == split and again.mesh.pp == 4
        exact = plan(again, SHAPE, there, dp=4)
        assert max(p.device_bytes for p in way.parts) == pytest.approx(exact.device_bytes)
        assert way.fits == all(p.device_bytes <= p.capacity_bytes for p in way.parts)


def test_memory_of_the_smaller_kind_takes_blocks_away_from_it():
    roomy = staged(mixed("a100-40gb", "h100-sxm"), "pp: 2, dp: 8, zero: 1")
    tight = staged(mixed("a100-40gb", "h100-sxm"), "pp: 2, dp: 8, zero: 1", micro_batch=4)
    fitting = [w for w in tight if w.fits]
    assert fitting and all(p.device_bytes <= p.capacity_bytes for w in fitting for p in w.parts)
    small = [next(p for p in w.parts if p.gpu == "a100-40gb").blocks[0] for w in (roomy[0], fitting[0])]
    assert small[1] <= small[0]


@pytest.mark.parametrize(("other", "roomy"), [("h200", True), ("h100-sxm", False)])
def test_a_split_leaves_the_mean_error_of_predicted_memory_free_where_one_can(other, roomy):
    there, words = mixed("a100-40gb", other), ("pp: 2, dp: 8, zero: 1",)
    way = staged(there, *words, micro_batch=4)[0]
    small = next(p for p in way.parts if p.gpu == "a100-40gb")
    # Half of the margin is left on the smaller kind: blocks have to go to the other, if that has room for them.
    filled = replace(find("a100-40gb"), hbm_bytes=small.device_bytes * (1 + way.margin / 2))
    tight = replace(there, cluster=cluster_of(filled, gpus=16), table=table([filled, find(other)]))
    again = staged(tight, *words, micro_batch=4)[0]
    left = next(p for p in again.parts if p.gpu == "a100-40gb").device_bytes
    assert way.margin > 0 and again.fits and again.roomy == roomy
    assert ("fits within the error bar" in arranged_text([again])) != roomy
    assert left < small.device_bytes if roomy else left == small.device_bytes


def test_replicas_keep_the_pace_of_the_slowest_and_dealing_by_speed_is_predicted_only():
    found, all_ways = ways(mixed("a100-80gb", "h100-sxm", counts=(8, 24)), "pp: 1, dp: 32, zero: 2")
    forms = {w.form: w for w in all_ways}
    assert set(forms) == {"replicas", "by speed"}
    assert forms["replicas"].step_s == found.step_s and forms["replicas"].runs
    assert not forms["by speed"].runs and forms["by speed"].step_s < found.step_s
    assert [(p.first, p.last) for p in forms["replicas"].parts] == [(0, 7), (8, 31)]


def test_a_stage_is_never_on_two_kinds():
    assert not staged(mixed("a100-80gb", "h100-sxm", counts=(4, 12)), "pp: 2, dp: 8, zero: 1")
