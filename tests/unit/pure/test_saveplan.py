import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.errors import InvariantError
from sirara.pure.layout import Box, range_boxes, whole
from sirara.pure.saveplan import (
    ITEM_BYTES,
    PlannedTensor,
    SavePlan,
    plan_save,
    safetensors_header,
    weight_index,
)
from tests.checkpoints import elements_of


def one_node(rank):
    return 0


def planned(name, shape, boxes, dtype="F32"):
    return PlannedTensor(name=name, dtype=dtype, shape=shape, boxes=boxes)


@st.composite
def held(draw, shape, world):
    """Boxes per rank that cover a tensor: flat cuts, whole copies, and overlapping boxes."""
    kind = draw(st.sampled_from(["flat", "copies", "overlapping"]))
    if kind == "copies":
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=1))
        return {r: (whole(shape),) for r in ranks}
    total = int(np.prod(shape))
    ends = [0, *sorted(draw(st.integers(0, total)) for _ in range(world - 1)), total]
    boxes = {r: range_boxes(shape, ends[r], ends[r + 1]) for r in range(world)}
    if kind == "overlapping" and total:
        low = tuple(draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True))
        boxes[draw(st.integers(0, world - 1))] += (Box(low, size),)
    return boxes


@st.composite
def plans(draw):
    world = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5))
    tensors = []
    for i, shape in enumerate(shapes):
        suffix = draw(st.sampled_from(["", "/exp_avg"]))
        dtype = draw(st.sampled_from(["F32", "BF16", "F64", "U8"]))
        tensors.append(planned(f"t{i}{suffix}", shape, draw(held(shape, world)), dtype))
    return world, tensors


@settings(max_examples=200)
@given(plans(), st.sampled_from([1, 64, 1 << 30]), st.sampled_from([8, 24, 1 << 24]))
def test_every_element_is_written_once_by_a_rank_that_holds_it(case, file_bytes, piece_bytes):
    _, tensors = case
    plan = plan_save(tensors, node_of=one_node, file_bytes=file_bytes, piece_bytes=piece_bytes)
    for t, tensor in enumerate(tensors):
        written = Counter(
            i for p in plan.pieces if p.tensor == t for i in elements_of(tensor.shape, p.box).tolist()
        )
        assert written == Counter(range(int(np.prod(tensor.shape))))
    for p in plan.pieces:
        tensor = tensors[p.tensor]
        mine = {i for b in tensor.boxes[p.rank] for i in elements_of(tensor.shape, b).tolist()}
        assert set(elements_of(tensor.shape, p.box).tolist()) <= mine
        assert p.length == p.box.volume * ITEM_BYTES[tensor.dtype] <= piece_bytes


@given(plans(), st.sampled_from([1, 64, 1 << 30]))
def test_pieces_and_headers_fill_their_files_without_hole_or_overlap(case, file_bytes):
    _, tensors = case
    plan = plan_save(tensors, node_of=one_node, file_bytes=file_bytes, piece_bytes=16)
    for f, file in enumerate(plan.files):
        at = file.header_bytes
        for p in (p for p in plan.pieces if p.file == f):
            assert p.position == at
            at += p.length
        assert at == file.size
        assert len(file.header(uuid="u" * 36, step=7)) == file.header_bytes


@given(plans(), st.sampled_from([1, 64, 1 << 30]))
def test_a_weight_lies_in_its_file_in_c_order(case, file_bytes):
    _, tensors = case
    plan = plan_save(tensors, node_of=one_node, file_bytes=file_bytes, piece_bytes=24)
    for f, file in enumerate(plan.files):
        for e in file.entries if file.holds_weights else ():
            t = next(i for i, tensor in enumerate(tensors) if tensor.name == e.name)
            item = ITEM_BYTES[e.dtype]
            for p in (p for p in plan.pieces if (p.file, p.tensor) == (f, t)):
                start = (p.position - file.header_bytes - e.start) // item
                expected = np.arange(start, start + p.box.volume)
                assert (elements_of(tensors[t].shape, p.box) == expected).all()


def test_the_plan_does_not_depend_on_the_order_in_which_ranks_are_listed():
    shape = (40, 8)
    boxes = {r: (whole(shape),) for r in range(3)}
    backwards = dict(reversed(boxes.items()))
    a = plan_save([planned("w", shape, boxes)], node_of=one_node, piece_bytes=256)
    b = plan_save([planned("w", shape, backwards)], node_of=one_node, piece_bytes=256)
    assert a.pieces == b.pieces and a.digest == b.digest


def test_what_all_hold_is_split_evenly_after_what_one_holds():
    mib = 1 << 20
    tensors = [
        planned("lonely/x", (3 * mib,), {0: (whole((3 * mib,)),)}, "U8"),
        *(planned(f"shared{i}/x", (mib,), {r: (whole((mib,)),) for r in range(3)}, "U8") for i in range(9)),
    ]
    load = Counter()
    for p in plan_save(tensors, node_of=one_node).pieces:
        load[p.rank] += p.length
    assert set(load.values()) == {4 * mib}


