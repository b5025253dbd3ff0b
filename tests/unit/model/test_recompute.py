"""Selective recompute: outputs of norms and activation functions are made again by the backward that reads them."""

import pytest
import torch
from torch import Tensor

from sirara.model.decoder import Decoder
from sirara.pure.families import FAMILIES
from tests.unit.model.test_decoder import KEY, batch, initialised, shape_of


def kept_bytes(decoder: Decoder) -> tuple[int, list[Tensor]]:
    """Bytes that one block keeps for its backward beside parameters, and its gradients."""
    block, positions = decoder.units()[1], batch(decoder.shape)[2]
    torch.manual_seed(0)
    x, dy = (torch.randn(2, 32, 64, requires_grad=True) for _ in range(2))
    leaves = list(block.parameters())
    known = {p.untyped_storage().data_ptr() for p in leaves}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x, positions, None, KEY)
    return sum(storages.values()), list(torch.autograd.grad(y, [x, *leaves], dy))


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_keeps_less_by_exactly_the_outputs_and_gives_equal_bits(family):
    shape = shape_of(family)
    decoder = initialised(shape, torch.float32)
    kept, want = kept_bytes(decoder)
    decoder.recompute_activations(True)
    less, grads = kept_bytes(decoder)
    tokens, size = 64, 4
    assert kept - less == tokens * size * (2 * shape.hidden + shape.ffn)
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)


def test_a_deferred_job_survives_that_its_norms_weights_are_let_go():
    """ZeRO 3 frees weights between the two halves of backward."""
    decoder = initialised(shape_of("llama"), torch.float64)
    _, want = kept_bytes(decoder.float())
    decoder.recompute_activations(True)
    deferral = decoder.split_backward()
    deferral.active = True
    block = decoder.units()[1]
    positions = batch(decoder.shape)[2]
    torch.manual_seed(0)
    x, dy = (torch.randn(2, 32, 64, requires_grad=True) for _ in range(2))
    leaves = list(block.parameters())
    torch.autograd.grad(block(x, positions, None, KEY), [x, *leaves], dy, allow_unused=True)
    for leaf in leaves:
        leaf.data.fill_(float("nan"))
    later = deferral.take().run()
    for leaf, grad in zip(leaves, want[1:], strict=True):
        assert id(leaf) not in later or torch.equal(later[id(leaf)], grad)
    assert len(later) == sum(leaf.dim() > 1 for leaf in leaves)


def test_blocks_are_switched_one_by_one():
    decoder = initialised(shape_of("llama"), torch.float32)
    kept, _ = kept_bytes(decoder)
    decoder.units()[2].recompute_activations(True)
    assert kept_bytes(decoder)[0] == kept
