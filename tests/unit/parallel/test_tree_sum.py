"""The binary counter against the tree written down as a recursion, in numbers whose sum depends on the order."""

import numpy as np
import pytest
import torch

from sirara.parallel.reduce import Pool, TreeSum

LEAVES = [np.float32(x) for x in np.random.default_rng(1).normal(size=32) * 10.0 ** np.arange(-16, 16)]


def tree(start: int, stop: int) -> np.float32:
    """The sum of the leaves [start, stop): the largest aligned subtree on the left, the rest on the right."""
    if stop - start == 1:
        return LEAVES[start]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return tree(start, start + half) + tree(start + half, stop)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_any_number_of_leaves_in_any_blocks_is_added_on_the_one_tree(k: int) -> None:
    # A fold from the largest entry gives equal bits on all layouts as well, but other ones.
    for count in range(1, len(LEAVES) + 1):
        pool = Pool(torch.device("cpu"))
        whole = TreeSum(torch.float32, pool)
        for first in range(0, count, 1 << k):
            block = TreeSum(torch.float32, pool)
            for leaf in LEAVES[first : min(count, first + (1 << k))]:
                block.push(0, torch.tensor([leaf]), owned=True)
            folded = block.fold()
            assert folded is not None
            whole.push(k, folded.tensor, owned=True)
        assert float(whole.total(1)) == float(tree(0, count)), (count, k)


def test_a_borrowed_leaf_is_kept_when_its_owner_writes_it_again() -> None:
    pool = Pool(torch.device("cpu"))
    counter = TreeSum(torch.float32, pool)
    theirs = torch.tensor([1.0])
    counter.push(0, theirs, owned=False)
    counter.settle()
    theirs.fill_(7.0)
    counter.push(0, torch.tensor([2.0]), owned=False)
    assert counter.total(1).tolist() == [3.0]
    assert theirs.tolist() == [7.0]
