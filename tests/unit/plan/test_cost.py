"""Step times: terms that add up, limits of physics, schedules in their known order, 50,000 points a second."""

import time

import numpy as np
import pytest

from sirara.plan.collectives import all_reduce_s, gather_s
from sirara.plan.constants import Constants, fitted
from sirara.plan.cost import step_time
from sirara.plan.hardware import DTYPES, index_of, shipped_table
from sirara.plan.kernels import dense_block, matmul, rates
from sirara.plan.points import Attention, Kind, Launch, Recompute, Schedule, points, sizes
from sirara.pure.schedule import chunks_of, schedule, sending_early
from sirara.pure.simulate import Costs, simulate

GPT_175B = {
    "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "vocab": 51200, "seq": 2048, "micro_batch": 1,
    "global_batch": 1536, "tp": 8, "pp": 8, "dp": 8, "recompute": int(Recompute.FULL), "kind": int(Kind.MEGATRON),
    "attention": int(Attention.PLAIN), "accelerator": index_of("a100-80gb"), "tied": 1,
}  # fmt: skip
LLAMA_8B = {
    "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "seq": 8192, "gated": 1,
    "attention": int(Attention.TUNED), "accelerator": index_of("h100-sxm"), "dp": 8, "global_batch": 64,
    "launch": int(Launch.FUSED), "dp_overlap": 1,
}  # fmt: skip
MIXTURE = {
    "layers": 48, "hidden": 2048, "ffn": 768, "expert_ffn": 768, "experts": 128, "topk": 8, "heads": 32, "kv_heads": 4,
    "head_dim": 128, "vocab": 151936, "seq": 4096, "gated": 1, "dp": 32, "global_batch": 512, "zero": 1,
    "attention": int(Attention.TUNED), "accelerator": index_of("h100-sxm"),
}  # fmt: skip


def times(**columns):
    return step_time(points(columns), shipped_table(), fitted())


def random_points(n, seed=3):
    rng = np.random.default_rng(seed)
    return points(
        {
            "layers": rng.integers(1, 12, n) * 8, "hidden": rng.integers(4, 32, n) * 512, "ffn": 16384, "heads": 32,
            "vocab": 50000, "seq": rng.choice([1024, 2048, 8192], n), "gated": rng.integers(0, 2, n),
            "tp": rng.choice([1, 2, 4, 8], n), "pp": rng.choice([1, 2, 4, 8], n), "dp": rng.choice([1, 4, 16, 64], n),
            "cp": rng.choice([1, 2], n), "zero": rng.integers(0, 4, n), "micro_batch": rng.choice([1, 2, 4], n),
            "global_batch": 1024, "recompute": rng.choice([0, 1, 8, 64], n), "schedule": rng.integers(0, 5, n),
            "experts": rng.choice([0, 64], n), "topk": 4, "expert_ffn": 2048, "ep": rng.choice([1, 2, 4], n),
            "attention": rng.integers(0, 3, n), "launch": rng.integers(0, 3, n), "loss": rng.integers(0, 3, n),
            "accelerator": rng.choice([index_of(a) for a in ("a100-80gb", "h100-sxm", "gb200", "mi300x")], n),
            "offload_optimizer": rng.integers(0, 2, n), "dp_overlap": rng.integers(0, 2, n),
        }
    )  # fmt: skip


def test_exposed_terms_are_not_negative_and_add_up_to_the_step():
    t = step_time(random_points(2000), shipped_table(), fitted())
    terms = t.exposed()
    assert min(v.min() for v in terms.values()) >= 0
    np.testing.assert_allclose(sum(terms.values()), t.step_s, rtol=1e-12)


def test_one_point_and_many_give_the_same_times():
    p = random_points(200)
    together = step_time(p, shipped_table(), fitted()).step_s
    alone = [step_time(p.take([i]), shipped_table(), fitted()).step_s[0] for i in range(200)]
    np.testing.assert_allclose(alone, together, rtol=1e-12)


def test_no_step_is_faster_than_its_floating_point_operations():
    p = random_points(2000)
    p = p.take(p.experts == 0)
    flops = 6 * (sizes(p).total(p) - sizes(p).embedding) * p.seq * p.global_batch
    peak = shipped_table().peak[p.accelerator, DTYPES.index("bf16")] * p.gpus
    assert (step_time(p, shipped_table(), fitted()).step_s > flops / peak).all()


