"""`sirara ckpt`: which checkpoints there are, what is in them, whether their bytes are good."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from sirara.checkpoint.find import find
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.retention import is_verified
from sirara.checkpoint.scrub import scrub
from sirara.checkpoint.steps import incomplete_steps
from sirara.cli.options import json_option, say_json
from sirara.errors import CheckpointError, Exit, StorageError
from sirara.pure.manifest import MANIFEST

TARGET_HELP = (
    "a run (its name, the beginning of it, its folder, or latest), a checkpoints folder, or a step's folder"
)
SHOWN_FAULTS = 20


@click.group()
def ckpt() -> None:
    """List, show and verify checkpoints. TARGET is a run, a folder of checkpoints, or one step's folder."""


step_option = click.option("--step", type=int, metavar="N", help="This step; default: the newest.")


@ckpt.command("ls")
@click.argument("target")
@json_option()
def ls(target: str, as_json: bool) -> None:
    """The committed steps of TARGET, newest first, and what is incomplete."""
    found = find(target)
    rows = [_summary(path) for path in found.paths()]
    incomplete = [] if found.only else incomplete_steps(found.folder)
    if as_json:
        say_json({"folder": str(found.folder), "steps": rows, "incomplete": incomplete})
        return
    if rows:
        click.echo(f"{'step':>12}  {'size':>10}  {'tokens':>14}  {'saved':16}  state")
    for row in rows:
        click.echo(
            f"{row['step']:>12}  {_size(row['bytes']):>10}  {row['tokens']:>14,}  {row['saved'][:16]:16}  "
            + (row["fault"] or ("verified" if row["verified"] else "committed"))
        )
    for name in incomplete:
        click.echo(f"incomplete: {name} (no {MANIFEST}; it is not a checkpoint and is never counted)")
    if not rows:
        click.echo(f"no committed checkpoint in {found.folder}")


@ckpt.command("show")
@click.argument("target")
@step_option
@click.option("--tensors", is_flag=True, help="Every tensor with its dtype, shape and number of pieces.")
@json_option()
def show(target: str, step: int | None, tensors: bool, as_json: bool) -> None:
    """What one step of TARGET holds: its place in the run, its record, its files."""
    snapshot = Snapshot(find(target).path(step))
    m = snapshot.manifest
    listed = [
        {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "pieces": len(m.pieces_of(i))}
        for i, t in enumerate(m.tensors)
    ]
    files = [{"name": f.name, "bytes": f.size} for f in m.files]
    fields: dict[str, Any] = {
        "path": str(snapshot.path),
        "run": m.run,
        "step": m.step,
        "tokens": m.tokens,
        "attempt": m.attempt,
        "uuid": m.uuid,
        "verified": is_verified(snapshot.path, uuid=m.uuid),
        "layout": m.layout,
        "versions": m.versions,
        "aliases": m.aliases,
        "record": m.record,
    }
    if as_json:
        more = {"tensors": listed} if tensors else {}
        say_json(fields | {"files": files, "tensor_count": len(listed), "piece_count": len(m.pieces)} | more)
        return
    for name, value in fields.items():
        if name != "record":
            click.echo(f"{name:9} {_text(value)}")
    click.echo("record")
    for name, value in m.record.items():
        click.echo(f"  {name:13} {_text(value)}")
    click.echo(f"files     {_size(sum(f['bytes'] for f in files))} in {len(files)}")
    for f in files:
        click.echo(f"  {_size(f['bytes']):>10}  {f['name']}")
    click.echo(f"tensors   {len(listed)} in {len(m.pieces)} pieces")
    for t in listed if tensors else ():
        click.echo(
            f"  {t['dtype']:5} {'x'.join(map(str, t['shape'])) or 'scalar':16} {t['pieces']:4}  {t['name']}"
        )


@ckpt.command("verify")
@click.argument("target")
@click.option("--step", type=int, metavar="N", help="Only this step; default: every committed one.")
@json_option()
def verify(target: str, step: int | None, as_json: bool) -> int:
    """Read every byte of TARGET's steps from the disk and name what is not as it was written (exit 65)."""
    found = find(target)
    paths = found.paths() if step is None else [found.path(step)]
    if not paths:
        found.path(None)  # says that there is none
    results = [_verified(path, quiet=as_json) for path in paths]
    incomplete = [] if found.only or step is not None else incomplete_steps(found.folder)
    bad = [r for r in results if r["faults"]]
    if as_json:
        say_json({"folder": str(found.folder), "ok": not bad, "steps": results, "incomplete": incomplete})
    else:
        for name in incomplete:
            click.echo(f"incomplete: {name} (no {MANIFEST}; it is not a checkpoint)")
    return Exit.CORRUPT if bad else Exit.DONE


def _verified(path: Path, *, quiet: bool) -> dict[str, Any]:
    began = time.perf_counter()
    faults: list[dict[str, str]] = []
    read, step, pieces = 0, None, 0
    try:
        snapshot = Snapshot(path, check_sizes=False)
        step, pieces = snapshot.step, len(snapshot.manifest.pieces)
        read = sum(f.size for f in snapshot.manifest.files)
        faults = [{"file": f.file, "tensor": f.tensor, "box": f.box, "what": f.what} for f in scrub(snapshot)]
    except (CheckpointError, StorageError) as fault:
        faults = [{"file": MANIFEST, "tensor": "", "box": "", "what": f"{fault.what} {fault.why}".strip()}]
    took = time.perf_counter() - began
    if not quiet:
        if faults:
            click.echo(f"{path.name}: {len(faults)} faults")
        else:
            click.echo(f"{path.name}: good, {pieces} pieces, {_size(read)} in {took:.1f} s")
        for f in faults[:SHOWN_FAULTS]:
            click.echo(f"  {f['file']}: {f['tensor']}{f['box']}{' ' if f['tensor'] else ''}{f['what']}")
        if faults[SHOWN_FAULTS:]:
            click.echo(f"  and {len(faults) - SHOWN_FAULTS} more (--json lists them all)")
    return {
        "step": step,
        "path": str(path),
        "pieces": pieces,
        "bytes": read,
        "seconds": took,
        "faults": faults,
    }


def _summary(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(path), "fault": ""}
    saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC)
    row["saved"] = saved.isoformat(sep=" ", timespec="seconds")
    try:
        m = Snapshot(path).manifest
    except (CheckpointError, StorageError) as fault:
        digits = path.name.removeprefix("step-")
        unknown = {"bytes": 0, "tokens": 0, "verified": False}
        return row | unknown | {"step": int(digits) if digits.isdigit() else 0, "fault": fault.what}
    return row | {
        "step": m.step,
        "bytes": sum(f.size for f in m.files),
        "tokens": m.tokens,
        "layout": m.layout,
        "uuid": m.uuid,
        "verified": is_verified(path, uuid=m.uuid),
    }


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={_text(v)}" for k, v in value.items()) or "-"
    return str(value)
