"""Row-parallel weights saved by real keepers: whole rows in few pieces, though no rank holds one."""

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sirara.checkpoint.digest import digest_of
from sirara.checkpoint.manager import State
from sirara.pure.layout import Box
from tests.checkpoints import differing, even, load, manager, plan_of, ranges_of
from tests.harness import run_ranks

ROWS = 300


def columns(state, world):
    """Every matrix cut by columns, everything else by rows."""
    cut = {}
    for name, t in state.items():
        n = t.shape[-1]
        ends = [n * r // world for r in range(world + 1)]
        corner = (0,) * (t.dim() - 1)
        cut[name] = {
            r: (Box((*corner, ends[r]), (*t.shape[:-1], ends[r + 1] - ends[r])),) for r in range(world)
        }
    return cut


def some_state():
    g = torch.Generator().manual_seed(1)
    state = {f"{i}.down.weight": torch.randn(ROWS, 64, generator=g).bfloat16() for i in range(3)}
    state |= {
        f"{name}/{kind}": torch.randn(ROWS, 64, generator=g) for name in list(state) for kind in ("m", "v")
    }
    return state | {"norm.weight": torch.randn(64, generator=g)}


def save_twice(folder):
    import torch.distributed as dist

    from tests.ranks.test_async_save import agree

    rank, world = dist.get_rank(), dist.get_world_size()
    state = some_state()
    boxes = columns(state, world)
    ranges = ranges_of(state, boxes, rank)
    saves = manager(
        Path(folder) / "checkpoints",
        rank=rank,
        world=world,
        asynchronous=True,
        memory=Path(folder) / "shm",
        agree=agree,
    )
    for step in (1, 2):
        before = {name: t.clone() for name, t in state.items()}
        record = {"step": step, "tokens": step}
        saved = State(plan=plan_of(state, boxes), ranges=ranges, record=record, hf_files={}, aliases={})
        assert saves.start(step, saved, tiers=("disk",), patient=True)
        for r in ranges:
            r.data.add_(1.0)  # training goes on
        outcome = saves.wait()
        assert outcome is not None and outcome.fault is None, outcome
        for t in state.values():
            t.add_(1.0)
    found = load(saves.open(2), state, even(state, 1)) if rank == 0 else before
    saves.close(clean=True)
    expected = str(digest_of((name, 0, t.reshape(-1)) for name, t in before.items()))
    return outcome.digest == expected, differing(before, found)


@pytest.mark.parametrize("tp", [2, 4])
def test_rows_that_no_rank_holds_are_saved_whole_in_few_pieces(tmp_path, tp):
    for same_digest, different in run_ranks(tp, save_twice, str(tmp_path)):
        assert same_digest and different == []
    step = tmp_path / "checkpoints" / "step-000000002"
    manifest = json.loads((step / "manifest.json").read_bytes())
    per_tensor = [manifest["pieces"]["tensor"].count(t) for t in range(len(manifest["tensors"]["name"]))]
    for name, n, shape in zip(
        manifest["tensors"]["name"], per_tensor, manifest["tensors"]["shape"], strict=True
    ):
        most = tp * (ceil(ROWS * 64 * 4 / tp / (16 << 20)) + 2)
        assert n <= min(most, tp), (name, n, shape)
    assert len(list(step.glob("*.safetensors"))) == 2
    state = some_state()
    for t in state.values():
        t.add_(1.0)
    weights = load_file(step / "model.safetensors")
    assert sorted(weights) == sorted(name for name in state if "/" not in name)
    assert differing(weights, state) == []
