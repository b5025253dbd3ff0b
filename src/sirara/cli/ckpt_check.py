"""`sirara ckpt verify`: are the bytes what they were?"""

import time
from pathlib import Path
from typing import Any

import click

from sirara.checkpoint.find import find
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub import scrub
from sirara.checkpoint.steps import incomplete_steps
from sirara.cli.ckpt_options import SHOWN, size_text, step_option
from sirara.cli.options import json_option, say_json
from sirara.errors import CheckpointError, Exit, StorageError
from sirara.pure.manifest import MANIFEST


@click.command()
@click.argument("target")
@step_option("Only this step; default: every committed one.")
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
            click.echo(f"{path.name}: good, {pieces} pieces, {size_text(read)} in {took:.1f} s")
        for f in faults[:SHOWN]:
            click.echo(f"  {f['file']}: {f['tensor']}{f['box']}{' ' if f['tensor'] else ''}{f['what']}")
        if faults[SHOWN:]:
            click.echo(f"  and {len(faults) - SHOWN} more (--json lists them all)")
    return {
        "step": step,
        "path": str(path),
        "pieces": pieces,
        "bytes": read,
        "seconds": took,
        "faults": faults,
    }
