"""A plan as one page of HTML, without scripts or other files."""

import html
from collections.abc import Sequence

from sirara.plan.explain import SOURCES, TERMS, duration, played, terms_of, text, verdict_of
from sirara.plan.verdict import GIB, Plan
from sirara.pure.schedule import Kind
from sirara.pure.simulate import Span

COLOURS = {
    "weights": "#4269d0", "gradients": "#efb118", "optimizer": "#ff725c", "window": "#6cc5b0",
    "activations": "#3ca951", "work": "#a463f2", "rest": "#9c6b4e",
}  # fmt: skip
SPAN_COLOURS = {
    Kind.FORWARD: "#4269d0",
    Kind.BACKWARD: "#efb118",
    Kind.INPUT: "#efb118",
    Kind.WEIGHT: "#3ca951",
}
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;color:#222}"
    "pre{background:#f6f6f4;padding:1em;overflow-x:auto}td,th{padding:2px 10px;text-align:right}"
    ".bar{display:flex;height:22px;background:#eee;border-right:2px solid #c00;margin:3px 0}"
    ".line{position:relative;height:20px;background:#eee;margin:2px 0}.line span{position:absolute;top:0;bottom:0}"
)


def as_html(plan: Plan, *, assumed: Sequence[str] = (), more: Sequence[str] = ()) -> str:
    """Memory bars, the step's terms, the timeline, and the text; more: texts about it, such as a search's."""
    capacity = plan.setting.capacity_bytes
    full = max(capacity, plan.device_bytes)
    parts = [f"<h1>{html.escape(plan.config.name)}</h1>", f"<p>{html.escape(verdict_of(plan))}</p>"]
    parts.append("<h2>Memory of each stage</h2>")
    parts.append(
        "<p>" + " ".join(f'<span style="color:{COLOURS[n]}">&#9632; {w}</span>' for n, _, w in TERMS) + "</p>"
    )
    for stage in plan.held.stages:
        found = terms_of(plan, stage)
        cells = "".join(
            f'<div title="{name} {size / GIB:.2f} GiB: {SOURCES[name]}" style="width:{size / full * 100:.3f}%;'
            f'background:{COLOURS[name]}"></div>'
            for name, size in found.items()
        )
        parts.append(f'<div>stage {stage.rank}, {sum(found.values()) / GIB:.1f} GiB</div><div class="bar" '
                     f'style="width:{capacity / full * 100:.2f}%">{cells}</div>')  # fmt: skip
    parts.append(f"<h2>Step of {duration(plan.step_s)}</h2><table>")
    for name, value in plan.times.exposed().items():
        if float(value[0]) > 0:
            parts.append(
                f"<tr><th>{name}</th><td>{duration(float(value[0]))}</td>"
                f"<td>{float(value[0]) / plan.step_s:.1%}</td></tr>"
            )
    parts.append("</table>")
    result = played(plan)
    if result is not None:
        parts.append(f"<h2>Schedule {plan.held.table.name}</h2>")
        parts += [f'<div class="line">{_spans(spans, result.makespan_s)}</div>' for spans in result.timeline]
    words = "\n\n".join([text(plan, assumed=assumed), *more])
    parts.append(f"<h2>In words</h2><pre>{html.escape(words)}</pre>")
    title = html.escape(plan.config.name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _spans(spans: Sequence[Span], total_s: float) -> str:
    return "".join(
        f'<span title="{s.action}" style="left:{s.start_s / total_s * 100:.3f}%;'
        f'width:{(s.stop_s - s.start_s) / total_s * 100:.3f}%;background:{SPAN_COLOURS[s.action.kind]}"></span>'
        for s in spans
    )
