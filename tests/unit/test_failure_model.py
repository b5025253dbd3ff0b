"""Every row of the failure model names a test that exists; its odds are those that are computed."""

import re
from pathlib import Path

from sirara.pure.copies import parity_layout, peer_layout

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failure-model.md"


def test_every_row_names_a_test_that_exists():
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith("|---")
    ]
    rows = [row for row in rows if not row.endswith("| test |")]
    assert len(rows) > 30
    for row in rows:
        named = re.search(r"`(tests/\S+\.py)::(\w+)` \|$", row)
        assert named, f"no test in {row}"
        file, test = named.groups()
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M), f"{file} has no {test}"


def test_the_odds_are_those_of_the_layouts():
    rows = re.findall(r"^(peer|parity)(.*?)  +[\d.]+ +(.+)$", PAGE.read_text(), re.M)
    assert len(rows) == 5
    for kind, how, odds in rows:
        numbers = [int(n) for n in re.findall(r"\d+", how)]
        if kind == "peer":
            layout = peer_layout(16 if numbers[0] == 2 else 15, numbers[0])
        else:
            layout = parity_layout(16, numbers[0], numbers[1])
            assert len(layout.groups) == numbers[2]
        said = [float(text) for text in re.findall(r"[\d.]+", odds)]
        assert said == [round(100 * layout.survival(lost), 1) for lost in (1, 2, 3, 4)], how
