"""`sirara export`: a checkpoint's weights as a Hugging Face folder."""

from pathlib import Path

import click
import torch

from sirara.checkpoint.export import FLOATS, export_step
from sirara.checkpoint.find import find
from sirara.checkpoint.reader import Snapshot
from sirara.cli.options import json_option, say_json


@click.command()
@click.argument("target", metavar="RUN_OR_STEP")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="This step; default: the newest.")
@click.option(
    "--dtype", type=click.Choice(FLOATS), help="Convert the weights, from their masters where there are any."
)
@click.option("--link", is_flag=True, help="Hard links instead of a copy: at once, and no space is used.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@json_option()
def export(
    target: str, out: Path, step: int | None, dtype: str | None, link: bool, dry_run: bool, as_json: bool
) -> None:
    """Write the weights of RUN_OR_STEP into the new folder OUT, as transformers reads them.

    RUN_OR_STEP is a run (its newest checkpoint is taken) or a step's folder. Every piece is verified on the
    way.
    """
    snapshot = Snapshot(find(target).path(step))
    kind = getattr(torch, dtype) if dtype else None
    done = export_step(snapshot, out, dtype=kind, link=link, dry_run=dry_run)
    if as_json:
        fields = {"out": str(out), "step": snapshot.step, "run": snapshot.manifest.run, "dry_run": dry_run}
        counts = {"tensors": done.tensors, "bytes": done.total_bytes, "dtype": done.dtype}
        say_json(fields | counts | {"files": list(done.files)})
        return
    word = "would write" if dry_run else "wrote"
    click.echo(f"{word} step {snapshot.step} of {snapshot.manifest.run} to {out}:")
    click.echo(f"{done.tensors} tensors, {done.dtype}, {done.total_bytes:,} bytes in {', '.join(done.files)}")
