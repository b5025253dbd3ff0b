"""Tensor parallelism against one process: every family, degree and form, parameters cut by their placement."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sirara.comm.world import World, world_comm
from sirara.errors import InvariantError
from sirara.model import loss
from sirara.model.decoder import Decoder
from sirara.model.split import Deferral
from sirara.parallel.tensor import TensorAxis
from sirara.pure.families import ModelShape, TensorSpec, unit_specs
from sirara.pure.placement import Shard, held_ranges
from sirara.pure.recompute import MODULES
from sirara.pure.rng import DropoutKey
from tests.harness import run_ranks
from tests.unit.model.test_decoder import batch, initialised, shape_of

KEY = DropoutKey(seed=1, step=2, microbatch=3)
SCALE = 1 / 59
SELECTIVE = ("norm", "act")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"kv_heads": 4}),
    "llama-grouped": ("llama", {"kv_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"kv_heads": 1, "tie_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {}),
}


def open_axis(*, sequence: bool = False, direct: bool = True) -> TensorAxis:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return TensorAxis(world_comm(world, timeout_s=30, direct=direct), sequence=sequence)


def part_of(spec: TensorSpec, full: Tensor, axis: TensorAxis) -> Tensor:
    """What this rank holds of a tensor; several tensors side by side have a dim of their own before the cut one."""
    if not isinstance(spec.placement, Shard):
        return full
    dim, packs = spec.placement.dim, spec.placement.packs
    ranges = held_ranges(spec.placement, spec.shape, degree=axis.size, rank=axis.rank)
    parts = [full.narrow(dim, low, high - low) for low, high in ranges]
    return torch.stack(parts, dim) if packs > 1 else parts[0]


def lively(shape: ModelShape, dtype: torch.dtype = torch.float64, **options: float) -> Decoder:
    """Initialised, and with biases and norms that are not zeros and ones: every part matters."""
    decoder = initialised(shape, dtype, **options)
    generator = torch.Generator().manual_seed(3)
    for p in decoder.parameters():
        if p.dim() == 1:
            p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return decoder


def cut(decoder: Decoder, axis: TensorAxis) -> None:
    """Gives a decoder this rank's parts of its own parameters."""
    for unit, spec in zip(decoder.units(), unit_specs(decoder.shape), strict=True):
        for t in spec.tensors:
            owner, _, name = t.local.rpartition(".")
            own = part_of(t, unit.get_parameter(t.local).detach(), axis).clone()
            setattr(unit.get_submodule(owner), name, nn.Parameter(own))
    decoder.set_axis(axis)


def copies(spec: TensorSpec, grad: Tensor, axis: TensorAxis) -> Tensor:
    """The gradient of the tensor's part, summed over the ranks whose gradients of it are partial."""
    if isinstance(spec.placement, Shard):
        parts = spec.placement.parts
        if parts is None or parts >= axis.size:
            return grad
        each = axis.size // parts
        rows = [torch.empty_like(grad) for _ in range(axis.size)]
        dist.all_gather(rows, grad.contiguous())
        first = axis.rank // each * each
        return torch.stack(rows[first : first + each]).sum(0)
    if axis.sequence or "_norm" in spec.local.split(".")[1]:
        dist.all_reduce(grad)
    return grad


