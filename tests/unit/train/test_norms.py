"""Norm sums by half grains: equal bits for any threads and shards; overflow is no fault, bad elements are named."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sirara.train.agree import FINE, HALF, grain_sums
from sirara.train.step import loss_sum


def sums(shards: list[torch.Tensor]) -> tuple[list[np.ndarray], tuple[float, float]]:
    return grain_sums(
        shards, [SimpleNamespace(index=n, shard=(2048, 2048 + len(s))) for n, s in enumerate(shards)]
    )  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grains", [1, 2, 3, 700, 3000])
def test_a_grain_has_the_same_sum_with_any_threads_and_neighbours(dtype: torch.dtype, grains: int) -> None:
    shard = torch.randn(grains * 2 * HALF, generator=torch.Generator().manual_seed(grains), dtype=dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sums([shard])[0][0])
            cut = 2 * HALF * (grains // 2)
            if cut:
                results.append(np.concatenate(sums([shard[:cut], shard[cut:]])[0]))
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(result, results[0]) for result in results)
    assert results[0].sum() == pytest.approx(float(shard.double().square().sum()), rel=1e-5)


def test_finite_elements_whose_squares_overflow_are_summed_right() -> None:
    shard = torch.zeros(2 * HALF)
    shard[7] = 1e30
    (total,), bad = sums([shard])
    assert bad == FINE
    assert total.sum() == pytest.approx(1e60, rel=1e-6)


def test_a_norm_beyond_float32_is_no_fault_and_summed_right() -> None:
    shard = torch.full((2 * HALF,), 3e38)
    (total,), bad = sums([shard])
    assert bad == FINE
    assert total.sum() == pytest.approx(2 * HALF * 9e76, rel=1e-6)


def test_a_gradient_that_is_bad_everywhere_is_not_searched_beyond_its_first_element() -> None:
    # A run that blows up has no finite element left: a look at every row took minutes on a large shard.
    with CountOps() as ops:
        assert sums([torch.full((1000 * HALF,), torch.nan)])[1] == (0.0, 2048.0)
    assert ops.count < 50


class CountOps(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_element_is_named_by_group_and_place(value: float) -> None:
    good, poor = torch.ones(2 * HALF), torch.ones(2 * HALF)
    poor[[600, 900]] = value
    assert sums([good, poor])[1] == (1.0, 2048.0 + 600.0)


def test_loss_sums_do_not_depend_on_the_order() -> None:
    losses = (
        torch.rand(4, 256, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 1)[:, None]
    )
    assert loss_sum(losses) == loss_sum(losses.flip(0, 1)) == loss_sum(losses.T)
