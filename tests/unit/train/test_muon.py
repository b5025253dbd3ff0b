"""Muon on one rank against dense references and torch's own."""

from math import sqrt

import pytest
import torch

from sirara.comm.group import Comm
from sirara.errors import InvariantError
from sirara.pure.families import ModelShape, unit_specs
from sirara.pure.groups import flat_groups
from sirara.train.muon import COEFFICIENTS, Muon, orthogonalise
from sirara.train.optim import AdamW, make_optimizer
from sirara.train.ranges import Optimizer, Plane, Range
from tests.flat import Place, drawn, place_of

Tensor = torch.Tensor
GPT2 = ModelShape(family="gpt2", layers=2, hidden=48, heads=4, vocab=67, max_seq=16)
LLAMA = ModelShape(family="llama", layers=2, hidden=48, heads=4, kv_heads=2, ffn=80, vocab=67, max_seq=16)
DTYPES = [torch.float32, torch.float64]


def muon(**changes) -> Optimizer:
    keys = {"name": "muon", "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} | changes
    return make_optimizer(**keys)


def alone(optimizer: Optimizer, shape: ModelShape, dtype: torch.dtype) -> Place:
    comm = Comm([0], 0, group=None, timeout_s=1)
    return place_of(optimizer, shape, comm=comm, dp=1, sharded=True, dtype=dtype)


def tensors_of(place: Place, values: list[Tensor]) -> dict[str, Tensor]:
    return {
        slot.tensor.name: flat[slot.start : slot.start + slot.numel].view(slot.tensor.shape)
        for group, flat in zip(place.groups, values, strict=True)
        for slot in group.slots
    }


def by_singular_values(x_MN: Tensor, steps: int) -> Tensor:
    u, s, v = torch.linalg.svd(x_MN / torch.linalg.matrix_norm(x_MN), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("dims", [(24, 24), (16, 70), (70, 16), (1, 9), (9, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(dims, steps):
    x_MN = torch.randn(dims, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = orthogonalise(x_MN, steps)
    assert got.is_contiguous()
    torch.testing.assert_close(got, by_singular_values(x_MN, steps), rtol=0, atol=1e-12)


def test_singular_values_come_near_1():
    x_MN = torch.randn(64, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = torch.linalg.svdvals(orthogonalise(x_MN))
    assert s.min() > 0.6
    assert s.max() < 1.3


@pytest.mark.parametrize("dims", [(128, 350), (350, 128), (2048, 33), (64, 3000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_equal_bits(dims, dtype):
    x_MN = torch.randn(dims, generator=torch.Generator().manual_seed(1), dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(orthogonalise(x_MN))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)


def test_scale_of_a_matrix_does_not_matter_and_zeros_stay_zeros():
    x_MN = torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(x_MN * 1024), orthogonalise(x_MN), rtol=0, atol=1e-15)
    assert torch.equal(orthogonalise(torch.zeros(4, 6)), torch.zeros(4, 6))


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=lambda shape: shape.family)
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_of_blocks_follow_the_dense_formula(shape, nesterov):
    lr, m = 0.01, 0.9
    place = alone(muon(momentum=m, nesterov=nesterov), shape, torch.float64)
    matrices = {t.name for unit in unit_specs(shape)[1:-1] for t in unit.tensors if len(t.shape) == 2}
    weights = {name: w for name, w in drawn(shape, 0, torch.float64).items() if name in matrices}
    momentum = {name: torch.zeros_like(w) for name, w in weights.items()}
    for update in (1, 2, 3):
        grads = drawn(shape, update, torch.float64)
        place.update(grads, lr=lr, update=update, shrink=1.5)
        for name, w in weights.items():
            g = grads[name] / 1.5
            momentum[name] = m * momentum[name] + (1 - m) * g
            direction = (1 - m) * g + m * momentum[name] if nesterov else momentum[name]
            step = lr * 0.2 * sqrt(max(w.shape))
            weights[name] = (1 - lr * 0.1) * w - step * by_singular_values(direction, 5)
    got = tensors_of(place, place.weights)
    for name, expected in weights.items():
        torch.testing.assert_close(got[name], expected, rtol=0, atol=1e-12)
    kept = [state for state in place.state if "momentum" in state]
    assert all(set(state) == {"momentum"} for state in kept) and len(kept) == shape.layers


def test_updates_equal_those_of_torch_as_far_as_its_bfloat16_goes():
    shape, lr = LLAMA, 0.01
    place = alone(muon(), shape, torch.float32)
    names = [t.name for unit in unit_specs(shape)[1:-1] for t in unit.tensors if len(t.shape) == 2]
    start = drawn(shape, 0, torch.float32)
    theirs = {name: torch.nn.Parameter(start[name].clone()) for name in names}
    reference = torch.optim.Muon(theirs.values(), lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for update in (1, 2, 3):
        grads = drawn(shape, update, torch.float32)
        for name, parameter in theirs.items():
            parameter.grad = grads[name].clone()
        reference.step()
        place.update(grads, lr=lr, update=update)
    got = tensors_of(place, place.weights)
    for name, parameter in theirs.items():
        moved, expected = got[name] - start[name], parameter.detach() - start[name]
        # bfloat16 has 8 bits: products of a step are off by 2^-8 each.
        assert torch.linalg.norm(moved - expected) < 0.03 * torch.linalg.norm(expected)
    momenta = tensors_of(
        place,
        [s.get("momentum", torch.zeros(g.numel)) for g, s in zip(place.groups, place.state, strict=True)],
    )
    for name, parameter in theirs.items():
        expected = reference.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(momenta[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_else_is_adamw(dtype):
    shape = GPT2
    mixed, plain = alone(muon(), shape, dtype), alone(AdamW(), shape, dtype)
    for update in (1, 2):
        for place in (mixed, plain):
            place.update(drawn(shape, update, dtype), lr=0.01, update=update, shrink=2.0)
    matrices = {t.name for unit in unit_specs(shape)[1:-1] for t in unit.tensors if len(t.shape) == 2}
    got, expected = tensors_of(mixed, mixed.weights), tensors_of(plain, plain.weights)
    for name in got:
        assert torch.equal(got[name], expected[name]) == (name not in matrices), name


def test_update_of_a_matrix_has_the_size_of_adamw_s():
    """Root mean square 0.2, which is what AdamW's updates have in practice: that is what carries lr over."""
    place = alone(muon(weight_decay=0.0), LLAMA, torch.float64)
    before = {name: w.clone() for name, w in tensors_of(place, place.weights).items()}
    place.update(drawn(LLAMA, 1, torch.float64), lr=1.0, update=1)
    for name, w in tensors_of(place, place.weights).items():
        if ".layers." in name and w.dim() == 2:
            # A semi-orthogonal matrix has root mean square 1 / sqrt(max(rows, columns)).
            rms = float((w - before[name]).square().mean().sqrt())
            assert rms == pytest.approx(0.2, rel=0.3), name


def test_padding_stays_zero():
    place = alone(muon(), GPT2, torch.float32)
    place.update(drawn(GPT2, 1, torch.float32), lr=0.1, update=1)
    for group, weights, state in zip(place.groups, place.weights, place.state, strict=True):
        inside = torch.zeros(len(weights), dtype=torch.bool)
        for slot in group.slots:
            inside[slot.start : slot.start + slot.numel] = True
        for values in (weights, *state.values()):
            assert not values[~inside].any()


def test_update_before_prepare_and_foreign_ranges_are_broken_promises():
    empty = torch.zeros(0)
    with pytest.raises(InvariantError, match="before prepare"):
        muon().update([], lr=0.1, update=1)
    place = alone(muon(), GPT2, torch.float32)
    with pytest.raises(InvariantError, match="the plan is for flat ranges"):
        place.optimizer.update([Range(weights_U=empty, grad_U=empty, state={}, decay=True)], lr=0.1, update=1)
    groups = [flat_groups(unit_specs(GPT2))]
    with pytest.raises(InvariantError, match="dp 2"):
        muon().prepare(Plane(groups=groups, comm=Comm([0], 0, group=None, timeout_s=1), dp=2, sharded=True))


def test_muon_names_its_states():
    assert isinstance(muon(), Muon)
    assert set(muon().state_names) == {"momentum", "exp_avg", "exp_avg_sq"}
