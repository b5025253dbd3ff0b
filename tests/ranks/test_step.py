"""The step pipeline on one and on several ranks: equal bits for every dp, ZeRO stage and block size."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from sirara.parallel.stage import Inputs
from sirara.train.optim import make_optimizer
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step
from tests.harness import run_ranks
from tests.toy import LENGTH, VOCAB, assemble

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
    options: dict[str, Any] | None = None,
) -> list[Any]:
    """Losses, norms and the final digest of a few steps on the ranks of the current group."""
    stage, mesh, dealt = assemble(
        zero=zero,
        microbatches=microbatches,
        block=block,
        precision=precision,
        tied=tied,
        direct=direct,
        **(options or {}),
    )
    optim = make_optimizer(name=optimizer, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = TrainState(stage=stage, mesh=mesh, state_names=optim.states_of, counters=Counters())
    state.reset_optimizer()
    step = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optim, clip=0.5)
    out: list[Any] = []
    update = 0
    for n in range(STEPS):
        inputs = {i: batch(n, i) for i in dealt.mine(mesh.coordinate("dp"))}
        valid = sum(int((batch(n, i).targets_BL != -100).sum()) for i in range(microbatches))
        losses = step.accumulate(inputs, valid_targets=valid, keys=None)
        if poison == n:
            for flat in stage.zero.groups:
                if flat.index == 1:
                    for gradient in flat.sums.values():
                        spoil(gradient)
        result = step.finish(losses, valid_targets=valid, lr=1e-2, update=update + 1, request=mesh.rank)
        update += not result.skipped
        out.append(
            (
                result.loss.hex(),
                result.grad_norm.hex(),
                result.bad_parameter,
                result.request - (mesh.world - 1),
            )
        )
    state.check_replicas()
    out.append(str(state.digest()))
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


@lru_cache
def oracle(
    precision: str, tied: bool, optimizer: str, poison: int | None = None, microbatches: int = 12
) -> list[Any]:
    return train(0, 1, precision, tied, optimizer, poison, microbatches)


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("block", ["auto", 1, 2, 8])
def test_bits_are_those_of_one_process(dp: int, zero: int, block: Any) -> None:
    for values in run_ranks(dp, train, zero, block, "fp32", True, "adamw"):
        assert values == oracle("fp32", True, "adamw")


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bits_are_those_of_one_process_in_other_precisions(precision: str, zero: int) -> None:
    for dp, block in ((2, 4), (3, "auto")):
        for values in run_ranks(dp, train, zero, block, precision, False, "lion"):
            assert values == oracle(precision, False, "lion")


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_without_a_block_add_nothing(microbatches: int, direct: bool, zero: int) -> None:
    for values in run_ranks(4, train, zero, 1, "fp32", True, "adamw", None, microbatches, direct):
        assert values == oracle("fp32", True, "adamw", None, microbatches)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_non_finite_gradient_is_named_and_changes_nothing(zero: int) -> None:
    expected = oracle("bf16", True, "adamw", poison=1)
    assert expected[1][2] == "b0.mix.weight" and expected[0][2] is None
    for values in run_ranks(2, train, zero, "auto", "bf16", True, "adamw", 1):
        assert values == expected


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_way_between_ranks_does_not_change_bits(zero: int) -> None:
    for values in run_ranks(3, train, zero, 1, "bf16", True, "adamw", None, MICROBATCHES, False):
        assert values == oracle("bf16", True, "adamw")


def test_the_block_size_does_not_change_one_process() -> None:
    assert train(1, "auto", "fp32", True, "adamw") == oracle("fp32", True, "adamw")