def test_matmul_pays_for_tiles_and_waves_that_are_not_full():
    p = points({"accelerator": index_of("a100-80gb"), "hidden": 64, "heads": 1})
    k = Constants(quantised=1.0)
    r = rates(p, shipped_table(), k)

    def seconds(m, n, depth):
        return float(matmul(r, k, np.array([m]), np.array([n]), np.array([depth]))[0])

    # 108 units take 108 tiles of 256 x 128 in one wave; one row of tiles more takes a second one.
    full, more = seconds(256 * 12, 128 * 9, 4096), seconds(256 * 13, 128 * 9, 4096)
    assert more > 1.3 * full
    assert seconds(1, 4096, 4096) > 2 * 4096 * 4096 / 2e12  # a vector: the matrix goes through memory once
    assert seconds(0, 4096, 4096) == 0


def test_zero_bubble_schedules_are_faster_in_the_order_of_their_paper():
    kinds = [Schedule.ONE_F_ONE_B, Schedule.ZB_H1, Schedule.ZB_H2]
    t = times(**{**GPT_175B, "recompute": 0, "global_batch": 128, "schedule": [int(k) for k in kinds]})
    assert t.bubble[0] > t.bubble[1] > t.bubble[2] >= 0


def test_bubble_of_1f1b_is_the_other_stages_once_and_interleaving_divides_it():
    t = times(
        **{**GPT_175B, "layers": 96, "vocab": 1, "vpp": [1, 2, 4], "schedule": int(Schedule.INTERLEAVED)}
    )
    np.testing.assert_allclose(t.bubble[0] / t.bubble, [1, 2, 4], rtol=1e-3)
    stage = (t.forward_s + t.backward_s + (t.tp + t.recompute * 0) / 192)[0]
    assert t.bubble[0] == pytest.approx(7 * stage, rel=0.02)


def test_full_recompute_costs_another_forward_and_stops_early_where_torch_does():
    t = times(**{**LLAMA_8B, "recompute": [0, int(Recompute.FULL), int(Recompute.FULL)],
                 "kind": [int(Kind.SIRARA), int(Kind.SIRARA), int(Kind.FSDP2)]})  # fmt: skip
    assert t.recompute[0] == 0
    assert 0.25 * t.step_s[0] < t.recompute[1] < 0.4 * t.step_s[0]
    assert t.recompute[2] < t.recompute[1]


def test_tensor_parallelism_over_two_nodes_pays_for_the_network():
    t = times(**{**GPT_175B, "tp": [8, 16], "dp": [8, 4]})
    assert t.tp[1] > 4 * t.tp[0]


def test_all_reduce_over_two_nodes_sends_less_between_them_than_a_ring():
    """Megatron's tensor parallelism: with sequence parallelism the same volume goes as gathers, which are rings."""
    ring = times(**{**GPT_175B, "tp": 16, "pp": 4, "sequence_parallel": 1}).tp
    assert times(**{**GPT_175B, "tp": 16, "pp": 4}).tp < 0.95 * ring
    assert times(**GPT_175B).tp == pytest.approx(times(**{**GPT_175B, "sequence_parallel": 1}).tp)


def test_hosts_wait_for_each_other_only_where_the_device_waits_for_its_host():
    patient = fitted().changed({"sync_s": 0.0})
    small = {
        **GPT_175B,
        "hidden": 1024,
        "ffn": 4096,
        "heads": 16,
        "layers": 24,
        "pp": 1,
        "dp": 1,
        "global_batch": 8,
    }
    for columns, low, high in ((small, 0.2, 0.6), (GPT_175B, 0.0, 0.02)):
        p = points(columns)
        waits = (
            1 - step_time(p, shipped_table(), patient).step_s / step_time(p, shipped_table(), fitted()).step_s
        )
        assert low <= waits[0] <= high


def test_ends_of_a_pipeline_have_one_neighbour():
    """The last stage has the head, so it sets the pace, and meets one boundary a microbatch where others meet two."""
    few, many = (times(**{**GPT_175B, "tp": 1, "global_batch": b}) for b in (256, 512))
    boundary = 2 * GPT_175B["seq"] * GPT_175B["hidden"] / 25e9 / fitted().network
    assert (many.pp - few.pp)[0] / 32 == pytest.approx(boundary, rel=0.02)


def test_zero_3_of_2021_falls_with_devices_at_a_fixed_batch_as_it_was_published():
    """144 TFLOP/s a device on 384 devices, 44 on 1,536: arXiv:2104.04473, table 2; FLOPs by its equation 3."""
    columns = {**GPT_175B, "tp": 1, "pp": 1, "zero": 3, "kind": int(Kind.MEGATRON_2021)}
    columns |= {"dropout": 1, "reduce_bytes": 2}
    t = times(**{**columns, "dp": [384, 1536], "micro_batch": [4, 1]})
    h, s, layers = 12288, 2048, 96
    flops = 96 * 1536 * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (16 * layers * h))
    rate = flops / np.array([384, 1536]) / t.step_s / 1e12
    np.testing.assert_allclose(rate, [144, 44], rtol=0.15)


