"""From a YAML file, the environment and the command line to a checked RunConfig with each value's origin.

    defaults  <  file  <  SIRARA_ environment  <  command line

`SIRARA_TRAIN__STEPS=10` sets train.steps; on the command line `a.b=c`, `--a.b=c` and `--set a.b=c` are the
same. Values are read as YAML, so `data.train=[{path: a}]` works; `data.train.0.path=a` reaches into a list.
Paths are made absolute here, because a run may be resumed from another folder.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sirara.config.check import REQUIRED_SIZES, SIZES, check_layout
from sirara.config.complain import complaint
from sirara.config.run_folder import RunFolder
from sirara.config.schema import ON_PAPER, ModelConfig, RunConfig
from sirara.config.yaml_file import KeyPath, dump_yaml, parse_yaml, read_yaml
from sirara.errors import ConfigError
from sirara.pure.families import PRESETS, ModelShape, RopeScaling
from sirara.pure.hf_config import shape_from_config

ENV_PREFIX = "SIRARA_"
# Variables that speak to Sirara but are no keys of a configuration.
NOT_CONFIG = frozenset({"SIRARA_DEVICE", "SIRARA_DEADLINE", "SIRARA_PROFILE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked configuration.

    origins: for every leaf "sirara.yaml:12", "environment SIRARA_SEED", "command line" or "default".
    text: the resolved YAML; loading it without environment and overrides gives the same configuration.
    auto: `mesh: auto`, which leaves the whole layout to the planner; `config` has the defaults in its place.
    """

    config: RunConfig
    origins: dict[str, str]
    text: str
    auto: bool = False


def load(
    path: Path | str,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    on_paper: bool = False,
) -> Loaded:
    """Reads, merges and checks.

    Args:    on_paper: for a plan, which may ask for what this version does not run.
    Raises:  ConfigError naming key, file and line, what was found and what to do.
    """
    path = Path(path)
    value, lines = read_yaml(path)
    tree = _Tree(value, {key: f"{path}:{line}" for key, line in lines.items()})
    for name, text in sorted((env or {}).items()):
        if name.startswith(ENV_PREFIX) and name not in NOT_CONFIG:
            key = name.removeprefix(ENV_PREFIX).lower().split("__")
            tree.set(key, _parse(text, name), f"environment {name}")
    for key, text in split_overrides(overrides):
        tree.set(key.split("."), _parse(text, f"{key}={text}"), "command line")
    return _checked(tree, str(path), on_paper=on_paper)


def model_shape(config: RunConfig, tokenizer_vocab: int | None) -> ModelShape:
    """The complete sizes of the model to train.

    Args:    tokenizer_vocab: tokens that the data uses; None when there is no tokenizer to ask.
    Raises:  ConfigError for sizes that do not fit together, a folder of `model.from` without a readable
             config.json, and a vocabulary that is larger than the model's.
    """
    shape = _shape(config.model, vocab=tokenizer_vocab)
    if tokenizer_vocab is not None and tokenizer_vocab > shape.vocab:
        raise ConfigError(
            f"the tokenizer has {tokenizer_vocab} tokens, the model only model.vocab={shape.vocab}",
            code="SR108",
            where="model.vocab",
            try_=[
                "model.vocab=tokenizer",
                f"model.vocab={tokenizer_vocab}",
                "data.tokenizer=... a smaller one",
            ],
        )
    return shape


