"""Weights whose columns lie with several ranks: pieces of whole rows, filled by the ranks of one node."""

from collections import Counter
from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.pure.layout import Box, range_boxes
from sirara.pure.saveplan import ITEM_BYTES, PlannedTensor, SavePlan, plan_save
from tests.checkpoints import elements_of

MIB = 1 << 20


def columns(shape, tp, dp=1, *, dim=1, dtype="F32", name="w"):
    """`dim` cut over tp; what a rank has of it is one flat range, cut over dp (dp > 1: ZeRO). Rank = dp * tp + tp."""
    boxes = {}
    for t in range(tp):
        low, high = shape[dim] * t // tp, shape[dim] * (t + 1) // tp
        local = tuple(high - low if d == dim else n for d, n in enumerate(shape))
        corner = tuple(low if d == dim else 0 for d in range(len(shape)))
        for z in range(dp):
            start, stop = prod(local) * z // dp, prod(local) * (z + 1) // dp
            boxes[z * tp + t] = tuple(b.moved(corner) for b in range_boxes(local, start, stop))
    return PlannedTensor(name=name, dtype=dtype, shape=shape, boxes=boxes)


def replicated(tensor, world, copies):
    """The same boxes again for ranks world, world + 1, ..."""
    boxes = {r + c * world: held for c in range(copies) for r, held in tensor.boxes.items()}
    return PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, boxes=boxes)


def check(plan, node_of=lambda r: 0):
    """Every element in one piece; the parts of a piece are all of it, each held by a rank of the writer's node."""
    assembled = set(plan.assembled.tolist())
    parts = [p for r in {int(r) for r in plan.parts.rank} for p in plan.parts_of(r)]
    for t, tensor in enumerate(plan.tensors):
        held = {
            r: {i for b in boxes for i in elements_of(tensor.shape, b).tolist()}
            for r, boxes in tensor.boxes.items()
        }
        written = Counter()
        for i, piece in enumerate(plan.pieces):
            if piece.tensor != t:
                continue
            inside = elements_of(tensor.shape, piece.box).tolist()
            written.update(inside)
            if i not in assembled:
                assert set(inside) <= held[piece.rank]
                continue
            filled = Counter()
            for part in (p for p in parts if p.piece == i):
                mine = elements_of(tensor.shape, part.box).tolist()
                assert set(mine) <= held[part.rank] and node_of(part.rank) == node_of(piece.rank)
                assert part.rank == piece.rank or not set(mine) <= held[piece.rank]
                filled.update(mine)
            assert filled == Counter(inside)
        assert written == Counter(range(prod(tensor.shape)))
    for f, file in enumerate(plan.files):
        at = file.header_bytes
        for p in (p for p in plan.pieces if p.file == f):
            assert p.position == at
            at += p.length
        assert at == file.size


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=3).map(tuple),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([4, 16, 64, 1 << 20]),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_rows_of_several_ranks_are_whole_pieces_filled_once(
    shape, tp, dp, copies, piece_bytes, per_node, data
):
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = replicated(columns(shape, tp, dp, dim=dim), tp * dp, copies)
    other = replicated(columns(shape, tp, dp, dim=0, name="w/m"), tp * dp, copies)

    def node_of(rank):
        return rank // per_node

    plan = plan_save([tensor, other], node_of=node_of, piece_bytes=piece_bytes, assemble=True)
    check(plan, node_of)
    again = SavePlan.from_bytes(plan.to_bytes())
    assert again.pieces == plan.pieces and again.digest == plan.digest
    for rank in range(tp * dp * copies):
        assert again.parts_of(rank) == plan.parts_of(rank)
        assert again.helpers_of(rank) == plan.helpers_of(rank)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dp", [1, 3])