def test_one_large_replica_is_shared_by_its_holders():
    size = 64 << 20
    plan = plan_save(
        [planned("w", (size,), {r: (whole((size,)),) for r in range(4)}, "U8")], node_of=one_node
    )
    load = Counter()
    for p in plan.pieces:
        load[p.rank] += p.length
    assert set(load.values()) == {size // 4}


def test_files_are_few_and_named_by_side_node_and_number():
    tensors = [
        planned(name, (1000,), {r: range_boxes((1000,), 250 * r, 250 * r + 250) for r in range(4)})
        for name in ("a", "b", "a/m", "b/m")
    ]
    plan = plan_save(tensors, node_of=lambda r: r // 2, file_bytes=2100)
    assert [f.name for f in plan.files] == [
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        *("optim-0-0.safetensors", "optim-0-1.safetensors", "optim-1-0.safetensors", "optim-1-1.safetensors"),
    ]
    assert [f.name for f in plan_save(tensors[:1], node_of=one_node).files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "boxes, message",
    [
        ({0: range_boxes((4, 3), 0, 11)}, "w: the ranks' boxes leave 1 of 12 elements out"),
        ({0: (whole((4, 3)), Box((3, 0), (2, 3)))}, r"box \[3:5,0:3\] of rank 0 lies outside shape"),
        ({}, "leave 12 of 12"),
    ],
)
def test_a_plan_with_a_hole_or_a_box_outside_is_refused_by_name(boxes, message):
    with pytest.raises(InvariantError, match=message):
        plan_save([planned("w", (4, 3), boxes)], node_of=one_node)


def test_a_name_planned_twice_and_an_unknown_dtype_are_refused():
    w = planned("w", (1,), {0: (whole((1,)),)})
    with pytest.raises(InvariantError, match="'w' is planned twice"):
        plan_save([w, w], node_of=one_node)
    with pytest.raises(InvariantError, match="dtype 'F7'"):
        plan_save([planned("w", (1,), {0: (whole((1,)),)}, "F7")], node_of=one_node)


def test_the_index_names_every_weight_and_only_weights():
    tensors = [planned(n, (2,), {0: (whole((2,)),)}) for n in ("a", "b", "a/m")]
    text = weight_index(plan_save(tensors, node_of=one_node)).decode()
    assert '"a": "model.safetensors"' in text and '"b"' in text and "a/m" not in text
    assert '"total_size": 16' in text


def test_a_header_keeps_its_length_whatever_step_and_uuid():
    plan = plan_save([planned("a", (2,), {0: (whole((2,)),)})], node_of=one_node)
    entries = plan.files[0].entries
    lengths = {len(safetensors_header(entries, uuid=u * 36, step=s)) for u, s in [("0", 0), ("f", 10**11)]}
    assert lengths == {plan.files[0].header_bytes} == {4096}


@pytest.mark.parametrize("suffix", ["", "/m"])
def test_a_header_that_just_fills_a_block_and_one_that_just_does_not_are_planned_as_they_are(suffix):
    """Text of every length around the end of a block: a header that is longer than planned would lie on tensors."""
    sizes = set()
    for chars in range(3800, 4100):
        plan = plan_save([planned("n" * chars + suffix, (2,), {0: (whole((2,)),)})], node_of=one_node)
        (file,) = plan.files
        assert len(file.header(uuid="u" * 36, step=7)) == file.header_bytes
        sizes.add(file.header_bytes)
    assert sizes == {4096, 8192}


@given(plans(), st.sampled_from([1, 64, 1 << 30]))
def test_a_plan_comes_back_from_its_bytes(case, file_bytes):
    world, tensors = case
    plan = plan_save(tensors, node_of=one_node, file_bytes=file_bytes, piece_bytes=16)
    back = SavePlan.from_bytes(plan.to_bytes())
    assert back.pieces == plan.pieces and back.digest == plan.digest and back.writers == plan.writers
    assert back.files == plan.files and back.total_bytes == plan.total_bytes
    for f, g in zip(back.files, plan.files, strict=True):
        assert f.entries == g.entries and f.header(uuid="u", step=1) == g.header(uuid="u", step=1)
        assert f.header(uuid="u", step=1) == safetensors_header(g.entries, uuid="u", step=1)
    for rank in range(world + 1):
        mine = [p for p in plan.pieces if p.rank == rank]
        assert back.pieces_of.get(rank, []) == mine and back.bytes_of(rank) == sum(p.length for p in mine)


def test_a_plan_that_was_damaged_on_its_way_is_refused():
    raw = plan_save([planned("a", (2,), {0: (whole((2,)),)})], node_of=one_node).to_bytes()
    for i in (0, len(raw) // 2, len(raw) - 1):
        with pytest.raises(InvariantError, match="did not arrive as it was sent"):
            SavePlan.from_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])


def test_names_that_json_must_escape_keep_the_length_of_their_header():
    tensors = [planned(n, (3,), {0: (whole((3,)),)}) for n in ('a"b\\c', "größe", "größe/m")]
    plan = plan_save(tensors, node_of=one_node)
    for file in plan.files:
        assert len(file.header(uuid="u" * 36, step=7)) == file.header_bytes
        assert file.header(uuid="u", step=7) == safetensors_header(file.entries, uuid="u", step=7)


@pytest.mark.long
@pytest.mark.parametrize("ranks_per_tensor", [2, 16, 64])
def test_ten_thousand_tensors_written_by_a_thousand_ranks_are_planned_in_two_seconds(ranks_per_tensor):
    n, world, numel = 10_000, 1000, 4096 * 1024
    tensors = []
    for i in range(n):
        lo = i * world // n
        hi = min(world, lo + ranks_per_tensor)
        ends = np.linspace(0, numel, hi - lo + 1).astype(int).tolist()
        boxes = {lo + k: range_boxes((4096, 1024), ends[k], ends[k + 1]) for k in range(hi - lo)}
        tensors.append(planned(f"t{i}" + ("/m" if i % 3 else ""), (4096, 1024), boxes))
    began = time.process_time()
    plan = plan_save(tensors, node_of=lambda r: r // 8, assemble=True)
    took = time.process_time() - began
    assert len(plan.columns) >= n * (ranks_per_tensor - 1) and took < 2.0, f"{took:.2f} s"
