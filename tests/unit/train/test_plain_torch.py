"""The step pipeline on one process against a plain loop of torch: autograd, clip_grad_norm_, AdamW."""

from math import prod

import pytest
import torch

from sirara.pure.families import init_slice
from sirara.train.optim import AdamW
from sirara.train.step import Step
from tests.ranks.test_step import batch
from tests.toy import Toy, assemble, specs

STEPS, MICROBATCHES, LR, CLIP = 4, 6, 1e-2, 0.05


def valid_targets(step: int) -> int:
    return sum(int((batch(step, i).targets_BL != -100).sum()) for i in range(MICROBATCHES))


def drawn(tied: bool) -> dict[str, torch.Tensor]:
    return {
        t.name: torch.from_numpy(init_slice(t, 7, 0, prod(t.shape))).double().view(t.shape)
        for unit in specs(tied=tied)
        for t in unit.tensors
        if t.tied_to is None
    }


def ours(tied: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    stage, mesh, dealt = assemble(zero=1, microbatches=MICROBATCHES, block=2, precision="fp64", tied=tied)
    optimizer = AdamW()
    for flat in stage.zero.groups:
        flat.state = {name: torch.zeros_like(flat.weights_U) for name in optimizer.state_names}
    step = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optimizer, clip=CLIP)
    seen = []
    for n in range(STEPS):
        valid = valid_targets(n)
        inputs = {i: batch(n, i) for i in range(MICROBATCHES)}
        losses = step.accumulate(inputs, valid_targets=valid, keys=None)
        result = step.finish(losses, valid_targets=valid, lr=LR, update=n + 1, request=0)
        seen.append((result.loss, result.grad_norm))
    weights = {
        slot.tensor.name: flat.weights_U[slot.start : slot.start + slot.numel].view(slot.tensor.shape)
        for flat in stage.zero.groups
        for slot in flat.group.slots
    }
    return seen, weights


def plain(tied: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    units, weights = Toy().units(), {n: torch.nn.Parameter(w) for n, w in drawn(tied).items()}
    for unit, spec in zip(units, specs(tied=tied), strict=True):
        for t in spec.tensors:
            owner, _, name = t.local.rpartition(".")
            setattr(unit.get_submodule(owner), name, weights[t.tied_to or t.name])
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": 0.1},
            {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    seen = []
    for n in range(STEPS):
        optimizer.zero_grad()
        valid, total = valid_targets(n), 0.0
        for i in range(MICROBATCHES):
            b = batch(n, i)
            x = units[0](b.tokens_BL, b.positions_BL, None)
            for unit in units[1:-1]:
                x = unit(x, b.positions_BL, None, None)
            objective, losses_BL = units[-1](x, b.targets_BL, 1.0 / valid)
            objective.backward()
            total += float(losses_BL.sum())
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        optimizer.step()
        seen.append((total / valid, float(norm)))
    return seen, {name: w.detach() for name, w in weights.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_is_that_of_plain_torch_in_float64(tied: bool) -> None:
    (seen, weights), (expected, theirs) = ours(tied), plain(tied)
    assert all(norm > CLIP for _, norm in expected)
    for got, want in zip(seen, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    for name, value in theirs.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
