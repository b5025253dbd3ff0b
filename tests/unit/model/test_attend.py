import itertools
import math

import pytest
import torch

from sirara.model.attend import Mask, alibi_slopes, attend
from sirara.pure.rng import DropoutKey, dropout_keep

B, L, N, E = 2, 9, 4, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 6]])


def inputs(kv_heads: int = N, queries: int = L) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (N, kv_heads, kv_heads)
    q, k, v = (torch.randn(B, L, h, E, dtype=torch.float64, requires_grad=True) for h in heads)
    return [q[:, -queries:], k, v]


def brute_force(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None = None,
    slopes: tuple[float, ...] | None = None,
    documents: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    p: float = 0.0,
) -> torch.Tensor:
    """Token by token, head by head, from the definition."""
    rows = []
    offset = k.shape[1] - q.shape[1]
    for b, i, n in itertools.product(range(B), range(q.shape[1]), range(N)):
        at, kv = offset + i, n // (N // k.shape[2])
        seen = [
            j
            for j in range(at + 1)
            if (window is None or j > at - window)
            and (documents is None or documents[b, j] == documents[b, at])
        ]
        scores = torch.stack([q[b, i, n] @ k[b, j, kv] / math.sqrt(E) for j in seen])
        if slopes is not None:
            scores = scores - slopes[n] * torch.tensor([float(at - j) for j in seen])
        weights = torch.softmax(scores, 0)
        if keep is not None:
            weights = weights * keep[b, n, i, seen] / (1 - p)
        rows.append((weights.unsqueeze(1) * v[b, seen, kv]).sum(0))
    return torch.stack(rows).view(B, q.shape[1], N * E)


@pytest.mark.parametrize("queries", [L, 3, 1])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("window", "alibi", "packed"),
    [
        (None, False, False),
        (4, False, False),
        (None, True, False),
        (None, False, True),
        (3, True, True),
        (99, False, False),
    ],
)
def test_attend_and_its_gradients_equal_brute_force(window, alibi, packed, kv_heads, queries):
    slopes = alibi_slopes(N) if alibi else None
    documents = DOCUMENTS if packed else None
    leaves = inputs(kv_heads, queries)
    ours = attend(*leaves, Mask(window=window, slopes=slopes), documents_BM=documents)
    theirs = brute_force(*leaves, window=window, slopes=slopes, documents=documents)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    dy = torch.randn_like(ours)
    grads = (torch.autograd.grad(y, leaves, dy) for y in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_dropped_attention_weights_are_those_of_the_key():
    key = DropoutKey(seed=3, step=5, microbatch=7)
    leaves = inputs()
    ours = attend(*leaves, Mask(), p=0.3, key=key, layer=2)
    kept = dropout_keep(key.stream(2, "attention"), 0.3, B * N * L * L).reshape(B, N, L, L)
    theirs = brute_force(*leaves, keep=torch.from_numpy(kept).double(), p=0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    without = attend(*leaves, Mask(), p=0.3, key=None, layer=2)
    torch.testing.assert_close(without, brute_force(*leaves), rtol=0, atol=1e-10)


def test_no_token_sees_a_later_one_or_another_document():
    leaves = inputs()
    mask = Mask(window=5, slopes=alibi_slopes(N))
    before = attend(*leaves, mask, documents_BM=DOCUMENTS)
    q, k, v = (t.detach().clone() for t in leaves)
    k[:, 4], v[:, 4] = 50.0, 50.0
    changed = (attend(q, k, v, mask, documents_BM=DOCUMENTS) != before).any(-1)
    seen = torch.zeros(B, L, dtype=torch.bool)
    seen[0, 4:7] = True  # document 1 is tokens 3 to 6
    seen[1, 4:8] = True  # document 5 ends at token 7, the window of token 4 at token 8
    assert torch.equal(changed, seen)


def test_slopes_of_powers_of_two_and_of_112_heads():
    assert alibi_slopes(8) == tuple(2.0 ** -(i + 1) for i in range(8))
    slopes = alibi_slopes(112)
    assert len(set(slopes)) == 112
    assert slopes[0] == 2.0 ** (-8 / 64) and slopes[63] == 2.0**-8
    assert slopes[64] == 2.0 ** (-4 / 64) and slopes[65] == 2.0 ** (-12 / 64)


def test_biases_follow_documents_that_change_in_place():
    mask, documents, leaves = Mask(), DOCUMENTS.clone(), inputs()
    before = attend(*leaves, mask, documents_BM=documents)
    documents.zero_()
    after = attend(*leaves, mask, documents_BM=documents)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, attend(*leaves, Mask()), rtol=0, atol=1e-12)
