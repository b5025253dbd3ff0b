import pytest
import torch
from torch.nn import functional

from sirara.model import ops
from sirara.model.linear import linear


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def same(
    ours: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor], tolerance: float = 1e-12
) -> None:
    """Equal values and equal gradients of every leaf, for a random gradient of the output."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_of_several_layers_equals_the_layers_one_by_one(biased, transposed):
    x, outs = leaf(2, 5, 8), (6, 4, 3)
    weights = [leaf(8, o) if transposed else leaf(o, 8) for o in outs]
    biases = [leaf(o) for o in outs] if biased else None
    ours = linear(x, weights, biases, transposed=transposed)
    matrices = [w.t() if transposed else w for w in weights]
    theirs = torch.cat(
        [functional.linear(x, w, b) for w, b in zip(matrices, biases or [None] * 3, strict=True)], -1
    )
    same(ours, theirs, [x, *weights, *(biases or [])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_neighbours_in_one_storage_and_copies_elsewhere_give_equal_bits(dtype):
    flat = torch.randn(3 * 64 * 64).to(dtype)
    neighbours = [flat[i * 4096 : (i + 1) * 4096].view(64, 64).requires_grad_() for i in range(3)]
    copies = [w.detach().clone().requires_grad_() for w in neighbours]
    x, dy = leaf(4, 16, 64, dtype=dtype), torch.randn(4, 16, 192).to(dtype)
    a, b = linear(x, neighbours), linear(x, copies)
    assert torch.equal(a, b)
    assert ops.side_by_side(neighbours, 0).data_ptr() == flat.data_ptr()
    for ga, gb in zip(
        torch.autograd.grad(a, [x, *neighbours], dy), torch.autograd.grad(b, [x, *copies], dy), strict=True
    ):
        assert torch.equal(ga, gb)


def test_weights_in_the_wrong_order_or_with_a_gap_are_not_taken_for_one_matrix():
    flat = torch.arange(40.0)
    first, second, later = flat[:8].view(2, 4), flat[8:16].view(2, 4), flat[20:28].view(2, 4)
    for pair in ([second, first], [first, later], [first, second.clone()]):
        assert torch.equal(ops.side_by_side(pair, 0), torch.cat(pair))


def test_gradients_of_weights_are_views_of_one_product():
    x, weights = leaf(7, 8), [leaf(6, 8), leaf(4, 8)]
    dw = torch.autograd.grad(linear(x, weights).sum(), weights)
    assert dw[0].untyped_storage().data_ptr() == dw[1].untyped_storage().data_ptr()


def test_frozen_weights_get_no_gradient_and_no_work():
    x, weights = leaf(7, 8), [leaf(6, 8).detach(), leaf(4, 8).detach()]
    y = linear(x, weights)
    (dx,) = torch.autograd.grad(y.sum(), [x])
    torch.testing.assert_close(dx, torch.cat(weights).sum(0).expand(7, 8))


@pytest.mark.parametrize("rows", [3, 5000])
def test_rms_norm_equals_its_formula(rows):
    x, w = leaf(rows, 200), leaf(200)
    same(ops.rms_norm(x, w, 1e-5), x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w, [x, w], 1e-10)


@pytest.mark.parametrize("rows", [3, 5000])
def test_layer_norm_equals_torchs(rows):
    x, w, b = leaf(rows, 200), leaf(200), leaf(200)
    same(ops.layer_norm(x, w, b, 1e-5), functional.layer_norm(x, (200,), w, b, 1e-5), [x, w, b], 1e-10)


def test_swiglu_and_gelu_equal_their_formulas():
    x = leaf(3, 4, 20)
    gate, up = x.chunk(2, -1)
    same(ops.swiglu(x), gate * torch.sigmoid(gate) * up, [x])
    same(ops.gelu_tanh(x), 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))), [x])


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "swiglu"])
def test_bfloat16_is_within_its_rounding_of_float32(name):
    """Computed in float32 inside: the error stays at one rounding of inputs and outputs."""
    x, w, b = (leaf(*s, dtype=torch.bfloat16) for s in ((300, 256), (256,), (256,)))
    leaves = {"rms_norm": [x, w], "layer_norm": [x, w, b], "swiglu": [x]}[name]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def run(args: list[torch.Tensor]) -> torch.Tensor:
        return getattr(ops, name)(*args) if name == "swiglu" else getattr(ops, name)(*args, 1e-5)

    y, z = run(leaves), run(wide)
    dy = torch.randn_like(y)
    pairs = [
        (y, z),
        *zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(z, wide, dy.double()), strict=True),
    ]
    for low, high in pairs:
        assert low.dtype == torch.bfloat16
        error = (low.double() - high).abs().max() / high.abs().max()
        assert error < 2**-7


def test_norms_of_rows_at_the_ends_of_the_float_range():
    tiny = torch.full((1, 64), 1e-22)
    huge = torch.full((1, 64), 1e17)
    w = torch.ones(64)
    torch.testing.assert_close(ops.rms_norm(tiny, w, 1e-5), tiny / 1e-5**0.5)
    torch.testing.assert_close(ops.rms_norm(huge, w, 1e-5), torch.ones(1, 64))


def test_spans_cover_the_rows_in_order_and_depend_on_the_width_alone():
    cpu = torch.device("cpu")
    for width in (1, 64, 8192, 250_880):
        cuts = ops.spans(10_000, width, cpu)
        assert [low for low, _ in cuts[1:]] == [high for _, high in cuts[:-1]]
        assert cuts[0][0] == 0 and cuts[-1][1] == 10_000
        assert (
            ops.spans(777, width, cpu)[:-1]
            == [c for c in cuts if c[1] <= 776][: len(ops.spans(777, width, cpu)) - 1]
        )
