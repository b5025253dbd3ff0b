"""`sirara ckpt reshard`: rewrite what is saved, never in place."""

from pathlib import Path

import click

from sirara.checkpoint.find import step_folder
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.reshard_files import reshard_step
from sirara.cli.ckpt_options import Size, dry_option, size_text, step_option
from sirara.cli.options import json_option, say_json
from sirara.pure.saveplan import FILE_BYTES, PIECE_BYTES


@click.command()
@click.argument("target")
@click.argument("out", type=click.Path(path_type=Path))
@step_option()
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes that share the optimizer state.")
@click.option(
    "--file-size", type=Size(), default=FILE_BYTES, metavar="SIZE", help="About this much in a file [2GiB]."
)
@click.option(
    "--piece-size",
    type=Size(),
    default=PIECE_BYTES,
    metavar="SIZE",
    help="At most this much per hash [16MiB].",
)
@dry_option()
@json_option()
def reshard(
    target: str,
    out: Path,
    step: int | None,
    nodes: int,
    file_size: int,
    piece_size: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write one step of TARGET into the new step folder OUT, as if other nodes had saved it.

    The state is the same to the bit (`ckpt diff` says so); any layout reads either. TARGET may be RUN@N.
    """
    snapshot = Snapshot(step_folder(target, step))
    done = reshard_step(
        snapshot, out, nodes=nodes, file_bytes=file_size, piece_bytes=piece_size, dry_run=dry_run
    )
    if as_json:
        fields = {"out": str(out), "run": snapshot.manifest.run, "step": snapshot.step, "dry_run": dry_run}
        say_json(fields | {"tensors": done.tensors, "bytes": done.total_bytes, "files": list(done.files)})
        return
    word = "would write" if dry_run else "wrote"
    click.echo(f"{word} step {snapshot.step} of {snapshot.manifest.run} to {out}:")
    click.echo(f"{done.tensors} tensors, {size_text(done.total_bytes)} in {len(done.files)} files")
