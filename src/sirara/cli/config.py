"""`sirara config`: what a configuration means after all overrides, and the JSON Schema of the file."""

import json
import os

import click

from sirara.cli.options import WITH_OVERRIDES, json_option, overrides, say_json
from sirara.config.load import Loaded, load
from sirara.config.schema import json_schema
from sirara.config.yaml_file import parse_yaml


@click.group()
def config() -> None:
    """Show a configuration and where its values come from; print the JSON Schema of the file."""


@config.command(context_settings=WITH_OVERRIDES)
@click.argument("path", metavar="CONFIG")
@overrides
@click.option("--origins", is_flag=True, help="Show beside each value where it was given.")
@json_option("Print JSON: {config, origins}.")
def show(path: str, overrides: list[str], origins: bool, as_json: bool) -> None:
    """Print the complete configuration: defaults, file, SIRARA_ environment and overrides, checked."""
    loaded = load(path, overrides, os.environ)
    if as_json:
        resolved = parse_yaml(loaded.text, path)[0]
        say_json({"config": resolved, "origins": loaded.origins})
    elif origins:
        for line in _with_origins(loaded):
            click.echo(line)
    else:
        click.echo(loaded.text, nl=False)


@config.command()
def schema() -> None:
    """Print the JSON Schema of sirara.yaml, for editors and other tools."""
    click.echo(json.dumps(json_schema(), indent=2))


def _with_origins(loaded: Loaded) -> list[str]:
    resolved = parse_yaml(loaded.text, "resolved")[0]
    rows = []
    for key, origin in loaded.origins.items():
        value = resolved
        for word in key.split("."):
            value = value[int(word)] if isinstance(value, list) else value[word]
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append((f"{key} = {text}", origin))
    width = max(len(left) for left, _ in rows)
    return [f"{left:<{width}}  # {origin}" for left, origin in rows]
