"""Folders of these tests lie in memory where there is such a place: campaigns make thousands of fsyncs, and it is their
order that is tested, not the speed of a disk."""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tmp_path_factory(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[pytest.TempPathFactory]:
    if not os.access("/dev/shm", os.W_OK) or request.config.getoption("basetemp"):
        yield tmp_path_factory
        return
    root = tempfile.mkdtemp(dir="/dev/shm", prefix="sirara-faults-")
    here = copy.copy(tmp_path_factory)  # other folders of tests keep theirs
    here._basetemp = Path(root)  # there is no public way to tell it
    yield here
    shutil.rmtree(root, ignore_errors=True)
