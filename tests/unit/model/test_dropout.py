import pytest
import torch

from sirara.model.dropout import Cut, dropout, keep_mask
from sirara.pure.rng import DropoutKey, dropout_keep

KEY = DropoutKey(seed=11, step=22, microbatch=33)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("stream", [0, 1, 2**63, 2**64 - 1, KEY.stream(3, "mlp output")])
def test_torchs_mask_equals_numpys(stream, p):
    for count in (1, 2, 7, 100_001):
        ours = keep_mask(stream, p, count, torch.device("cpu"))
        assert torch.equal(ours, torch.from_numpy(dropout_keep(stream, p, count)))


def test_kept_elements_and_gradients_are_scaled_and_dropped_ones_are_zero():
    x = torch.randn(20, 50, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, KEY, 4, "embed")
    keep = torch.from_numpy(dropout_keep(KEY.stream(4, "embed"), 0.25, 1000)).view(20, 50).double()
    torch.testing.assert_close(y, x * keep / 0.75)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], keep / 0.75)


def test_a_dropped_infinity_is_zero():
    x = torch.full((1000,), torch.inf)
    y = dropout(x, 0.5, KEY, 0, "embed")
    assert set(y.tolist()) == {0.0, torch.inf}


def test_no_key_or_no_probability_returns_x_itself():
    x = torch.randn(3)
    assert dropout(x, 0.5, None, 0, "embed") is x
    assert dropout(x, 0.0, KEY, 0, "embed") is x


@pytest.mark.parametrize("first", [0, 1, 2, 7])
def test_a_part_of_a_tensor_has_its_part_of_the_mask(first):
    key = DropoutKey(seed=1, step=2, microbatch=3)
    x = torch.ones(6, 5)
    whole = dropout(x, 0.5, key, 1, "site").flatten()
    part = dropout(torch.ones(11), 0.5, key, 1, "site", Cut(first=first))
    assert torch.equal(part, whole[first : first + 11])
    runs = dropout(torch.ones(2, 3), 0.5, key, 1, "site", Cut(first=first, step=15, runs=2))
    assert torch.equal(runs, torch.stack((whole[first : first + 3], whole[first + 15 : first + 18])))
