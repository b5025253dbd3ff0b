"""The project that the command line is tried on; a file of tests that needs it in some state has its own."""

from collections.abc import Iterator

import pytest

from tests.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()