def test_a_row_parallel_weight_is_few_pieces_evenly_written(tp, dp):
    shape = (8192, 4096)
    plan = plan_save([columns(shape, tp, dp, dtype="BF16")], node_of=lambda r: 0, assemble=True)
    total = prod(shape) * 2
    load, count = Counter(), Counter()
    for p in plan.pieces:
        load[p.rank] += p.length
        count[p.rank] += 1
    assert max(count.values()) <= ceil(total / (tp * dp) / (16 * MIB)) + 2
    assert max(load.values()) - min(load.values()) <= 16 * MIB
    plain = plan_save([columns(shape, tp, dp, dtype="BF16")], node_of=lambda r: 0)
    assert len(plain.pieces) >= shape[0] * tp and len(plan.pieces) <= total // (16 * MIB) + 3 * tp * dp


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_that_a_rank_writes_has_a_part_of_every_other_rank(tp):
    shape = (64, 4 * tp)
    plan = plan_save([columns(shape, tp)], node_of=lambda r: 0, piece_bytes=64 * tp, assemble=True)
    check(plan)
    for rank in range(tp):
        pieces = plan.pieces_of[rank]
        assert plan.helpers_of(rank) == tuple(r for r in range(tp) if r != rank)
        assert all(p.box.size[1] == 4 * tp for p in pieces)
        parts = plan.parts_of(rank)
        assert {p.piece for p in parts} == set(plan.assembled.tolist())
        assert all(p.box.offset[1] == 4 * rank and p.box.size[1] == 4 for p in parts)


def test_columns_that_are_spread_over_nodes_stay_with_their_ranks():
    tensor = columns((6, 8), 2)
    plan = plan_save([tensor], node_of=lambda r: r, assemble=True)
    assert not len(plan.assembled) and len(plan.pieces) == 12
    assert plan.pieces == plan_save([tensor], node_of=lambda r: r).pieces


def test_replicas_on_two_nodes_share_the_rows_and_help_only_at_home():
    tensor = replicated(columns((512, 4096), 2), 2, 2)
    plan = plan_save([tensor], node_of=lambda r: r // 2, assemble=True)
    load = Counter()
    for p in plan.pieces:
        load[p.rank] += p.length
    assert set(load.values()) == {512 * 4096 * 4 // 4}
    assert {r: plan.helpers_of(r) for r in range(4)} == {0: (1,), 1: (0,), 2: (3,), 3: (2,)}


def test_state_beside_the_weights_keeps_its_columns():
    plan = plan_save([columns((64, 8), 2, name="w/exp_avg")], node_of=lambda r: 0, assemble=True)
    assert not len(plan.assembled)
    assert [p.box for p in plan.pieces] == [Box((0, 0), (64, 4)), Box((0, 4), (64, 4))]


def test_packed_columns_and_rows_of_one_are_left_as_runs():
    """Fused gate and up: a rank holds two stretches of rows, each a run."""
    boxes = {r: (Box((4 * r, 0), (4, 6)), Box((8 + 4 * r, 0), (4, 6))) for r in range(2)}
    rows = PlannedTensor(name="gate_up", dtype="F32", shape=(16, 6), boxes=boxes)
    flat = PlannedTensor(
        name="bias",
        dtype="F32",
        shape=(1, 9),
        boxes={r: range_boxes((1, 9), 3 * r, 3 * r + 3) for r in range(3)},
    )
    plan = plan_save([rows, flat], node_of=lambda r: 0, assemble=True)
    assert not len(plan.assembled) and len(plan.pieces) == 7


@pytest.mark.parametrize("tp, nodes", [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_files_are_few(tp, nodes):
    world, layers = 2 * tp * nodes, 8
    tensors = []
    for i in range(layers):
        for kind, dtype in (("", "BF16"), ("/master", "F32"), ("/exp_avg", "F32"), ("/exp_avg_sq", "F32")):
            dp = world // tp
            tensors.append(
                columns((4096, 14336), tp, dp if kind else 1, dtype=dtype, name=f"l{i}.down{kind}")
            )
            tensors.append(
                columns((14336, 4096), tp, dp if kind else 1, dim=0, dtype=dtype, name=f"l{i}.up{kind}")
            )
    plan = plan_save(tensors, node_of=lambda r: r * nodes // world, assemble=True)
    total = sum(prod(t.shape) * ITEM_BYTES[t.dtype] for t in tensors)
    assert len(plan.files) <= nodes * ceil(total / (2 << 30)) * 2 + 6
    for rank in range(world):
        mine = np.bincount(plan.columns.at.tensor[plan.indices_of(rank)], minlength=len(tensors))
        held = np.bincount(
            plan.columns.at.tensor[plan.indices_of(rank)],
            weights=plan.columns.length[plan.indices_of(rank)],
            minlength=len(tensors),
        )
        assert (mine <= np.ceil(held / (16 * MIB)) + 2).all()
