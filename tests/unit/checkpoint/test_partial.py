"""Some weights of a checkpoint into another model: what is taken, what is missing, what stays."""

from pathlib import Path

import pytest
import torch

from sirara.checkpoint.partial import load_weights
from sirara.checkpoint.ranges import NamedRange
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, ConfigError
from tests.checkpoints import Boxes, State, even, ranges_of, replicated, save, small_state

WEIGHTS = ("embed.weight", "block.0.weight", "block.0.bias", "none", "head.weight")


def weights(state: State) -> State:
    return {n: t for n, t in state.items() if n in WEIGHTS}


def fill(like: State, boxes: Boxes | None = None, rank: int = 0) -> tuple[list[NamedRange], State]:
    """Ranges that view the tensors of a new state full of 7."""
    state = {n: torch.full_like(t, 7) for n, t in like.items()}
    return ranges_of(state, boxes or replicated(like, 1), rank), state


@pytest.fixture
def saved(tmp_path: Path) -> tuple[State, Snapshot]:
    state = small_state(3)
    return state, Snapshot(save(tmp_path, 5, state, even(state, 2)))


def values(ranges: list[NamedRange]) -> State:
    return {r.tensor: r.data for r in ranges}


def test_weights_alone_are_taken_and_no_other_state(saved):
    state, snapshot = saved
    ranges, _ = fill(state | {})
    report = load_weights(snapshot, ranges)
    got = values(ranges)
    assert sorted(report.taken) == sorted(WEIGHTS)
    assert (report.missing, report.unexpected, report.left, report.grown, report.converted) == ((),) * 5
    assert torch.equal(got["embed.weight"], state["embed.weight"].reshape(-1))
    # Its master is filled, the weight is the rounding of that.
    assert torch.equal(got["head.weight/master"], state["head.weight/master"].reshape(-1))
    assert (got["embed.weight/exp_avg"] == 7).all() and (got["scale/value"] == 7).all()


def test_a_subset_of_names_leaves_the_rest_as_it_is(saved):
    state, snapshot = saved
    ranges, _ = fill(weights(state))
    report = load_weights(snapshot, ranges, names=["block.*"])
    assert set(report.taken) == {"block.0.weight", "block.0.bias"}
    assert set(report.left) == {"embed.weight", "none", "head.weight"}
    assert (values(ranges)["embed.weight"] == 7).all()
    with pytest.raises(ConfigError, match=r"no weight is called 'blok\.0\.bias'") as caught:
        load_weights(snapshot, ranges, names=["blok.0.bias"])
    assert "the nearest name is 'block.0.bias'" in caught.value.why


def test_a_larger_model_is_explicit_in_names_and_in_shapes(saved):
    state, snapshot = saved
    larger = weights(state) | {"embed.weight": torch.zeros(17, 8), "block.1.weight": torch.zeros(7, 5, 3)}
    ranges, _ = fill(larger)
    with pytest.raises(
        CheckpointError, match=r"embed.weight has shape \[13, 8\] in the checkpoint and \[17, 8\] here"
    ):
        load_weights(snapshot, ranges, strict=False)
    with pytest.raises(CheckpointError, match=r"1 missing: block.1.weight"):
        load_weights(snapshot, ranges, grow=True)
    assert all((r.data == 7).all() for r in ranges)
    report = load_weights(snapshot, ranges, strict=False, grow=True)
    assert report.missing == ("block.1.weight",)
    assert report.grown == (("embed.weight", (13, 8), (17, 8)),)
    got = values(ranges)["embed.weight"].view(17, 8)
    assert torch.equal(got[:13], state["embed.weight"]) and (got[13:] == 7).all()
    assert "5 weights taken" in str(report) and "1 missing: block.1.weight" in str(report)


def test_what_the_model_has_no_place_for_is_unexpected(saved):
    state, snapshot = saved
    smaller = {n: t for n, t in weights(state).items() if n != "head.weight"}
    with pytest.raises(CheckpointError, match=r"1 unexpected: head\.weight"):
        load_weights(snapshot, fill(smaller)[0])
    assert load_weights(snapshot, fill(smaller)[0], strict=False).unexpected == ("head.weight",)
    assert load_weights(snapshot, fill(smaller)[0], names=["e*", "b*", "n*"]).unexpected == ()


def test_a_smaller_shape_is_refused_even_when_larger_ones_are_allowed(saved):
    state, snapshot = saved
    ranges, _ = fill(weights(state) | {"embed.weight": torch.zeros(11, 8)})
    with pytest.raises(CheckpointError, match=r"embed\.weight has shape"):
        load_weights(snapshot, ranges, strict=False, grow=True)


def test_values_come_from_the_masters_where_the_dtypes_differ(saved):
    state, snapshot = saved
    ranges, _ = fill(weights(state) | {"head.weight": torch.zeros(6, 8)})
    report = load_weights(snapshot, ranges)
    assert torch.equal(values(ranges)["head.weight"], state["head.weight/master"].reshape(-1))
    assert report.converted == ()
    ranges, _ = fill(weights(state) | {"embed.weight": torch.zeros(13, 8, dtype=torch.float64)})
    report = load_weights(snapshot, ranges)
    assert torch.equal(values(ranges)["embed.weight"], state["embed.weight"].double().reshape(-1))
    assert report.converted == (("embed.weight", "F32", "F64"),)


def test_parts_of_a_grown_weight_land_where_each_rank_holds_them(saved):
    state, snapshot = saved
    larger = {"embed.weight": torch.zeros(17, 9)}
    boxes = even(larger, 3)
    whole = torch.full((17, 9), 7.0)
    for rank in range(3):
        ranges, _ = fill(larger, boxes, rank)
        load_weights(snapshot, ranges, names=["embed*"], grow=True)
        for r in ranges:
            at = 0
            for box in r.boxes:
                whole[box.slices] = r.data[at : at + box.volume].view(box.size)
                at += box.volume
    expected = torch.full((17, 9), 7.0)
    expected[:13, :8] = state["embed.weight"]
    assert torch.equal(whole, expected)
