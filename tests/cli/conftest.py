"""The project that the command line is tried on; a file of tests that needs it in some state has its own."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from sirara.cli.main import cli
from tests.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    project = Project(tmp_path_factory.mktemp("project"))
    yield project
    project.close()


@pytest.fixture
def look(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command prints in the folder of the project; it must succeed."""
    monkeypatch.chdir(project.folder)

    def look(*words: object) -> str:
        result = CliRunner().invoke(cli, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.stdout

    return look
