"""Checkpoints for tests: a small state, cut over any number of ranks, saved by threads and read back."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sirara.checkpoint.manager import CheckpointManager, NamedRange, PlannedTensor, Snapshot, dtype_name
from sirara.checkpoint.restore import Candidate, Restored, read_first
from sirara.pure.layout import Box, range_boxes, whole

State = dict[str, torch.Tensor]
Boxes = dict[str, dict[int, tuple[Box, ...]]]  # tensor -> rank -> boxes


def small_state(seed: int = 0) -> State:
    """Weights and moments: odd sizes, a scalar, an empty tensor, bf16 with its master."""
    g = torch.Generator().manual_seed(seed)
    state: State = {
        "embed.weight": torch.randn(13, 8, generator=g),
        "block.0.weight": torch.randn(7, 5, 3, generator=g),
        "block.0.bias": torch.randn(11, generator=g),
        "none": torch.zeros(0, 4),
        "head.weight": torch.randn(6, 8, generator=g).bfloat16(),
    }
    for name in list(state):
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"{name}/{kind}"] = torch.randn(state[name].shape, generator=g)
    state["head.weight/master"] = torch.randn(6, 8, generator=g)
    state["scale/value"] = torch.tensor(float(seed))
    return state


def flat_cuts(state: State, cuts: Sequence[float]) -> Boxes:
    """Rank r of len(cuts)+1 holds the elements between the r-th and the next fraction of every tensor."""
    ends = [0.0, *sorted(cuts), 1.0]
    return {
        name: {
            r: range_boxes(t.shape, round(ends[r] * t.numel()), round(ends[r + 1] * t.numel()))
            for r in range(len(ends) - 1)
        }
        for name, t in state.items()
    }


def even(state: State, world: int) -> Boxes:
    return flat_cuts(state, [r / world for r in range(1, world)])


def replicated(state: State, world: int) -> Boxes:
    return {name: {r: (whole(t.shape),) for r in range(world)} for name, t in state.items()}


def plan_of(state: State, boxes: Boxes) -> list[PlannedTensor]:
    return [
        PlannedTensor(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape), boxes=boxes[n])
        for n, t in state.items()
    ]


def ranges_of(state: State, boxes: Boxes, rank: int, *, filled: bool = True) -> list[NamedRange]:
    out = []
    for name, t in state.items():
        mine = boxes[name].get(rank, ())
        parts = [t[b.slices].reshape(-1) for b in mine]
        data = torch.cat(parts) if parts else t.new_empty(0)
        if not filled:
            data = torch.full_like(data, 77)
        out.append(NamedRange(tensor=name, shape=tuple(t.shape), boxes=mine, data=data))
    return out


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def manager(folder: Path, *, rank: int = 0, world: int = 1, **options: Any) -> CheckpointManager:
    settings: dict[str, Any] = {"run": "run-1", "node": 0, "attempt": 1, "keep_last": 3, "keep_every": None}
    settings |= {"deadline_s": 30.0} | options
    return CheckpointManager(folder, rank=rank, world=world, **settings)


def restore(
    m: CheckpointManager,
    read: Callable[[Snapshot], None],
    *,
    steps: Sequence[int] | None = None,
    agree: Callable[[str], str] = lambda fault: fault,
) -> Restored | None:
    """The newest step of the step folders alone that all ranks can read; None when there is none."""
    found = read_first(
        [Candidate(step=s, open=partial(m.open, s)) for s in (m.newest() if steps is None else steps)],
        read,
        agree=agree,
        distrust=m.distrust,
        where=str(m.folder),
    )
    return None if found is None else Restored(step=found[0].step, skipped=found[1])


def in_ranks(world: int, fn: Callable[[int], Any]) -> list[Any]:
    """fn(rank) on `world` threads; the first rank's exception is raised."""
    results: list[Any] = [None] * world
    faults: list[BaseException | None] = [None] * world

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as fault:
            faults[rank] = fault

    threads = [threading.Thread(target=body, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        if fault is not None:
            raise fault
    return results


def save(
    folder: Path,
    step: int,
    state: State,
    boxes: Boxes | None = None,
    *,
    record: Mapping[str, Any] | None = None,
    hf_files: Mapping[str, bytes] | None = None,
    **options: Any,
) -> Path:
    """The committed folder of `state`, saved by as many ranks as `boxes` has."""
    boxes = even(state, 1) if boxes is None else boxes
    world = 1 + max(r for held in boxes.values() for r in held)
    plan = plan_of(state, boxes)

    def one(rank: int) -> Path | None:
        return manager(folder, rank=rank, world=world, **options).save(
            step,
            plan=plan,
            ranges=ranges_of(state, boxes, rank),
            record=dict(record or {"step": step, "tokens": 100 * step}),
            hf_files=dict(hf_files or {"config.json": b"{}\n"}),
            aliases={},
        )

    return in_ranks(world, one)[0]


def load(snapshot: Snapshot, like: State, boxes: Boxes | None = None) -> State:
    """The state read by as many ranks as `boxes` has, put together again."""
    boxes = even(like, 1) if boxes is None else boxes
    state = {name: torch.full_like(t, 55) for name, t in like.items()}
    for rank in range(1 + max(r for held in boxes.values() for r in held)):
        ranges = ranges_of(like, boxes, rank, filled=False)
        snapshot.read_into(ranges)
        for r in ranges:
            at = 0
            for box in r.boxes:
                state[r.tensor][box.slices] = r.data[at : at + box.volume].reshape(box.size)
                at += box.volume
    return state


def differing(a: State, b: State) -> list[str]:
    return [name for name in a if not equal_bits(a[name], b[name])]


def flip_bit(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x10
    path.write_bytes(bytes(raw))


def elements_of(shape: Sequence[int], box: Box) -> np.ndarray:
    """Flat indices of a box's elements, by brute force."""
    return np.arange(int(np.prod(shape))).reshape(shape)[box.slices].reshape(-1)
