"""`sirara import`: a Hugging Face folder as a checkpoint."""

from pathlib import Path

import click

from sirara.checkpoint.import_hf import import_folder
from sirara.cli.options import json_option, say_json
from sirara.errors import ConfigError


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@json_option()
def import_(source: Path, out: Path, dry_run: bool, as_json: bool) -> None:
    """Make the step folder OUT, weights only and step 0, from the Hugging Face folder SRC.

    Only safetensors are read; pickled weights (.bin, .pt) are refused. OUT is verified, and loads with
    from_pretrained as SRC does; `model.from: OUT` starts a run from it.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} is no Hugging Face folder: there is no config.json", code="SR101")
    done = import_folder(source, out, dry_run=dry_run)
    if as_json:
        counts = {"tensors": done.tensors, "bytes": done.total_bytes, "dtype": done.dtype}
        say_json({"out": str(out), "step": 0, "dry_run": dry_run, **counts, "files": list(done.files)})
        return
    word = "would import" if dry_run else "imported"
    click.echo(f"{word} {done.tensors} tensors, {done.dtype}, {done.total_bytes:,} bytes, to {out}")
