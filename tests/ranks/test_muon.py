"""Muon on several ranks: the bits of one rank for every dp, tp and kind of sharding, and each matrix travels once."""

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirara.comm.group import Comm
from sirara.comm.world import World, world_comm
from sirara.pure.families import ModelShape, unit_specs
from sirara.pure.groups import flat_groups
from sirara.train.optim import make_optimizer
from tests.flat import drawn, flat_range, place_of
from tests.harness import run_ranks
from tests.ranks.test_step import train as steps

SHAPES = {
    "gpt2": ModelShape(family="gpt2", layers=2, hidden=48, heads=4, vocab=101, max_seq=16),
    "bloom": ModelShape(family="bloom", layers=2, hidden=32, heads=4, vocab=101, max_seq=16),
    "llama": ModelShape(
        family="llama", layers=3, hidden=48, heads=4, kv_heads=2, ffn=80, vocab=101, max_seq=16
    ),
}
UPDATES = 3
DEGREES = [(1, 2), (2, 1), (3, 1), (2, 2), (4, 1), (1, 4)]

Held = list[tuple[list[int], dict[str, torch.Tensor]]]


def train(comm: Comm, family: str, dp: int, sharded: bool, dtype: torch.dtype) -> tuple[Held, int]:
    """Per group the bounds and, by name, weights and state of the updated range; and the bytes sent per update."""
    shape = SHAPES[family]
    optimizer = make_optimizer(name="muon", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    place = place_of(optimizer, shape, comm=comm, dp=dp, sharded=sharded, dtype=dtype)
    before = comm.bytes_sent
    for update in range(1, UPDATES + 1):
        place.update(drawn(shape, update, dtype), lr=0.01, update=update, shrink=1.3)
    sent = (comm.bytes_sent - before) // UPDATES
    held = zip(place.bounds, place.weights, place.state, strict=True)
    return [([*bounds], {"": w} | state) for bounds, w, state in held], sent


def on_a_rank(family: str, dp: int, sharded: bool, dtype: torch.dtype, direct: bool) -> tuple[Held, int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return train(world_comm(world, timeout_s=20, direct=direct), family, dp, sharded, dtype)


@lru_cache
def one_rank(family: str, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Per kind ("" for weights, or a name of state) the logical tensors after all updates on one rank."""
    held, sent = train(Comm([0], 0, group=None, timeout_s=1), family, 1, True, dtype)
    assert sent == 0
    place = place_of(
        make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        SHAPES[family],
        comm=Comm([0], 0, group=None, timeout_s=1),
        dp=1,
        sharded=True,
        dtype=dtype,
    )
    out: dict[str, dict[str, torch.Tensor]] = {}
    for group, (_, kinds) in zip(place.groups, held, strict=True):
        for kind, flat in kinds.items():
            for slot in group.slots:
                values = flat[slot.start : slot.start + slot.numel].view(slot.tensor.shape)
                out.setdefault(kind, {})[slot.tensor.name] = values
    return out


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(("dp", "tp"), DEGREES)
@pytest.mark.parametrize("sharded", [False, True], ids=["zero 0", "zero 1-3"])
def test_every_layout_has_the_bits_of_one_rank(family, dp, tp, sharded):
    # Both links between ranks, and both dtypes, somewhere in the matrix.
    dtype = torch.float64 if (dp + tp + sharded) % 2 else torch.float32
    expected = one_rank(family, dtype)
    ranks = run_ranks(dp * tp, on_a_rank, family, dp, sharded, dtype, dp != 2)
    units = unit_specs(SHAPES[family])
    for place, (held, _) in enumerate(ranks):
        groups = flat_groups(units, tp=tp, tp_rank=place % tp)
        for group, (bounds, kinds) in zip(groups, held, strict=True):
            for kind, values in kinds.items():
                assert torch.equal(values, flat_range(group, expected[kind], *bounds)), (group.name, kind)


@pytest.mark.parametrize("dp", [2, 3])
def test_each_element_of_a_matrix_leaves_once_and_comes_back_once(dp):
    ranks = run_ranks(dp, on_a_rank, "llama", dp, True, torch.float32, True)
    matrices = [t for unit in unit_specs(SHAPES["llama"])[1:-1] for t in unit.tensors if len(t.shape) == 2]
    elements = sum(t.shape[0] * t.shape[1] for t in matrices)
    # A rank owns about 1 of dp parts of what it holds: that stays.
    sent = sum(bytes_sent for _, bytes_sent in ranks) / 4
    assert elements * 2 * (dp - 1) / dp == pytest.approx(sent, rel=0.25)
    assert sent <= 2 * elements


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (2, {"pp": 2, "schedule": "zb-v"}),
        (4, {"pp": 2, "schedule": "1f1b"}),
    ],
    ids=["dp 2", "dp 3", "dp 4", "pp 2", "pp 2 dp 2"],
)
def test_training_has_the_bits_of_one_process_at_every_stage(zero, ranks, options):
    """Losses, norms and the digest of weights and state: Muon of the mean gradient of the whole batch."""
    precision = "bf16" if ranks == 3 else "fp32"
    for values in run_ranks(ranks, steps, zero, "auto", precision, True, "muon", None, 12, True, options):
        assert values == one_process(precision)


@lru_cache
def one_process(precision: str) -> list[Any]:
    return steps(0, 1, precision, True, "muon")


def test_muon_is_not_adamw():
    assert one_process("fp32")[-1] != steps(0, 1, "fp32", True, "adamw")[-1]
