"""What the verbs of `sirara ckpt` share: how a step is named, how sizes are read and written."""

import re
from typing import Any

import click

from sirara.cli.options import Decorator

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SHOWN = 20
"""Rows that people see of a long list; --json has them all."""


class Size(click.ParamType):
    """Bytes: `512`, `64MiB`, `1.5 GiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B?)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a size; write 64MiB, 2GiB or bytes", param, ctx)
        return int(float(found[1]) * UNITS[found[2]])


def step_option(help: str = "This step; default: the newest.") -> Decorator:
    """Adds the parameter `step`."""
    return click.option("--step", type=int, metavar="N", help=help)


def dry_option() -> Decorator:
    """Adds the parameter `dry_run`."""
    return click.option("--dry-run", is_flag=True, help="Say what would be done, change nothing.")


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={value_text(v)}" for k, v in value.items()) or "-"
    return str(value)


def shape_text(shape: tuple[int, ...] | list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
