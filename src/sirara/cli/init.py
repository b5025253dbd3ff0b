"""`sirara init`: a configuration to start from, with a word on every line."""

import difflib
import os
import shlex
from pathlib import Path

import click

from sirara.errors import ConfigError, StorageError

_SIZES = """\
  family: llama                 # gpt2 | bloom | llama | mistral | qwen2 | qwen3
  layers: 6
  hidden: 512
  heads: 8
  kv_heads: 8                   # fewer than heads: grouped-query attention
  ffn: 1408
  vocab: tokenizer              # as many as the tokenizer has, or a number
  max_seq: 256                  # longest sequence that the model can see
  tie_embeddings: true"""

_PRESET = """\
  preset: {preset:<21} # sizes given here replace the preset's: layers: 4
  vocab: tokenizer              # as many as the tokenizer has; without this line the preset's"""

_STARTER = """\
# A run of Sirara. All keys: sirara config schema. With origins: sirara config show sirara.yaml --origins
# Any key can be set for one run: sirara run sirara.yaml train.steps=10
schema: 1
name: {name}
run_dir: runs                   # a run is runs/<name>-<8 hex>/
seed: 1234
numerics: exact                 # the same bits on any layout and after any kill; or fast

model:
{model}
  dropout: 0.0

data:                           # first: sirara data build data/tokens --input TEXT... --train-bpe 4096
  tokenizer: data/tokens/tokenizer.json
  train:                        # several sources are blended by weight
    - {{path: data/tokens, weight: 1.0}}
  eval: []                      # - {{path: data/held-out, name: held-out}}
  seq_len: {seq_len:<20} # tokens per training sequence, at most model.max_seq

train:
  steps: 200
  global_batch: 32              # sequences per optimizer step, whatever the number of processes
  micro_batch: 4                # sequences per forward and backward: what must fit into memory
  precision: fp32               # of weights: fp32 | bf16 (with fp32 masters) | fp64
  optimizer: {{name: adamw, lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}}
  lr_schedule: {{name: cosine, warmup_steps: 20, min_lr_ratio: 0.1}}
  clip_grad_norm: 1.0
  eval_every: 50

mesh: {{dp: auto, zero: 1}}       # one process per device; zero: 1 splits the optimizer's state over them
checkpoint: {{every: 50, keep_last: 3}}
launch: {{nproc: auto, max_restarts: 3, stop_grace: 10m}}
log: {{every: 1}}
"""


@click.command()
@click.argument("folder", metavar="[DIR]", default=".")
@click.option("--preset", metavar="NAME", help="A published model instead of a small one, such as llama3-8b.")
@click.option("--name", help="Name of the run; default: the folder's.")
def init(folder: str, preset: str | None, name: str | None) -> None:
    """Write DIR/sirara.yaml, a commented configuration to start from. Nothing is overwritten."""
    path = Path(folder) / "sirara.yaml"
    text = starter(name=name or _name_of(Path(folder)), preset=preset)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists and is left alone",
            code="SR112",
            try_=["sirara init ANOTHER-FOLDER", f"rm {path}"],
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}")
    # The file's paths are seen from its own folder.
    into = "" if path.parent == Path() else f"cd {shlex.quote(str(path.parent))} && "
    click.echo(f"next:  {into}sirara doctor")
    click.echo("       sirara data build data/tokens --input TEXT... --train-bpe 4096")
    click.echo("       sirara run sirara.yaml")


def starter(*, name: str, preset: str | None = None) -> str:
    """The text of a configuration that loads as it is.

    Raises:  ConfigError for a preset that does not exist.
    """
    from sirara.pure.families import PRESETS

    if preset is None:
        return _STARTER.format(name=name, model=_SIZES, seq_len=256)
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=3, cutoff=0.4)
        raise ConfigError(
            f"there is no preset {preset!r}",
            code="SR112",
            where="--preset",
            why=f"presets are {', '.join(PRESETS)}",
            try_=[f"--preset {word}" for word in near],
        )
    seq_len = min(4096, PRESETS[preset].max_seq)
    return _STARTER.format(name=name, model=_PRESET.format(preset=preset), seq_len=seq_len)


def _name_of(folder: Path) -> str:
    last = Path(os.path.abspath(folder)).name
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in last).lstrip("._-")[:64]
    return name if name and name != "latest" else "run"
