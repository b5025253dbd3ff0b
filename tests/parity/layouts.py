"""Trains one small model in any layout through the real `Trainer`, and says how far that is from one process.

    case       a row of knobs: what is computed (family, optimizer, ...) and by whom (mesh, schedule, ZeRO, ...)
    train      the case on the ranks of the current group: losses, norms, digests, and what is needed to compare
    oracle     the same computation in one process
    compare    the bounds of the contract: equal bits where tp = 1, `close` where tp > 1

What only says by whom something is computed is in LAYOUT; the rest is what the oracle shares with its cases.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sirara.comm.world import World
from sirara.config.run_folder import RunFolder
from sirara.config.schema import RunConfig
from sirara.data.store import write_store
from sirara.pure.layout import Box
from sirara.train.own_loop import Trainer
from tests.harness import run_ranks
from tests.parity.faults import plant
from tests.parity.pairs import Row, Rule

VOCAB, LAYERS, MICRO, LENGTH = 67, 6, 2, 8
SMALL = 9
"""A vocabulary of which the last of four ranks holds nothing: 3 3 3 0."""
STEPS, LONG_STEPS = 4, 20
FAMILIES = {
    "gpt2": {"family": "gpt2"},
    "bloom": {"family": "bloom"},
    "llama": {"family": "llama"},
    "llama, 2 kv heads": {"family": "llama", "kv_heads": 2},
    "llama, 1 kv head": {"family": "llama", "kv_heads": 1},
    "qwen3": {"family": "qwen3"},
}
FROZEN = {
    "gpt2": ["transformer.wte.weight", "transformer.h.1.*"],
    "bloom": ["transformer.word_embeddings.weight", "transformer.h.1.*"],
    "llama": ["model.embed_tokens.weight", "model.layers.1.*"],
    "qwen3": ["model.embed_tokens.weight", "model.layers.1.*"],
}
"""The embedding, tied or not, and a whole block: its backward has nothing to differentiate but its input."""

KNOBS: dict[str, Sequence[Any]] = {
    "family": tuple(FAMILIES),
    "tied": (True, False),
    "optimizer": ("adamw", "lion", "muon"),
    "dropout": (0.0, 0.1),
    "smoothing": (0.0, 0.1),
    "frozen": (False, True),
    "microbatches": (7, 4, 1),
    "pp": (1, 2, 4),
    "tp": (1, 2),
    "dp": (1, 2, 3),
    "zero": (0, 1, 2, 3),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    "sequence": (False, True),
    "recompute": ("none", "selective", "full", 1, "mlp:1 attention", "per stage"),
    "gather": ("microbatch", "step"),
    "split": ("auto", "uneven"),
    "block": ("auto", 1, 4),
    "evaluate": (False, True),
}
LAYOUT = (
    *("pp", "tp", "dp", "zero", "schedule", "sequence", "recompute", "gather", "split", "block"),
    "evaluate",
)
RULES = [
    Rule(("pp", "tp", "dp"), lambda pp, tp, dp: pp * tp * dp <= 4),
    Rule(("sequence", "tp"), lambda sequence, tp: tp > 1 or not sequence),
    Rule(("gather", "zero"), lambda gather, zero: gather == "microbatch" or zero == 3),
    # One stage has nothing to divide, and eight stages of eight units have one way.
    Rule(("split", "pp", "schedule"), lambda split, pp, s: split == "auto" or 1 < stages(pp, s) < LAYERS + 2),
]
PLAIN: Row = {knob: values[0] for knob, values in KNOBS.items()}


def stages(pp: int, schedule: str) -> int:
    return pp * (2 if schedule in ("interleaved", "zb-v") else 1)


def ranks_of(case: Row) -> int:
    return case["pp"] * case["tp"] * case["dp"]


def name_of(case: Row) -> str:
    """The case in one word, without what is plain."""
    words = [
        f"{knob}={value}" if not isinstance(value, str) else value.replace(", ", "-").replace(" ", "-")
        for knob, value in case.items()
        if value != PLAIN.get(knob) or knob == "family"
    ]
    return "_".join(words)


def uneven(count: int) -> list[int]:
    """Layers per stage, most of them on the last but one."""
    inner = [1] * (count - 2)
    first = [0] if count > 2 else [1]
    split = [*first, *inner, 0]
    split[-2 if count > 2 else -1] += LAYERS - sum(split)
    return split


def recipes(count: int) -> list[str]:
    """One per stage, neighbours unlike each other."""
    return [("norm+attention", "full", "mlp", "none")[stage % 4] for stage in range(count)]


def make_store(folder: Path) -> None:
    """Token stores so short that training crosses epochs and meets short last samples; 5 batches to evaluate."""
    rng = np.random.default_rng(5)
    for vocab in (VOCAB, SMALL):
        documents = [rng.integers(1, vocab, n) for n in (150, 3, 88, 260)]
        write_store(folder / f"train-{vocab}", documents, vocab=vocab, eot=0)
    write_store(folder / "eval", [rng.integers(1, SMALL, n) for n in (50, 27)], vocab=SMALL, eot=0)
    make_run(folder)


def make_run(folder: Path) -> None:
    run = folder / "parity-00000000"
    (run / "checkpoints").mkdir(parents=True)
    (run / "control" / "attempts").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"run": run.name}))


def config_of(case: Row, stores: Path, steps: int) -> RunConfig:
    count = stages(case["pp"], case["schedule"])
    family = FAMILIES[case["family"]]
    return RunConfig.model_validate(
        {
            "name": "parity",
            "model": {
                **family,
                "layers": LAYERS,
                "hidden": 32,
                "heads": 4,
                "vocab": case.get("vocab", VOCAB),
                "max_seq": 16,
                "tie_embeddings": case["tied"],
                "dropout": case["dropout"],
                "attention_dropout": case["dropout"],
            },
            "data": {
                "train": [{"path": str(stores / f"train-{case.get('vocab', VOCAB)}")}],
                "eval": [{"path": str(stores / "eval")}],
                "seq_len": LENGTH,
            },
            "train": {
                "steps": steps,
                "global_batch": MICRO * case["microbatches"],
                "micro_batch": MICRO,
                "precision": case.get("precision", "fp64"),
                "optimizer": {"name": case["optimizer"], "lr": 1e-3},
                "lr_schedule": {"name": "cosine", "warmup_steps": 2},
                "recompute": recipes(count) if case["recompute"] == "per stage" else case["recompute"],
                "label_smoothing": case["smoothing"],
                "freeze": FROZEN[family["family"]] if case["frozen"] else [],
                # Most steps are clipped, the first ones are not always.
                "clip_grad_norm": 0.5,
            },
            "mesh": {
                "pp": case["pp"],
                "tp": case["tp"],
                "zero": case["zero"],
                "schedule": case["schedule"],
                "sequence_parallel": case["sequence"],
                "gather": case["gather"],
                "split": uneven(count) if case["split"] == "uneven" else "auto",
                "block": case["block"],
            },
            # Saves beside the training have tests of their own; here a keeper per rank would only cost time.
            "checkpoint": {"async": False},
            "launch": {"hang_timeout": 20.0},
        }
    )


def open_trainer(
    case: Row, stores: Path, steps: int, *, home: Path | None = None, attempt: int = 0
) -> Trainer:
    """A trainer of the case on the ranks of the current group; `home` holds its run folder."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    run = RunFolder((home or stores) / "parity-00000000")
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return Trainer(config_of(case, stores, steps), run, attempt=attempt, world=world)


