"""Recompute inside a block: what lies between its matrix products is made again by the backward that reads it."""

import pytest
import torch
from torch import Tensor

from sirara.model.decoder import Decoder
from sirara.pure.families import FAMILIES
from sirara.pure.recompute import MODULES
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


def lively(family: str, **changes: int) -> Decoder:
    return initialised(shape_of(family, **changes), torch.float32)


@pytest.mark.parametrize("modules", [("attention",), ("mlp",), ("norm", "attention"), MODULES], ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_set_of_modules_gives_equal_bits_and_keeps_less(family, modules):
    decoder = lively(family)
    kept, want = kept_bytes(decoder)
    decoder.recompute_modules(modules)
    less, grads = kept_bytes(decoder)
    assert less < kept
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)


def test_what_each_module_lets_go():
    """llama, elements a token: D of a hidden state, A and K features of query and key heads, F of the MLP."""
    decoder = lively("llama")
    shape, tokens, size = decoder.shape, 64, 4
    d, a, k, f = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn
    # Beside: a number per head and one per norm; the tables of angles, which belong to all blocks.
    lse, norm, tables = shape.heads, 1, 2 * shape.head_dim
    kept, _ = kept_bytes(decoder)
    for modules, less in (
        (("norm",), 2 * d),
        (("act",), f),
        (("mlp",), d + norm + 3 * f),
        # q, k, v of every query head and the output go, the product that they come from stays.
        (("attention",), (4 * a + lse + tables) - (a + 2 * k)),
    ):
        decoder.recompute_modules(modules)
        assert kept - kept_bytes(decoder)[0] == tokens * size * less, modules


def test_a_part_that_is_made_again_runs_twice_in_all(monkeypatch):
    """Once forward and once backward, though two of its readers need it there."""
    decoder, calls = lively("llama"), []
    attention = decoder.units()[1].attn
    core = attention._core
    monkeypatch.setattr(attention, "_core", lambda *args: calls.append(1) or core(*args))
    decoder.recompute_modules(("attention",))
    kept_bytes(decoder)
    assert len(calls) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_keeps_less_by_exactly_the_outputs_and_gives_equal_bits(family):
    shape = shape_of(family)
    decoder = initialised(shape, torch.float32)
    kept, want = kept_bytes(decoder)
    decoder.recompute_modules(("norm", "act"))
    less, grads = kept_bytes(decoder)
    tokens, size = 64, 4
    assert kept - less == tokens * size * (2 * shape.hidden + shape.ffn)
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("modules", [("norm", "act"), ("attention",), ("mlp",), MODULES], ids="+".join)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_deferred_job_survives_that_weights_are_let_go(family, modules):
    """ZeRO 3 frees weights between the two halves of backward."""
    decoder = lively(family)
    _, want = kept_bytes(decoder)
    decoder.recompute_modules(modules)
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
    decoder.units()[2].recompute_modules(MODULES)
    assert kept_bytes(decoder)[0] == kept
