"""Optimizers on flat ranges against torch's own and against plain formulas; equal bits on any cut and any threads."""

import itertools

import pytest
import torch

from sirara.errors import ConfigError
from sirara.train.optim import AdamW, Lion, Optimizer, Range, make_optimizer

N = 16_384


def case(
    dtype: torch.dtype, optimizer: Optimizer
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(N, generator=generator, dtype=dtype)
    grad = torch.randn(N, generator=generator, dtype=dtype)
    return (
        weights,
        grad,
        {name: torch.rand(N, generator=generator, dtype=dtype) * 0.1 for name in optimizer.state_names},
    )


def updated(optimizer: Optimizer, dtype: torch.dtype, cuts: list[int]) -> list[torch.Tensor]:
    weights, grad, state = case(dtype, optimizer)
    bounds = [0, *cuts, N]
    ranges = [
        Range(
            weights_U=weights[a:b], grad_U=grad[a:b], state={k: v[a:b] for k, v in state.items()}, decay=True
        )
        for a, b in itertools.pairwise(bounds)
    ]
    optimizer.update(ranges, lr=1e-2, update=7, shrink=1.7)
    return [weights, *state.values()]


@pytest.mark.parametrize("optimizer", [AdamW(), Lion()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_cut_and_any_threads_give_equal_bits(
    optimizer: Optimizer, dtype: torch.dtype, threads: int
) -> None:
    expected = updated(optimizer, dtype, [])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for cuts in ([1024], [1024, 5120, 15_360], []):
            for got, want in zip(updated(optimizer, dtype, cuts), expected, strict=True):
                assert torch.equal(got, want)
    finally:
        torch.set_num_threads(before)


def test_adamw_equals_torch_over_several_updates() -> None:
    weights, _, _ = case(torch.float64, AdamW())
    ours, theirs = weights.clone(), torch.nn.Parameter(weights.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = {name: torch.zeros(N, dtype=torch.float64) for name in AdamW().state_names}
    for update in range(1, 6):
        grad = torch.sin(torch.arange(N, dtype=torch.float64) * update)
        theirs.grad = grad.clone()
        reference.step()
        AdamW().update([Range(weights_U=ours, grad_U=grad, state=state, decay=True)], lr=1e-2, update=update)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay", [True, False])
def test_lion_is_the_published_formula(decay: bool) -> None:
    weights, grad, state = case(torch.float64, Lion())
    momentum = state["momentum"].clone()
    expected = weights * (1 - 1e-2 * 0.1 * decay) - 1e-2 * torch.sign(0.9 * momentum + 0.1 * grad)
    expected_momentum = 0.99 * momentum + 0.01 * grad
    Lion().update([Range(weights_U=weights, grad_U=grad, state=state, decay=decay)], lr=1e-2, update=1)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(state["momentum"], expected_momentum, rtol=0, atol=1e-15)


def test_ranges_without_decay_are_not_decayed() -> None:
    weights = torch.ones(1024)
    state = {name: torch.zeros(1024) for name in AdamW().state_names}
    AdamW().update(
        [Range(weights_U=weights, grad_U=torch.zeros(1024), state=state, decay=False)], lr=0.1, update=1
    )
    assert torch.equal(weights, torch.ones(1024))


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sgd"):
        make_optimizer(name="sgd", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [AdamW(), Lion()])
def test_shrinking_equals_dividing_the_gradient_first(optimizer: Optimizer) -> None:
    results = []
    for shrink in (1.0, 1.7):
        weights, grad, state = case(torch.float64, optimizer)
        one = Range(weights_U=weights, grad_U=grad if shrink != 1.0 else grad / 1.7, state=state, decay=True)
        optimizer.update([one], lr=1e-2, update=1, shrink=shrink)
        results.append(weights)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)
