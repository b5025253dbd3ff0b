"""`sirara data`: text into token stores, a look into them, a check of their bytes."""

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sirara.cli.options import json_option, say_json
from sirara.data.build_plan import BuildPlan, TokenizerChoice, plan_build
from sirara.data.store import TOKENIZER, TokenStore
from sirara.data.tokenise import BuildReport, Progress, build, is_built, skipped_text
from sirara.data.tokenizer import TextTokenizer
from sirara.errors import CorruptDataError, Exit

SHOWN_FAULTS = 10
PLAIN_EVERY_S = 5.0


@click.group()
def data() -> None:
    """Build, show and check token stores, the form in which runs read text."""


@data.command("build")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--input",
    "inputs",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    metavar="PATH",
    help="A text file or a folder of them; may be repeated. Read are .txt .md .py .jsonl .ndjson .parquet, "
    "also with .gz or .zst.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE", help="A tokenizer.json.")
@click.option("--train-bpe", type=int, metavar="N", help="Train a byte-level BPE of N tokens on this text.")
@click.option("--bytes", "as_bytes", is_flag=True, help="One token per byte.")
@click.option("--field", default="text", show_default=True, help="Where JSON lines and tables have the text.")
@click.option(
    "--end-token",
    metavar="TOKEN",
    help="The token that ends a document; default: what the tokenizer calls so.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes; default: one per usable core.")
