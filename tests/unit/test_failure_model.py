"""Every row of the failure model names a test that exists."""

import re
from pathlib import Path

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
