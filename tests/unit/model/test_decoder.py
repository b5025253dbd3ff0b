import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from sirara.errors import InvariantError, LayoutError
from sirara.model.attention import KvCache
from sirara.model.decoder import Decoder
from sirara.model.split import Pending
from sirara.pure.families import FAMILIES, ModelShape, init_slice, unit_specs
from sirara.pure.rng import DropoutKey

KEY = DropoutKey(seed=1, step=2, microbatch=3)


def shape_of(family: str, **changes: object) -> ModelShape:
    sizes: dict[str, object] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq": 32}
    if FAMILIES[family].grouped_query:
        sizes["kv_heads"] = 2
    return ModelShape(family=family, **(sizes | changes))  # type: ignore[arg-type]


def initialised(shape: ModelShape, dtype: torch.dtype = torch.float64, **options: float) -> Decoder:
    decoder = Decoder(shape, device="cpu", dtype=dtype, **options)
    with torch.no_grad():
        for unit, spec in zip(decoder.units(), unit_specs(shape), strict=True):
            for t in spec.tensors:
                p = unit.get_parameter(t.local)
                # Stronger than the true initial values, so that every part matters.
                p.copy_(
                    torch.from_numpy(init_slice(t, 7, 0, p.numel())).view(p.shape) * (4 if p.dim() > 1 else 1)
                )
    return decoder


