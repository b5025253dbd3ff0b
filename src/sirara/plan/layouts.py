"""The layouts of a model on so many devices: degrees outside, all other knobs inside, and what makes one illegal.

    outer     pp, tp, cp, ep    with dp = gpus / (pp * tp * cp)
    inner     zero, schedule and virtual stages, micro_batch, recompute, sequence parallelism, offload, precision

The rules are those of `config/check.py`, here on columns; a test holds the two together by enumeration.  Some more
leave out what is the same layout twice, or never wise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirara.config.schema import RunConfig
from sirara.plan.from_config import OFFLOAD_CODES, SCHEDULE_CODES, SELECTIVE, Columns
from sirara.plan.hardware import Accelerator
from sirara.plan.points import Recompute
from sirara.pure.recompute import Setting
from sirara.pure.schedule import SPLIT_BACKWARD, chunks_of
from sirara.pure.shape import ModelShape

Bools = NDArray[np.bool_]
SHARES = 8
"""Of a stage's blocks that are computed again, where blocks are compiled: this many steps."""
NOTHING = ("none", "none", "none")
OFFLOADED = ("optimizer", "params", "activations")
NEEDED = 1 << 16
"""A code beside those of `Recompute`: as little as makes each stage fit, module by module (needed.py)."""


_OFFLOADS = (
    ("host", "none", "none"),
    ("none", "none", "host"),
    ("host", "host", "none"),
    ("host", "host", "host"),
    ("disk", "disk", "host"),
)
"""What a search tries to put elsewhere."""


class Reason(IntEnum):
    """Why a layout is left out; the first that holds."""

    LEGAL = 0
    TP_HEADS = 1
    TP_FFN = 2
    TP_KV_HEADS = 3
    TP_DOMAIN = 4
    PP_UNITS = 5
    MICRO_BATCH = 6
    IDLE_RANKS = 7
    SEQUENCE_TP = 8
    SEQUENCE_TOKENS = 9
    CP_SEQ = 10
    EP_EXPERTS = 11
    ZERO_ALONE = 12
    SCHEDULE_ALONE = 13
    COMPILE_SPLIT = 14
    COMPILE_SELECTIVE = 15
    SHARE = 16
    NOTHING_NEEDED = 17
    """Found by the search."""
    MEMORY = 20
    """Legal, but does not fit; found by the search."""


