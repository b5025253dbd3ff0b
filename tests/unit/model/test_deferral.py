"""Split backward: the input's gradient now, the weights' later, with the bits of doing both at once."""

import pytest
import torch
from torch import Tensor

from sirara.model import loss
from sirara.model.linear import linear
from sirara.model.split import Deferral, Wiring
from sirara.pure.families import FAMILIES
from tests.unit.model.test_decoder import KEY, batch, initialised, shape_of


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_made_later_equal_gradients_made_at_once_in_bits(family):
    decoder = initialised(shape_of(family), dropout=0.1)
    block, positions = decoder.units()[1], batch(decoder.shape)[2]
    x = torch.randn(2, 32, 64, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    named = dict(block.named_parameters())
    leaves = list(named.values())
    dx, *want = torch.autograd.grad(block(x, positions, None, KEY), [x, *leaves], dy)

    deferral = decoder.split_backward()
    y = block(x, positions, None, KEY)
    deferral.active = True
    dx_now, *now = torch.autograd.grad(y, [x, *leaves], dy, allow_unused=True)
    deferral.active = False
    del y
    jobs = deferral.take()
    later = jobs.run()

    assert torch.equal(dx, dx_now)
    for (name, leaf), grad, got in zip(named.items(), want, now, strict=True):
        assert (got is None) == ("norm" not in name)
        assert torch.equal(grad, later[id(leaf)] if got is None else got)
    assert len(later) == sum(g is None for g in now)
    assert not jobs.jobs and not deferral.take().jobs


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_heads_weight_gradient_may_come_later_with_equal_bits(dtype, chunks, monkeypatch):
    decoder = initialised(shape_of("llama")).to(dtype)
    head, targets = decoder.units()[-1], batch(decoder.shape)[1]
    monkeypatch.setattr(loss, "LOGITS_BYTES", 0)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", -(-targets.numel() // chunks))
    x = torch.randn(*targets.shape, 64, dtype=dtype, requires_grad=True)
    leaves = [*head.parameters()]

    def run():
        return head(x, targets, 0.3)[0] * 2

    dx, *want = torch.autograd.grad(run(), [x, *leaves])
    deferral = decoder.split_backward()
    assert all(map(torch.equal, torch.autograd.grad(run(), [x, *leaves]), [dx, *want]))
    y = run()
    deferral.active = True
    dx_now, *now = torch.autograd.grad(y, [x, *leaves], allow_unused=True)
    later = deferral.take().run()
    assert list(later) == [id(head.proj.weight)]
    got = [later.get(id(leaf), grad) for leaf, grad in zip(leaves, now, strict=True)]
    assert all(map(torch.equal, [dx_now, *got], [dx, *want]))


def test_a_deferral_that_is_not_active_changes_nothing():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    deferral = Deferral()
    y = linear(x, [w], wiring=Wiring(deferral=deferral))
    assert all(g is not None for g in torch.autograd.grad(y.sum(), [x, w]))
    assert not deferral.take().jobs


def test_frozen_leaves_get_no_later_gradient():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    bias = torch.randn(5, requires_grad=True)
    deferral = Deferral(active=True)
    y = linear(x, [w], [bias], wiring=Wiring(deferral=deferral))
    torch.autograd.grad(y.sum(), [x, bias], allow_unused=True)
    assert list(deferral.take().run()) == [id(bias)]


def test_two_uses_of_one_leaf_add_up():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    deferral = Deferral(active=True)
    wiring = Wiring(deferral=deferral)

    def run() -> Tensor:
        return linear(linear(x, [w], wiring=wiring), [w], wiring=wiring)

    y = run()
    torch.autograd.grad(y.sum(), [x, w], allow_unused=True)
    deferral.active = False
    torch.testing.assert_close(
        deferral.take().run()[id(w)], torch.autograd.grad(run().sum(), [w])[0], rtol=1e-6, atol=1e-6
    )
