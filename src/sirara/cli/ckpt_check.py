"""`sirara ckpt verify`, `repair`, `why`: are the bytes what they were, can they be again, what will a resume take?"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from sirara.checkpoint.explain import Explanation, Save, explain
from sirara.checkpoint.find import find, step_number
from sirara.checkpoint.mend import mend
from sirara.checkpoint.places import Places, places_of, run_of
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.repair import Repaired
from sirara.checkpoint.scrub import scrub
from sirara.checkpoint.scrub_places import Scrubbed, scrub_places, torn
from sirara.checkpoint.steps import incomplete_steps, step_name
from sirara.cli.ckpt_options import SHOWN, dry_option, size_text, step_option, value_text
from sirara.cli.options import json_option, say_json
from sirara.config.run_folder import RunFolder
from sirara.errors import CheckpointError, ConfigError, Exit, StorageError
from sirara.events import read
from sirara.pure.manifest import MANIFEST


@click.command(short_help="read every byte, name what is bad")
@click.argument("target")
@step_option("Only this step; default: every committed one.")
@click.option("--disk-only", is_flag=True, help="Leave out what nodes and object stores keep of the run.")
@json_option()
def verify(target: str, step: int | None, disk_only: bool, as_json: bool) -> int:
    """Read every byte of TARGET's steps and name what is not as it was written (exit 65).

    Of a run: its step folders, the images and parity of the nodes that this machine sees, and its object store.
    """
    found = find(target)
    run = None if disk_only or found.only else run_of(found.folder)
    places = places_of(run) if run else Places(run="")
    paths = found.paths() if step is None else [found.folder / step_name(step)] if step in found.steps else []
    if step is not None and found.only:
        found.path(step)  # says that the folder is one step's
    results = [_verified(path, quiet=as_json) for path in paths]
    copies, unasked = _scrubbed(places, step, quiet=as_json)
    if not results and not copies:
        if not as_json:
            _say_unasked(unasked)  # what is not here may be there
        found.path(step)  # says that there is none
    incomplete = [] if found.only or step is not None else [*incomplete_steps(found.folder), *torn(places)]
    bad = [r for r in (*results, *copies) if r["faults"]]
    if as_json:
        fields = {"folder": str(found.folder), "ok": not bad, "steps": results, "copies": copies}
        say_json(fields | {"incomplete": incomplete, "unasked": unasked})
    else:
        for name in incomplete:
            click.echo(
                f"incomplete: {name}"
                + (f" (no {MANIFEST}; it is not a checkpoint)" if "step-" in name else "")
            )
        _say_unasked(unasked)
    return Exit.CORRUPT if bad else Exit.DONE


def _verified(path: Path, *, quiet: bool) -> dict[str, Any]:
    began = time.perf_counter()
    faults: list[dict[str, str]] = []
    read_bytes, step, pieces = 0, None, 0
    try:
        snapshot = Snapshot(path, check_sizes=False)
        step, pieces = snapshot.step, len(snapshot.manifest.pieces)
        read_bytes = sum(f.size for f in snapshot.manifest.files)
        faults = [{"file": f.file, "tensor": f.tensor, "box": f.box, "what": f.what} for f in scrub(snapshot)]
    except (CheckpointError, StorageError) as fault:
        faults = [
            {
                "file": MANIFEST,
                "tensor": "",
                "box": "",
                "what": ": ".join(filter(None, (fault.what, fault.why))),
            }
        ]
    took = time.perf_counter() - began
    if not quiet:
        if faults:
            click.echo(f"{path.name}: {len(faults)} faults")
        else:
            click.echo(f"{path.name}: good, {pieces} pieces, {size_text(read_bytes)} in {took:.1f} s")
        _say_some(
            [f"{f['file']}: {f['tensor']}{f['box']}{' ' if f['tensor'] else ''}{f['what']}" for f in faults]
        )
    return {
        "step": step,
        "path": str(path),
        "pieces": pieces,
        "bytes": read_bytes,
        "seconds": took,
        "faults": faults,
    }


def _scrubbed(places: Places, step: int | None, *, quiet: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of what the other places keep, and what could not be asked."""
    rows: list[dict[str, Any]] = []
    unasked = list(places.unasked)
    try:
        for one in scrub_places(places, step):
            rows.append(_scrubbed_row(one))
            if not quiet:
                state = f"{len(one.faults)} faults" if one.faults else f"good, {size_text(one.bytes)}"
                late = "" if one.committed else " (not committed)"
                click.echo(f"{one.place}: step {one.step}, {one.what}: {state}{late}")
                _say_some(one.faults)
    except StorageError as fault:
        unasked.append(f"{fault.what} ({fault.why})" if fault.why else fault.what)
    return rows, unasked


