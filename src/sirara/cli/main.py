"""The command line: finds the verb, loads its module, and says errors the same way for all of them.

A verb's module is imported when the verb is used, so `sirara --help` needs neither torch nor the other verbs.
"""

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from sirara import __version__
from sirara.errors import Exit, SiraraError, StorageError

INTERRUPTED = 130
# The reader of our output went away (`sirara logs RUN | head`): what a shell reports for SIGPIPE.
PIPE_CLOSED = 141


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives, and its line in `sirara --help`."""

    module: str
    attribute: str
    help: str
    hidden: bool = False


VERBS: dict[str, dict[str, Verb]] = {
    "Begin": {
        "init": Verb("init", "init", "write a commented sirara.yaml to start from"),
        "doctor": Verb("doctor", "doctor", "check this machine, and say what to do about what is wrong"),
        "data": Verb("data", "data", "build, show and check token stores"),
        "config": Verb(
            "config", "config", "show a configuration and where its values come from; its JSON Schema"
        ),
    },
    "Plan": {
        "plan": Verb(
            "plan", "plan", "memory, time, money and goodput of a layout, before there are machines for it"
        ),
    },
    "Train": {
        "run": Verb("run", "run", "start a run"),
        "resume": Verb("run", "resume", "continue a run, on this layout or another"),
        "stop": Verb("run", "stop", "save, then end a run at its next step"),
        "save": Verb("run", "save", "ask a run for a checkpoint at its next step"),
        "worker": Verb("worker", "worker", "one training process (started by run and resume)", hidden=True),
    },
    "Watch": {
        "status": Verb("look", "status", "what runs, how far, and what happened"),
        "metrics": Verb("look", "metrics", "loss, gradient norm, rate and times of every step"),
        "logs": Verb("look", "logs", "what the ranks wrote"),
        "report": Verb(
            "look", "report", "what became of a run, attempt by attempt, and how right its plan was"
        ),
    },
    "Use": {
        "ckpt": Verb("ckpt", "ckpt", "list, compare, verify, repair and thin out checkpoints"),
        "export": Verb("export", "export", "write a checkpoint as a Hugging Face folder"),
        "import": Verb("import_", "import_", "make a checkpoint from a Hugging Face folder"),
        "sample": Verb("sample", "sample", "generate text from a checkpoint"),
    },
}


class Verbs(click.Group):
    """A group that knows its verbs by name and imports them one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in VERBS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = next((section[cmd_name] for section in VERBS.values() if cmd_name in section), None)
        if verb is None:
            return None
        module = importlib.import_module(f"sirara.cli.{verb.module}")
        command: click.Command = getattr(module, verb.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        shown = [name for section in VERBS.values() for name, verb in section.items() if not verb.hidden]
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            near = difflib.get_close_matches(args[0], shown, n=1)
            hint = f"did you mean `sirara {near[0]}`?" if near else f"the verbs are {', '.join(shown)}"
            raise click.UsageError(f"there is no verb {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in VERBS.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.help) for name, verb in section.items() if not verb.hidden])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """click's main, with our errors and exit codes around it; tests enter here too."""
        try:
            # What a verb returns, or gives to ctx.exit, is the exit code.
            code = super().main(args, *rest, **{**options, "standalone_mode": False})
            _leave(code if isinstance(code, int) and not isinstance(code, bool) else Exit.DONE)
        except click.ClickException as error:
            error.show()
            _leave(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            _leave(INTERRUPTED)
        except SiraraError as error:
            _say(error)
            _leave(error.exit_code)
        except BrokenPipeError:
            # Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _leave(PIPE_CLOSED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                traceback.print_exc()
                _leave(Exit.USER_CODE)
            _say(
                StorageError(f"{error.strerror}: {error.filename or 'while writing'}", try_=["sirara doctor"])
            )
            _leave(Exit.STORAGE)
        except Exception:  # noqa: BLE001 - the last one to hear of it
            traceback.print_exc()
            _leave(Exit.USER_CODE)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`sirara VERB --help` tells more. Exit codes: 0 done, 2 usage or configuration, 65 corrupt data, "
    "74 I/O or disk full, 75 stopped on request with a committed checkpoint.",
)
@click.version_option(__version__, prog_name="sirara")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train large models with PyTorch: planned, killed at any moment, continued with the same numbers."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main() -> NoReturn:
    """The program `sirara`."""
    cli.main(prog_name="sirara")


def _say(error: SiraraError) -> None:
    head, _, tail = str(error).partition(":")
    if not os.environ.get("NO_COLOR"):
        head = click.style(head, fg="red", bold=True)
    click.echo(f"{head}:{tail}", err=True)


def _leave(code: int) -> NoReturn:
    sys.exit(int(code))
