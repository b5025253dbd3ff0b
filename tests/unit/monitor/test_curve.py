"""Curves: what is drawn is where it belongs."""

import pytest

from sirara.monitor.curve import BLANK, DOTS, draw_png, draw_text, sparkline, terminal_curve, write_png


def dots(lines, margin):
    """Coordinates of all dots of a drawn curve, y downwards."""
    found = set()
    for row, line in enumerate(lines):
        for column, character in enumerate(line[margin:]):
            bits = ord(character) - BLANK
            for y in range(4):
                for x in range(2):
                    if bits & DOTS[y][x]:
                        found.add((2 * column + x, 4 * row + y))
    return found


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right():
    lines = terminal_curve([1, 2, 3], [3.0, 2.0, 1.0], width=13, height=2)
    assert [line[:3] for line in lines[:2]] == ["3 ┤", "1 ┤"]
    found = dots(lines[:2], 3)
    assert min(found) == (0, 0) and max(found) == (19, 7)
    assert all(y in (x * 7 // 19, x * 7 // 19 + 1) for x, y in found)
    assert lines[2].split() == ["step", "1", "step", "3"]


def test_a_constant_curve_is_one_level_line():
    found = dots(terminal_curve([1, 5], [2.0, 2.0], width=13, height=3)[:3], 3)
    assert {y for _, y in found} == {6}
    assert {x for x, _ in found} == set(range(20))


def test_losses_that_are_no_numbers_leave_a_gap_in_the_data_only():
    nan, inf = float("nan"), float("inf")
    assert terminal_curve([1, 2, 3], [nan, inf, nan], width=20, height=2) == []
    assert terminal_curve([1, 2, 3], [1.0, nan, 3.0], width=20, height=2) == terminal_curve(
        [1, 3], [1.0, 3.0], width=20, height=2
    )


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [([], 5, ""), ([1.0], 5, "▁"), ([1.0, 2.0, 3.0], 3, "▁▅█"), ([1.0, 1.0, 3.0, 3.0], 2, "▁█")],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width) == line


def test_a_png_is_written_with_every_curve(tmp_path):
    write_png(tmp_path / "a.png", {"train": ([1, 2], [2.0, 1.0])}, title="t")
    write_png(tmp_path / "b.png", {"train": ([1, 2], [2.0, 1.0]), "held": ([2], [1.5])}, title="t")
    one, two = (tmp_path / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
    assert one.startswith(b"\x89PNG") and two.startswith(b"\x89PNG") and one != two


def test_a_run_is_drawn_from_its_folder(tmp_path):
    for name in ("events", "metrics"):
        (tmp_path / f"{name}.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.5}\n{"step": 9, "train/loss": 1.5}\n'
    )
    assert "2.5 ┤" in draw_text(tmp_path) and "step 9" in draw_text(tmp_path)
    draw_png(tmp_path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
