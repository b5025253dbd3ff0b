"""Every Python snippet of the pages runs, and every file that they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run(page: Path) -> None:
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    files = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [f for f in files if not any((base / f).exists() for base in (ROOT, ROOT / "src/sirara"))]
    assert not missing
