"""A plan as one picture: memory of each stage, the step by term, the schedule.  It alone needs matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sirara.plan.explain import TERMS, played, terms_of
from sirara.plan.page import COLOURS, SPAN_COLOURS
from sirara.plan.verdict import GIB, Plan


def picture(plan: Plan, path: str | Path) -> None:
    """Writes the picture; the ending of the path says its format."""
    ranks, piped = len(plan.held.stages), played(plan) is not None
    tall = max(1.0, 0.2 * ranks)
    rows = [tall, 1.4, tall] if piped else [tall, 1.4]
    figure = Figure(figsize=(11, 2.6 + 1.4 * sum(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1, height_ratios=rows)
    _memory(axes[0], plan)
    _step(axes[1], plan)
    if piped:
        _schedule(axes[2], plan)
    figure.suptitle(
        f"{plan.config.name}: {plan.gpus:,} x {plan.setting.cluster.accelerator.name}, "
        f"step {plan.step_s:.3g} s, MFU {plan.mfu:.1%}"
    )
    figure.savefig(path, dpi=120)


def _memory(ax: Axes, plan: Plan) -> None:
    ranks = [s.rank for s in plan.held.stages]
    left = [0.0] * len(ranks)
    for name, _, words in TERMS:
        sizes = [terms_of(plan, s)[name] / GIB for s in plan.held.stages]
        ax.barh(ranks, sizes, left=left, color=COLOURS[name], label=words)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    ax.axvline(plan.setting.capacity_bytes / GIB, color="red", label="capacity")
    ax.invert_yaxis()
    ax.set_yticks(ranks[:: max(1, len(ranks) // 16)])
    ax.set(xlabel="GiB per device", ylabel="stage")
    ax.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.35))


def _step(ax: Axes, plan: Plan) -> None:
    terms = {k: float(v[0]) for k, v in plan.times.exposed().items() if float(v[0]) > 1e-3 * plan.step_s}
    ax.bar(list(terms), list(terms.values()), color="#4269d0", label="exposed")
    hidden = {
        k: float(getattr(plan.times, f"hidden_{k}")[0]) for k in terms if hasattr(plan.times, f"hidden_{k}")
    }
    ax.bar(
        list(hidden),
        list(hidden.values()),
        bottom=[terms[k] for k in hidden],
        color="#c6cbd6",
        label="hidden",
    )
    ax.set(ylabel="seconds of a step")
    ax.legend(fontsize=7)


def _schedule(ax: Axes, plan: Plan) -> None:
    result = played(plan)
    if result is None:
        return
    for rank, spans in enumerate(result.timeline):
        ax.broken_barh(
            [(s.start_s, s.stop_s - s.start_s) for s in spans],
            (rank - 0.4, 0.8),
            facecolors=[SPAN_COLOURS[s.action.kind] for s in spans],
            edgecolor="white",
            linewidth=0.4 if len(spans) < 100 else 0.0,
        )
    ax.invert_yaxis()
    ax.set(
        xlabel=f"seconds; {plan.held.table.name}, the first {plan.held.table.microbatches} microbatches",
        ylabel="rank",
    )
