"""What verbs share: configuration overrides on the command line, and `--json`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# A command that takes overrides must let `--train.steps=10` pass to its argument.
WITH_OVERRIDES = {"ignore_unknown_options": True}


def overrides(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the parameter `overrides`: `a.b=c`, `--a.b=c` and `--set a.b=c`, in this form for `config.load`.

    The command needs `context_settings=WITH_OVERRIDES`.
    """
    option = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        expose_value=False,
        callback=_remember,
        help="Set a key of the configuration; KEY=VALUE alone does it too.",
    )
    argument = click.argument(
        "overrides", nargs=-1, type=click.UNPROCESSED, callback=_with_assignments, metavar="[KEY=VALUE]..."
    )
    return option(argument(command))


def json_option(help: str = "Print JSON.") -> Decorator:
    """Adds the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def say_json(value: Any) -> None:
    """One line of JSON on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def _remember(ctx: click.Context, _: click.Parameter, value: Sequence[str]) -> None:
    ctx.meta["sirara.assignments"] = list(value)


def _with_assignments(ctx: click.Context, _: click.Parameter, value: Sequence[str]) -> list[str]:
    return [*value, *ctx.meta.get("sirara.assignments", [])]
