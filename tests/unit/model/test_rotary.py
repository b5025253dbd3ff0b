import math

import pytest
import torch

from sirara.model.rotary import Rotary, frequencies, rotate, split_heads
from sirara.pure.families import ModelShape, RopeScaling


def shape(**changes: object) -> ModelShape:
    sizes = {"family": "llama", "layers": 1, "hidden": 64, "heads": 4, "vocab": 9, "max_seq": 64}
    return ModelShape(**(sizes | changes))  # type: ignore[arg-type]


def turned(x: torch.Tensor, position: int, radians: torch.Tensor) -> torch.Tensor:
    """One head by the definition: pair i is a complex number turned by position * radians[i]."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(radians), position * radians
    )
    return torch.cat((z.real, z.imag), -1)


def test_heads_turn_by_their_positions_whatever_the_order_of_positions():
    rotary = Rotary(shape())
    positions = torch.tensor([[0, 1, 2, 3], [9, 0, 63, 7]])
    x = torch.randn(2, 4, 3, 16, dtype=torch.float64)
    y = rotate(x, rotary.tables(positions, torch.float64))
    for b in range(2):
        for t in range(4):
            want = turned(x[b, t], int(positions[b, t]), rotary.frequencies)
            torch.testing.assert_close(y[b, t], want, rtol=0, atol=1e-12)


def test_scores_depend_on_the_distance_alone():
    rotary = Rotary(shape())
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, of: int) -> torch.Tensor:
        tables = [rotary.tables(torch.tensor([[p]]), torch.float64) for p in (at, of)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    torch.testing.assert_close(score(7, 3), score(44, 40), rtol=0, atol=1e-12)


def test_linear_scaling_divides_and_llama3_leaves_fast_waves_alone():
    base = frequencies(shape())
    torch.testing.assert_close(base, 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16))
    linear = frequencies(shape(rope_scaling=RopeScaling(kind="linear", factor=4.0)))
    torch.testing.assert_close(linear, base / 4)
    llama3 = frequencies(shape(rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_seq=64)))
    turns = 64 * base / (2 * math.pi)
    assert turns.min() < 1 < turns.max()
    for got, was, fits in zip(llama3, base, turns, strict=True):
        if fits >= 4:
            assert got == was
        elif fits <= 1:
            torch.testing.assert_close(got, was / 8)
        else:
            assert was / 8 < got < was


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize(("kv_heads", "per_head"), [(4, False), (2, False), (4, True)])
def test_split_heads_and_its_gradient_equal_slices_of_the_projection(kv_heads, per_head, with_tables):
    rotary = Rotary(shape())
    positions = torch.tensor([[3, 1, 4], [1, 5, 9]])
    tables = rotary.tables(positions, torch.float64) if with_tables else None
    qkv = torch.randn(2, 3, (4 + 2 * kv_heads) * 16, dtype=torch.float64, requires_grad=True)
    if per_head:
        q, k, v = qkv.view(2, 3, 4, 3, 16).unbind(3)
    else:
        q, k, v = qkv.view(2, 3, -1, 16).split([4, kv_heads, kv_heads], 2)
    theirs = (rotate(q, tables), rotate(k, tables), v) if tables is not None else (q, k, v)
    ours = split_heads(qkv, 4, kv_heads, per_head=per_head, tables=tables)
    grads = [torch.randn_like(t) for t in ours]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        *(torch.autograd.grad(t, qkv, grads)[0] for t in (ours, theirs)), rtol=0, atol=1e-12
    )


def test_turning_back_is_the_gradient_of_turning():
    tables = Rotary(shape()).tables(torch.tensor([[5, 6]]), torch.float64)
    x = torch.randn(1, 2, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rotate(t, tables), (x,))


def test_tables_follow_positions_that_change_in_place():
    """The last tables are kept for the next block; changed positions must not get the old ones."""
    rotary = Rotary(shape())
    positions = torch.tensor([[0, 1]])
    before = rotary.tables(positions, torch.float32)
    assert rotary.tables(positions, torch.float32) is before
    positions += 5
    after = rotary.tables(positions, torch.float32)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[0], Rotary(shape()).tables(torch.tensor([[5, 6]]), torch.float32)[0])
