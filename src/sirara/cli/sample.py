"""`sirara sample`: text from a checkpoint, an export or any Hugging Face folder."""

from pathlib import Path

import click

from sirara.checkpoint.find import find
from sirara.checkpoint.hf_model import load_decoder
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.scrub import scrub_pieces
from sirara.cli.options import json_option, say_json
from sirara.data.tokenizer import TextTokenizer
from sirara.errors import ConfigError
from sirara.model.generate import Choice, generate
from sirara.pure.manifest import MANIFEST

ROOM = click.FloatRange(min=0)


@click.command()
@click.argument("target", metavar="RUN_OR_FOLDER")
@click.option("--prompt", default="", help="The text to continue; default: the beginning of a document.")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Most tokens to add."
)
@click.option(
    "--temperature", type=ROOM, default=1.0, show_default=True, help="0: always the likeliest token."
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Choose among the K likeliest; 0: all.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="... that hold this chance."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@json_option()
def sample(
    target: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
) -> None:
    """Continue --prompt with the newest checkpoint of a run, a step's folder, an export or a Hugging Face folder."""
    folder = Path(target) if (Path(target) / "config.json").is_file() else find(target).path(None)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json: text cannot become tokens", try_=["copy it there"]
        )
    if (folder / MANIFEST).is_file():
        for fault in scrub_pieces(Snapshot(folder)):
            raise fault.error()
    model = load_decoder(folder)
    tokenizer = TextTokenizer.load(folder / "tokenizer.json")
    choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    start = tokenizer.encode(prompt).tolist() if prompt else [tokenizer.eot]
    added = list(generate(model, start, tokens=tokens, choice=choice, stop=tokenizer.eot))
    text = prompt + tokenizer.decode(added) if prompt else tokenizer.decode(added)
    if as_json:
        say_json({"folder": str(folder), "prompt": prompt, "text": text, "tokens": len(added), "seed": seed})
        return
    click.echo(text)
