"""Real processes save at once into the same files, and other numbers of processes read."""

from pathlib import Path

import pytest

from tests.checkpoints import (
    differing,
    equal_bits,
    even,
    flat_cuts,
    load,
    manager,
    plan_of,
    ranges_of,
    replicated,
    small_state,
)
from tests.harness import run_ranks

LAYOUTS = {
    "even": lambda state, world: even(state, world),
    "uneven": lambda state, world: flat_cuts(state, [0.1 * r for r in range(1, world)]),
    "replicas": replicated,
}


def save_part(rank: int, world: int, folder: str, layout: str, steps: int) -> list[str]:
    state = small_state()
    boxes = LAYOUTS[layout](state, world)
    m = manager(Path(folder), rank=rank, world=world)
    return [
        str(
            m.save(
                step,
                plan=plan_of(state, boxes),
                ranges=ranges_of(state, boxes, rank),
                record={"step": step},
                hf_files={"config.json": b"{}"},
                aliases={},
            )
        )
        for step in range(1, steps + 1)
    ]


def save_on_ranks(folder: str, layout: str, steps: int) -> list[str]:
    import torch.distributed as dist

    return save_part(dist.get_rank(), dist.get_world_size(), folder, layout, steps)


def read_on_ranks(folder: str, layout: str, step: int) -> list[str]:
    import torch.distributed as dist

    state = small_state()
    boxes = LAYOUTS[layout](state, dist.get_world_size())
    snapshot = manager(Path(folder), rank=1, world=2).open(step)
    ranges = ranges_of(state, boxes, dist.get_rank(), filled=False)
    snapshot.read_into(ranges)
    wanted = ranges_of(state, boxes, dist.get_rank())
    return [a.tensor for a, b in zip(ranges, wanted, strict=True) if not equal_bits(a.data, b.data)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_three_processes_saved_at_once_is_read_by_two_and_by_one(tmp_path, layout):
    paths = run_ranks(3, save_on_ranks, str(tmp_path), layout, 2)
    assert [p[-1] == "None" for p in paths] == [False, True, True]
    assert run_ranks(2, read_on_ranks, str(tmp_path), "uneven", 2) == [[], []]
    state = small_state()
    assert differing(state, load(manager(tmp_path).open(1), state)) == []
