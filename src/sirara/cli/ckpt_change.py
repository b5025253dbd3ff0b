"""`sirara ckpt reshard`, `prune`, `pin`: change which files there are, never what is in them."""

from pathlib import Path
from typing import Any

import click

from sirara.checkpoint.find import find, step_folder
from sirara.checkpoint.pins import is_pinned, unpin
from sirara.checkpoint.pins import pin as pin_step
from sirara.checkpoint.prune import Pruned
from sirara.checkpoint.prune import prune as prune_steps
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.reshard_files import reshard_step
from sirara.cli.ckpt_options import Size, dry_option, size_text, step_option
from sirara.cli.options import json_option, say_json
from sirara.config.load import load
from sirara.config.run_folder import RunFolder
from sirara.config.schema import CheckpointConfig
from sirara.errors import ConfigError
from sirara.events import live, read
from sirara.pure.retain import Rules
from sirara.pure.saveplan import FILE_BYTES, PIECE_BYTES


@click.command(short_help="rewrite a step as if other nodes had saved it")
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


@click.command(short_help="delete the steps that no rule keeps")
@click.argument("target")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N verified steps."
)
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep the multiples of K.")
@click.option("--keep-best", metavar="METRIC", help="Keep the step where it was lowest, like eval/val/loss.")
@click.option(
    "--no-read", is_flag=True, help="Trust the mark of the newest verified step, do not read it again."
)
@dry_option()
@json_option()
def prune(
    target: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    no_read: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete the steps of TARGET (a run or its checkpoints folder) that no rule keeps.

    Rules that are not given are those of the run's configuration. Pinned steps stay, steps of other runs as well; the
    newest verified step is read from end to end before anything goes, and it never goes itself.
    """
    found = find(target)
    if found.only is not None:
        raise ConfigError(f"{found.only} is one step; prune takes a run or a folder of checkpoints")
    run = RunFolder(found.folder.parent)
    configured = _configured(run, needed=keep_last is None)
    rules = Rules(
        last=keep_last or configured.keep_last,
        every=keep_every or configured.keep_every,
        best=keep_best or configured.keep_best,
    )
    # Not the folder's name: a folder may be renamed, or copied.
    name = str(run.record().get("run", run.id)) if (run.path / "run.json").is_file() else None
    scores = _scores(run, rules.best) if rules.best else {}
    if keep_best and not scores:
        raise ConfigError(f"no step of {found.folder.parent} has the metric {keep_best!r}")
    done = prune_steps(
        found.folder, rules=rules, run=name, scores=scores, reread=not no_read, dry_run=dry_run
    )
    if as_json:
        say_json(_pruned_record(done, found.folder, rules, dry_run=dry_run))
        return
    for v in done.verdicts:
        click.echo(
            f"{v.step:>12}  {size_text(done.sizes[v.step]):>10}  {'stays' if v.stays else 'goes ':5}  {v.why}"
        )
    word = "would free" if dry_run else "freed"
    click.echo(f"{word} {size_text(done.freed)} in {len(done.gone)} of {len(done.verdicts)} steps")


def _configured(run: RunFolder, *, needed: bool) -> CheckpointConfig:
    if run.config.is_file():
        return load(run.config).config.checkpoint
    if needed:
        raise ConfigError(
            f"{run.path} has no config.yaml that says how many checkpoints are kept", try_="say --keep-last N"
        )
    return CheckpointConfig()


def _scores(run: RunFolder, metric: str) -> dict[int, float]:
    rows = live(read(run.metrics), read(run.events))
    return {
        int(row["step"]): float(row[metric]) for row in rows if row.get(metric) is not None and "step" in row
    }


def _pruned_record(done: Pruned, folder: Path, rules: Rules, *, dry_run: bool) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "dry_run": dry_run,
        "keep_last": rules.last,
        "keep_every": rules.every,
        "keep_best": rules.best,
        "relied_on": done.relied_on,
        "freed": done.freed,
        "steps": [
            {"step": v.step, "stays": v.stays, "why": v.why, "bytes": done.sizes[v.step]}
            for v in done.verdicts
        ],
    }


@click.command(short_help="keep one step whatever the rules say")
@click.argument("target")
@step_option()
@click.option("--note", default="", help="For whom or what; kept in the file.")
@click.option("--undo", is_flag=True, help="Take the pin away.")
@dry_option()
@json_option()
def pin(target: str, step: int | None, note: str, undo: bool, dry_run: bool, as_json: bool) -> None:
    """Keep one step of TARGET whatever the rules say, until the pin is taken away. TARGET may be RUN@N."""
    snapshot = Snapshot(step_folder(target, step), check_sizes=False)
    was = is_pinned(snapshot.path)
    if not dry_run:
        if undo:
            unpin(snapshot.path)
        else:
            pin_step(snapshot.path, note=note)
    if as_json:
        fields = {"path": str(snapshot.path), "step": snapshot.step, "pinned": not undo, "was_pinned": was}
        say_json(fields | {"dry_run": dry_run})
        return
    word = ("would be " if dry_run else "is ") + ("pinned no more" if undo else "pinned")
    click.echo(f"step {snapshot.step} of {snapshot.manifest.run} {word}")
