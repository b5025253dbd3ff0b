import pytest
import torch
from torch.nn import functional

from sirara.model import loss
from sirara.model.decoder import Decoder
from sirara.model.loss import token_losses
from sirara.pure.shape import ModelShape

T, D, V = 50, 16, 37


@pytest.fixture(autouse=True)
def seed(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 1)


def leaves(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = (torch.randn(*s, dtype=torch.float64).to(dtype).requires_grad_() for s in ((T, D), (V, D)))
    targets = torch.randint(0, V, (T,))
    targets[::7] = -100
    return x, w, targets


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_losses_and_gradients_equal_cross_entropys_for_any_chunk(chunk_rows, monkeypatch):
    x, w, targets = leaves()
    monkeypatch.setattr(loss, "LOGITS_BYTES", chunk_rows * V * 8)
    objective, losses = token_losses(x, w, targets, 0.37)
    theirs = functional.cross_entropy(x @ w.T, targets, reduction="none", ignore_index=-100)
    torch.testing.assert_close(losses, theirs.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(objective, 0.37 * theirs.sum(), rtol=0, atol=1e-12)
    assert not losses.requires_grad and losses[0] == 0 and losses[7] == 0
    ours, want = (
        torch.autograd.grad(3.0 * objective, (x, w)),
        torch.autograd.grad(3 * 0.37 * theirs.sum(), (x, w)),
    )
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("limit_rows", "least_rows"), [(9, 1), (1, 9)])
def test_no_chunk_of_logits_exceeds_its_limit(limit_rows, least_rows, monkeypatch):
    x, w, targets = leaves()
    monkeypatch.setattr(loss, "LOGITS_BYTES", limit_rows * V * 8)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", least_rows)
    rows = []
    inner = loss._losses

    def spy(logits: torch.Tensor, *rest: object) -> None:
        rows.append(logits.shape[0])
        inner(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loss, "_losses", spy)
    token_losses(x, w, targets, 1.0)
    assert max(rows) <= 9 and sum(rows) == T and len(rows) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunk_rows", [8, 1000])
def test_low_dtypes_have_float32_losses_and_gradients_within_their_rounding(dtype, chunk_rows, monkeypatch):
    x, w, targets = leaves(dtype)
    monkeypatch.setattr(loss, "LOGITS_BYTES", chunk_rows * V * dtype.itemsize)
    objective, losses = token_losses(x, w, targets, 1 / T)
    assert losses.dtype == torch.float32
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    theirs = functional.cross_entropy(xd @ wd.T, targets, reduction="none", ignore_index=-100)
    bound = 8 * torch.finfo(dtype).eps
    assert (losses - theirs).abs().max() < bound * 4
    for a, b in zip(
        torch.autograd.grad(objective, (x, w)), torch.autograd.grad(theirs.sum() / T, (xd, wd)), strict=True
    ):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() < bound * b.abs().max()


def test_losses_of_hopeless_targets_are_exact_and_not_infinite():
    """A probability below the smallest float must not make the loss infinite."""
    x, w = torch.eye(2, dtype=torch.float32), torch.tensor([[0.0, 0.0], [200.0, 5000.0]])
    _, losses = token_losses(x, w, torch.tensor([0, 0]), 1.0)
    assert losses.tolist() == [200.0, 5000.0]


def test_without_gradients_nothing_but_losses_is_made():
    x, w, targets = leaves()
    with torch.no_grad():
        objective, losses = token_losses(x, w, targets, 1.0)
    assert objective.grad_fn is None
    torch.testing.assert_close(losses, token_losses(x, w, targets, 1.0)[1], rtol=0, atol=0)


def test_a_batch_without_targets_has_no_loss_and_zero_gradients():
    x, w, _ = leaves()
    objective, losses = token_losses(x, w, torch.full((T,), -100), 1.0)
    assert objective.item() == 0.0 and not losses.any()
    assert not any(g.any() for g in torch.autograd.grad(objective, (x, w)))


def test_a_target_beyond_the_vocabulary_is_an_error():
    x, w, targets = leaves()
    targets[3] = V
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(x, w, targets, 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_label_smoothing_equals_cross_entropys(smoothing, dtype, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 20 * V * 8)
    x, w, targets = leaves(dtype)
    objective, losses = token_losses(x, w, targets, 0.37, smoothing=smoothing)
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    theirs = functional.cross_entropy(xd @ wd.T, targets, reduction="none", label_smoothing=smoothing)
    exact = dtype == torch.float64
    bound = 1e-12 if exact else 8 * torch.finfo(dtype).eps
    assert (losses - theirs).abs().max() < bound * 10
    grads = torch.autograd.grad(objective, (x, w))
    for a, b in zip(grads, torch.autograd.grad(0.37 * theirs.sum(), (xd, wd)), strict=True):
        assert (a.double() - b).abs().max() < bound * b.abs().max().clamp(min=1.0)
    assert losses[0] == 0 and losses[7] == 0


def test_smoothed_losses_of_hopeless_targets_are_exact():
    x, w = torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, 0.0], [200.0, 5000.0]]).double()
    _, losses = token_losses(x, w, torch.tensor([0, 0]), 1.0, smoothing=0.5)
    assert losses.tolist() == [150.0, 3750.0]


def test_a_target_beyond_the_vocabulary_is_an_error_with_smoothing_too():
    x, w, targets = leaves()
    targets[3] = V
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(x, w, targets, 1.0, smoothing=0.1)


def test_a_frozen_weight_gets_no_gradient_and_no_product(monkeypatch):
    x, w, targets = leaves()
    want = torch.autograd.grad(token_losses(x, w, targets, 0.5)[0] * 3, x)[0]
    products = []
    inner = loss.product
    monkeypatch.setattr(loss, "product", lambda *a, **k: products.append(a) or inner(*a, **k))
    objective, _ = token_losses(x, w.detach(), targets, 0.5)
    assert torch.equal(torch.autograd.grad(objective * 3, x)[0], want)
    assert len(products) == 2  # logits and dx of one chunk


def test_evaluation_is_plain_cross_entropy_where_training_is_smoothed():
    shape = ModelShape(family="llama", layers=1, hidden=16, heads=2, vocab=11, max_seq=4)
    heads = [Decoder(shape, label_smoothing=s, device="cpu").head for s in (0.0, 0.3)]
    for head in heads:
        for p in head.parameters():
            torch.nn.init.constant_(p, 0.5)
        torch.nn.init.normal_(head.proj.weight, generator=torch.Generator().manual_seed(1))
    x, targets = (
        torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2)),
        torch.tensor([[1, 2, -100, 4]]),
    )
    trained = [head(x.requires_grad_(), targets, 1.0)[1] for head in heads]
    with torch.no_grad():
        evaluated = [head(x, targets, 1.0)[1] for head in heads]
    assert not torch.equal(*trained) and torch.equal(*evaluated)
    assert torch.equal(trained[0], evaluated[0])