# ------------------------------------------------------------ what a run leaves

Part = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]], np.ndarray]
"""(logical tensor, its shape, boxes (offset, size), elements box after box)."""


@dataclass(slots=True)
class Trace:
    """What one rank did, or joined what all did.

    seen: (step, microbatch, unit) -> square sums of the unit's output on the ranks that have it.
    gradients: per step, state: at the end.
    """

    begin: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    digest: str = ""
    seen: dict[tuple[int, int, int], float] = field(default_factory=dict)
    gradients: list[list[Part]] = field(default_factory=list)
    state: list[Part] = field(default_factory=list)
    kinds: frozenset[str] = frozenset()

    def common(self) -> tuple[object, ...]:
        """What is the same on all ranks."""
        return self.begin, self.steps, self.evaluations, self.digest


def train(
    case: Row, stores: str, steps: int, keep: bool = False, fault: Mapping[str, Any] | None = None
) -> Trace:
    """The case on the ranks of the current group.

    keep: gradients, final state and outputs too.  fault: planted before the first step.
    """
    with torch.no_grad():
        trainer = open_trainer(case, Path(stores), steps)
    try:
        trainer.start()
        trace = Trace(begin=str(trainer.digest()))
        kinds: set[str] = set()
        plant(trainer, fault, kinds)
        if keep:
            watch(trainer, trace)
        for step in range(steps):
            result = trainer.train_step()
            trace.steps.append((result.loss.hex(), result.grad_norm.hex()))
            if case["evaluate"] and step % 2 == 0:
                trace.evaluations.append(trainer.evaluate()["eval"].hex())
        if fault is None:
            trainer.state.check_replicas()
        trace.digest = str(trainer.digest())
        if keep:
            keep_state(trainer, trace)
        trace.kinds = frozenset(kinds)
        return trace
    finally:
        trainer.end(clean=True)