def batch(shape: ModelShape, sequences: int = 2, length: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = (torch.randint(0, shape.vocab, (sequences, length)) for _ in range(2))
    targets[0, :5] = -100
    return tokens, targets, torch.arange(length).repeat(sequences, 1)


def by_units(decoder: Decoder, key: DropoutKey | None = None) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients the way a stage makes them: one small graph per unit."""
    tokens, targets, positions = batch(decoder.shape)
    embed, *blocks, head = decoder.units()
    trail: list[tuple[Tensor | None, Tensor]] = [(None, embed(tokens, positions, key))]
    for block in blocks:
        x = trail[-1][1].detach().requires_grad_()
        trail.append((x, block(x, positions, None, key)))
    x = trail[-1][1].detach().requires_grad_()
    objective, losses = head(x, targets, 1 / 59)
    trail.append((x, objective))
    dy, grads = None, []
    for unit, (x, y) in zip(reversed(decoder.units()), reversed(trail), strict=True):
        inputs = [] if x is None else [x]
        got = torch.autograd.grad(y, [*inputs, *unit.parameters()], dy)
        dy = got[0] if inputs else None
        grads.append(list(got[len(inputs) :]))
    return losses, [g for unit in reversed(grads) for g in unit]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_a_tensor_of_the_table_and_the_other_way_round(family):
    shape = shape_of(family)
    decoder = Decoder(shape)
    assert {p.device.type for p in decoder.parameters()} == {"meta"}
    for unit, spec in zip(decoder.units(), unit_specs(shape), strict=True):
        assert {n: tuple(p.shape) for n, p in unit.named_parameters()} == {
            t.local: t.shape for t in spec.tensors
        }


def test_a_tied_head_is_a_leaf_of_its_own_on_the_embeddings_memory():
    decoder = Decoder(shape_of("gpt2"), device="cpu")
    assert decoder.head.proj.weight is not decoder.embed.tokens.weight
    assert decoder.head.proj.weight.data_ptr() == decoder.embed.tokens.weight.data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_unit_by_unit_equals_the_whole_model_with_cross_entropy(family):
    decoder = initialised(shape_of(family))
    losses, grads = by_units(decoder)
    tokens, targets, _ = batch(decoder.shape)
    logits = decoder(tokens)
    theirs = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), theirs.detach(), rtol=0, atol=1e-12)
    leaves = [p for unit in decoder.units() for p in unit.parameters()]
    for a, b in zip(grads, torch.autograd.grad(theirs.sum() / 59, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_differences_of_the_loss(family):
    decoder = initialised(shape_of(family))
    _, grads = by_units(decoder)
    leaves = [p for unit in decoder.units() for p in unit.parameters()]
    torch.manual_seed(1)
    directions = [torch.randn_like(p) for p in leaves]
    # Of a tied weight both uses move together, so their slopes add up.
    slope = sum((g * d).sum().item() for g, d in zip(grads, _tied(decoder, leaves, directions), strict=True))

    def moved(by: float) -> float:
        for p, d in _distinct(leaves, directions):
            p.data.add_(d, alpha=by)
        total = by_units(decoder)[0].sum().item() / 59
        for p, d in _distinct(leaves, directions):
            p.data.sub_(d, alpha=by)
        return total

    difference = (moved(1e-6) - moved(-1e-6)) / 2e-6
    assert slope == pytest.approx(difference, rel=1e-5)


def _distinct(leaves: list[Tensor], directions: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    seen: set[int] = set()
    for p, d in zip(leaves, directions, strict=True):
        if p.data_ptr() not in seen:
            seen.add(p.data_ptr())
            yield p, d


def _tied(decoder: Decoder, leaves: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    owner = {p.data_ptr(): d for p, d in reversed(list(zip(leaves, directions, strict=True)))}
    return [owner[p.data_ptr()] for p in leaves]


WIDE = {"hidden": 256, "heads": 4, "vocab": 3000, "max_seq": 128}
# oneDNN's bf16 products keep their bits only where it does not deal them out differently.
NARROW = WIDE | {"hidden": 128, "heads": 2, "kv_heads": 2, "vocab": 640}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_two_and_three_threads_give_equal_bits(family, dtype, threads):
    """torch's layer_norm weight gradients, whole-tensor sums and MKL's long products do not."""
    sizes = NARROW if dtype == torch.bfloat16 else WIDE
    decoder = initialised(shape_of(family, layers=1, **sizes), dtype, dropout=0.1)
    tokens, targets, positions = batch(decoder.shape, 4 if dtype == torch.bfloat16 else 2, 128)

    def run() -> list[Tensor]:
        embed, block, head = decoder.units()
        leaves = [list(u.parameters()) for u in (embed, block, head)]
        x = embed(tokens, positions, KEY)
        y = block(x.detach().requires_grad_(), positions, None, KEY)
        objective, losses = head(y.detach().requires_grad_(), targets, 1 / 251)
        dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        grads = [torch.autograd.grad(z, v, d) for z, v, d in ((x, leaves[0], dx), (y, leaves[1], dx))]
        return [x, y, losses, *itertools.chain(*grads), *torch.autograd.grad(objective, leaves[2])]

    results = []
    for n in (1, 2, 3):
        threads(n)
        results.append(run())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_packed_in_one_sequence_equal_documents_alone(family):
    decoder = initialised(shape_of(family))
    tokens = batch(decoder.shape)[0][:1]
    documents = torch.tensor([[0] * 20 + [1] * 12])
    positions = torch.cat((torch.arange(20), torch.arange(12))).unsqueeze(0)
    with torch.no_grad():
        packed = decoder(tokens, positions_BL=positions, documents_BL=documents)
        alone = torch.cat((decoder(tokens[:, :20]), decoder(tokens[:, 20:])), 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_with_a_cache_equals_all_at_once(family):
    changes = {"sliding_window": 5} if family == "mistral" else {}
    decoder = initialised(shape_of(family, **changes))
    tokens, _, positions = batch(decoder.shape)
    cache = KvCache()
    with torch.no_grad():
        parts = [decoder(tokens[:, :7], positions_BL=positions[:, :7], cache=cache)]
        for t in range(7, 32):
            parts.append(decoder(tokens[:, t : t + 1], positions_BL=positions[:, t : t + 1], cache=cache))
        whole = decoder(tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_changes_with_the_microbatch_and_not_from_run_to_run(family):
    decoder = initialised(shape_of(family), dropout=0.2, attention_dropout=0.2)
    losses = [
        by_units(decoder, DropoutKey(seed=1, step=2, microbatch=m))[0]
        if m is not None
        else by_units(decoder)[0]
        for m in (3, 3, 4, None)
    ]
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2]) and not torch.equal(losses[0], losses[3])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_compiles_without_a_graph_break_and_computes_the_same(family):
    decoder = initialised(shape_of(family, layers=1), torch.float32)
    block = decoder.units()[1]
    positions = batch(decoder.shape)[2]
    x, dy = torch.randn(2, 32, 64, requires_grad=True), torch.randn(2, 32, 64)
    leaves = [x, *block.parameters()]

    def run(f: Callable[..., Tensor]) -> list[Tensor]:
        y = f(x, positions, None, None)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    for a, b in zip(run(compiled), run(block), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@dataclass
class NoRanks:
    """An axis on paper."""

    size: int
    rank: int = 0
    sequence: bool = False

    def sum(self, x_TD: Tensor) -> Pending:
        raise NotImplementedError

    scatter_sum = gather_tokens = sum

    def gather_small(self, row_N: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("degree", [3, 8])
def test_heads_that_cannot_be_dealt_out_are_refused(degree):
    with pytest.raises(LayoutError, match=f"4 heads, 2 kv heads and an ffn of 192 .* {degree} ranks"):
        Decoder(shape_of("llama")).set_axis(NoRanks(degree))


def test_a_head_that_is_cut_refuses_to_make_logits():
    decoder = initialised(shape_of("llama"))
    decoder.set_axis(NoRanks(2))
    with pytest.raises(InvariantError, match="whole vocabulary"):
        decoder.head.logits(torch.ones(1, 2, 64))


def test_an_axis_of_one_rank_changes_nothing():
    decoder = initialised(shape_of("bloom"))
    want = by_units(decoder)
    decoder.set_axis(NoRanks(1))
    got = by_units(decoder)
    for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True):
        assert torch.equal(a, b)