WHY = {
    Reason.TP_HEADS: "tp does not divide the attention heads",
    Reason.TP_FFN: "tp does not divide the width of the MLP",
    Reason.TP_KV_HEADS: "tp neither divides the key and value heads nor is a multiple of them",
    Reason.TP_DOMAIN: "tensor- and context-parallel ranks would leave the scale-up domain",
    Reason.PP_UNITS: "more stages than units of the model",
    Reason.MICRO_BATCH: "micro_batch does not divide global_batch",
    Reason.IDLE_RANKS: "fewer microbatches than data-parallel ranks",
    Reason.SEQUENCE_TP: "sequence parallelism has no meaning for tp 1",
    Reason.SEQUENCE_TOKENS: "tp does not divide the tokens of a microbatch",
    Reason.CP_SEQ: "2 cp does not divide the sequence",
    Reason.EP_EXPERTS: "ep does not divide the experts, or there are none",
    Reason.ZERO_ALONE: "with one data-parallel rank all ZeRO stages are the same",
    Reason.SCHEDULE_ALONE: "with one pipeline rank all schedules are the same",
    Reason.COMPILE_SPLIT: "a compiled block has one backward, the schedule splits it",
    Reason.COMPILE_SELECTIVE: "in a compiled block the compiler decides what is kept",
    Reason.SHARE: "a stage has too few blocks to compute a share of them again",
    Reason.NOTHING_NEEDED: "recompute as needed is none where it fits without",
    Reason.MEMORY: "does not fit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried for every knob.  schedules: (name, virtual stages).  recompute: (code, share of the blocks).

    offload: (optimizer, params, activations).  recipe: the only recompute that is tried, where it is no code.
    processes: of a node, where the configuration says another number than these devices need.
    """

    gpus: int
    pp: tuple[int, ...]
    tp: tuple[int, ...]
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1),)
    micro_batch: tuple[int, ...] = (1,)
    recompute: tuple[tuple[int, float], ...] = ((0, 1.0),)
    sequence_parallel: tuple[int, ...] = (0, 1)
    offload: tuple[tuple[str, str, str], ...] = (NOTHING,)
    precision: tuple[str, ...] = ("bf16",)
    recipe: Setting | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """One choice of the degrees."""

    pp: int
    tp: int
    cp: int
    ep: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Columns [I] of all choices of the other knobs; `at`: which entry of the space's tuple each one is."""

    columns: Columns
    at: dict[str, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.columns["zero"])


def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def whole_space(config: RunConfig, shape: ModelShape, accelerator: Accelerator, gpus: int) -> Space:
    """All knobs, also those that are predicted before they run."""
    t = config.train
    schedules = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
    schedules += [("interleaved", v) for v in (3, 4, 6, 8, 12, 16) if v * 2 <= shape.layers + 2]
    precisions, launch = [t.precision], config.launch
    said = isinstance(launch.nproc, int) and launch.nproc * launch.nodes != gpus
    if t.precision == "bf16" and "fp8" in accelerator.peak_flops_per_s:
        precisions.append("fp8")
    full = int(Recompute.FULL)
    return Space(
        gpus=gpus,
        pp=tuple(d for d in divisors(gpus) if d <= shape.layers + 2),
        tp=tuple(d for d in divisors(gpus) if d <= max(8, min(accelerator.domain, 64))),
        cp=tuple(d for d in divisors(gpus) if d <= 16 and d & (d - 1) == 0),
        schedules=tuple(schedules),
        micro_batch=tuple(m for m in (1, 2, 4, 8, 16) if m <= t.global_batch),
        recompute=(
            (0, 1.0),
            *(((SELECTIVE, 1.0), (NEEDED, 1.0)) if not t.compile else ()),
            *(((full, n / SHARES) for n in range(1, SHARES)) if t.compile else ()),
            (full, 1.0),
        ),
        # A CPU's memory is the host's.
        offload=(
            NOTHING,
            *(_OFFLOADS if not accelerator.on_cpu else ()),
        ),
        precision=tuple(precisions),
        processes=gpus // launch.nodes if said and gpus % launch.nodes == 0 else None,
    )


def runnable_space(config: RunConfig, shape: ModelShape, accelerator: Accelerator, gpus: int) -> Space:
    """What `mesh: auto` may choose: keys of the mesh alone, and only what this version runs.

    What a run's numbers hang on (micro_batch, precision) stays as the configuration has it.
    """
    space = whole_space(config, shape, accelerator, gpus)
    full = int(Recompute.FULL)
    asked = config.train.recompute
    codes = {"none": (0, 1.0), "selective": (SELECTIVE, 1.0), "full": (full, 1.0)}
    code = codes.get(asked) if isinstance(asked, str) else None
    return replace(
        space,
        cp=(1,),
        ep=(1,),
        micro_batch=(config.train.micro_batch,),
        recompute=(code or (0, 1.0),),
        recipe=None if code else asked,
        offload=(NOTHING,),
        precision=(config.train.precision,),
    )


def outers(space: Space) -> list[Outer]:
    """All degrees whose product is the number of devices."""
    return [
        Outer(pp=pp, tp=tp, cp=cp, ep=ep, dp=space.gpus // (pp * tp * cp))
        for pp, tp, cp, ep in product(space.pp, space.tp, space.cp, space.ep)
        if space.gpus % (pp * tp * cp) == 0
    ]


def inner(space: Space) -> Inner:
    """The other knobs as columns."""
    knobs: dict[str, Sequence[Any]] = {
        "precision": space.precision,
        "offload": space.offload,
        "recompute": space.recompute,
        "schedule": space.schedules,
        "sequence_parallel": space.sequence_parallel,
        "micro_batch": space.micro_batch,
        "zero": space.zero,
    }
    grid = np.meshgrid(*[np.arange(len(v)) for v in knobs.values()], indexing="ij")
    at = {name: g.ravel() for name, g in zip(knobs, grid, strict=True)}

    def column(name: str, values: Sequence[Any]) -> NDArray[Any]:
        return np.array(values)[at[name]]

    return Inner(
        at=at,
        columns={
            "zero": column("zero", space.zero),
            "micro_batch": column("micro_batch", space.micro_batch),
            "sequence_parallel": column("sequence_parallel", space.sequence_parallel),
            "schedule": column("schedule", [int(SCHEDULE_CODES[n]) for n, _ in space.schedules]),
            "vpp": column("schedule", [v for _, v in space.schedules]),
            "recompute": column("recompute", [code for code, _ in space.recompute]),
            "recompute_share": column("recompute", [share for _, share in space.recompute]),
            **{
                f"offload_{what}": column("offload", [OFFLOAD_CODES[places[n]] for places in space.offload])
                for n, what in enumerate(OFFLOADED)
            },
            "precision": column("precision", space.precision),
        },
    )


def legal(c: Columns, model: Columns, *, domain: int, compiled: bool = False) -> NDArray[np.int8]:
    """The `Reason` of each layout.

    Args:  c: columns of a layout, scalars and arrays.  model: sizes.  domain: devices on one set of links.
    """
    tp, pp, vpp, cp, ep = (np.asarray(c[k]) for k in ("tp", "pp", "vpp", "cp", "ep"))
    micro, dp, zero = np.asarray(c["micro_batch"]), np.asarray(c["dp"]), np.asarray(c["zero"])
    sp, batch = np.asarray(c["sequence_parallel"]) > 0, model["global_batch"]
    heads, kv, ffn, layers, seq = (model[k] for k in ("heads", "kv_heads", "ffn", "layers", "seq"))
    schedule, recompute = np.asarray(c["schedule"]), np.asarray(c["recompute"])
    share = np.asarray(c["recompute_share"])
    split = np.isin(schedule, [int(SCHEDULE_CODES[name]) for name in SPLIT_BACKWARD])
    experts = model.get("experts", 0)
    rules: list[tuple[Reason, Any]] = [
        (Reason.TP_HEADS, heads % tp != 0),
        (Reason.TP_FFN, ffn % tp != 0),
        (Reason.TP_KV_HEADS, (kv % tp != 0) & (tp % kv != 0)),
        (Reason.TP_DOMAIN, tp * cp > domain if domain > 1 else tp < 0),
        (Reason.PP_UNITS, pp * vpp > layers + 2),
        (Reason.MICRO_BATCH, batch % micro != 0),
        (Reason.IDLE_RANKS, batch // micro < dp),
        (Reason.SEQUENCE_TP, sp & (tp == 1)),
        (Reason.SEQUENCE_TOKENS, sp & (micro * seq % tp != 0)),
        (Reason.CP_SEQ, (cp > 1) & (seq % (2 * cp) != 0)),
        (Reason.EP_EXPERTS, (ep > 1) & ((experts == 0) | (experts % ep != 0))),
        (Reason.ZERO_ALONE, (zero > 0) & (dp * cp == 1)),
        (Reason.SCHEDULE_ALONE, (pp == 1) & (schedule != int(SCHEDULE_CODES["1f1b"]))),
        (Reason.COMPILE_SPLIT, split & compiled),
        (Reason.COMPILE_SELECTIVE, (recompute == SELECTIVE) & compiled),
        (Reason.SHARE, (share < 1) & (share * (layers // (pp * vpp)) < 1)),
    ]
    n = np.broadcast(tp, pp, vpp, cp, ep, micro, dp, zero, sp, schedule, recompute, share).shape
    found = np.zeros(n, dtype=np.int8)
    for reason, wrong in reversed(rules):
        np.copyto(found, np.int8(reason), where=np.broadcast_to(wrong, n))
    return found


def overrides_of(
    space: Space, outer: Outer, inside: Inner, i: int, *, layers: int, block: int | None
) -> list[str]:
    """A layout as a configuration spells it, keys that differ from nothing included."""
    at = {name: int(index[i]) for name, index in inside.at.items()}
    name, chunks = space.schedules[at["schedule"]]
    code, share = space.recompute[at["recompute"]]
    offload = zip(OFFLOADED, space.offload[at["offload"]], strict=True)
    words = [
        f"pp: {outer.pp}",
        f"dp: {outer.dp}",
        f"cp: {outer.cp}",
        f"tp: {outer.tp}",
        f"ep: {outer.ep}",
        f"zero: {space.zero[at['zero']]}",
        f"schedule: {name}",
        f"sequence_parallel: {str(bool(space.sequence_parallel[at['sequence_parallel']])).lower()}",
    ]
    if chunks != chunks_of(name):
        words.append(f"virtual_stages: {chunks}")
    if block is not None:
        words.append(f"block: {block}")
    return [
        f"mesh={{{', '.join(words)}}}",
        f"train.micro_batch={space.micro_batch[at['micro_batch']]}",
        f"train.recompute={spelt(space.recipe or _recompute(code, share, layers // (outer.pp * chunks)))}",
        f"train.precision={space.precision[at['precision']]}",
        *(f"offload.{what}={place}" for what, place in offload),
        *([f"launch.nproc={space.processes}"] if space.processes is not None else []),
    ]


def spelt(setting: Setting) -> str:
    """`train.recompute` as a command line gives it."""
    return str(setting) if isinstance(setting, str | int) else f"[{', '.join(map(str, setting))}]"


def _recompute(code: int, share: float, blocks: int) -> str | int:
    if code == NEEDED:
        # What each stage needs is counted later.
        return "none"
    if code & int(Recompute.FULL):
        return "full" if share == 1 else max(1, int(share * blocks))
    return "none" if not code else "selective"


def words_of(space: Space, outer: Outer, inside: Inner, i: int) -> dict[str, str]:
    """The same for people: knob -> value."""
    at = {name: int(index[i]) for name, index in inside.at.items()}
    name, chunks = space.schedules[at["schedule"]]
    return {
        "pp": str(outer.pp),
        "dp": str(outer.dp),
        "cp": str(outer.cp),
        "tp": str(outer.tp),
        "ep": str(outer.ep),
        "zero": str(space.zero[at["zero"]]),
        "schedule": name + (f" x {chunks}" if chunks > 1 else ""),
        "micro_batch": str(space.micro_batch[at["micro_batch"]]),
        "recompute": recompute_word(*space.recompute[at["recompute"]])
        if space.recipe is None
        else spelt(space.recipe),
        "sequence_parallel": "yes" if space.sequence_parallel[at["sequence_parallel"]] else "no",
        "offload": _away(space.offload[at["offload"]]),
        "precision": space.precision[at["precision"]],
    }


def _away(places: Sequence[str]) -> str:
    """What is offloaded, and where to if not to the host's memory."""
    away = zip(OFFLOADED, places, strict=True)
    return (
        " + ".join(w + (f" ({place})" if place == "disk" else "") for w, place in away if place != "none")
        or "none"
    )


def recompute_word(code: int, share: float) -> str:
    """A recompute setting in words."""
    if code == NEEDED:
        return "as needed"
    if code & int(Recompute.FULL):
        return "full" if share == 1 else f"full, {share:.1%} of blocks"
    return {0: "none", SELECTIVE: "selective"}.get(code, str(code))


def knob_values(space: Space) -> Iterator[tuple[str, int, str]]:
    """(knob, index, value in words) of every value that is tried inside."""
    for n, value in enumerate(space.zero):
        yield "zero", n, str(value)
    for n, (name, chunks) in enumerate(space.schedules):
        yield "schedule", n, name + (f" x {chunks}" if chunks > 1 else "")
    for n, value in enumerate(space.micro_batch):
        yield "micro_batch", n, str(value)
    for n, (code, share) in enumerate(space.recompute):
        yield "recompute", n, recompute_word(code, share)
    for n, value in enumerate(space.sequence_parallel):
        yield "sequence_parallel", n, "yes" if value else "no"
    for n, places in enumerate(space.offload):
        yield "offload", n, _away(places)
    for n, value in enumerate(space.precision):
        yield "precision", n, value
