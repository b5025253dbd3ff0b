"""What a trace counts, against closed forms."""

from typing import Any

import pytest

from sirara.errors import ConfigError, LayoutError
from sirara.pure.families import parameter_count
from sirara.train.trace import trace
from tests.layouts import small

LENGTH, HIDDEN, LAYERS = 16, 64, 4
WIDTH = {"bf16": 2, "fp32": 4, "fp64": 8}


@pytest.mark.parametrize(
    "mesh",
    [{"pp": 2, "dp": 2}, {"tp": 2, "dp": 2, "zero": 3}, {"pp": 4, "tp": 4, "dp": 1}, {"dp": 3}],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_the_ranks_of_one_replica_hold_the_parameters_of_the_model(family: str, mesh: dict[str, Any]):
    config, shape = small(family=family, mesh=mesh, train={"global_batch": 12})
    total = 0.0
    for pp in range(mesh.get("pp", 1)):
        for tp in range(mesh.get("tp", 1)):
            rank = pp * mesh["dp"] * mesh.get("tp", 1) + tp
            found = trace(config, shape, rank=rank)
            for group in found.groups:
                copies = int(group.name.rpartition(":")[2].split()[0]) if "copies" in group.name else 1
                total += 0 if group.guest else group.elements / copies
            assert found.parameters == parameter_count(shape)
            assert found.parameters_here == sum(group.elements for group in found.groups)
            assert all(g.elements + g.padding == g.shard * mesh["dp"] for g in found.groups)
    assert total == parameter_count(shape)


@pytest.mark.parametrize("precision", WIDTH)
@pytest.mark.parametrize("zero", range(4))
def test_bytes_held_are_those_of_the_stage(zero: int, precision: str):
    config, shape = small(mesh={"dp": 4, "zero": zero}, train={"precision": precision})
    found = trace(config, shape, rank=1)
    shards = sum(group.shard for group in found.groups)
    full, updated = 4 * shards, shards if zero else 4 * shards
    weights, sums = WIDTH[precision], 4 if precision == "bf16" else WIDTH[precision]
    assert found.held["weights"] == (shards if zero == 3 else full) * weights
    assert found.held.get("masters", 0) == (updated * sums if precision == "bf16" else 0)
    assert found.held["optimizer"] == 2 * updated * sums
    assert (found.held["window"] > 0) == (zero == 3)
    # At most two units are gathered at a time; a block and the embedding with its positions are all there is here.
    assert found.held["window"] < full * weights


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dp", [2, 4])
def test_bytes_over_dp_are_a_partial_sum_per_round_and_the_weights_once(precision: str, dp: int):
    config, shape = small(mesh={"dp": dp, "zero": 1, "block": 1}, train={"precision": precision})
    dp_traffic = trace(config, shape, rank=0).traffic["dp"]
    groups = trace(config, shape, rank=0).groups
    shards, rounds = sum(group.shard for group in groups), 8 // dp
    # The tied embedding is reduced once for each of its two uses.
    twice = sum(group.shard for group in groups if "tied" in group.name)
    assert dp_traffic.kinds["reduce"].bytes == rounds * (dp - 1) * (shards + twice) * WIDTH[precision]
    assert dp_traffic.kinds["publish"].bytes == (dp - 1) * shards * WIDTH[precision]
    assert dp_traffic.calls == rounds * (len(groups) + 1) + len(groups)


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_over_tp_are_two_sums_per_block_forward_and_two_backward(tp: int):
    config, shape = small(mesh={"pp": 3, "tp": tp, "dp": 1, "split": [1, 2, 1]})
    traffic = trace(config, shape, rank=tp).traffic
    state = 2 * LENGTH * HIDDEN * 4
    blocks, sums = 2, 4
    once = state if tp == 2 else 2 * (tp - 1) * state // tp
    assert traffic["tp"].bytes == 8 * blocks * sums * once
    # The middle stage sends each hidden state on and each gradient back.
    assert traffic["pp"].bytes == 8 * 2 * state
    assert traffic["pp"].calls == 16


def test_a_number_of_ranks_that_is_open_is_refused():
    config, shape = small(mesh={"pp": 2})
    with pytest.raises(ConfigError, match=r"mesh\.dp=auto") as error:
        trace(config, shape, rank=0)
    assert error.value.code == "SR122"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_of_the_mesh_is_refused(rank: int):
    config, shape = small(mesh={"pp": 2, "dp": 2})
    with pytest.raises(LayoutError, match=f"--rank {rank}") as error:
        trace(config, shape, rank=rank)
    assert "4 ranks" in error.value.why