def gradients(
    decoder: Decoder,
    axis: TensorAxis | None,
    key: DropoutKey | None,
    deferral: Deferral | None = None,
    length: int = 32,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Losses and every unit's gradients, the way a stage makes them."""
    tokens, targets, positions = batch(decoder.shape, length=length)
    embed, *blocks, head = decoder.units()
    x = None
    trail: list[tuple[Tensor | None, Tensor]] = [(None, embed(tokens, positions, key))]
    for block in blocks:
        x = trail[-1][1].detach().requires_grad_()
        trail.append((x, block(x, positions, None, key)))
    x = trail[-1][1].detach().requires_grad_()
    objective, losses = head(x, targets, SCALE)
    trail.append((x, objective))
    if axis is not None and axis.sequence:
        assert x.shape == (tokens.numel() // axis.size, decoder.shape.hidden)
    dy, grads = None, []
    for unit, (x, y) in zip(reversed(decoder.units()), reversed(trail), strict=True):
        inputs, leaves = [] if x is None else [x], list(unit.parameters())
        if deferral is not None:
            deferral.active = True
        got = torch.autograd.grad(y, [*inputs, *leaves], dy, allow_unused=True)
        dy, own = got[0] if inputs else None, got[len(inputs) :]
        if deferral is not None:
            deferral.active = False
            later = deferral.take().run()
            own = [later[id(leaf)] if g is None else g for leaf, g in zip(leaves, own, strict=True)]
        grads.append(list(own))
    return losses, grads[::-1]


def compare(
    family: str,
    changes: dict[str, Any],
    sequence: bool,
    options: dict[str, float],
    recompute: Sequence[str] = (),
    deferred: bool = False,
) -> list[list[float]]:
    """Asserts that this rank's losses and gradients are its parts of one process's; returns the losses."""
    torch.set_num_threads(1)
    shape = shape_of(family, **changes)
    axis = open_axis(sequence=sequence)
    key = KEY if "dropout" in options else None
    losses, grads = gradients(lively(shape, **options), None, key)
    decoder = lively(shape, **options)
    cut(decoder, axis)
    decoder.recompute_modules(recompute)
    deferral = decoder.split_backward() if deferred else None
    ours, parts = gradients(decoder, axis, key, deferral)
    torch.testing.assert_close(ours, losses, rtol=0, atol=1e-12)
    for unit, spec, want, have in zip(decoder.units(), unit_specs(shape), grads, parts, strict=True):
        by_name = {n: (w, h) for (n, _), w, h in zip(unit.named_parameters(), want, have, strict=True)}
        for t in spec.tensors:
            full, own = by_name[t.local]
            message = f"{spec.name} {t.local}"
            torch.testing.assert_close(
                copies(t, own, axis),
                part_of(t, full, axis),
                rtol=0,
                atol=1e-12,
                msg=lambda m, at=message: f"{at}: {m}",
            )
    return ours.tolist()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_one_process(case, degree, sequence):
    values = run_ranks(degree, compare, *CASES[case], sequence, {})
    assert all(value == values[0] for value in values)  # equal bits on all ranks


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", ["llama-grouped", "gpt2", "bloom"])
def test_dropout_masks_are_those_of_one_process(case, degree, sequence):
    run_ranks(degree, compare, *CASES[case], sequence, {"dropout": 0.2, "attention_dropout": 0.3})


@pytest.mark.parametrize(("vocab", "smoothing"), [(5, 0.1), (9, 0.0), (130, 0.1), (131, 0.0)])
def test_any_vocabulary_is_dealt_out_even_if_a_rank_gets_none_of_it(vocab, smoothing):
    """5 over 4 ranks: 2, 2, 1 and 0 rows."""
    for family, sequence in (("gpt2", False), ("llama", True)):
        run_ranks(4, compare_in_chunks, family, {"vocab": vocab}, sequence, {"label_smoothing": smoothing})


def compare_in_chunks(*args: Any) -> list[list[float]]:
    """The head's logits in many chunks, as many on every rank."""
    before = loss.CHUNK_TOKENS, loss.LOGITS_BYTES
    loss.CHUNK_TOKENS, loss.LOGITS_BYTES = 1, 40 * 8
    try:
        return compare(*args)
    finally:
        loss.CHUNK_TOKENS, loss.LOGITS_BYTES = before


def axis_sums(dtype: torch.dtype, direct: bool, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Everything the axis can do with random rows, and the rows of all ranks."""
    axis = open_axis(direct=direct)
    rows = [
        torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(axis.size)
    ]
    own, few = rows[axis.rank], shape[0] // axis.size
    # Two sums in flight at once, waited for in order.
    first, second = axis.sum(own.clone()), axis.scatter_sum(own.clone())
    return {
        "sum": first.wait(),
        "scatter": second.wait(),
        "tokens": axis.gather_tokens(own[:few].t().contiguous().t()).wait(),
        "small": axis.gather_small(own[0]),
        "rows": torch.stack(rows),
    }


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_rank_order_rounded_once_and_equal_on_all_ranks(size, dtype, direct):
    for shape in ((12, 5), (12, 1), (12, 0)):
        answers = run_ranks(size, axis_sums, dtype, direct, shape)
        rows = answers[0]["rows"]
        total = rows[0].float()
        for row in rows[1:]:
            total = total + row.float()
        few = 12 // size
        for rank, answer in enumerate(answers):
            assert torch.equal(answer["sum"], total.to(dtype))
            assert torch.equal(answer["scatter"], total.to(dtype)[rank * few : (rank + 1) * few])
            assert torch.equal(answer["tokens"], torch.cat([row[:few] for row in rows]))
            assert torch.equal(answer["small"], rows[:, 0])


def uneven() -> str:
    axis = open_axis(sequence=True)
    try:
        axis.scatter_sum(torch.ones(5, 2))
    except InvariantError as error:
        return str(error)
    return ""


def test_tokens_that_cannot_be_spread_evenly_are_refused_before_anything_is_sent():
    assert all("5 tokens" in text and "2 ranks" in text for text in run_ranks(2, uneven))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("case", CASES)
def test_recompute_and_split_backward_change_nothing(case, sequence):
    for recompute, deferred in ((SELECTIVE, False), ((), True), (MODULES, False), (MODULES, True)):
        run_ranks(2, compare, *CASES[case], sequence, {"dropout": 0.2}, recompute, deferred)


def bits(case: str, sequence: bool, recompute: Sequence[str], deferred: bool) -> list[Tensor]:
    decoder = lively(shape_of(CASES[case][0], **CASES[case][1]), torch.float32)
    cut(decoder, open_axis(sequence=sequence))
    decoder.recompute_modules(recompute)
    deferral = decoder.split_backward() if deferred else None
    return list(chain(*gradients(decoder, None, None, deferral)[1]))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_recompute_and_split_backward_give_equal_bits(sequence):
    want = run_ranks(2, bits, "llama", sequence, (), False)
    for recompute, deferred in ((SELECTIVE, False), (SELECTIVE, True), (MODULES, False), (("mlp",), True)):
        for ours, theirs in zip(
            run_ranks(2, bits, "llama", sequence, recompute, deferred), want, strict=True
        ):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b)


def compiled(case: str, sequence: bool) -> float:
    """The largest difference that compiling the blocks makes, relative to each tensor's largest value."""
    decoder = lively(shape_of(CASES[case][0], layers=1, **CASES[case][1]), torch.float32)
    axis = open_axis(sequence=sequence)
    cut(decoder, axis)
    losses, want = gradients(decoder, axis, KEY)
    torch.compiler.reset()
    for block in decoder.blocks:
        block.compile(dynamic=False, backend="aot_eager")
    ours, got = gradients(decoder, axis, KEY)
    pairs = [(ours, losses), *zip(chain(*got), chain(*want), strict=True)]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


@pytest.mark.parametrize(("case", "sequence"), [("llama-grouped", True), ("gpt2", True), ("bloom", False)])
def test_compiled_blocks_compute_the_same(case, sequence):
    assert max(run_ranks(2, compiled, case, sequence)) < 1e-5