def watch(trainer: Trainer, trace: Trace) -> None:
    """Notes gradients as they are reduced, and what each unit makes of each microbatch."""
    zero, mine = trainer.stepper.stage.zero, trainer.deal.mine(trainer.mesh.coordinate("dp"))
    reduce = zero.reduce

    def reduce_and_note() -> list[torch.Tensor]:
        shards = reduce()
        trace.gradients.append(
            [
                _part(
                    piece.tensor.name,
                    piece.tensor.shape,
                    piece.boxes,
                    shard_S[at : at + piece.stop - piece.start],
                )
                for flat, shard_S in zip(zero.trained, shards, strict=True)
                for piece in flat.group.pieces(*flat.shard)
                for at in [piece.flat - flat.shard[0]]
            ]
        )
        return shards

    zero.reduce = reduce_and_note  # type: ignore[method-assign]
    speaks = trainer.config.mesh.sequence_parallel or trainer.mesh.coordinate("tp") == 0
    for chunk in trainer.stepper.stage.chunks.values():
        chunk.forward = _noting(chunk.forward, list(chunk.units), chunk.last, mine, trainer, trace, speaks)  # type: ignore[method-assign]


def keep_state(trainer: Trainer, trace: Trace) -> None:
    """Notes what this rank holds of the state."""
    trace.state = [_part(r.tensor, r.shape, r.boxes, r.data.clone()) for r in trainer.state.ranges()]