def test_experts_over_more_nodes_send_more_and_dedup_sends_less():
    t = times(**{**MIXTURE, "ep": [1, 8, 32, 32], "dedup": [0, 0, 0, 1]})
    assert t.ep[0] == 0 and t.ep[1] < t.ep[3] < t.ep[2]


def test_overlap_moves_traffic_from_exposed_to_hidden():
    t = times(
        **{**GPT_175B, "recompute": 0, "tp_overlap": [0, 1], "dp_overlap": [0, 1], "pp_overlap": [0, 1]}
    )
    assert t.tp[1] < t.tp[0] and t.dp[1] < t.dp[0] and t.pp[1] < t.pp[0]
    np.testing.assert_allclose(t.tp[1] + t.hidden_tp[1], t.tp[0], rtol=1e-9)
    assert t.step_s[1] < t.step_s[0]


def test_small_blocks_take_at_least_what_the_host_needs_to_launch_them():
    tiny = {"layers": 24, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1000, "seq": 128}
    t = times(accelerator=index_of("h100-sxm"), launch=[0, 1, 2], **tiny)
    assert t.launch[0] > t.launch[1] > t.launch[2]
    assert t.step_s[0] > 24 * fitted().host_s


def test_optimizer_on_the_host_costs_its_own_time():
    t = times(**{**LLAMA_8B, "zero": 2, "offload_optimizer": [0, 1]})
    assert t.offload[0] == 0 and t.offload[1] > 0 and t.step_s[1] > t.step_s[0]


def test_gather_of_a_small_message_is_far_from_the_bandwidth_of_a_large_one():
    p = points({"accelerator": index_of("h100-sxm"), "hidden": 64, "heads": 1})
    r, k = rates(p, shipped_table(), fitted()), fitted()
    eight = np.array([8.0])
    small, large = (s / gather_s(r, k, np.array([s]), eight, eight)[0] for s in (1e5, 1e9))
    assert large > 10 * small


def test_a_ring_has_a_step_for_each_other_rank_and_a_tree_over_nodes_fewer():
    p = points({"accelerator": index_of("h100-sxm"), "hidden": 64, "heads": 1})
    r, k = rates(p, shipped_table(), fitted()), fitted()
    ranks, within, small = np.array([1024.0, 2048.0]), np.array([8.0, 8.0]), np.array([8.0, 8.0])
    half, whole = gather_s(r, k, small, ranks, within)
    assert whole - half == pytest.approx(128 * 4e-6 + (1024 - 128) * 1.9e-6, rel=1e-3)
    less, more = all_reduce_s(r, k, small, ranks, within)
    assert 2 * 4e-6 < more - less < 10 * 4e-6


def test_fifty_thousand_points_take_less_than_a_second():
    p = random_points(4000)
    step_time(p.take(slice(0, 100)), shipped_table(), fitted())
    began = time.process_time()
    for _ in range(5):
        step_time(p, shipped_table(), fitted())
    assert 20_000 / (time.process_time() - began) > 50_000


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_bubbles_are_those_of_the_simulator(name, pp):
    sizes = {"layers": 8 * pp, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 256, "seq": 2048}
    chunks = chunks_of(name)
    kind = {"1f1b": Schedule.ONE_F_ONE_B, "zb-h1": Schedule.ZB_H1, "zb-v": Schedule.ZB_V}[name]
    m = 2 * pp
    p = points({**sizes, "pp": pp, "vpp": chunks, "schedule": int(kind), "global_batch": m, "pp_overlap": 1,
                "attention": 2, "accelerator": index_of("a100-80gb")})  # fmt: skip
    hardware, k = shipped_table(), fitted()
    t = step_time(p, hardware, k)
    b = dense_block(p, rates(p, hardware, k), k)
    weight = float(b.weights[0]) / float(b.work(0)[0] + b.work(1)[0])
    forward, backward = float(t.forward_s[0]), float(t.backward_s[0])
    w = weight * (forward + backward)
    stages = pp * chunks
    table = schedule(name, ranks=pp, chunks=chunks, microbatches=m)
    table = table if name != "1f1b" else sending_early(table)
    costs = Costs.uniform(
        stages, forward_s=forward / chunks, input_s=(backward - w) / chunks, weight_s=w / chunks
    )
    bubble = simulate(table, costs).makespan_s - m * (forward + backward)
    # In units of a step: rules of thumb beside a played table.
    assert abs(float(t.bubble[0]) - bubble) < 0.03 * m * (forward + backward), (float(t.bubble[0]), bubble)
