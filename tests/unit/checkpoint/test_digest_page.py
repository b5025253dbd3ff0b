"""The definition on docs/numerics.md is the product's."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from sirara.checkpoint.digest import digest_slice

PAGE = Path(__file__).parents[3] / "docs" / "numerics.md"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_page_defines_what_the_product_computes(dtype: torch.dtype) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict = {}
    exec(code, names)
    data = torch.randn(65_536 + 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    # Only the seam between two table blocks: the page's version is made to be read, not to be fast.
    tail = data[65_400:]
    full = np.zeros(len(data), dtype=np.uint16 if dtype == torch.bfloat16 else data.numpy().dtype)
    full[65_400:] = (
        tail.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else tail.numpy()
    )
    ours = digest_slice("model.norm.weight", 65_400, tail)
    assert names["digest"]("model.norm.weight", full) == (ours.first, ours.second)