def _shape(model: ModelConfig, *, vocab: int | None) -> ModelShape:
    if model.from_ is not None and model.layers is None:
        return _shape_of_folder(weights_folder(Path(model.from_)))
    given: dict[str, Any] = {name: getattr(model, name) for name in SIZES if getattr(model, name) is not None}
    if model.rope_scaling is not None:
        given["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if given.get("vocab", None if model.preset else "tokenizer") == "tokenizer":
        if vocab is None:
            raise ConfigError(
                "model.vocab=tokenizer, but there is no tokenizer to ask", try_=["data.tokenizer=FILE"]
            )
        given["vocab"] = vocab
    if model.preset is None:
        return ModelShape(**given)
    if model.preset not in PRESETS:
        raise ConfigError(f"model.preset={model.preset} is not known", try_=[f"one of {', '.join(PRESETS)}"])
    return _resized(PRESETS[model.preset], given)


def _resized(preset: ModelShape, given: dict[str, Any]) -> ModelShape:
    """A preset with some sizes replaced; what follows from a replaced size is derived again."""
    derived: dict[str, Any] = {}
    if preset.head_dim * preset.heads == preset.hidden and {"hidden", "heads"} & set(given):
        derived["head_dim"] = 0
    if preset.kv_heads == preset.heads and "heads" in given:
        derived["kv_heads"] = 0
    if "hidden" in given:
        derived["ffn"] = 0
    return replace(preset, **{**derived, **given})


def weights_folder(folder: Path) -> Path:
    """The Hugging Face folder that `model.from` means: itself, or the newest committed step of a run's folder."""
    if (folder / "config.json").exists() or not (folder / "checkpoints").is_dir():
        return folder
    run = RunFolder(folder)
    steps = run.committed_steps()
    return run.checkpoints / f"step-{steps[-1]:09d}" if steps else folder


def _shape_of_folder(folder: Path) -> ModelShape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.from={folder} is no Hugging Face folder: there is no config.json", code="SR101"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.from={folder}: config.json cannot be read: {error}", code="SR101"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.from={folder}: config.json is not a JSON object", code="SR101")
    return shape_from_config(config)


def split_overrides(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """(dotted key, text of the value) of `a.b=c`, `--a.b=c`, `--set a.b=c` and `--set=a.b=c`."""
    pairs = []
    words = iter(overrides)
    for word in words:
        given = word
        if word == "--set":
            given = next(words, "")
        elif word.startswith("--"):
            given = word.removeprefix("--set=") if word.startswith("--set=") else word[2:]
        key, equals, text = given.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(
                f"{word if word != '--set' else f'--set {given}'} is not an override",
                code="SR104",
                where="command line",
                try_=["key=value with the key spelled as in the file, such as train.steps=100"],
            )
        pairs.append((key, text))
    return pairs


@dataclass
class _Tree:
    """Nested values under construction, with the origin of each key that was given."""

    value: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def set(self, words: Sequence[str], value: Any, origin: str) -> None:
        path: KeyPath = ()
        here: Any = self.value
        for word in words[:-1]:
            path = (*path, _step(here, word, words, origin))
            below = _at(here, path[-1])
            if below is None or (path == ("mesh",) and below == "auto"):
                here[path[-1]] = below = {}
                self.origins[path] = origin
            if not isinstance(below, dict | list):
                raise ConfigError(
                    f"{'.'.join(words)} cannot be set: {'.'.join(map(str, path))} is {below!r}",
                    code="SR104",
                    where=origin,
                )
            here = below
        path = (*path, _step(here, words[-1], words, origin))
        for key in [key for key in self.origins if key[: len(path)] == path]:
            del self.origins[key]
        here[path[-1]] = value
        self.origins[path] = origin

    def origin(self, path: KeyPath) -> str:
        """Where a key was given, or the nearest section around it that was."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return ""

    def origin_of_leaf(self, path: KeyPath) -> str:
        """Where this very value was given: itself, or inside a list or section given as a whole."""
        here: Any = self.value
        for word in path:
            here = _at(here, word)
            if here is None and word != path[-1]:
                return "default"
        given = here is not None or path in self.origins
        return self.origin(path) if given and self.origin(path) else "default"


def _at(container: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return container[step] if isinstance(container, list) and step < len(container) else None
    return container.get(step) if isinstance(container, dict) else None


def _step(container: Any, word: str, words: Sequence[str], origin: str) -> str | int:
    if not isinstance(container, list):
        return word
    if not word.isdecimal() or int(word) >= len(container):
        raise ConfigError(
            f"{'.'.join(words)} cannot be set: {word} is no index of a list of {len(container)}",
            code="SR104",
            where=origin,
        )
    return int(word)


def _parse(text: str, source: str) -> Any:
    return parse_yaml(text, source)[0]


def _checked(tree: _Tree, source: str, *, on_paper: bool = False) -> Loaded:
    _make_paths_absolute(tree.value)
    try:
        _fill_in_sizes(tree.value.get("model"))
        config = RunConfig.model_validate(tree.value, context=ON_PAPER if on_paper else None)
        _fits_the_model(config)
    except ValidationError as error:
        raise complaint(error, tree.value, tree.origin, source) from error
    except ConfigError as error:
        raise _placed(error, tree, source) from error
    resolved = config.model_dump(by_alias=True, mode="json")
    resolved["model"] = {key: value for key, value in resolved["model"].items() if value is not None}
    origins = {".".join(map(str, path)): tree.origin_of_leaf(path) for path in _leaves(resolved)}
    auto = tree.value.get("mesh") == "auto"
    return Loaded(config=config, origins=origins, text=dump_yaml(resolved), auto=auto)


def _make_paths_absolute(value: dict[str, Any]) -> None:
    value.setdefault("run_dir", RunConfig.model_fields["run_dir"].default)
    model, data, offload = value.get("model"), value.get("data"), value.get("offload")
    places: list[tuple[Any, str]] = [
        (value, "run_dir"),
        (model, "from"),
        (data, "tokenizer"),
        (offload, "path"),
    ]
    for key in ("train", "eval"):
        sources = _at(data, key)
        places += [(source, "path") for source in sources] if isinstance(sources, list) else []
    for section, key in places:
        if isinstance(section, dict) and isinstance(section.get(key), str) and section[key]:
            section[key] = os.path.abspath(os.path.expanduser(section[key]))


def _fill_in_sizes(model: Any) -> None:
    """Writes the sizes of the folder `model.from` beside it: a run must not need the folder for ever."""
    if not isinstance(model, dict) or not isinstance(model.get("from"), str) or model.get("preset"):
        return
    folder = weights_folder(Path(model["from"]))
    complete = all(model.get(name) is not None for name in (*REQUIRED_SIZES, "vocab"))
    if complete and not folder.exists():
        return
    shape = asdict(_shape_of_folder(folder))
    for name in SIZES:
        if shape[name] is None:
            continue
        if model.get(name, shape[name]) != shape[name]:
            raise ConfigError(
                f"model.{name}={model[name]} is not what {folder / 'config.json'} says: {shape[name]}",
                where=f"model.{name}",
                try_=[f"leave model.{name} out"],
            )
        model[name] = shape[name]


def _fits_the_model(config: RunConfig) -> None:
    # No layout hangs on the size of the vocabulary.
    shape = _shape(config.model, vocab=1)
    check_layout(config, shape)
    if config.data.seq_len > shape.max_seq:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is longer than model.max_seq={shape.max_seq}",
            where="data.seq_len",
            try_=[f"data.seq_len={shape.max_seq}", f"model.max_seq={config.data.seq_len}"],
        )


def _placed(error: ConfigError, tree: _Tree, source: str) -> ConfigError:
    """The same error with the origin of its key."""
    # The errors of a model's sizes begin with the key.
    key = error.where or error.what.partition("=")[0]
    if not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", key):
        return error
    path: KeyPath = tuple(int(word) if word.isdecimal() else word for word in key.split("."))
    origin = tree.origin(path) or source
    return type(error)(error.what, code=error.code, where=f"{key} ({origin})", why=error.why, try_=error.try_)


def _leaves(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    if isinstance(value, dict) and value:
        return [leaf for key, below in value.items() for leaf in _leaves(below, (*path, key))]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))]
    return [path]
