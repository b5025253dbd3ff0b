"""`sirara ckpt ls`, `show`, `diff`: look at checkpoints; nothing here changes one."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from sirara.checkpoint.compare import Comparison, TensorDiff, compare
from sirara.checkpoint.find import find, step_folder
from sirara.checkpoint.pins import is_pinned
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.retention import read_back, state_text
from sirara.checkpoint.steps import incomplete_steps, named_step
from sirara.cli.ckpt_options import shape_text, size_text, step_option, value_text
from sirara.cli.options import json_option, say_json
from sirara.errors import CheckpointError, Exit, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, TensorEntry
from sirara.pure.saveplan import ITEM_BYTES


@click.command(short_help="committed steps, newest first")
@click.argument("target")
@json_option()
def ls(target: str, as_json: bool) -> None:
    """The committed steps of TARGET, newest first, and what is incomplete.

    Of each is said when its bytes were last read and whether files were written since; `ckpt verify` reads them now.
    """
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
            f"{row['step']:>12}  {size_text(row['bytes']):>10}  {row['tokens']:>14,}  {row['saved'][:16]:16}  "
            + _state(row)
        )
    for name in incomplete:
        click.echo(f"incomplete: {name} (no {MANIFEST}; it is not a checkpoint and is never counted)")
    if not rows:
        click.echo(f"no committed checkpoint in {found.folder}")


@click.command(short_help="what one step holds")
@click.argument("target")
@step_option()
@click.option("--tensors", is_flag=True, help="Every tensor: dtype, shape, bytes, number of pieces, files.")
@json_option()
def show(target: str, step: int | None, tensors: bool, as_json: bool) -> None:
    """What one step of TARGET holds: its place in the run, its record, its files."""
    snapshot = Snapshot(step_folder(target, step))
    m = snapshot.manifest
    listed = [_tensor_row(snapshot, i) for i in range(len(m.tensors))] if tensors else []
    files = [{"name": f.name, "bytes": f.size} for f in m.files]
    fields: dict[str, Any] = {
        "path": str(snapshot.path),
        "run": m.run,
        "step": m.step,
        "tokens": m.tokens,
        "attempt": m.attempt,
        "uuid": m.uuid,
        **_read_back(snapshot.path, m),
        "pinned": is_pinned(snapshot.path),
        "layout": m.layout,
        "versions": m.versions,
        "aliases": m.aliases,
        "record": m.record,
    }
    if as_json:
        more = {"tensors": listed} if tensors else {}
        counts = {"tensor_count": len(m.tensors), "piece_count": len(m.pieces)}
        say_json(fields | {"files": files} | counts | more)
        return
    for name, value in fields.items():
        if name not in ("record", "read_back", "changed"):  # the state says both
            click.echo(f"{name:9} {value_text(value)}")
    click.echo("record")
    for name, value in m.record.items():
        click.echo(f"  {name:13} {value_text(value)}")
    click.echo(f"files     {size_text(sum(f['bytes'] for f in files))} in {len(files)}")
    for f in files:
        click.echo(f"  {size_text(f['bytes']):>10}  {f['name']}")
    click.echo(f"tensors   {len(m.tensors)} in {len(m.pieces)} pieces")
    for t in listed:
        click.echo(
            f"  {t['dtype']:7} {shape_text(t['shape']):16} {size_text(t['bytes']):>10} {t['pieces']:5}  "
            f"{t['name']}  {', '.join(t['files'])}"
        )


@click.command(short_help="compare two steps, tensor by tensor")
@click.argument("a")
@click.argument("b")
@click.option("--only", multiple=True, metavar="GLOB", help="Only tensors whose names fit, like '*/exp_avg'.")
@click.option("--quick", is_flag=True, help="Take pieces with equal hashes as equal without reading them.")
@click.option("--all", "every", is_flag=True, help="Show the equal tensors as well.")
@json_option()
def diff(a: str, b: str, only: tuple[str, ...], quick: bool, every: bool, as_json: bool) -> int:
    """Compare two steps, tensor by tensor: exit 0 when they are equal to the bit, 1 when they are not.

    A and B are steps, as RUN@N or by their folders; RUN alone means its newest step. Layouts and files do not count.
    """
    left, right = Snapshot(step_folder(a)), Snapshot(step_folder(b))
    found = compare(left, right, only=only, quick=quick)
    if as_json:
        say_json(
            {
                "a": str(left.path),
                "b": str(right.path),
                "equal": found.equal,
                "differing": len(found.differing),
                "record": {k: {"a": x, "b": y} for k, (x, y) in found.record.items()},
                "tensors": [_diff_row(t) for t in found.tensors],
            }
        )
    else:
        _say_diff(found, left, right, every=every)
    return Exit.DONE if found.equal else Exit.USER_CODE


def _say_diff(found: Comparison, a: Snapshot, b: Snapshot, *, every: bool) -> None:
    click.echo(f"A  step {a.step} of {a.manifest.run}  {a.path}")
    click.echo(f"B  step {b.step} of {b.manifest.run}  {b.path}")
    shown = found.tensors if every else found.differing
    width = max((len(t.name) for t in shown), default=0)
    for t in shown:
        click.echo(f"  {t.name:{width}}  {_diff_text(t)}")
    for name, (x, y) in found.record.items():
        click.echo(f"  record {name}: {value_text(x)} and {value_text(y)}")
    counts = f"{len(found.differing)} of {len(found.tensors)} tensors differ"
    click.echo("equal to the bit" if found.equal else counts)


def _diff_text(t: TensorDiff) -> str:
    if t.a is None or t.b is None:
        return t.what
    if t.what == "shape":
        return f"shape {list(t.a.shape)} and {list(t.b.shape)}"
    if t.what == "equal":
        return "equal"
    head = f"dtype {t.a.dtype} and {t.b.dtype}, " if t.what == "dtype" else ""
    if not t.differing:
        return head + "equal values"
    nans = f", {t.nans} NaN on one side only" if t.nans else ""
    largest = "" if t.max_abs is None else f", max |a-b| {t.max_abs:.6g}"
    return f"{head}{t.differing} elements differ{largest}{nans}, first at {list(t.first or ())}"


def _diff_row(t: TensorDiff) -> dict[str, Any]:
    # JSON has no infinity: it becomes the text "inf".
    largest = t.max_abs if t.max_abs is None or math.isfinite(t.max_abs) else str(t.max_abs)
    return {
        "name": t.name,
        "what": t.what,
        "a": _entry_row(t.a),
        "b": _entry_row(t.b),
        "differing": t.differing,
        "max_abs": largest,
        "nans": t.nans,
        "first": None if t.first is None else list(t.first),
    }


def _entry_row(entry: TensorEntry | None) -> dict[str, Any] | None:
    return None if entry is None else {"dtype": entry.dtype, "shape": list(entry.shape)}


def _tensor_row(snapshot: Snapshot, i: int) -> dict[str, Any]:
    m = snapshot.manifest
    t, pieces = m.tensors[i], m.pieces_of(i)
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "bytes": math.prod(t.shape) * ITEM_BYTES[t.dtype],
        "pieces": len(pieces),
        "files": list(dict.fromkeys(m.files[int(f)].name for f in m.pieces.file[pieces])),
    }


def _state(row: dict[str, Any]) -> str:
    if row["fault"]:
        return row["fault"]
    return row["state"] + ("; pinned" if row["pinned"] else "")


def _read_back(path: Path, manifest: Manifest) -> dict[str, Any]:
    """When its bytes were read and what was written since, of a step whose sizes agree."""
    found = read_back(path, manifest)
    when, changed = (found.time, list(found.changed)) if found else (None, [])
    return {"read_back": when, "changed": changed, "state": state_text(found)}


def _summary(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(path), "fault": ""}
    saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC)
    row["saved"] = saved.isoformat(sep=" ", timespec="seconds")
    named = named_step(path.name)
    try:
        m = Snapshot(path, step=named).manifest
    except (CheckpointError, StorageError) as fault:
        unknown = {"bytes": 0, "tokens": 0, "read_back": None, "changed": [], "pinned": is_pinned(path)}
        return row | unknown | {"step": named or 0, "state": fault.what, "fault": fault.what}
    return row | {
        "step": m.step,
        "bytes": sum(f.size for f in m.files),
        "tokens": m.tokens,
        "layout": m.layout,
        "uuid": m.uuid,
        **_read_back(path, m),
        "pinned": is_pinned(path),
    }
