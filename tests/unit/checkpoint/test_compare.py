"""What two steps have in common, against torch."""

import math
import shutil

import pytest
import torch

from sirara.checkpoint.compare import compare
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, ConfigError
from tests.checkpoints import even, flip_bit, replicated, save, small_state


def steps(tmp_path, a, b, **options):
    left = save(tmp_path / "a", 1, a, even(a, 2))
    return Snapshot(left), Snapshot(save(tmp_path / "b", 1, b, **options))


def by_name(found):
    return {t.name: t for t in found.tensors}


def test_the_same_state_is_equal_whatever_layout_saved_it(tmp_path):
    state = small_state(3)
    a, b = steps(tmp_path, state, state, boxes=replicated(state, 3))
    for quick in (False, True):
        found = compare(a, b, quick=quick)
        assert found.equal and len(found.tensors) == len(state)
        assert {t.what for t in found.tensors} == {"equal"}


def test_values_apart_are_counted_and_measured_as_torch_does(tmp_path):
    a, b = small_state(0), small_state(0)
    for name in ("embed.weight", "head.weight", "block.0.bias/exp_avg"):
        b[name] = b[name].clone()
        b[name].view(-1)[2::3] += 0.5
    found = compare(*steps(tmp_path, a, b))
    assert not found.equal
    assert [t.name for t in found.differing] == ["embed.weight", "head.weight", "block.0.bias/exp_avg"]
    for t in found.differing:
        apart = (a[t.name].double() - b[t.name].double()).abs()
        assert t.what == "values" and t.max_abs == apart.max().item()
        assert t.differing == int((apart > 0).sum()) and t.nans == 0
        assert t.first == tuple(int(i) for i in apart.nonzero()[0])


def test_bits_decide_and_nan_equals_itself(tmp_path):
    a = {"w": torch.tensor([0.0, math.nan, 1.0, math.inf, math.nan]), "s": torch.tensor(2.0)}
    b = {"w": torch.tensor([-0.0, math.nan, math.nan, -math.inf, math.nan]), "s": torch.tensor(2.0)}
    w = by_name(compare(*steps(tmp_path, a, b)))["w"]
    assert (w.differing, w.nans, w.max_abs, w.first) == (3, 1, math.inf, (0,))


def test_missing_tensors_other_shapes_and_other_dtypes_are_named(tmp_path):
    a = {"w": torch.ones(4, 3), "x": torch.ones(5), "y": torch.arange(6.0), "only_a": torch.ones(2)}
    b = {
        "w": torch.ones(3, 4),
        "x": torch.ones(5),
        "y": torch.arange(6.0).bfloat16(),
        "only_b": torch.ones(2),
    }
    b["z"], a["z"] = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]).half()
    found = by_name(compare(*steps(tmp_path, a, b)))
    assert {n: t.what for n, t in found.items()} == {
        "w": "shape", "x": "equal", "y": "dtype", "only_a": "only in A", "z": "dtype", "only_b": "only in B",
    }  # fmt: skip
    assert found["y"].differing == 0 and found["y"].max_abs == 0.0
    assert found["z"].differing == 1 and found["z"].max_abs == 0.5
    assert found["w"].a.shape == (4, 3) and found["w"].b.shape == (3, 4)


def test_small_floats_and_integers_are_compared_too(tmp_path):
    a = {
        "f": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "i": torch.tensor([1, -5]),
        "b": torch.tensor([True]),
    }
    b = {
        "f": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
        "i": torch.tensor([1, 7]),
        "b": torch.tensor([False]),
    }
    found = by_name(compare(*steps(tmp_path, a, b)))
    assert {n: t.max_abs for n, t in found.items()} == {"f": 2.0, "i": 12.0, "b": 1.0}


def test_a_record_that_differs_makes_steps_differ_but_the_layout_does_not(tmp_path):
    state = small_state(1)
    a = Snapshot(save(tmp_path / "a", 1, state, record={"step": 1, "seed": 3, "layout": {"dp": 2}}))
    b = Snapshot(save(tmp_path / "b", 1, state, record={"step": 1, "seed": 4, "layout": {"dp": 1}}))
    found = compare(a, b)
    assert found.record == {"seed": (3, 4)} and not found.equal and not found.differing
    assert compare(a, b, only=["embed*"]).equal


def test_large_tensors_are_compared_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("sirara.checkpoint.compare.CHUNK_BYTES", 64)
    a, b = small_state(0), small_state(0)
    b["block.0.weight"] = b["block.0.weight"].clone()
    b["block.0.weight"][6, 4, 2] = 9.0
    b["block.0.weight"][3, 1, 0] = -9.0
    found = by_name(compare(*steps(tmp_path, a, b)))["block.0.weight"]
    assert found.differing == 2 and found.first == (3, 1, 0)
    assert found.max_abs == (a["block.0.weight"].double() - b["block.0.weight"].double()).abs().max().item()


def test_only_takes_globs_and_refuses_those_that_fit_nothing(tmp_path):
    a, b = steps(tmp_path, small_state(0), small_state(0))
    assert {t.name.partition("/")[2] for t in compare(a, b, only=["*/exp_avg"]).tensors} == {"exp_avg"}
    with pytest.raises(ConfigError, match="no tensor of either step fits nothing"):
        compare(a, b, only=["nothing*"])


def test_a_damaged_piece_is_an_error_not_a_difference_unless_quick(tmp_path):
    state = small_state(0)
    path = save(tmp_path / "a", 1, state)
    shutil.copytree(path, tmp_path / "b")
    flip_bit(tmp_path / "b" / "model.safetensors", 4100)
    a, b = Snapshot(path), Snapshot(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        compare(a, b)
    assert compare(a, b, quick=True).equal