@click.option("--skip-unreadable", is_flag=True, help="Go on without files that cannot be read.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, write nothing.")
@json_option("End with one JSON object on stdout; progress goes to stderr.")
def build_command(
    out: Path,
    inputs: tuple[Path, ...],
    tokenizer: Path | None,
    train_bpe: int | None,
    as_bytes: bool,
    field: str,
    end_token: str | None,
    workers: int | None,
    skip_unreadable: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Tokenise text into the new folder OUT.

    One of --tokenizer, --train-bpe and --bytes says how. An interrupted build goes on with the same command;
    the tokens do not depend on the number of processes. Lines that cannot be read are listed in skipped.txt.
    """
    choice = TokenizerChoice(file=tokenizer, train_bpe=train_bpe, as_bytes=as_bytes, end_token=end_token)
    plan = plan_build(out, inputs, choice, field=field)
    if dry_run:
        _say_plan(plan, as_json)
        return
    try:
        with _Shown(plan) as shown:
            report = build(plan, workers=workers, skip_unreadable=skip_unreadable, on_progress=shown)
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on with the finished shards", err=True)
        raise
    _say_report(plan, report, as_json)


@data.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--document", type=click.IntRange(min=0), metavar="N", help="Show document N instead of the beginning."
)
@click.option("--tokens", "count", type=click.IntRange(min=1), default=200, show_default=True, metavar="N")
@click.option("--ids", is_flag=True, help="Show token ids beside the text.")
@json_option()
def show(store: Path, document: int | None, count: int, ids: bool, as_json: bool) -> None:
    """Say what is in the token store STORE and decode a piece of it."""
    opened = TokenStore.open(store)
    facts = _facts(opened)
    start, stop = 0, opened.tokens
    if document is not None:
        if document >= opened.documents:
            raise click.BadParameter(
                f"{document} is beyond the last document, {opened.documents - 1}", param_hint="--document"
            )
        start, stop = (int(at) for at in opened.offsets()[document : document + 2])
    tokens = opened.read(start, min(stop, start + count))
    text = _decoded(opened, tokens)
    sample = {"document": document or 0, "start": start, "of_tokens": stop - start, "text": text}
    if as_json:
        say_json({**facts, "sample": {**sample, "ids": tokens.tolist()}})
        return
    for name, value in facts.items():
        click.echo(f"{name:<16} {_human(name, value)}")
    click.echo(f"\ntokens {start} to {start + len(tokens)} of {stop}, document {sample['document']}:\n")
    click.echo(text if text is not None else "(no tokenizer in the store; see --ids)")
    if ids:
        click.echo(f"\n{' '.join(map(str, tokens.tolist()))}")


@data.command()
@click.argument("store", type=click.Path(path_type=Path))
@json_option()
def check(store: Path, as_json: bool) -> int:
    """Read every byte of the token store STORE and compare it with the hashes in its index."""
    # Not TokenStore.open, which ends at the first file that is missing: all faults are wanted.
    opened = TokenStore.unchecked(store)
    begun = time.monotonic()
    faults: list[CorruptDataError] = []
    sound_bytes = 0
    for found in opened.faults():
        if isinstance(found, CorruptDataError):
            faults.append(found)
        else:
            sound_bytes += found
    elapsed_s = time.monotonic() - begun
    if as_json:
        say_json(
            {
                "store": str(store),
                "sound": not faults,
                "sound_bytes": sound_bytes,
                "faults": [{"code": f.code, "what": f.what, "where": f.where, "why": f.why} for f in faults],
            }
        )
    else:
        for fault in faults:
            click.echo(str(fault), err=True)
        verdict = f"{len(faults)} faults" if faults else "sound"
        click.echo(f"{store}: {verdict}; {_size(sound_bytes)} as written, read in {elapsed_s:.1f} s")
    return Exit.CORRUPT if faults else Exit.DONE


class _Shown:
    """Progress on stderr: a live bar on a terminal, one plain line now and then elsewhere."""

    def __init__(self, plan: BuildPlan) -> None:
        self.plan = plan
        self.begun = self.said = time.monotonic()
        self.phase = ""
        self.bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TextColumn("{task.fields[tokens]:,} tokens"),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("reading", total=plan.bytes, tokens=0)

    def __enter__(self) -> "_Shown":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, now: Progress) -> None:
        if self.bar:
            self.bar.update(self.task, description=now.phase, completed=now.done_bytes, tokens=now.tokens)
            return
        time_s = time.monotonic()
        if now.phase == self.phase and time_s - self.said < PLAIN_EVERY_S:
            return
        self.phase, self.said = now.phase, time_s
        share = f"{_size(now.done_bytes)} of {_size(now.total_bytes)}" if now.phase == "tokenising" else ""
        tokens = f"{now.tokens:,} tokens" if now.tokens else ""
        facts = ", ".join(part for part in (share, tokens, f"{time_s - self.begun:.0f} s") if part)
        click.echo(f"{now.phase}: {facts}", err=True)


def _say_plan(plan: BuildPlan, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "out": str(plan.out),
        "files": len(plan.files),
        "bytes": plan.bytes,
        "passed_over": len(plan.passed_over),
        "tokenizer": str(plan.choice),
        "continues": plan.building.exists(),
        "is_there": is_built(plan),
    }
    if as_json:
        say_json({**facts, "dry_run": True})
        return
    click.echo(f"would read   {len(plan.files)} files, {_size(plan.bytes)}")
    for file in itertools.islice(plan.files, 5):
        click.echo(f"             {file.path}")
    if len(plan.files) > 5:
        click.echo(f"             ... and {len(plan.files) - 5} more")
    if plan.passed_over:
        click.echo(f"would pass   {len(plan.passed_over)} files with other endings")
    click.echo(f"tokenizer    {plan.choice}")
    if facts["is_there"]:
        click.echo(f"is there     {plan.out}, made from the same text by the same tokenizer")
        return
    goes_on = ", going on with an earlier build" if facts["continues"] else ""
    click.echo(f"would write  {plan.out}{goes_on}")


def _say_report(plan: BuildPlan, report: BuildReport, as_json: bool) -> None:
    store = report.store
    skipped = report.skipped()
    if as_json:
        extra = {"fresh": report.fresh, "kept_shards": report.kept_shards, "elapsed_s": report.elapsed_s}
        say_json({**_facts(store), **extra})
        return
    for line in skipped[:SHOWN_FAULTS]:
        click.echo(f"skipped  {line}", err=True)
    if len(skipped) > SHOWN_FAULTS:
        more = len(skipped) - SHOWN_FAULTS
        click.echo(f"skipped  {more} more, all listed in {store.path / 'skipped.txt'}", err=True)
    if plan.passed_over:
        click.echo(f"passed over {len(plan.passed_over)} files with other endings", err=True)
    if not report.fresh:
        click.echo(f"{store.path} is there already, made from the same text by the same tokenizer")
        return
    if plan.choice.train_bpe and store.index.vocab < plan.choice.train_bpe:
        click.echo(
            f"the text has pairs for {store.index.vocab} of the {plan.choice.train_bpe} tokens", err=True
        )
    speed = plan.bytes / max(report.elapsed_s, 1e-9)
    click.echo(
        f"{store.path}: {store.tokens:,} tokens in {store.documents:,} documents, vocabulary "
        f"{store.index.vocab:,}; {_size(plan.bytes)} in {report.elapsed_s:.1f} s ({_size(speed)}/s)"
    )


def _facts(store: TokenStore) -> dict[str, Any]:
    index = store.index
    lengths = np.diff(store.offsets()[:1_000_001])
    stored = sum(file.bytes for file in (*index.files, index.offsets, *index.extra))
    return {
        "store": str(store.path),
        "tokens": index.tokens,
        "documents": index.documents,
        "vocabulary": index.vocab,
        "end_token_id": index.eot,
        "dtype": index.dtype,
        "token_files": len(index.files),
        "stored_bytes": stored,
        "document_tokens": {
            "shortest": int(lengths.min()),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
        },
        "tokenizer_digest": index.tokenizer,
        "digest": index.digest,
        "origin": index.origin,
        "skipped": len(skipped_text(store)),
    }


def _human(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if name.endswith("_bytes"):
        return _size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _decoded(store: TokenStore, tokens: np.ndarray) -> str | None:
    file = store.path / TOKENIZER
    if not file.exists():
        return None
    return TextTokenizer.load(file, end_token=store.index.eot).decode(tokens)


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
