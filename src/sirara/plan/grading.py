"""The plan of an attempt graded by what was measured: signed errors, and the term that was mispredicted.

    error    predicted / measured - 1, in percent: below zero the plan promised too little
    memory   each stage's peak by the rank that held most, split into what lives on between steps and what a step adds
    time     the median step, split into PARTS by the rank that computed longest, where they could be measured

Measured memory is what is allocated above what was there before the model.  No number here is predicted anew: the plan
is the one that the run has stored (stored.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from sirara.plan.stored import Expected, How, StageExpected

GIB = float(1 << 30)
WRONG_BYTES = 16 << 20
"""Of memory: what is nearer says nothing; libraries and the allocator come and go by as much."""
WRONG_PCT = 5.0
"""An error that is worth a word about its cause."""
CALIBRATE_PCT = 15.0
"""An error of the step time above which figures of the shipped table are to be replaced by measured ones."""
MOST_STAGES = 6
"""Stages that are shown in words."""

_COMPUTATION = ("matmul", "attention", "memory_bound", "launch", "recompute", "slowed")
_PIPELINE = ("pp", "bubble")
PARTS: Mapping[str, tuple[str, ...]] = {
    "computation": _COMPUTATION,
    "tp": ("tp",),
    "pipeline": _PIPELINE,
    "dp": ("dp",),
    "update": ("optimizer", "offload"),
    "forward and backward": (*_COMPUTATION, "tp", "cp", "ep", *_PIPELINE),
}
"""Measured part of a step -> the plan's terms that it is held against.  pipeline: letters between stages, and waiting
for the slowest rank.  forward and backward: all of it, where a device's queue hides which waited for which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasured:
    """The rank of one pipeline stage that held most.  None: not measured on this device."""

    stage: int
    rank: int
    peak_bytes: float
    between_bytes: float
    reserved_bytes: float | None = None
    device_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an attempt has measured so far.

    steps: that count for the time.  step_s: None without any.  parts_s: seconds by names of PARTS, {} where they cannot
    be told apart.  stages: () where memory is not counted.
    """

    steps: int
    step_s: float | None
    parts_s: Mapping[str, float]
    stages: tuple[StageMeasured, ...]
    load: float | None = None
    """Processes that wanted to compute on this machine in the last minute; None where computing is an accelerator's."""
    cores: int | None = None
    ranks: int = 1
    """Of the run: they are part of the load."""

    @property
    def busy(self) -> bool:
        """Whether others took computing time of the machine."""
        return self.load is not None and self.cores is not None and self.load > max(self.cores, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One number as predicted and as measured.  error_pct: signed."""

    predicted: float
    measured: float
    error_pct: float

    @staticmethod
    def of(predicted: float | None, measured: float | None) -> "Pair | None":
        """None where one of the two is missing, or nothing was measured."""
        if predicted is None or not measured or measured <= 0:
            return None
        return Pair(
            predicted=predicted, measured=measured, error_pct=round(100 * (predicted / measured - 1), 2)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGrade:
    """One pipeline stage's memory, bytes; `rank`: where it was measured."""

    stage: int
    rank: int
    peak: Pair | None
    between: Pair | None
    in_step: Pair | None
    reserved: Pair | None
    device: Pair | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGrade:
    """How right the plan of one attempt was.

    peak: of the busiest device, predicted and measured.  busiest_rank: which one that was.  steps: how many steps the
    time is the median of.  wrong: what was mispredicted, in words.  advice: what to do about it.
    """

    attempt: int
    accelerator: str
    how: How
    why: str
    peak: Pair | None
    busiest_rank: int | None
    stages: tuple[StageGrade, ...]
    step: Pair | None
    steps: int
    parts: Mapping[str, Pair]
    wrong: tuple[str, ...]
    advice: tuple[str, ...]
    load: float | None = None
    cores: int | None = None

    def errors(self) -> dict[str, float]:
        """The two errors by the names of the metrics; what cannot be graded is left out."""
        found = {"plan/peak_error_pct": self.peak, "plan/step_error_pct": self.step}
        return {name: pair.error_pct for name, pair in found.items() if pair is not None}

    def as_record(self) -> dict[str, Any]:
        """Plain data, for events and --json."""
        return {**asdict(self), "parts": {name: asdict(pair) for name, pair in self.parts.items()}}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "RunGrade":
        """The inverse of `as_record`; other keys are passed over.

        Raises:  KeyError or TypeError for a record of something else.
        """
        return RunGrade(
            attempt=int(record["attempt"]),
            accelerator=str(record["accelerator"]),
            how=cast("How", record["how"]),
            why=str(record["why"]),
            peak=_pair(record["peak"]),
            busiest_rank=record["busiest_rank"],
            stages=tuple(
                StageGrade(
                    stage=int(s["stage"]),
                    rank=int(s["rank"]),
                    **{k: _pair(s[k]) for k in ("peak", "between", "in_step", "reserved", "device")},
                )
                for s in record["stages"]
            ),
            step=_pair(record["step"]),
            steps=int(record["steps"]),
            parts={name: Pair(**pair) for name, pair in record["parts"].items()},
            wrong=tuple(record["wrong"]),
            advice=tuple(record["advice"]),
            load=record.get("load"),
            cores=record.get("cores"),
        )


def _pair(record: Mapping[str, float] | None) -> Pair | None:
    return None if record is None else Pair(**record)


def grade(expected: Expected, measured: Measured) -> RunGrade:
    """The grade of an attempt that has a plan."""
    by_stage = {s.stage: s for s in expected.stages}
    stages = tuple(_stage_grade(by_stage.get(m.stage), m) for m in measured.stages)
    most = max(measured.stages, key=lambda m: m.peak_bytes, default=None)
    peak = Pair.of(
        max((s.peak_bytes for s in expected.stages), default=None), most.peak_bytes if most else None
    )
    step = Pair.of(expected.step_s, measured.step_s)
    parts: dict[str, Pair] = {}
    for name, seconds in measured.parts_s.items():
        terms = [expected.exposed_s.get(term, 0.0) for term in PARTS[name]]
        pair = Pair.of(sum(terms), seconds) if expected.step_s is not None else None
        if pair is not None:
            parts[name] = pair
    return RunGrade(
        attempt=expected.attempt,
        accelerator=expected.accelerator,
        how=expected.how,
        why=expected.why,
        peak=peak,
        busiest_rank=most.rank if most else None,
        stages=stages,
        step=step,
        steps=measured.steps,
        parts=parts,
        wrong=(*_wrong_memory(stages), *_wrong_time(step, parts, measured)),
        advice=_advice(expected, step, measured),
        load=measured.load,
        cores=measured.cores,
    )


def _stage_grade(expected: StageExpected | None, measured: StageMeasured) -> StageGrade:
    e = expected
    in_step = measured.peak_bytes - measured.between_bytes
    return StageGrade(
        stage=measured.stage,
        rank=measured.rank,
        peak=Pair.of(e and e.peak_bytes, measured.peak_bytes),
        between=Pair.of(e and e.between_bytes, measured.between_bytes),
        in_step=Pair.of(e and e.peak_bytes - e.between_bytes, in_step),
        reserved=Pair.of(e and e.reserved_bytes, measured.reserved_bytes),
        device=Pair.of(e and e.device_bytes, measured.device_bytes),
    )


def _wrong_memory(stages: Sequence[StageGrade]) -> Iterator[str]:
    graded = [(s, s.peak) for s in stages if s.peak is not None]
    if not graded:
        return
    worst, peak = max(graded, key=lambda pair: abs(pair[1].error_pct))
    terms = {
        "weights, gradients and optimizer state": worst.between,
        "activations and work of a step": worst.in_step,
    }
    known = {name: pair for name, pair in terms.items() if pair is not None}
    if abs(peak.error_pct) < WRONG_PCT or abs(peak.predicted - peak.measured) < WRONG_BYTES or not known:
        return
    name = max(known, key=lambda n: abs(known[n].predicted - known[n].measured))
    yield f"memory of stage {worst.stage}: {name}, {_sizes(known[name])}"


def _wrong_time(step: Pair | None, parts: Mapping[str, Pair], measured: Measured) -> Iterator[str]:
    if step is None or abs(step.error_pct) < WRONG_PCT:
        return
    if _was_busy(step, measured):
        yield (
            f"step time: {_times(step)}; the machine was busy: load average {measured.load:.1f} "
            f"on {measured.cores} cores"
        )
        return
    share = WRONG_PCT / 100 * step.measured
    off = {name: pair for name, pair in parts.items() if abs(pair.predicted - pair.measured) > share}
    for name in sorted(off, key=lambda n: -abs(off[n].predicted - off[n].measured)):
        yield f"step time: {name}, {_times(off[name])}"
    if not parts:
        yield f"step time: {_times(step)}; its parts were not measured"


def _was_busy(step: Pair | None, measured: Measured) -> bool:
    """Whether a step that took longer than planned had to share its cores with other programs."""
    return step is not None and step.error_pct <= -WRONG_PCT and measured.busy


def _advice(expected: Expected, step: Pair | None, measured: Measured) -> tuple[str, ...]:
    if _was_busy(step, measured):
        return ("measure again when nothing else computes on the machine",)
    if expected.how == "profile" or step is None or abs(step.error_pct) <= CALIBRATE_PCT:
        return ()
    return (f"sirara plan calibrate   (the times stand on {_stands_on(expected.how, expected.accelerator)})",)


# ---- words


def grade_lines(found: RunGrade) -> list[str]:
    """The grade for a terminal, unindented; a person reads it in half a minute."""
    lines = [_memory_line(found)]
    shown = _shown(found.stages)
    lines += [line for stage in shown for line in _stage_lines(stage, len(found.stages))]
    if len(shown) < len(found.stages):
        lines.append(f"  and {len(found.stages) - len(shown)} stages with smaller errors")
    lines.append(_time_line(found))
    lines += [_row(name, _times(pair), pair) for name, pair in found.parts.items()]
    lines += [f"mispredicted  {what}" for what in found.wrong]
    lines += [f"try           {what}" for what in found.advice]
    return lines


def _shown(stages: Sequence[StageGrade]) -> list[StageGrade]:
    """All stages, or those with the largest errors, in their order."""
    worst = sorted(stages, key=lambda s: -abs(s.peak.error_pct) if s.peak is not None else 0.0)
    return sorted(worst[:MOST_STAGES], key=lambda s: s.stage)


def _row(name: str, text: str, pair: Pair) -> str:
    return f"  {name:<25} {text:<44}{pair.error_pct:+.1f} %"


def _memory_line(found: RunGrade) -> str:
    if found.peak is None:
        return "memory  not measured"
    return f"memory  {_sizes(found.peak)}: {found.peak.error_pct:+.1f} %, rank {found.busiest_rank} held most"


def _stage_lines(stage: StageGrade, stages: int) -> Iterator[str]:
    label = f"stage {stage.stage} " if stages > 1 else ""
    rows = {
        "peak": stage.peak if stages > 1 else None,
        "between steps": stage.between,
        "added by a step": stage.in_step,
        "reserved": stage.reserved,
        "device total": stage.device,
    }
    for name, pair in rows.items():
        if pair is not None:
            yield _row(label + name, _sizes(pair), pair)


def _time_line(found: RunGrade) -> str:
    stands = _stands_on(found.how, found.accelerator)
    if found.step is None:
        why = (
            "not predicted" if found.steps else "no step yet without a save, an evaluation or a wait for data"
        )
        return f"step    {why} ({stands})"
    return f"step    {_times(found.step)}: {found.step.error_pct:+.1f} %, median of {found.steps} ({stands})"


def _stands_on(how: How, accelerator: str) -> str:
    return {
        "profile": "the profile measured on this machine",
        "shipped": f"shipped figures of {accelerator}",
        "placeholder": f"shipped figures of {accelerator}, which do not describe this device",
    }[how]


def _sizes(pair: Pair) -> str:
    return f"predicted {size_text(pair.predicted)}, measured {size_text(pair.measured)}"


def size_text(nbytes: float) -> str:
    """`1.25 GiB`, `12.5 MiB`"""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.1f} MiB"


def _times(pair: Pair) -> str:
    return f"predicted {time_text(pair.predicted)}, measured {time_text(pair.measured)}"


def time_text(seconds: float) -> str:
    """`1.25 s`, `12.5 ms`"""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
