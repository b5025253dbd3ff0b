"""`sirara plan CONFIG`: a layout judged, or the best one found; with --trace one rank of it played on paper."""

import os
import re
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from sirara.cli.options import WITH_OVERRIDES, json_option, overrides, say_json
from sirara.cli.planned import planned, shape_on_paper
from sirara.config.load import load
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError

if TYPE_CHECKING:
    from sirara.train.trace import GroupLine, Trace, Traffic

GIB = 1 << 30


class _Plan(click.Command):
    """`plan CONFIG`, and verbs of its own, which are imported when they are used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] == "validate":
            from sirara.cli.plan_validate import plan_validate

            return plan_validate.make_context(f"{info_name} validate", args[1:], parent, **extra)
        if args and args[0] == "calibrate":
            from sirara.cli.plan_calibrate import plan_calibrate

            return plan_calibrate.make_context(f"{info_name} calibrate", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=_Plan,
    context_settings=WITH_OVERRIDES,
    epilog="`sirara plan calibrate` measures this machine for --gpu here; `sirara plan validate ROWS.csv` compares "
    "predictions with published measurements.",
)
@click.argument("path", metavar="CONFIG")
@overrides
@click.option("--gpus", type=click.IntRange(1), help="Devices; default: what the mesh asks for.")
@click.option("--gpu", default=None, help="Accelerator by name, a YAML file, or `here`. Default: h100-sxm.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes that the devices are on.")
@click.option("--price", type=float, help="Of one device for one hour.")
@click.option("--mtbf", type=float, help="Device hours between failures.")
@click.option(
    "--what-if", "what_if", multiple=True, metavar="KEY=VALUE", help="Show the plan with this change too."
)
@click.option("--search", "searching", is_flag=True, help="Find the best layout for these devices.")
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "memory"]),
    default="time",
    show_default=True,
    help="What --search wants least of.",
)
@click.option("--ceiling", help="Of device memory, such as 60GiB.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False), help="Write the plan as a page.")
@click.option(
    "--png", "png_file", type=click.Path(dir_okay=False), help="Write it as a picture (needs matplotlib)."
)
@click.option(
    "--trace", "tracing", is_flag=True, help="Build one rank without memory and play one step of it."
)
@click.option("--rank", type=int, help="The rank that is traced.  [default: 0]")
@json_option()
def plan(
    path: str, overrides: list[str], tracing: bool, rank: int | None, as_json: bool, **options: Any
) -> None:
    """Memory, time, money and goodput of a run before there are machines for it.

    Exit code 3: it does not fit; the nearest changes that fit are named.  With --trace the real modules of one rank,
    on tensors without memory, play all microbatches of one real step; the data that CONFIG names are not read.
    """
    if tracing:
        _refuse_beside_trace(options)
        _trace(path, overrides, rank or 0, as_json=as_json)
        return
    if rank is not None:
        raise ConfigError(
            f"--rank {rank} says which rank is traced", code="SR216", where="--rank",
            try_=["--trace", "leave --rank out"],
        )  # fmt: skip
    planned(path, overrides, as_json=as_json, **options)


def _refuse_beside_trace(options: Mapping[str, Any]) -> None:
    """Raises:  ConfigError SR216 for options that say something of machines or searches."""
    names = {"searching": "search", "html_file": "html", "png_file": "png", "what_if": "what-if"}
    given = [f"--{names.get(k, k)}" for k, v in options.items() if v not in (None, False, ())]
    if options["objective"] == "time":
        given.remove("--objective")
    if given:
        raise ConfigError(
            f"--trace plays one rank of CONFIG as it stands, and {', '.join(given)} "
            f"{'says' if len(given) == 1 else 'say'} something else",
            code="SR216", where="--trace", try_=[f"leave {', '.join(given)} out", "leave --trace out"],
        )  # fmt: skip


def _trace(path: str, overrides: list[str], rank: int, *, as_json: bool) -> None:
    config = load(path, overrides, os.environ).config
    shape = shape_on_paper(config)
    # The one form of `plan` that needs torch.
    from sirara.train.trace import trace

    began = time.perf_counter()
    found = trace(config, shape, rank=rank)
    took = {"seconds": round(time.perf_counter() - began, 3), "peak_bytes": _peak_bytes()}
    if as_json:
        say_json({"rank": rank, "world": found.mesh.world, **asdict(found), **took})
        return
    for line in _text(found, config):
        click.echo(line)
    click.echo(
        f"{'how':<14}parameters of the model are counted from its tensors; all other figures were played, "
        f"{found.dealt} of {found.dealt} microbatches, in {took['seconds']:.1f} s and {_gib(took['peak_bytes'])}"
    )


def _text(t: "Trace", config: RunConfig) -> list[str]:
    mesh, m = t.mesh, config.mesh
    places = ", ".join(f"{a} {mesh.coordinate(a)} of {getattr(mesh, a)}" for a in ("pp", "dp", "tp"))
    elements, padding = sum(g.elements for g in t.groups), sum(g.padding for g in t.groups)
    actions = ", ".join(f"{kind} {count}" for kind, count in t.actions.items())
    lines = [
        f"{'rank':<14}{mesh.rank} of {mesh.world:,}: {places}; zero {m.zero}, {config.train.precision}",
        f"{'parameters':<14}{t.parameters:,} of the model, {t.parameters_here:,} on this rank",
        *(f"{f'stage {s}':<14}{len(units)} units: {_named(units)}" for s, units in t.stages.items()),
        f"{'flat groups':<14}{len(t.groups)}: {elements:,} elements and {padding:,} of padding",
        *_group_lines(t.groups),
        f"{'held':<14}{_gib(sum(t.held.values()))} after the step",
        *(f"  {what:<24}{_gib(size):>12}" for what, size in t.held.items()),
        f"{'step':<14}{t.microbatches:,} microbatches of {config.train.micro_batch} x {config.data.seq_len} tokens, "
        f"{t.dealt:,} of this rank, in blocks of {t.block}",
        f"{m.schedule:<14}{actions}",
        f"{'sent':<14}{_gib(sum(a.bytes for a in t.traffic.values()))} in the step",
        f"  {'axis':<8}{'ranks':>6}{'calls':>10}{'bytes':>22}",
    ]
    for name, traffic in t.traffic.items():
        lines += _traffic_lines(name, traffic)
    if config.train.compile:
        lines.append(f"{'compile':<14}blocks were played uncompiled: they hold and send the same")
    return lines


def _named(units: tuple[str, ...]) -> str:
    """The units of a stage; blocks are neighbours, so the first and the last one name them all."""
    blocks = [unit for unit in units if unit.startswith("block.")]
    if len(blocks) < 4:
        return ", ".join(units)
    ends = [unit for unit in units if unit not in blocks]
    return ", ".join([*ends[: units[0] in ends], f"{blocks[0]} to {blocks[-1]}", *ends[units[0] in ends :]])


def _group_lines(groups: "tuple[GroupLine, ...]") -> list[str]:
    """One line for all groups that differ in the number of their block alone."""

    def alike(g: "GroupLine") -> tuple[Any, ...]:
        return (re.sub(r"\.\d+", ".*", g.name), g.elements, g.padding, g.shard, g.guest)

    width = max(len(g.name) for g in groups)
    lines = []
    for (name, elements, padding, shard, guest), same in groupby(sorted(groups, key=alike), key=alike):
        of = "a copy" if guest else f"shard {shard:,}"
        lines.append(
            f"  {len(list(same)):>3} x {name:<{width}}{elements:>16,} elements{padding:>8,} padding, {of}"
        )
    return lines


def _traffic_lines(name: str, traffic: "Traffic") -> list[str]:
    head = f"  {name:<8}{traffic.ranks:>6}{traffic.calls:>10,}{traffic.bytes:>22,}"
    return [head, *(f"    {kind:<12}{n.calls:>10,}{n.bytes:>22,}" for kind, n in traffic.kinds.items())]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
