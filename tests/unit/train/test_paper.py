"""Tensors without memory: forms are those of torch's meta kernels, also where they are only remembered."""

import pytest
import torch

from sirara.train.paper import META, OnPaper


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def forms(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device.type


CASES = {
    "product": lambda: meta(3, 5) @ meta(5, 7),
    "transposed sum": lambda: meta(3, 5).t() + meta(5, 3),
    "to bf16": lambda: meta(4, 6).t().to(torch.bfloat16),
    "integer times integer": lambda: meta(4, dtype=torch.int64) * 2,
    "integer times float": lambda: meta(4, dtype=torch.int64) * 2.0,
    "integer plus truth": lambda: meta(4, dtype=torch.int64) + True,
    "softmax": lambda: torch.softmax(meta(2, 3, dtype=torch.bfloat16), -1),
    "row of a matrix": lambda: meta(4, 6)[1],
    "in place": lambda: meta(4, 6).mul_(meta(6)),
    "into another": lambda: torch.mul(meta(4, 6), meta(6), out=meta(4, 6)),
    "second result": lambda: torch.native_layer_norm(meta(4, 6), [6], meta(6), meta(6), 1e-5)[1],
}


@pytest.mark.parametrize("case", CASES)
def test_results_have_the_form_of_meta_kernels_the_first_time_and_later(case: str):
    expected = forms(CASES[case]())
    with OnPaper():
        assert [forms(CASES[case]()) for _ in range(3)] == [expected] * 3


def test_what_is_written_in_place_is_returned_itself_also_when_it_is_remembered():
    with OnPaper():
        for _ in range(3):
            x, out = meta(4), meta(4)
            assert x.add_(meta(4)) is x
            assert torch.mul(x, x, out=out) is out


def test_a_wrong_shape_is_an_error_however_often_the_right_one_was_seen():
    with OnPaper():
        for _ in range(2):
            meta(4, 6).add_(meta(6))
        with pytest.raises(RuntimeError):
            meta(4, 6).add_(meta(5))


def test_gradients_flow_through_remembered_results():
    with OnPaper():
        for _ in range(3):
            x = meta(3, 5).requires_grad_()
            (dx,) = torch.autograd.grad((x @ meta(5, 7)).sum(), x)
            assert dx.shape == x.shape


def test_the_host_reads_zeros_but_what_it_has_sent_as_it_was():
    with OnPaper():
        assert meta(3).double().tolist() == [0.0, 0.0, 0.0]
        assert meta(1).item() == 0
        sent = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(META)
        assert sent.is_meta
        assert sent[1].expand(2, 2).cpu().tolist() == [[3.0, 4.0], [3.0, 4.0]]


def test_a_search_finds_every_element():
    with OnPaper():
        assert (meta(3, 4) > 0).nonzero().shape == (12, 2)
