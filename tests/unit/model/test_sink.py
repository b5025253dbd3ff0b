"""Gradients that are written where they are wanted: the same bits, each place used once, sparse embeddings."""

from itertools import accumulate

import pytest
import torch

from sirara.model.decoder import Decoder
from sirara.model.ops import adds_as_a_sum, product
from sirara.parallel.flat import Places
from sirara.pure.shape import ModelShape


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_their_places_have_the_bits_of_those_that_are_returned(family, dtype):
    shape = ModelShape(family=family, layers=1, hidden=32, heads=4, vocab=61, max_seq=8, tie_embeddings=False)
    model = Decoder(shape, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    tokens = torch.randint(61, (2, 8), generator=generator)
    positions = torch.arange(8).expand(2, 8)

    def gradients():
        found = []
        x = model.embed(tokens, positions, None)
        y = model.blocks[0](x.detach().requires_grad_(), positions, None, None)
        for unit, out in ((model.embed, x), (model.blocks[0], y)):
            found += torch.autograd.grad(out, list(unit.parameters()), torch.ones_like(out))
        return found

    plain = gradients()
    sink = Places()
    model.set_sink(sink)
    leaves = [*model.embed.parameters(), *model.blocks[0].parameters()]
    # End to end, as in a flat group: q, k, v and gate, up are one matrix each.
    ends = [0, *accumulate(leaf.numel() for leaf in leaves)]
    flat = torch.full((ends[-1],), 7.0, dtype=dtype)
    places = {
        id(leaf): flat[low:high].view(leaf.shape)
        for leaf, low, high in zip(leaves, ends[:-1], ends[1:], strict=True)
    }
    sink.fresh = dict(places)
    written = 0
    for leaf, before, after in zip(leaves, plain, gradients(), strict=True):
        assert torch.equal(before, after.to_dense())
        written += after.data_ptr() == places[id(leaf)].data_ptr() if not after.is_sparse else 0
    matrices = [leaf for leaf in model.blocks[0].parameters() if leaf.dim() == 2]
    assert written == len(matrices) > 0
    assert model.embed.tokens.weight.shape == gradients()[0].shape and gradients()[0].is_sparse


def test_a_place_is_given_out_once_and_only_with_all_its_neighbours():
    sink, a, b, other = Places(), *torch.zeros(3, 2)
    sink.fresh = {id(a): torch.ones(2), id(b): torch.ones(2)}
    assert sink.places([a, other], onto=False) is None and sink.places([a, b], onto=True) is None
    assert len(sink.places([a, b], onto=False) or ()) == 2
    assert sink.places([a], onto=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [3, 64, 256, 700, 2048])
def test_a_product_is_added_in_place_only_where_that_has_the_bits_of_a_sum(dtype, tokens):
    generator = torch.Generator().manual_seed(tokens)
    dy, x, c = (torch.randn(r, 96, dtype=dtype, generator=generator) for r in (tokens, tokens, 96))
    if adds_as_a_sum(dy.t(), x):
        for n in range(20):
            c = c + n
            assert torch.equal(c + product(dy.t(), x), product(dy.t(), x, onto=c.clone()))
    # What is rounded to a lower dtype first is another sum.
    assert not adds_as_a_sum(dy.t().bfloat16(), x.bfloat16())
