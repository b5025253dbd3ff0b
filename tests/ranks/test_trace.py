"""`plan --trace` counts what a real step on gloo ranks sends."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.comm.world import Comms, World, connect_axes
from sirara.mesh import Mesh
from sirara.parallel.stage import Inputs
from sirara.pure.families import init_slice, unit_specs
from sirara.train.assemble import assemble
from sirara.train.trace import mesh_of, trace
from tests.harness import run_ranks
from tests.layouts import SIZES, small

LAYOUTS: dict[str, dict[str, Any]] = {
    "tied over two stages": {"mesh": {"pp": 2, "dp": 2, "zero": 1}},
    "three axes": {"mesh": {"pp": 2, "dp": 1, "tp": 2, "zero": 1}, "train": {"precision": "bf16"}},
    "weights gathered for each use": {"family": "bloom", "mesh": {"dp": 2, "tp": 2, "zero": 3}},
    "tokens spread": {
        "family": "llama",
        "mesh": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 2},
        "train": {"recompute": "full"},
    },
    "interleaved": {"family": "llama", "mesh": {"pp": 2, "dp": 2, "schedule": "interleaved", "zero": 3}},
    "split backward": {"mesh": {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 2}},
    "one replica each": {"mesh": {"dp": 4, "zero": 0}},
    "ranks without a microbatch": {"mesh": {"dp": 4, "zero": 3}, "train": {"global_batch": 12}},
    "matrices that travel": {
        "family": "llama",
        "mesh": {"dp": 2, "tp": 2, "zero": 1},
        "train": {"optimizer": {"name": "muon"}},
    },
    "sums by the library": {"mesh": {"dp": 4, "zero": 2}, "numerics": "fast"},
}


def sent_by_a_real_step(layout: dict[str, Any]) -> dict[str, int]:
    config, shape = small(**layout)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh: Mesh = mesh_of(config, rank)
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    comms = connect_axes(world, mesh.groups(), timeout_s=20)
    built = assemble(config, shape, unit_specs(shape), mesh=mesh, comms=comms, device=torch.device("cpu"))
    built.state.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 1, a, b)))
    before = bytes_of(comms)
    mine = built.deal.mine(mesh.coordinate("dp"))
    losses = built.stepper.accumulate(
        {i: inputs(i) for i in mine}, valid_targets=built.deal.microbatches * 32, keys=None
    )
    result = built.stepper.finish(losses, valid_targets=512, lr=1e-3, update=1, request=0)
    assert not result.skipped and result.grad_norm > 0
    built.state.zero.wait_all()
    return {name: n - before[name] for name, n in bytes_of(comms).items()}


def bytes_of(comms: Comms) -> dict[str, int]:
    return {f.name: getattr(comms, f.name).bytes_sent for f in fields(comms)}


def inputs(i: int) -> Inputs:
    ids = torch.randint(SIZES["vocab"], (2, 17), generator=torch.Generator().manual_seed(i))
    return Inputs(
        tokens_BL=ids[:, :-1].contiguous(),
        targets_BL=ids[:, 1:].contiguous(),
        positions_BL=torch.arange(16).expand(2, 16),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_counts_the_bytes_that_each_rank_of_a_real_step_sends_on_each_axis(name: str):
    layout = LAYOUTS[name]
    config, shape = small(**layout)
    for rank, real in enumerate(run_ranks(4, sent_by_a_real_step, layout)):
        traced = {axis: t.bytes for axis, t in trace(config, shape, rank=rank).traffic.items()}
        assert traced == real, f"rank {rank}"
        assert sum(real.values()) > 0
