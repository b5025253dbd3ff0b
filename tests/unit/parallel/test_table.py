"""A user's own model is held against the table of its tensors before anything is made."""

import re

import pytest
import torch
from torch import nn

from sirara.errors import LayoutError
from tests.toy import HIDDEN, Toy, assemble, specs, tensor


def refused(change, table=None) -> LayoutError:
    toy = Toy()
    change(toy.units()[1])
    with pytest.raises(LayoutError) as error:
        assemble(model=toy, table=table)
    assert error.value.where == "unit 1, Block"
    return error.value


def test_a_parameter_that_the_table_does_not_know_is_refused_by_name():
    error = refused(lambda block: setattr(block, "extra", nn.Parameter(torch.ones(HIDDEN))))
    assert "extra is a parameter without a TensorSpec" in error.what and "local='extra'" in error.try_[0]


def test_a_tensor_of_the_table_that_the_module_has_not_is_refused_by_name():
    error = refused(lambda block: delattr(block, "unused"))
    assert "unused is a parameter of a TensorSpec alone" in error.what


def test_another_shape_than_the_module_s_is_refused_with_both():
    embed, block, *others = specs(tied=True)
    (_, *rest) = block.tensors
    wrong = type(block)(
        name=block.name,
        flops_per_token=0,
        tensors=(tensor("b0.mix.weight", "mix.weight", (HIDDEN, HIDDEN // 2)), *rest),
    )
    error = refused(lambda block: None, (embed, wrong, *others))
    assert re.search(rf"mix.weight is \[{HIDDEN}, {HIDDEN}\] .* \[{HIDDEN}, {HIDDEN // 2}\]", error.what)


def test_a_buffer_without_memory_is_refused():
    error = refused(lambda block: block.register_buffer("scale", torch.ones(3, device="meta")))
    assert "buffer scale lies on the meta device" in error.what


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_masks_that_no_other_layout_could_draw_again_are_refused(kind):
    error = refused(lambda block: setattr(block, "drop", kind(0.1)))
    assert f"drop is a {kind.__name__}" in error.what and "key" in error.try_[0]
    toy = Toy()
    toy.units()[1].drop = kind(0.0)
    assemble(model=toy)
