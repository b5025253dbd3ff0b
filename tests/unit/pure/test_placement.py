import pytest

from sirara.errors import LayoutError
from sirara.pure.placement import REPLICATE, Shard, held_ranges, holders


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "placement",
    [Shard(dim=0), Shard(dim=0, packs=3), Shard(dim=0, parts=24), Shard(dim=0, parts=24, packs=2)],
)
def test_every_index_is_held_by_as_many_ranks_as_holders_says(placement, degree):
    held = [0] * 144
    for rank in range(degree):
        for start, stop in held_ranges(placement, (144, 5), degree=degree, rank=rank):
            for i in range(start, stop):
                held[i] += 1
    assert held == [holders(placement, degree=degree)] * 144


def test_two_kv_heads_on_eight_ranks_have_four_neighbouring_holders_each():
    placement = Shard(dim=0, parts=2)
    ranges = [held_ranges(placement, (128, 7), degree=8, rank=r) for r in range(8)]
    assert ranges == [((0, 64),)] * 4 + [((64, 128),)] * 4
    assert holders(placement, degree=8) == 4


def test_a_vocabulary_of_50257_on_4_ranks_has_a_short_last_part():
    ranges = [held_ranges(Shard(dim=0), (50257, 8), degree=4, rank=r)[0] for r in range(4)]
    assert ranges == [(0, 12565), (12565, 25130), (25130, 37695), (37695, 50257)]


def test_a_replica_has_no_ranges_and_all_ranks_hold_it():
    assert held_ranges(REPLICATE, (8,), degree=4, rank=2) == ()
    assert holders(REPLICATE, degree=4) == 4


def test_eight_kv_heads_on_three_ranks_are_refused_with_degrees_that_work():
    with pytest.raises(
        LayoutError, match="8 parts of a dimension of 64 cannot be dealt out to 3 ranks"
    ) as caught:
        held_ranges(Shard(dim=0, parts=8), (64, 8), degree=3, rank=0)
    assert "mesh.tp=2" in caught.value.try_