def _scrubbed_row(one: Scrubbed) -> dict[str, Any]:
    return {
        "place": one.place,
        "what": one.what,
        "step": one.step,
        "uuid": one.uuid,
        "committed": one.committed,
        "bytes": one.bytes,
        "faults": list(one.faults),
    }


# ---- repair


@click.command(short_help="make bad pieces good again from other copies")
@click.argument("target")
@step_option("Only this step, also when its folder is gone; default: every committed one.")
@click.option(
    "--from",
    "replicas",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="A copy of the step's folder, from a backup say; asked first.",
)
@dry_option()
@json_option()
def repair(target: str, step: int | None, replicas: tuple[Path, ...], dry_run: bool, as_json: bool) -> int:
    """Make bad pieces of TARGET's steps good again from other copies; exit 65 when some cannot be.

    Copies are the folders given by --from, the images and parity of the nodes that this machine sees, and the object
    store. A file is written anew and then takes the place of the bad one. What no copy has is named.
    """
    found = find(target)
    if step is not None and found.only:
        found.path(step)  # says that the folder is one step's
    run = run_of(found.folder)
    places = places_of(run) if run else Places(run="")
    given = [Snapshot(path, check_sizes=False) for path in replicas]
    steps = [step] if step is not None else [step_number(path) for path in found.paths()]
    if not steps:
        raise CheckpointError(
            f"{found.folder} has no committed checkpoint",
            code="SR513",
            try_=["--step N rebuilds one that other places keep; sirara ckpt why RUN names them"],
        )
    results: list[Repaired] = []
    unasked = list(places.unasked)
    with TemporaryDirectory(prefix="sirara-decoded-") as scratch:
        for number in steps:
            done, more = mend(found, number, places, replicas=given, scratch=Path(scratch), dry_run=dry_run)
            unasked += more
            results.append(done)
            if not as_json:
                _say_repaired(done, dry_run=dry_run)
    unasked = list(dict.fromkeys(unasked))
    good = all(done.good for done in results)
    if as_json:
        fields = {
            "folder": str(found.folder),
            "dry_run": dry_run,
            "good": good,
            "steps": [_repaired_row(done) for done in results],
        }
        say_json(fields | {"unasked": unasked})
    else:
        _say_unasked(unasked)
    return Exit.DONE if good else Exit.CORRUPT


def _repaired_row(done: Repaired) -> dict[str, Any]:
    mended = [
        {"file": m.file, "tensor": m.tensor, "box": m.box, "what": m.what, "from": m.taken_from}
        for m in done.mended
    ]
    lost = [{"file": f.file, "tensor": f.tensor, "box": f.box, "what": f.what} for f in done.lost]
    fields = {"step": done.step, "path": str(done.path), "good": done.good, "rebuilt": done.rebuilt}
    return fields | {"mended": mended, "lost": lost}


def _say_repaired(done: Repaired, *, dry_run: bool) -> None:
    name, mended, lost = step_name(done.step), done.mended, done.lost
    if done.rebuilt:
        sources = Counter(m.taken_from for m in mended)
        parts = ", ".join(f"{count} parts from {source}" for source, count in sources.items())
        state = "cannot be rebuilt" if lost else "can be rebuilt" if dry_run else "rebuilt"
        click.echo(f"{name}: {state}" + (f": {parts}" if parts else ""))
    elif mended or lost:
        word = "can be repaired" if dry_run else "repaired"
        click.echo(f"{name}: {len(mended)} {word}" + (f", {len(lost)} cannot be" if lost else ""))
        _say_some([str(m) for m in mended])
    else:
        click.echo(f"{name}: good, nothing to repair")
    _say_some([str(fault) for fault in lost])


# ---- why


