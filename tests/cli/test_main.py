"""The command line as a whole: start-up, help, errors, exit codes."""

import errno
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from sirara.cli import main as cli_main
from sirara.cli.main import VERBS, cli
from sirara.errors import CheckpointError, ConfigError


def sirara(*words: str, env: dict[str, str] | None = None):
    return CliRunner(env=env).invoke(cli, words)


def least_cpu_s(times: int, *command: str) -> float:
    """Processor time of a command, which other processes of a busy machine do not lengthen by waiting."""
    seconds = []
    for _ in range(times):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        seconds.append(usage.ru_utime + usage.ru_stime)
    return min(seconds)


def test_help_takes_less_than_300_ms_and_imports_neither_torch_nor_numpy():
    assert least_cpu_s(5, sys.executable, "-m", "sirara", "--help") < 0.3
    code = "import sys; from sirara.cli.main import cli; cli.main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "sirara.cli.main" in imported
    assert not {"torch", "numpy", "pydantic", "rich", "sirara.config"} & imported


def test_help_lists_every_verb_but_the_worker():
    shown = sirara("--help").output
    for section in VERBS.values():
        for name, verb in section.items():
            assert (f"  {name} " in shown) is (not verb.hidden)


def test_bare_sirara_shows_help_and_is_a_usage_error():
    assert sirara().exit_code == 2


def test_unknown_verb_names_the_nearest_one():
    result = sirara("reusme")
    assert result.exit_code == 2
    assert "there is no verb 'reusme'; did you mean `sirara resume`?" in result.output
    assert "Traceback" not in result.output


@pytest.fixture
def verb(monkeypatch):
    """Puts a verb `probe` in place that does what the test says."""

    def put(action):
        command = click.Command("probe", callback=action)
        monkeypatch.setattr(cli_main.Verbs, "list_commands", lambda self, ctx: ["probe"])
        monkeypatch.setattr(cli_main.Verbs, "get_command", lambda self, ctx, name: command)

    return put


def raises(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no such thing", where="x.yaml:3", try_=["another"]), 2, "error[SR100]: no such thing"),
        (CheckpointError("torn"), 65, "error[SR500]: torn"),
        (OSError(errno.ENOSPC, "No space left on device", "/d/f"), 74, "No space left on device: /d/f"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_errors_are_said_without_traceback_and_have_their_exit_code(verb, error, code, said):
    verb(raises(error))
    result = sirara("probe")
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("error", [ValueError("our fault"), OSError(errno.EBADF, "our fault")])
def test_unexpected_error_shows_its_traceback_and_is_1(verb, error):
    verb(raises(error))
    result = sirara("probe")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "our fault" in result.stderr


@pytest.mark.parametrize("code", [0, 3, 75])
def test_exit_code_of_a_verb_is_the_program_s(verb, code):
    verb(lambda: click.get_current_context().exit(code))
    assert sirara("probe").exit_code == code
    verb(lambda: code)
    assert sirara("probe").exit_code == code


def test_error_is_coloured_on_a_terminal_unless_no_color_says_otherwise(verb):
    verb(raises(ConfigError("wrong")))
    assert "\x1b[" in CliRunner(env={"NO_COLOR": ""}).invoke(cli, ["probe"], color=True).stderr
    assert "\x1b[" not in CliRunner(env={"NO_COLOR": "1"}).invoke(cli, ["probe"], color=True).stderr


def test_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m sirara config schema | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""
