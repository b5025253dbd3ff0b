"""What `sirara plan` does without --trace: from files and words to a plan, and to text, JSON and pictures."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from sirara.cli.options import say_json
from sirara.config.load import Loaded, load, model_shape
from sirara.config.schema import RunConfig
from sirara.config.units import parse_size_bytes
from sirara.data.sources import tokenizer_of
from sirara.errors import ConfigError, PlanError, SiraraError
from sirara.launch.local import count_gpus
from sirara.plan.constants import fitted
from sirara.plan.explain import SOURCES, changes_text, text
from sirara.plan.explain_search import search_record, search_text
from sirara.plan.from_config import cluster_of, degree_of_dp
from sirara.plan.goodput import Reliability
from sirara.plan.hardware import load as load_accelerator
from sirara.plan.hardware import table
from sirara.plan.layouts import whole_space
from sirara.plan.page import as_html
from sirara.plan.profile import Here, here, is_profile, of_profile, read
from sirara.plan.search import Found, search, smaller
from sirara.plan.unlike import arranged_text, arrangements, searched
from sirara.plan.verdict import Change, Plan, Setting, nearest, plan, refusal
from sirara.pure.families import ModelShape

DEFAULT_GPU, HERE = "h100-sxm", "here"


def shape_on_paper(config: RunConfig) -> ModelShape:
    """The model's sizes; a tokenizer is opened only where the vocabulary is said to be its own."""
    model = config.model
    given = model.preset is not None or model.from_ is not None
    asks = model.vocab == "tokenizer" or (model.vocab is None and not given)
    return model_shape(config, tokenizer_of(config.data)[1] if asks else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line says of machines and money; None: nothing."""

    gpus: int | None
    gpu: str | None
    nodes: int | None
    price: float | None
    mtbf: float | None
    ceiling: str | None


def planned(
    path: str,
    words: Sequence[str],
    *,
    as_json: bool,
    gpus: int | None,
    gpu: str | None,
    nodes: int | None,
    price: float | None,
    mtbf: float | None,
    what_if: Sequence[str],
    searching: bool,
    objective: str,
    ceiling: str | None,
    html_file: str | None,
    png_file: str | None,
) -> None:
    """One layout, or a search; see `sirara plan --help`.

    Raises:  PlanError when it does not fit.
    """
    wanted = Wanted(gpus=gpus, gpu=gpu, nodes=nodes, price=price, mtbf=mtbf, ceiling=ceiling)
    loaded = load(path, words, os.environ, on_paper=True)
    shape = shape_on_paper(loaded.config)
    setting, assumed = _setting(loaded, wanted)
    searching = searching or loaded.auto
    if what_if and searching:
        raise ConfigError(
            "--what-if asks about one layout, and --search or mesh: auto looks for one", code="SR216",
            where="--what-if", try_=["a layout, as in mesh.dp=8", "leave --what-if out"],
        )  # fmt: skip
    if objective != "time" and not searching:
        raise ConfigError(
            f"--objective {objective} says what a search looks for", code="SR216", where="--objective",
            try_=["--search", "leave --objective out"],
        )  # fmt: skip
    if searching:
        _searched(
            loaded,
            shape,
            setting,
            assumed,
            objective,
            as_json=as_json,
            html_file=html_file,
            png_file=png_file,
        )
        return
    found = plan(loaded.config, shape, setting, dp=degree_of_dp(loaded.config, setting.cluster.gpus))
    changes = [_what_if(found, wanted, path, words, change) for change in what_if]
    ways = arrangements(found) if setting.counts else []
    if as_json:
        say_json(
            {
                **found.as_record(),
                "sources": {**SOURCES, "step": found.how},
                "assumed": assumed,
                "what_if": [_record(c) for c in changes],
                "unlike_nodes": [way.as_record() for way in ways],
            }
        )
    else:
        click.echo(text(found, assumed=assumed))
        if changes:
            click.echo("\n" + changes_text(found, changes, "what if"))
        if ways:
            click.echo("\n" + arranged_text(ways))
    _write(found, assumed, html_file, png_file)
    if not found.fits and not any(way.fits and way.runs for way in ways):
        raise refusal(found, _near(found, path, words))


def _searched(
    loaded: Loaded,
    shape: ModelShape,
    setting: Setting,
    assumed: Sequence[str],
    objective: str,
    *,
    as_json: bool,
    html_file: str | None,
    png_file: str | None,
) -> None:
    """The best layout on these devices, or for the cost on fewer of them."""
    gpus = setting.cluster.gpus
    counts = (
        [gpus]
        if objective != "cost"
        else [gpus >> n for n in range(6) if gpus >> n >= 1 and gpus % (1 << n) == 0]
    )
    found: list[Found] = []
    refused: PlanError | None = None
    for count in counts:
        there = setting if count == gpus else smaller(setting, count)
        space = whole_space(loaded.config, shape, setting.cluster.accelerator, count)
        try:
            found.append(search(loaded.config, shape, there, space, objective=objective))
        except PlanError as error:
            refused = refused or error
    if not found:
        raise refused or PlanError("no layout fits", code="SR215")
    # Device hours, failures included: money needs no price for this.
    best = min(found, key=lambda f: f.best.gpu_hours) if objective == "cost" else found[0]
    ways = [way for _, way in searched(loaded.config, shape, setting)[:3]] if setting.counts else []
    if as_json:
        unlike = [way.as_record() for way in ways]
        say_json({**search_record(best), "assumed": list(assumed), "unlike_nodes": unlike})
    else:
        click.echo(text(best.best_now or best.best, assumed=assumed) + "\n\n" + search_text(best))
        if len(found) > 1:
            click.echo(
                "\ndevices"
                + "".join(f"\n  {f.best.gpus:>7,}  {f.best.gpu_hours:>14,.0f} device hours" for f in found)
            )
        if ways:
            click.echo("\n" + arranged_text(ways))
    _write(best.best_now or best.best, assumed, html_file, png_file)


def _setting(loaded: Loaded, wanted: Wanted) -> tuple[Setting, list[str]]:
    gpu, gpus, nodes = wanted.gpu, wanted.gpus, wanted.nodes
    assumed = [] if gpu else [f"{DEFAULT_GPU} (--gpu)"]
    names = [part.partition(":") for part in (gpu or DEFAULT_GPU).split("+")]
    profile, note = _profile(gpu, loaded)
    assumed += [note] if note else []
    kinds = [profile.accelerator if profile else load_accelerator(name) for name, _, _ in names]
    accelerator, counts = kinds[0], tuple(int(n) for _, _, n in names if n.isdecimal() and int(n))
    if len(counts) != len(kinds) and (len(kinds) > 1 or names[0][1]):
        raise ConfigError(
            f"--gpu {gpu} does not say how many of each", code="SR216", where="--gpu",
            try_=["+".join(f"{k.name}:64" for k in kinds)],
        )  # fmt: skip
    if counts:
        if gpus not in (None, sum(counts)):
            raise ConfigError(
                f"--gpu {gpu} is {sum(counts)} devices, not {gpus}", code="SR216", where="--gpu, --gpus",
                try_=["leave --gpus out"],
            )  # fmt: skip
        gpus = sum(counts)
    m, config = loaded.config.mesh, loaded.config
    if gpus is None and nodes is not None:
        gpus = cluster_of(accelerator, nodes=nodes).gpus
    if gpus is None:
        gpus = degree_of_dp(config, None) * m.pp * m.cp * m.tp
        if m.dp == "auto" and config.launch.nproc == "auto":
            assumed.append(f"{gpus} devices (--gpus)")
    price, mtbf = _positive("--price", wanted.price, or_none=True), _positive("--mtbf", wanted.mtbf)
    setting = Setting(
        cluster=cluster_of(accelerator, gpus=gpus, nodes=nodes),
        table=table(kinds),
        counts=counts if len(kinds) > 1 else (),
        constants=fitted(),
        price_per_hour=price,
        reliability=Reliability() if mtbf is None else Reliability(gpu_hours_per_failure=mtbf),
        ceiling_bytes=_ceiling(wanted.ceiling),
        profile=None if profile is None else profile.profile,
    )
    return setting, assumed


def _positive(option: str, value: float | None, *, or_none: bool = False) -> float | None:
    """The value of an option that is a quantity; or_none: 0 is one too."""
    if value is None or (math.isfinite(value) and (value > 0 or (or_none and value == 0))):
        return value
    raise ConfigError(f"{option} {value:g} is not a quantity", code="SR216", where=option)


def _ceiling(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        size = parse_size_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--ceiling {text} {error}", code="SR216", where="--ceiling") from error
    return _positive("--ceiling", float(size))


def _profile(gpu: str | None, loaded: Loaded) -> tuple[Here | None, str]:
    """(what is measured of the accelerator that was asked for, in words) for `here` and the file of a profile."""
    launch, mesh = loaded.config.launch, loaded.config.mesh
    workers = launch.nproc if isinstance(launch.nproc, int) else mesh.pp * mesh.cp * mesh.tp
    workers = max(workers, mesh.pp * mesh.cp * mesh.tp * (mesh.dp if isinstance(mesh.dp, int) else 1))
    if gpu == HERE:
        found = here("cuda" if count_gpus(os.environ) else "cpu", workers=workers // launch.nodes)
        return found, f"this machine: {found.why}"
    path = Path(gpu or "")
    if path.suffix in (".yaml", ".yml") and path.is_file() and is_profile(path):
        known = of_profile(read(path), workers=workers // launch.nodes)
        return known, f"the machine of {path}: {known.why}"
    return None, ""


def neighbours(found: Plan) -> list[str]:
    """Overrides near a plan, that need less memory; several keys of one change are joined by a blank."""
    c, m, t = found.config, found.config.mesh, found.config.train
    dp = int(found.point.dp[0])
    words = []
    if t.micro_batch > 1:
        words.append(f"train.micro_batch={t.micro_batch // 2}")
    if t.recompute == "none":
        words.append("train.recompute=selective")
    if t.recompute in ("none", "selective") and not t.compile:
        words.append("train.recompute=norm+attention+mlp")
    if t.recompute != "full":
        words.append("train.recompute=full")
    words += [f"mesh.zero={z}" for z in range(m.zero + 1, 4) if dp > 1]
    if m.block == "auto" or m.block > 1:
        words.append("mesh.block=1")
    if m.tp > 1 and not m.sequence_parallel:
        words.append("mesh.sequence_parallel=true")
    for key, value in (("tp", m.tp), ("pp", m.pp)):
        if dp % 2 == 0:
            words.append(f"mesh.{key}={value * 2} mesh.dp={dp // 2}")
        if dp % 4 == 0:
            words.append(f"mesh.{key}={value * 4} mesh.dp={dp // 4}")
    if t.recompute != "full" and dp > 1 and m.zero < 3:
        words.append("mesh.zero=3 train.recompute=full")
    if not found.setting.counts:
        words += [f"gpus={found.gpus * n}" for n in (2, 4)]
    if c.offload.optimizer == "none":
        words.append("offload.optimizer=host")
    if c.numerics == "exact":
        words.append("numerics=fast")
    return words


def _what_if(found: Plan, wanted: Wanted, path: str, words: Sequence[str], change: str) -> Change:
    """The plan of the same command with one change; what is wrong with the change is said in its place."""
    keys = _keys(change)
    machine = {key: value for key, _, value in (k.partition("=") for k in keys) if key in _MACHINE}
    rest = [k for k in keys if k.partition("=")[0] not in machine]
    try:
        gpus = _count(machine["gpus"]) if "gpus" in machine else found.gpus
        other = replace(
            wanted, gpus=gpus, gpu=machine.get("gpu", wanted.gpu), nodes=None if machine else wanted.nodes
        )
        loaded = load(path, [*words, *_freed(keys), *rest], os.environ, on_paper=True)
        setting, _ = _setting(loaded, other)
        config = loaded.config
        there = plan(config, shape_on_paper(config), setting, dp=degree_of_dp(config, setting.cluster.gpus))
    except SiraraError as error:
        return nearest(found, [(change, error.what, 0)])[0]
    return Change(
        keys=change,
        step_s=there.step_s,
        device_bytes=there.device_bytes,
        fits=there.fits,
        runs=not there.not_run,
    )


_MACHINE = ("gpus", "gpu")


def _keys(change: str) -> list[str]:
    """A value may have blanks, such as a recipe of recompute; a new key begins with its name."""
    return re.split(r"\s+(?=[\w.]+=)", change.strip())


def _freed(keys: Sequence[str]) -> list[str]:
    """Data parallelism follows from a change of devices or of the mesh, unless the change says it."""
    moved = any(k.startswith(("gpus=", "mesh.")) for k in keys)
    return ["mesh.dp=auto"] if moved and not any(k.startswith("mesh.dp=") for k in keys) else []


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"gpus={text} is no number of devices", code="SR216", where="--what-if")
    return int(text)


def _near(found: Plan, path: str, words: Sequence[str]) -> list[Change]:
    """The neighbours of a plan by formulas, all at once."""
    here: list[tuple[str, RunConfig | str, int]] = []
    changes: list[Change] = []
    for change in neighbours(found):
        keys = _keys(change)
        gpus = next((int(k.removeprefix("gpus=")) for k in keys if k.startswith("gpus=")), found.gpus)
        rest = [k for k in keys if not k.startswith("gpus=")]
        try:
            config = load(path, [*words, *_freed(keys), *rest], os.environ, on_paper=True).config
            dp = degree_of_dp(config, gpus)
        except SiraraError:
            continue
        if gpus == found.gpus:
            here.append((change, config, dp))
            continue
        cluster = cluster_of(found.setting.cluster.accelerator, gpus=gpus)
        changes += nearest(found, [(change, config, dp)], setting=replace(found.setting, cluster=cluster))
    return [*nearest(found, here), *changes]


def _record(change: Change) -> dict[str, Any]:
    """Null for what a change that cannot be has not: JSON has no NaN."""
    return {
        "keys": change.keys, "step_s": None if change.error else change.step_s,
        "device_bytes": None if change.error else change.device_bytes, "fits": change.fits,
        "runs_now": change.runs, "error": change.error,
    }  # fmt: skip


def _write(found: Plan, assumed: Sequence[str], html_file: str | None, png_file: str | None) -> None:
    try:
        if html_file:
            Path(html_file).write_text(as_html(found, assumed=assumed), encoding="utf-8")
        if png_file:
            _drawn(found, png_file)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        where = "--html" if error.filename == html_file else "--png"
        raise ConfigError(
            f"{error.filename} cannot be written: {error.strerror}", code="SR217", where=where
        ) from error


def _drawn(found: Plan, png_file: str) -> None:
    if Path(png_file).suffix.lower() != ".png":
        raise ConfigError(f"{png_file} does not end in .png", code="SR217", where="--png")
    try:
        from sirara.plan.draw import picture
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib",
            code="SR217",
            where="--png",
            try_=["pip install 'sirara[plot]'", "--html"],
        ) from error
    picture(found, png_file)