def _noting(
    forward: Callable[..., Any],
    units: list[int],
    last: bool,
    mine: list[int],
    trainer: Trainer,
    trace: Trace,
    speaks: bool,
) -> Callable[..., Any]:
    calls = [0]

    def noted(x: Any, inputs: Any, key: Any, scale: float) -> Any:
        trail, y = forward(x, inputs, key, scale)
        place = calls[0]
        calls[0] += 1
        outputs = [*trail.hidden[1:], y]
        for unit, output in zip(units, outputs, strict=True):
            # Losses of the head are on every tp rank, whatever the hidden state is.
            if speaks and not (unit == units[-1] and last and trainer.mesh.coordinate("tp")):
                key_ = (place // max(1, len(mine)), mine[place % max(1, len(mine))], unit)
                trace.seen[key_] = math.fsum(output.detach().double().square().flatten().tolist())
        return trail, y

    return noted


def _part(name: str, shape: Sequence[int], boxes: Sequence[Box], data: torch.Tensor) -> Part:
    return name, tuple(shape), [(b.offset, b.size) for b in boxes], data.detach().double().numpy().copy()


def joined(parts: Sequence[Part]) -> dict[str, np.ndarray]:
    """Whole tensors from the parts of all ranks; an element that nobody holds is NaN."""
    whole: dict[str, np.ndarray] = {}
    for name, shape, boxes, data in parts:
        target = whole.setdefault(name, np.full(shape, np.nan))
        at = 0
        for offset, size in boxes:
            n = math.prod(size)
            target[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = data[
                at : at + n
            ].reshape(size)
            at += n
    return whole


# ------------------------------------------------------------ running and comparing


def run(
    case: Row, stores: Path, steps: int, *, keep: bool = False, fault: Mapping[str, Any] | None = None
) -> Trace:
    """The case on as many ranks as it takes, as one trace; ranks that disagree are an error."""
    if ranks_of(case) == 1:
        return train(case, str(stores), steps, keep, fault)
    traces = run_ranks(ranks_of(case), train, case, str(stores), steps, keep, fault, deadline_s=100)
    return merged(traces)


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace from those of all ranks."""
    first = traces[0]
    for rank, trace in enumerate(traces):
        assert trace.common() == first.common(), f"rank {rank} has other numbers than rank 0"
    out = Trace(begin=first.begin, steps=first.steps, evaluations=first.evaluations, digest=first.digest)
    for trace in traces:
        for place, square in trace.seen.items():
            out.seen[place] = out.seen.get(place, 0.0) + square
        out.state += trace.state
        out.kinds |= trace.kinds
    steps = max(len(trace.gradients) for trace in traces)
    out.gradients = [[part for trace in traces for part in trace.gradients[n]] for n in range(steps)]
    return out


def plain_of(case: Row) -> Row:
    """The same computation in one process; it evaluates always."""
    return case | {knob: PLAIN[knob] for knob in LAYOUT} | {"evaluate": True}


@lru_cache(maxsize=16)
def _oracle(case: tuple[tuple[str, Any], ...], stores: Path, steps: int) -> Trace:
    return train(dict(case), str(stores), steps, True)


def oracle(case: Row, stores: Path, steps: int) -> Trace:
    """One process."""
    return _oracle(tuple(plain_of(case).items()), stores, steps)


CLOSE, ZERO = 1e-12, 1e-13


def differences(case: Row, got: Trace, expected: Trace) -> list[str]:
    """What is not as the contract says; nothing when all is well."""
    wrong: list[str] = []
    if got.begin != expected.begin:
        wrong.append(f"initial state: digest {got.begin}, expected {expected.begin}")
    if case["tp"] == 1:
        for n, (there, here) in enumerate(zip(got.steps, expected.steps, strict=True)):
            if there != here:
                wrong.append(f"step {n}: loss and norm {_shown(there)}, expected {_shown(here)}")
        if got.evaluations and got.evaluations != expected.evaluations:
            wrong.append(f"evaluation: {got.evaluations}, expected {expected.evaluations}")
        if got.digest != expected.digest:
            wrong.append(f"final state: digest {got.digest}, expected {expected.digest}")
        return wrong
    for n, (there, here) in enumerate(zip(got.steps, expected.steps, strict=True)):
        for what, a, b in zip(("loss", "norm"), there, here, strict=True):
            x, y = float.fromhex(a), float.fromhex(b)
            if not abs(x - y) <= CLOSE * abs(y):
                wrong.append(f"step {n}: {what} {x!r}, expected {y!r}")
    for a, b in zip(got.evaluations, expected.evaluations, strict=False):
        if not abs(float.fromhex(a) - float.fromhex(b)) <= CLOSE * float.fromhex(b):
            wrong.append(f"evaluation: {float.fromhex(a)!r}, expected {float.fromhex(b)!r}")
    return wrong + _far_tensors(got, expected)


def _far_tensors(got: Trace, expected: Trace) -> list[str]:
    """Tensors of the final state beyond |a - b| <= 1e-12 (1 + max|a|); elements whose gradient is zero by gradient."""
    wrong: list[str] = []
    here, there = joined(expected.state), joined(got.state)
    if here.keys() != there.keys():
        return [f"state holds other tensors: {sorted(here.keys() ^ there.keys())}"]
    ours = [joined(parts) for parts in expected.gradients]
    theirs = [joined(parts) for parts in got.gradients]
    largest = [max(float(np.abs(g).max()) for g in step.values() if g.size) for step in ours]
    for name, a in here.items():
        b, tensor = there[name], name.partition("/")[0]
        idle = np.zeros(a.shape, dtype=bool)
        if tensor in ours[0]:
            small = [np.abs(g[tensor]) < ZERO * most for g, most in zip(ours, largest, strict=True)]
            # What nobody touches (rows of tokens that did not occur) is compared by value.
            noise = [g[tensor] != 0 for g in (*ours, *theirs)]
            idle = np.all(small, axis=0) & np.any(noise, axis=0)
            for n, (g, h) in enumerate(zip(ours, theirs, strict=True)):
                far = np.abs(g[tensor] - h[tensor])[idle]
                if far.size and not far.max() < ZERO * largest[n] * 10:
                    wrong.append(f"step {n}: gradient of {tensor}, zero in truth, is off by {far.max():.3g}")
                off = np.linalg.norm(g[tensor] - h[tensor])
                # Each tensor for itself: a small one that is summed too often or too seldom hides in the norm of all.
                if name == tensor and not off <= 1e-10 * np.linalg.norm(g[tensor]) + ZERO * largest[n] * 10:
                    wrong.append(f"step {n}: gradient of {tensor} is off by {off:.3g}")
        far = np.abs(a - b)[~idle]
        if far.size and not far.max() <= CLOSE * (1 + np.abs(a).max()):
            wrong.append(f"{name}: off by {far.max():.3g}")
    return wrong


def _shown(step: tuple[str, str]) -> str:
    return " ".join(repr(float.fromhex(value)) for value in step)


def first_difference(case: Row, got: Trace, expected: Trace) -> str:
    """Where two kept runs part: the first step, there the first unit whose output differs, else the first gradient.

    Forward goes up from the embedding, so the first output that differs is where the fault is; backward comes down
    from the head, so of gradients it is the one nearest to the head.
    """
    for step in range(len(expected.steps)):
        for place in sorted(p for p in expected.seen if p[0] == step):
            a, b = expected.seen[place], got.seen.get(place, math.nan)
            if not _equal(case, math.sqrt(a), math.sqrt(b)):
                return (
                    f"step {step}: microbatch {place[1]} differs first in the output of {unit_name(place[2])}: "
                    f"norm {math.sqrt(b)!r}, expected {math.sqrt(a)!r}"
                )
        here, there = joined(expected.gradients[step]), joined(got.gradients[step])
        most = max(float(np.abs(g).max()) for g in here.values() if g.size)
        for name in backward_order(list(here)):
            far = np.abs(here[name] - there.get(name, np.nan))
            bound = 0.0 if case["tp"] == 1 else CLOSE * most
            if far.size and not far.max() <= bound:
                worst = np.unravel_index(np.argmax(np.nan_to_num(far, nan=np.inf)), far.shape)
                at = tuple(int(i) for i in worst)
                return f"step {step}: the gradient of {name} differs first, by {far[at]:.3g} at {at}"
    return "neither outputs nor gradients differ: the update does"


def _equal(case: Row, a: float, b: float) -> bool:
    return a == b if case["tp"] == 1 else abs(a - b) <= CLOSE * 10 * abs(a)


def unit_name(unit: int) -> str:
    return "the embedding" if unit == 0 else "the head" if unit == LAYERS + 1 else f"block {unit - 1}"


def backward_order(names: Sequence[str]) -> list[str]:
    """As backward reaches them: tensors come in the order of the groups of one process, units ascending."""

    def block(name: str) -> int:
        numbers = [int(word) for word in name.split(".") if word.isdigit()]
        if numbers:
            return numbers[0] + 1
        first = any(word in name for word in ("embed", "wte", "wpe"))
        return 0 if first else LAYERS + 1

    return sorted(names, key=block, reverse=True)


def check(case: Row, stores: Path, steps: int) -> None:
    """The case equals one process, or the first thing that differs is told."""
    expected = oracle(case, stores, steps)
    got = run(case, stores, steps, keep=case["tp"] > 1)
    wrong = differences(case, got, expected)
    if wrong:
        kept = got if got.gradients else run(case, stores, steps, keep=True)
        story = first_difference(case, kept, expected)
        raise AssertionError("\n  ".join([f"{name_of(case)}:", story, *wrong]))
