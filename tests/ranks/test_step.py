"""The step pipeline on one and on several ranks: equal bits for every dp, ZeRO stage and block size."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sirara.checkpoint.digest import Digest, digest_of
from sirara.comm.world import World, world_comm
from sirara.parallel.parallelize import Layout, parallelize
from sirara.parallel.stage import Inputs
from sirara.pure.families import init_slice
from sirara.pure.tree import deal
from sirara.train.optim import make_optimizer
from sirara.train.precision import precision_of
from sirara.train.step import Step
from tests.harness import run_ranks
from tests.toy import LENGTH, VOCAB, Toy, specs

STEPS, MICROBATCHES, B = 3, 12, 2


def batch(step: int, i: int) -> Inputs:
    rng = np.random.default_rng([step, i])
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (B, LENGTH + 1)))
    targets = tokens[:, 1:].clone()
    targets[0, : i % 4] = -100
    positions = torch.arange(LENGTH).expand(B, LENGTH)
    return Inputs(tokens_BL=tokens[:, :-1].contiguous(), targets_BL=targets, positions_BL=positions)


def train(
    zero: int,
    block: Any,
    precision: str,
    tied: bool,
    optimizer: str,
    poison: int | None = None,
    microbatches: int = MICROBATCHES,
    direct: bool = True,
) -> list[Any]:
    """Losses, norms and the final digest of a few steps on the ranks of the current group."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    comm = world_comm(world, timeout_s=20, direct=direct)
    kind = precision_of(precision)
    dealt = deal(microbatches, size, block)
    layout = Layout(zero=zero, deal=dealt, weights=kind.weights, sums=kind.sums)
    table = specs(tied=tied)
    stage = parallelize(Toy(), table, layout, comm=comm, device=torch.device("cpu"))
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 7, a, b)))
    optim = make_optimizer(name=optimizer, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for flat in stage.zero.groups:
        flat.state = {name: torch.zeros_like(flat.master_U) for name in optim.state_names}
    step = Step(stage=stage, comm=comm, deal=dealt, optimizer=optim, clip=0.5)
    out: list[Any] = []
    update = 0
    for n in range(STEPS):
        inputs = {i: batch(n, i) for i in dealt.mine(rank)}
        valid = sum(int((batch(n, i).targets_BL != -100).sum()) for i in range(microbatches))
        losses = step.accumulate(inputs, valid_targets=valid, keys=None)
        if poison == n:
            for gradient in stage.zero.groups[1].sums:
                spoil(gradient)
        result = step.finish(losses, valid_targets=valid, lr=1e-2, update=update + 1, request=rank)
        update += not result.skipped
        out.append(
            (result.loss.hex(), result.grad_norm.hex(), result.bad_parameter, result.request - (size - 1))
        )
    stage.zero.wait_all()
    out.append(str(state_digest(stage.zero, comm)))
    return out


def spoil(gradient: Any) -> None:
    finish = gradient.finish

    def poisoned() -> torch.Tensor:
        shard = finish()
        # Element 5 of the group lies in the first rank's shard.
        if gradient.comm.rank == 0:
            shard[5] = float("nan")
        gradient.finish = finish
        return shard

    gradient.finish = poisoned


def state_digest(zero: Any, comm: Any) -> Digest:
    parts = []
    for flat in zero.groups:
        tensors = {"": flat.weights_P[slice(*flat.shard)], "/master": zero.shard_of(flat, flat.master_U)}
        tensors |= {f"/{n}": zero.shard_of(flat, t) for n, t in flat.state.items()}
        for piece in flat.group.pieces(*flat.shard):
            at = piece.flat - flat.shard[0]
            for suffix, tensor in tensors.items():
                parts.append(
                    (piece.tensor.name + suffix, piece.start, tensor[at : at + piece.stop - piece.start])
                )
    return Digest.from_rows(comm.gather_rows("digest", digest_of(parts).as_int64()))


@lru_cache
def oracle(
    precision: str, tied: bool, optimizer: str, poison: int | None = None, microbatches: int = 12
) -> list[Any]:
    return train(0, 1, precision, tied, optimizer, poison, microbatches)


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("block", ["auto", 1, 2, 8])
def test_bits_are_those_of_one_process(dp: int, zero: int, block: Any) -> None:
    for values in run_ranks(dp, train, zero, block, "fp32", True, "adamw"):
        assert values == oracle("fp32", True, "adamw")


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("zero", [0, 1])
def test_bits_are_those_of_one_process_in_other_precisions(precision: str, zero: int) -> None:
    for dp, block in ((2, 4), (3, "auto")):
        for values in run_ranks(dp, train, zero, block, precision, False, "lion"):
            assert values == oracle(precision, False, "lion")


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("direct", [True, False])
def test_ranks_without_a_block_add_nothing(microbatches: int, direct: bool) -> None:
    for values in run_ranks(4, train, 1, 1, "fp32", True, "adamw", None, microbatches, direct):
        assert values == oracle("fp32", True, "adamw", None, microbatches)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_non_finite_gradient_is_named_and_changes_nothing(zero: int) -> None:
    expected = oracle("bf16", True, "adamw", poison=1)
    assert expected[1][2] == "b0.mix.weight" and expected[0][2] is None
    for values in run_ranks(2, train, zero, "auto", "bf16", True, "adamw", 1):
        assert values == expected


@pytest.mark.parametrize("zero", [0, 1])
def test_the_way_between_ranks_does_not_change_bits(zero: int) -> None:
    for values in run_ranks(3, train, zero, 1, "bf16", True, "adamw", None, MICROBATCHES, False):
        assert values == oracle("bf16", True, "adamw")


def test_the_block_size_does_not_change_one_process() -> None:
    assert train(1, "auto", "fp32", True, "adamw") == oracle("fp32", True, "adamw")
