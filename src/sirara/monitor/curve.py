"""Loss curves: in the terminal with Braille dots, and as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sirara.config.run_folder import RunFolder
from sirara.monitor.state import curves, live_metrics

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]

BLOCKS = "▁▂▃▄▅▆▇█"
# Dot (row, column) of a Braille cell -> its bit.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800


def draw_text(folder: Path, *, width: int = 78, height: int = 12) -> str:
    """The loss curve of a run for a terminal: every step that counts, over all its attempts."""
    steps, losses = curves(live_metrics(RunFolder(folder))).get("train", ([], []))
    return "\n".join(terminal_curve(steps, losses, width=width, height=height))


def draw_png(folder: Path, path: Path) -> None:
    """The loss curves of a run, training and evaluation, as a PNG (needs matplotlib, the extra `plot`)."""
    run = RunFolder(folder)
    write_png(path, curves(live_metrics(run)), title=run.id)


def sparkline(values: Sequence[float], width: int) -> str:
    """One line of blocks; each column is the mean of its share of the values."""
    if not values:
        return ""
    columns = [_mean(share) for share in _shares(values, min(width, len(values)))]
    low, high = min(columns), max(columns)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in columns)


def terminal_curve(steps: Sequence[int], values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Lines of a plot, `width` characters wide and `height` + 1 high, with the range of both axes.

    Empty if there is nothing to draw.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if v == v and abs(v) != float("inf")]
    if not points:
        return []
    low, high = min(v for _, v in points), max(v for _, v in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns, rows = 2 * max(1, width - margin), 4 * height
    first, last = points[0][0], points[-1][0]
    cells = [[BLANK] * (columns // 2) for _ in range(height)]
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - first) / max(1, last - first) * (columns - 1))
        y = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        for dot_x, dot_y in _line(before or (x, y), (x, y)):
            cells[dot_y // 4][dot_x // 2] |= DOTS[dot_y % 4][dot_x % 2]
        before = (x, y)
    lines = []
    for row, line in enumerate(cells):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        lines.append(f"{label:>{margin - 2}} ┤" + "".join(map(chr, line)))
    ends = f"step {first}", f"step {last}"
    gap = max(1, columns // 2 - len(ends[0]) - len(ends[1]))
    return [*lines, " " * margin + ends[0] + " " * gap + ends[1]]


def write_png(path: Path, curves: Curves, *, title: str) -> None:
    """Draws the curves into a PNG file (needs matplotlib, the extra `plot`)."""
    # matplotlib's own state is left alone: no pyplot, no global backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional, heavy library
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (steps, losses) in curves.items():
        if name == "train":
            axes.plot(steps, losses, linewidth=1.2, label="train")
        else:
            axes.plot(steps, losses, marker="o", markersize=3, linewidth=1.0, label=f"eval {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _shares(values: Sequence[float], parts: int) -> list[Sequence[float]]:
    return [values[i * len(values) // parts : (i + 1) * len(values) // parts] for i in range(parts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of a straight line, both ends included."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(x0 + round(i * (x1 - x0) / count), y0 + round(i * (y1 - y0) / count)) for i in range(count + 1)]
