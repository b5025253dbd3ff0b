"""One layout judged: memory by the executor's own rules, terms that add up, the verdict and its advice."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from sirara.checkpoint.space import Seats, planned_needs
from sirara.checkpoint.space import state_bytes as planned_state
from sirara.config.schema import RunConfig
from sirara.plan.advice import nearest, refusal
from sirara.plan.buffers import _closed, buffers_of
from sirara.plan.constants import fitted
from sirara.plan.explain import verdict_of
from sirara.plan.from_config import cluster_of
from sirara.plan.hardware import find, table
from sirara.plan.held import EVALUATED
from sirara.plan.saved import host_bytes, state_bytes
from sirara.plan.verdict import (
    GIB,
    Setting,
    budget_of,
    plan,
    what_does_not_run,
)
from sirara.pure.families import PRESETS, parameter_count, unit_specs
from sirara.pure.shape import ModelShape
from sirara.pure.tree import Deal, deal
from sirara.train.evaluate import AT_ONCE
from sirara.train.trace import trace

SHAPE = ModelShape(family="gpt2", layers=4, hidden=64, heads=4, vocab=101, max_seq=16)
SIZES = {"family": "gpt2", "layers": 4, "hidden": 64, "heads": 4, "vocab": 101, "max_seq": 16}


def config(*, mesh=None, model=None, seq=16, context=None, **train) -> RunConfig:
    numerics = train.pop("numerics", "exact")
    offload = train.pop("offload", {})
    tree = {
        "numerics": numerics,
        "model": model or SIZES,
        "data": {"train": [{"path": "none"}], "seq_len": seq},
        "train": {"steps": 10, "global_batch": 16, "micro_batch": 2, **train},
        "mesh": mesh or {},
        "offload": offload,
    }
    return RunConfig.model_validate(tree, context=context)


def setting(gpus: int, gpu: str = "a100-80gb") -> Setting:
    accelerator = find(gpu)
    return Setting(cluster=cluster_of(accelerator, gpus=gpus), table=table([accelerator]), constants=fitted())


@pytest.mark.parametrize(
    ("mesh", "train"),
    [
        ({"pp": 2, "dp": 2}, {}),
        ({"pp": 2, "dp": 2, "zero": 0}, {}),
        ({"pp": 1, "dp": 4, "zero": 3}, {"precision": "bf16"}),
        ({"pp": 2, "dp": 2, "zero": 3, "gather": "step"}, {}),
        ({"dp": 2, "tp": 2, "zero": 2}, {"precision": "bf16"}),
        ({"pp": 2, "dp": 1, "tp": 2, "sequence_parallel": True}, {"optimizer": {"name": "lion"}}),
        ({"pp": 2, "dp": 2, "schedule": "interleaved"}, {"optimizer": {"name": "muon"}}),
    ],
)
def test_weights_state_and_window_are_those_of_the_real_ranks(mesh, train):
    c = config(mesh=mesh, **train)
    world = c.mesh.pp * c.mesh.dp * c.mesh.tp
    found = plan(c, SHAPE, setting(world), dp=c.mesh.dp)
    for stage in found.held.stages:
        real = trace(c, SHAPE, rank=stage.rank * world // c.mesh.pp).held
        planned = {
            "weights": stage.weights, "masters": stage.masters, "optimizer": stage.optimizer, "window": stage.window
        }  # fmt: skip
        assert planned == {k: real[k] for k in planned}
        # Small groups share buffers of equal size, so what is played comes near, not equal.
        assert stage.gradients == pytest.approx(real["gradients and exchange"], rel=0.62)


def test_buffers_of_a_large_model_are_those_of_the_real_rank():
    shape = ModelShape(family="gpt2", layers=16, hidden=256, heads=4, vocab=101, max_seq=16)
    c = config(
        model={**SIZES, "layers": 16, "hidden": 256}, mesh={"dp": 2}, global_batch=32, precision="bf16"
    )
    real = trace(c, shape, rank=0).held["gradients and exchange"]
    found = plan(c, shape, setting(2), dp=2)
    assert found.held.stages[0].gradients == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize(
    ("mesh", "precision", "microbatches"),
    [
        ({"pp": 2, "schedule": "interleaved"}, "fp32", 8),
        ({"pp": 2, "schedule": "interleaved"}, "fp32", 32),
        ({"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-v"}, "bf16", 12),
        ({"pp": 4, "schedule": "interleaved"}, "fp32", 4),
        ({"pp": 2, "schedule": "zb-v"}, "fp32", 8),
        ({"pp": 2, "dp": 2, "zero": 0}, "fp32", 8),
        ({"pp": 2, "dp": 2, "zero": 1}, "fp32", 8),
        ({"pp": 2, "dp": 2, "zero": 1, "schedule": "interleaved"}, "fp32", 8),
        ({"pp": 2, "dp": 2, "zero": 2}, "fp32", 8),
        ({"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-v"}, "fp32", 8),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_sums_of_a_pipeline_are_those_of_the_real_ranks(mesh, precision, microbatches, tied):
    # As many tokens in the vocabulary as make the embedding count.
    mesh = {"dp": 1, **mesh}
    sizes = {"family": "llama", "layers": 8, "hidden": 128, "heads": 4, "vocab": 4096, "max_seq": 16}
    sizes |= {"tie_embeddings": tied}
    shape = ModelShape(**sizes)
    c = config(model=sizes, mesh=mesh, precision=precision, global_batch=2 * microbatches * mesh["dp"])
    found = plan(c, shape, setting(mesh["pp"] * mesh["dp"]), dp=mesh["dp"])
    for stage in found.held.stages:
        real = trace(c, shape, rank=stage.rank * mesh["dp"]).held
        # Scratch of sums in two dtypes is not counted.
        assert stage.gradients == pytest.approx(
            real["gradients and exchange"], rel=1e-3 if precision == "fp32" else 0.2
        )


def test_sums_of_chunks_are_those_of_the_real_ranks_at_every_stage():
    for schedule, zero, vocab, dp in product(("interleaved", "zb-v"), (0, 1, 2, 3), (256, 4096), (2, 3)):
        sizes = {"family": "llama", "layers": 7, "hidden": 128, "heads": 4, "vocab": vocab, "max_seq": 16}
        mesh = {"pp": 2, "dp": dp, "zero": zero, "schedule": schedule}
        c = config(model=sizes, mesh=mesh, global_batch=24, micro_batch=2)
        for stage in plan(c, ModelShape(**sizes), setting(2 * dp), dp=dp).held.stages:
            real = trace(c, ModelShape(**sizes), rank=dp * stage.rank).held["gradients and exchange"]
            assert stage.gradients == pytest.approx(real, rel=1e-3), (schedule, zero, vocab, dp, stage.rank)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_fast_sums_are_those_of_the_real_ranks(dp, zero, tied):
    sizes = {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "vocab": 4096, "max_seq": 16}
    sizes |= {"tie_embeddings": tied}
    c = config(model=sizes, mesh={"pp": 4, "dp": dp, "zero": zero}, numerics="fast", precision="fp32")
    for stage in plan(c, ModelShape(**sizes), setting(4 * dp), dp=dp).held.stages:
        real = trace(c, ModelShape(**sizes), rank=dp * stage.rank).held["gradients and exchange"]
        assert stage.gradients == pytest.approx(real, rel=1e-3), stage.rank


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [2, 3])
def test_a_head_alone_on_its_stage_has_two_buffers(zero, precision):
    sizes = {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "vocab": 32000, "max_seq": 16}
    c = config(model=sizes, mesh={"pp": 2, "dp": 2, "zero": zero, "block": 1}, precision=precision)
    for stage in plan(c, ModelShape(**sizes), setting(4), dp=2).held.stages:
        real = trace(c, ModelShape(**sizes), rank=2 * stage.rank).held["gradients and exchange"]
        assert stage.gradients == pytest.approx(real, rel=1e-3), stage.rank


def test_blocks_hold_as_many_buffers_as_they_are_deep():
    for k in range(1, 5):
        dealt = deal(1 << k, 1, 1 << k)
        assert buffers_of(dealt, lean=False, fast=False, same=True).full_sum == max(1, k)
    assert buffers_of(deal(64, 4, 8), lean=False, fast=True, same=True).full_sum == 1


@pytest.mark.timeout(30)
def test_a_hundred_thousand_microbatches_of_one_rank_are_played_place_by_place():
    # As deep as the largest whole subtree, of 2^16 leaves; in time linear in the microbatches.
    dealt = deal(100_000, 1)
    assert buffers_of(dealt, lean=False, fast=False, same=True).full_sum == 16


def test_the_closed_form_of_buffers_is_what_is_played():
    cases = [
        (64, 2, 0),
        (64, 8, 2),
        (64, 64, 0),
        (60, 6, 1),
        (256, 16, 3),
        (512, 48, 0),
        (1000, 10, 2),
        (7, 3, 0),
    ]
    for total, dp, k in cases:
        for lean in {False, k == 0}:
            for same in (False, True):
                dealt = Deal(microbatches=total, dp=dp, k=k)
                exact = asdict(buffers_of(dealt, lean=lean, fast=False, same=same))
                closed = asdict(_closed(dealt, "sum" if same or k else "leaf", lean=lean))
                for name, count in exact.items():
                    near = 6 if name == "once_shard_sum" else 1 if name.startswith("shard") else 0
                    assert abs(closed[name] - count) <= near, (total, dp, k, lean, same, name)


def test_an_evaluating_pipeline_has_room_for_the_hidden_states_that_wait():
    assert EVALUATED == AT_ONCE
    meshes = ({"dp": 1}, {"pp": 2, "dp": 1})
    one, piped = (plan(config(mesh=m, precision="fp32"), SHAPE, setting(2), dp=1) for m in meshes)
    for stage in one.held.stages:
        assert stage.phases()["evaluation"] == stage.static + max(stage.loss, stage.transient)
    # 2 x 16 tokens of 64 numbers of 4 bytes, as many in as out.
    letter = 2 * 16 * 64 * 4
    for stage in piped.held.stages:
        alone = stage.static + max(stage.loss, stage.transient)
        assert stage.phases()["evaluation"] == alone + 2 * AT_ONCE * letter


@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2, "zero": 3}])
def test_terms_of_the_step_add_up(mesh):
    c = config(mesh=mesh)
    dp = c.mesh.dp if c.mesh.dp != "auto" else 1
    found = plan(c, SHAPE, setting(c.mesh.pp * c.mesh.tp * dp), dp=dp)
    assert sum(float(v[0]) for v in found.times.exposed().values()) == pytest.approx(found.step_s, rel=1e-6)
    busiest = found.held.busiest
    parts = busiest.static + busiest.activations + max(busiest.loss, busiest.transient)
    assert parts == pytest.approx(found.allocated_bytes)
    assert found.allocated_bytes <= found.reserved_bytes <= found.device_bytes
    assert busiest.phases()["step"] == max(busiest.phases().values())


def big(**train):
    mesh = train.pop("mesh", {"dp": 8, "zero": 1})
    return config(
        model={"preset": "llama2-7b"}, seq=2048, mesh=mesh, precision="bf16", global_batch=64, **train
    )


def test_a_plan_that_does_not_fit_names_stage_terms_and_changes_that_fit():
    shape = PRESETS["llama2-7b"]
    c = big(micro_batch=8)
    found = plan(c, shape, setting(8, "a100-40gb"), dp=8)
    assert not found.fits
    keys = "train.micro_batch=1 train.recompute=full mesh.zero=3"
    other = big(micro_batch=1, recompute="full", mesh={"dp": 8, "zero": 3})
    changes = nearest(found, [(keys, other, 8), ("train.micro_batch=7", "7 does not divide 64", 0)])
    assert changes[0].fits and changes[1].error
    error = refusal(found, changes)
    assert error.exit_code == 3 and error.code == "SR214"
    assert "stage 0 needs" in error.what and "GiB" in error.why
    assert error.try_[0].startswith(keys)


def test_blocks_are_chosen_so_that_the_plan_fits():
    shape = PRESETS["llama2-7b"]
    c = big(micro_batch=1, recompute="full")
    roomy = plan(c, shape, setting(8, "b300"), dp=8)
    assert roomy.held.deal.k == 3
    small = replace(setting(8, "b300"), ceiling_bytes=roomy.device_bytes - 1 * GIB)
    found = plan(c, shape, small, dp=8)
    assert found.fits and found.held.deal.k < 3
    asked = plan(
        big(micro_batch=1, recompute="full", mesh={"dp": 8, "zero": 1, "block": 8}), shape, small, dp=8
    )
    assert not asked.fits


def test_fast_sums_take_less_than_exact_ones():
    shape = PRESETS["llama2-7b"]
    exact = plan(big(), shape, setting(8), dp=8)
    fast = plan(big(numerics="fast"), shape, setting(8), dp=8)
    assert fast.held.busiest.gradients < exact.held.busiest.gradients


def test_what_does_not_run_yet_is_said():
    c = config(offload={"optimizer": "host"}, context={"on_paper": True})
    assert "offload.optimizer=host does not run yet" in what_does_not_run(c)
    found = plan(c, SHAPE, setting(1), dp=1)
    assert found.not_run and found.as_record()["runs_now"] is False
    assert what_does_not_run(config()) == ""


PAPER = {"context": {"on_paper": True}, "model": {"preset": "llama2-7b"}, "seq": 2048, "precision": "bf16"}


def offloaded(dp=8, mesh=None, numerics="fast", **places):
    c = config(mesh={"dp": dp, "zero": 3, **(mesh or {})}, offload=places, numerics=numerics, **PAPER)
    return plan(c, PRESETS["llama2-7b"], setting(dp, "h100-sxm"), dp=dp)


def test_offloaded_weights_leave_the_device_but_for_two_units():
    here, there = offloaded(), offloaded(params="host")
    assert here.held.busiest.weights > 0 == there.held.busiest.weights
    assert here.held.busiest.window == there.held.busiest.window > 0
    shard = 2 * parameter_count(PRESETS["llama2-7b"]) / 8
    assert here.allocated_bytes - there.allocated_bytes == pytest.approx(shard, rel=1e-3)
    assert there.offloaded_bytes == pytest.approx(8 * shard, rel=1e-3) and not there.on_disk_bytes
    # One device alone has to have the two units too.
    alone = offloaded(dp=1, mesh={"zero": 0}, params="host")
    assert alone.held.busiest.weights == 0 < alone.held.busiest.window < 2 * 2 * 0.4e9


def test_state_on_disk_takes_no_memory_of_the_host_and_the_time_of_the_disks():
    host, disk = offloaded(optimizer="host"), offloaded(optimizer="disk")
    assert host.allocated_bytes == disk.allocated_bytes
    state = 12 * parameter_count(PRESETS["llama2-7b"])
    assert disk.on_disk_bytes == pytest.approx(state, rel=1e-3) and not host.on_disk_bytes
    assert host.offloaded_bytes - disk.offloaded_bytes == pytest.approx(state, rel=1e-3)
    # 84 GB read and written at 28 GB/s.
    assert float(disk.times.offload[0]) == pytest.approx(2 * state / 28e9, rel=0.01)
    assert float(host.times.offload[0]) < float(disk.times.offload[0])


def test_weights_that_cross_a_slow_link_are_waited_for():
    host, disk = offloaded(params="host"), offloaded(params="disk")
    assert float(host.times.offload[0]) < float(disk.times.offload[0])
    # 8 microbatches of 2 sequences, one on each rank: 1.7 GB of a shard come twice, at an eighth of 28 GB/s.
    shard = 2 * parameter_count(PRESETS["llama2-7b"]) / 8
    t = disk.times
    work = float((t.matmul + t.attention + t.memory_bound + t.recompute)[0])
    assert float(t.offload[0]) == pytest.approx(2 * shard / (28e9 / 8) - 0.9 * work, rel=0.01)


def test_what_a_node_may_hold_binds():
    within = offloaded(optimizer="host", host_budget="200GiB")
    over = offloaded(optimizer="host", host_budget="50GiB")
    assert within.fits and within.chosen and not over.fits and not over.chosen
    error = refusal(over, [])
    assert error.code == "SR214" and error.where == "offload.host_budget" and "50.0 GiB" in error.what
    # Without a budget, what the table says of the node: a DGX A100 of 40 GB has half of one of 80.
    assert budget_of(offloaded(optimizer="host").config, setting(8, "a100-40gb")) == 1e12
    assert budget_of(offloaded(optimizer="host").config, setting(8, "h100-sxm")) == 2e12
    changes = nearest(over, [("offload.optimizer=disk", offloaded(optimizer="disk").config, 8)])
    assert [c.fits for c in changes] == [True]


def test_gradients_go_to_the_host_with_every_microbatch_two_units_at_a_time():
    few = offloaded(optimizer="host", dp=1, mesh={"zero": 0})
    # Two blocks and more of 16-bit gradients, on the device.
    assert 2 * 2 * 0.2e9 < few.held.busiest.gradients < 2 * 2 * 0.3e9
    short = {**PAPER, "seq": 256}
    c = config(
        mesh={"dp": 1, "zero": 0}, offload={"optimizer": "host"}, numerics="fast", global_batch=1024, **short
    )
    many = plan(c, PRESETS["llama2-7b"], setting(1, "h100-sxm"), dp=1)
    t = many.times
    work = float((t.matmul + t.attention + t.memory_bound + t.recompute)[0])
    sent = 512 * 2 * parameter_count(PRESETS["llama2-7b"]) / 55e9
    assert float(t.offload[0]) >= max(0.0, sent - 0.9 * work) > 0


def test_without_a_budget_a_node_is_taken_to_have_two_terabytes():
    c = config(
        mesh={"dp": 8, "zero": 3},
        offload={"optimizer": "host"},
        **{**PAPER, "model": {"preset": "llama3-405b"}},
    )
    found = plan(c, PRESETS["llama3-405b"], setting(8, "h200"), dp=8)
    assert found.offloaded_bytes > 4e12 and not found.fits
    assert "a node is taken to have 1862.6 GiB" in refusal(found, []).what


def test_ranks_without_a_microbatch_are_said():
    found = plan(config(mesh={"dp": 16}), SHAPE, setting(16), dp=16)
    assert "8 of 16 data-parallel ranks have no microbatch" in verdict_of(found)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("what", ["optimizer", "params", "activations"])
def test_what_is_offloaded_is_in_closed_forms_as_it_is_counted(what, numerics):
    found = offloaded(numerics=numerics, **{what: "host"})
    assert found.allocated_bytes == pytest.approx(float(found.memory.allocated[0]), rel=0.06)


def test_saved_bytes_are_weights_masters_and_moments():
    n = parameter_count(SHAPE)
    assert state_bytes(config(), SHAPE) == n * (4 + 8)
    assert state_bytes(config(precision="bf16"), SHAPE) == n * (2 + 4 + 8)


def test_model_flops_follow_the_stated_convention():
    # 6 FLOPs per parameter and token are what counting matmuls gives, but for attention and the embedding.
    shape = PRESETS["llama2-7b"]
    found = plan(big(), shape, setting(8), dp=8)
    tokens = 64 * 2048
    flops = found.mfu * 312e12 * 8 * found.step_s
    matrices = parameter_count(shape) - shape.vocab * shape.hidden
    attention = 3 * 2 * shape.layers * 4096 * 2049 * tokens
    assert flops == pytest.approx(6 * matrices * tokens + attention, rel=1e-3)
    assert found.mfu < found.mfu_whole and found.hfu == pytest.approx(found.mfu)


def test_where_only_fast_sums_fit_the_verdict_names_both():
    shape = PRESETS["llama2-7b"]
    exact, fast = (
        big(micro_batch=1, recompute="full", numerics=n, mesh={"dp": 1}) for n in ("exact", "fast")
    )
    roomy = setting(1, "b300")
    less = plan(fast, shape, roomy, dp=1).device_bytes
    tight = replace(roomy, ceiling_bytes=less + GIB)
    found = plan(exact, shape, tight, dp=1)
    assert not found.fits
    error = refusal(found, nearest(found, [("numerics=fast", fast, 1)]))
    assert "numerics=exact needs" in error.why and "numerics=fast" in error.why


def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_stages_follow():
    c = {
        name: config(mesh={"pp": 2, "dp": 1, "schedule": name}, global_batch=64) for name in ("gpipe", "1f1b")
    }
    alive = {name: [s.alive for s in plan(x, SHAPE, setting(2), dp=1).held.stages] for name, x in c.items()}
    assert alive == {"gpipe": [32, 32], "1f1b": [2, 1]}


def test_host_memory_of_checkpoints_is_what_a_run_asks_of_its_file_systems():
    """Two snapshots; of peers and parity three generations."""
    tiers = ["disk", {"tier": "peer", "copies": 3}, {"tier": "parity", "data": 4, "parity": 2}]
    base = config()
    kept = base.checkpoint.model_validate({"tiers": tiers})
    c = base.model_copy(update={"checkpoint": kept})
    assert host_bytes(c, 100.0) == {"snapshots": 200.0, "images of other nodes": 600.0, "parity": 150.0}
    in_line = base.checkpoint.model_validate({"tiers": ["disk"], "async": False})
    assert host_bytes(base.model_copy(update={"checkpoint": in_line}), 100.0) == {}
    seats = Seats(node=0, nodes=8, local=8, world=64)
    needs = planned_needs(c, unit_specs(SHAPE), checkpoints=Path("none"), run="r", seats=seats)
    asked = {n.tier: n.times * n.each for n in needs if n.tier != "disk"}
    mine = host_bytes(c, planned_state(c, unit_specs(SHAPE)) / 8)
    for name, tier in (("snapshots", "memory"), ("images of other nodes", "peer"), ("parity", "parity")):
        assert mine[name] == pytest.approx(asked[tier], rel=1e-4)
    found = plan(c, SHAPE, setting(1), dp=1)
    assert found.saves.host_bytes_per_node == sum(found.saves.host.values()) > 0
