"""What the planner says that a block keeps, beside what autograd really saves of one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sirara.model.decoder import Decoder
from sirara.plan.own import own_bytes
from sirara.plan.points import pieces_of
from sirara.pure.recompute import kinds_of_blocks
from sirara.pure.shape import ModelShape
from tests.unit.plan.test_measured import SHAPE, config, planned

SEQ = 128
SHAPES = {
    "llama": ModelShape(family="llama", layers=1, hidden=64, heads=4, vocab=256, max_seq=SEQ),
    "grouped": ModelShape(family="llama", layers=1, hidden=64, heads=4, kv_heads=2, vocab=256, max_seq=SEQ),
    "qwen3": ModelShape(family="qwen3", layers=1, hidden=64, heads=4, kv_heads=4, head_dim=16, vocab=256, max_seq=SEQ),
    "gpt2": ModelShape(family="gpt2", layers=1, hidden=64, heads=4, vocab=256, max_seq=SEQ),
}  # fmt: skip


def saved_bytes(shape: ModelShape, recompute: str) -> int:
    """Distinct storages that the graph of one block holds, its input's included, parameters' and positions' not."""
    model = Decoder(shape, device="cpu", dtype=torch.float32)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    if recompute != "none":
        model.recompute_modules(kinds_of_blocks(recompute, stage=0, blocks=1)[0])
    x = torch.randn(1, SEQ, shape.hidden, requires_grad=True)
    positions = torch.arange(SEQ)[None]
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    if shape.traits.positions == "rope":
        block = model.units()[1]
        tables = block.attn.rotary.tables(positions, torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
        mine |= {t.untyped_storage().data_ptr() for t in tables}
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in mine:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model.units()[1](x, positions, None, None)
        assert y.requires_grad
        return sum(found.values())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "selective", "norm", "attention", "mlp", "norm+attention+mlp"])
def test_a_block_keeps_what_the_planner_says(name, recompute):
    shape = SHAPES[name]
    own = own_bytes(config(recompute=recompute), shape, tp=1, weight=4, on_cpu=True)
    assert own is not None
    gone = pieces_of(kinds_of_blocks(recompute, stage=0, blocks=1)[0])
    said = own.whole - float((gone * own.pieces).sum())
    assert said == pytest.approx(saved_bytes(shape, recompute), rel=0.02)


def test_tensor_and_sequence_parallel_ranks_keep_their_share():
    shape = replace(SHAPES["llama"], layers=1)
    one = own_bytes(config(), shape, tp=1, weight=4, on_cpu=True)
    two = own_bytes(config(), shape, tp=2, weight=4, on_cpu=True)
    spread = own_bytes(config(mesh={"tp": 2, "sequence_parallel": True}), shape, tp=2, weight=4, on_cpu=True)
    assert one is not None and two is not None and spread is not None
    assert spread.whole == pytest.approx(one.whole / 2, rel=0.01)
    # Without sequence parallelism inputs and outputs of both norms are whole: four hidden states.
    assert two.whole - spread.whole == pytest.approx(2 * SEQ * 64 * 4, rel=0.02)


def test_what_was_not_counted_is_none():
    assert own_bytes(config(compile=True), SHAPES["llama"], tp=1, weight=4, on_cpu=True) is None


def test_elsewhere_than_on_the_cpu_the_loss_needs_whole_temporaries_and_no_library_counts():
    there = own_bytes(config(), SHAPES["llama"], tp=1, weight=2, on_cpu=False)
    assert there is not None and there.libraries == 0.0
    assert np.isfinite([there.whole, there.loss, there.working, there.embedding]).all()


def test_weight_gradients_that_are_put_off_keep_more_than_blocks_that_are_made_again_do():
    mesh = {"pp": 2, "dp": 1, "split": [2, 2]}
    off, at_once = (
        planned(config(recompute="full", mesh={**mesh, "schedule": name}), None, 2).held.stages[0]
        for name in ("zb-h1", "gpipe")
    )
    own = own_bytes(config(recompute="full", mesh=mesh), SHAPE, tp=1, weight=4, on_cpu=True)
    assert own is not None
    # The first stage of gpipe holds four inputs of each of its blocks, that of zb-h1 what is owed of its blocks too.
    inputs = own.boundary
    assert at_once.activations == pytest.approx((4 * 2 + 2) * inputs)
    assert off.activations - 2 * inputs >= 2 * (own.owed - inputs)