@click.command(short_help="which steps can be restored from where, and why")
@click.argument("run_name", metavar="RUN")
@click.option(
    "--nodes", type=click.IntRange(min=1), metavar="N", help="Of the resume; default: as the last attempt."
)
@json_option()
def why(run_name: str, nodes: int | None, as_json: bool) -> int:
    """Which steps of RUN can be restored from where, and why the newest is or is not taken by a resume.

    Folders, leftovers, images and parity of the nodes that this machine sees, the object store, and the run's events
    are looked at: sizes, times and descriptions. `ckpt verify` reads every byte. A resume on N nodes asks nodes 0 to
    N - 1. Exit 65 when the run has saved and nothing can be restored.
    """
    found = find(run_name)
    run = run_of(found.folder)
    if found.only is not None or run is None:
        raise ConfigError(f"{run_name} is no run", try_="name a run, or its folder")
    events = read(run.events)
    told = explain(found.folder, places_of(run), events, nodes=nodes)
    if as_json:
        say_json(_why_record(told))
    else:
        _say_why(told, run)
    return Exit.DONE if told.taken or not (told.saves or told.unsaved) else Exit.CORRUPT


def _say_why(told: Explanation, run: RunFolder) -> None:
    click.echo(f"run {told.run}  {run.path}")
    for save in told.saves:
        for n, at in enumerate(save.found):
            share = "" if at.whole else f"{at.pieces} of {at.total} pieces; "
            click.echo(f"{save.step if n == 0 else '':>12}  {at.place:24}  {share}{at.what}")
    taken = told.taken
    if taken is None:
        click.echo("no step can be restored" if told.saves or told.unsaved else "nothing was saved yet")
    else:
        places = ", ".join(at.place for at in taken.found if at.pieces and at.asked)
        on = "" if told.nodes is None else f" on {told.nodes} node{'s' if told.nodes > 1 else ''}"
        click.echo(f"a resume{on} takes step {taken.step}, from {places}")
        click.echo("sizes, times and descriptions were looked at; `sirara ckpt verify` reads the bytes")
        changed = [name for at in taken.found for name in at.changed]
        if changed:
            click.echo(
                f"what was written since may be wrong: then a resume says so and {_next_best(told, taken)}"
            )
    for save in told.saves:
        if not save.restorable:
            click.echo(f"step {save.step} cannot be taken: {save.why}")
    for step, reason in told.unsaved:
        click.echo(f"step {step} {reason}")
    for name, reason in told.leftovers:
        click.echo(f"{name}: {reason}")
    if told.resumed is not None:
        attempt, step = told.resumed.get("attempt", "?"), told.resumed.get("from_step")
        click.echo(f"the last resume (attempt {attempt}) went on from step {step}")
        for skipped in told.resumed.get("skipped") or ():
            click.echo(f"  it did not take step {skipped[0]}: {skipped[1]}")
        for row in told.resumed.get("table") or ():
            click.echo(f"  {value_text(row)}")
    _say_unasked(told.unasked)


def _next_best(told: Explanation, taken: Save) -> str:
    if sum(at.pieces > 0 for at in taken.found if at.asked) > 1:
        return "takes these pieces from the other places"
    older = next((save.step for save in told.saves if save.restorable and save.step < taken.step), None)
    return "has no older step" if older is None else f"takes step {older}"


def _why_record(told: Explanation) -> dict[str, Any]:
    return {
        "run": told.run,
        "folder": str(told.folder),
        "takes": told.taken.step if told.taken else None,
        "nodes": told.nodes,
        "saves": [_save_row(save) for save in told.saves],
        "unsaved": [{"step": step, "why": reason} for step, reason in told.unsaved],
        "leftovers": [{"name": name, "why": reason} for name, reason in told.leftovers],
        "resumed": dict(told.resumed) if told.resumed is not None else None,
        "unasked": list(told.unasked),
    }


def _save_row(save: Save) -> dict[str, Any]:
    found = [
        {"place": f.place, "pieces": f.pieces, "of": f.total, "what": f.what, "asked": f.asked}
        | {"changed": list(f.changed)}
        for f in save.found
    ]
    fields = {"step": save.step, "uuid": save.uuid, "attempt": save.attempt, "found": found}
    return fields | {"restorable": save.restorable, "missing": save.missing, "why": save.why}


def _say_some(lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        click.echo(f"  {line}")
    if lines[SHOWN:]:
        click.echo(f"  and {len(lines) - SHOWN} more (--json lists them all)")


def _say_unasked(unasked: Sequence[str]) -> None:
    for reason in unasked:
        click.echo(f"not asked: {reason}")
