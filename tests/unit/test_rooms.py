"""The rules of the house are enforced: rooms, empty packages, and a linter that really complains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "sirara"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("pure/placement.py", "import sirara.train.lr", "rooms import only from rows above"),
        ("train/lr.py", "import sirara.cli.main", "rooms import only from rows above"),
        ("data/store.py", "import sirara.model", "rooms import only from rows above"),
        ("attic.py", "", "rooms import only from rows above"),
        ("pure/placement.py", "import torch", "rows 0-3 do without torch"),
        ("launch/local.py", "import sirara.train.lr", "launch and monitor start workers by command line"),
        ("launch/local.py", "import torch", "only launch.supervise imports torch"),
    ],
)
def test_planted_import_breaks_its_contract(tmp_path, file, line, contract):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(SRC, tmp_path / "src" / "sirara", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "sirara" / file).open("a") as module:
        module.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), done.stdout


def test_packages_are_empty_so_that_importing_one_module_imports_no_other():
    filled = [path for path in SRC.glob("*/**/__init__.py") if path.stat().st_size]
    assert filled == []
