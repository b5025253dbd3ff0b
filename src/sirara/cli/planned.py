"""What `sirara plan` does without --trace: from files and words to a plan, and to text, JSON and pictures."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sirara.cli.machines import Wanted, setting_of, stand_ins
from sirara.cli.options import say_json
from sirara.config.load import Loaded, load, model_shape
from sirara.config.schema import RunConfig
from sirara.data.sources import tokenizer_of
from sirara.errors import ConfigError, PlanError, SiraraError
from sirara.plan.advice import Change, nearest, refusal
from sirara.plan.explain import SOURCES, changes_text, hours, text
from sirara.plan.explain_search import search_record, search_text
from sirara.plan.from_config import cluster_of, degree_of_dp
from sirara.plan.layouts import whole_space
from sirara.plan.offload import slowest
from sirara.plan.page import as_html
from sirara.plan.search import Found, search, smaller
from sirara.plan.unlike import Arranged, arranged_text, arrangements, searched, why_none
from sirara.plan.verdict import RATES, UNITS, Plan, Setting, plan
from sirara.pure.families import ModelShape

PLANNED = 7
"""Changes near a layout that does not fit that are planned as it was."""


def shape_on_paper(config: RunConfig) -> ModelShape:
    """The model's sizes; a tokenizer is opened only where the vocabulary is said to be its own."""
    model = config.model
    given = model.preset is not None or model.from_ is not None
    asks = model.vocab == "tokenizer" or (model.vocab is None and not given)
    return model_shape(config, tokenizer_of(config.data)[1] if asks else None)


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
    setting, assumed = setting_of(loaded, wanted)
    assumed += stand_ins(setting.table, loaded.config.train.precision)
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
            wanted,
            as_json=as_json,
            html_file=html_file,
            png_file=png_file,
        )
        return
    dp = degree_of_dp(loaded.config, setting.cluster.gpus)
    found = plan(loaded.config, shape, setting, dp=dp)
    changes = [_what_if(found, wanted, path, words, change) for change in what_if]
    off = next((c.formulas_off for c in changes if c.measured), None)
    if off is not None and found.how == RATES:
        # Formulas beside measured times: as far off as they are there.
        found = plan(loaded.config, shape, replace(setting, formulas_off=off), dp=dp)
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
                "no_unlike_nodes": _why_no_ways(setting, found, ways),
            }
        )
    more = [changes_text(found, changes, "what if")] if changes else []
    more += [arranged_text(ways, why_none(found))] if setting.counts else []
    if not as_json:
        click.echo("\n\n".join([text(found, assumed=assumed), *more]))
    _write(found, assumed, more, html_file, png_file)
    if not found.fits and not any(way.fits and way.runs for way in ways):
        near = _near(found, path, words)
        raise refusal(found, [_what_if(found, wanted, path, words, keys) for keys in _first_that_fit(near)])


def _searched(
    loaded: Loaded,
    shape: ModelShape,
    setting: Setting,
    assumed: Sequence[str],
    objective: str,
    wanted: Wanted,
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
    if (setting.counts or len(counts) > 1) and sys.stderr.isatty():
        click.echo("searching: half a minute for a large model", err=True)
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
    ways = [way for _, way in searched(loaded.config, shape, setting)] if setting.counts else []
    alone = _alone(loaded, shape, wanted, objective) if setting.counts else {}
    if as_json:
        unlike = [way.as_record() for way in ways]
        why = _why_no_ways(setting, None, ways)
        say_json(
            {
                **search_record(best),
                "assumed": list(assumed),
                "unlike_nodes": unlike,
                "no_unlike_nodes": why,
                "one_kind_alone": [
                    {
                        "gpu": gpu,
                        "devices": f.best.gpus,
                        "step_s": (f.best_now or f.best).step_s,
                        "overrides": list(f.now_overrides or f.best_overrides),
                    }
                    for gpu, f in alone.items()
                ],
            }
        )
    more = [search_text(best)]
    if len(found) > 1:
        more.append(
            "devices"
            + "".join(
                f"\n  {f.best.gpus:>7,}  {hours(f.best.gpu_hours) if f.best.ends else 'never ends':>14}"
                f"{' device hours' if f.best.ends else ''}"
                for f in found
            )
        )
    shown = best.best_now or best.best
    if ways:
        more.append(arranged_text(ways))
    elif setting.counts:
        more.append(f"unlike nodes\n  {_why_no_ways(setting, None, ways)}")
    if setting.counts:
        more += [_alone_text(alone)] if alone else []
        more = [*_fastest_said(shown, ways, alone), *more]
    if not as_json:
        click.echo("\n\n".join([text(shown, assumed=assumed), *more]))
    _write(shown, assumed, more, html_file, png_file)


def _alone(loaded: Loaded, shape: ModelShape, wanted: Wanted, objective: str) -> dict[str, Found]:
    """By accelerator, the best layout on the nodes of that kind, the others left out; none where nothing fits."""
    found, counts = dict[str, Found](), dict[str, int]()
    for part in (wanted.gpu or "").split("+"):
        gpu, _, count = part.partition(":")
        counts[gpu] = counts.get(gpu, 0) + int(count)
    for gpu, count in counts.items():
        setting, _ = setting_of(loaded, replace(wanted, gpu=gpu, gpus=count, nodes=None))
        space = whole_space(loaded.config, shape, setting.cluster.accelerator, count)
        try:
            found[setting.cluster.accelerator.name] = search(
                loaded.config, shape, setting, space, objective=objective
            )
        except PlanError:
            continue
    return found


def _alone_text(alone: Mapping[str, Found]) -> str:
    lines = ["one kind alone, the others left out"]
    for gpu, f in alone.items():
        lines.append(f"  {f.best.gpus:,} x {gpu}: step {(f.best_now or f.best).step_s:.2f} s")
        lines.append("    " + " ".join(f"'{w}'" for w in f.now_overrides or f.best_overrides))
    return "\n".join(lines)


def _fastest_said(shown: Plan, ways: Sequence[Arranged], alone: Mapping[str, Found]) -> list[str]:
    """What beats the best layout of all devices taken as the slowest kind, if anything does."""
    others = [
        (way.step_s, "the first way to deal out unlike nodes") for way in ways[:1] if way.fits and way.runs
    ]
    others += [
        ((f.best_now or f.best).step_s, f"{f.best.gpus:,} x {gpu} alone, the others left out,")
        for gpu, f in alone.items()
        if f.best_now is not None and f.numerics == shown.config.numerics
    ]
    step_s, what = min(others, default=(math.inf, ""))
    if step_s >= shown.step_s:
        return []
    rest = f"than the best below, all as the slowest kind ({shown.step_s:.2f} s): use its keys, at the end"
    return [f"unlike nodes  {what} is faster ({step_s:.2f} s) {rest}"]


def _why_no_ways(setting: Setting, found: Plan | None, ways: Sequence[Arranged]) -> str:
    """Why there is no way to use unlike nodes, "" where there is one.  found: None after a search of all meshes."""
    if ways:
        return ""
    if not setting.counts:
        return "all devices are alike"
    return why_none(found) if found is not None else "no mesh deals them out; planned as the slowest kind"


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
    away = [f"offload.{what}=host" for what in ("optimizer", "params") if getattr(c.offload, what) == "none"]
    words += [*away[:1], *([" ".join(away)] if len(away) > 1 else [])]
    if c.numerics == "exact":
        words.append("numerics=fast")
    return words


def _what_if(found: Plan, wanted: Wanted, path: str, words: Sequence[str], change: str) -> Change:
    """The plan of the same command with one change; what is wrong with the change is said in its place."""
    keys = _keys(change)
    strange = [k for k in keys if not k.partition("=")[2]]
    if strange:
        raise ConfigError(
            f"--what-if {change}: {strange[0]} is no KEY=VALUE", code="SR216", where="--what-if"
        )
    machine = {key: value for key, _, value in (k.partition("=") for k in keys) if key in _MACHINE}
    rest = [k for k in keys if k.partition("=")[0] not in machine]
    try:
        gpus = _count(machine["gpus"]) if "gpus" in machine else found.gpus
        other = replace(
            wanted, gpus=gpus, gpu=machine.get("gpu", wanted.gpu), nodes=None if machine else wanted.nodes
        )
        loaded = load(path, [*words, *_freed(keys), *rest], os.environ, on_paper=True)
        setting, _ = setting_of(loaded, other)
        config = loaded.config
        setting = replace(setting, formulas_off=_formulas_off(found))
        stand_ins(setting.table, config.train.precision)
        there = plan(config, shape_on_paper(config), setting, dp=degree_of_dp(config, setting.cluster.gpus))
    except SiraraError as error:
        return nearest(found, [(change, error.what, 0)])[0]
    return Change(
        keys=change,
        step_s=there.step_s,
        tokens_per_s=there.tokens_per_s,
        device_bytes=there.device_bytes,
        fits=there.fits,
        runs=not there.not_run,
        measured=there.how == UNITS,
        formulas_off=_formulas_off(there),
        block=there.block,
    )


def _formulas_off(found: Plan) -> float:
    """What measured times of a layout are of the formulas', so that neighbours by formulas can stand beside it."""
    if found.how != UNITS:
        return found.setting.formulas_off
    formula = slowest(found.point, found.setting.table, found.setting.constants)
    return found.step_s / float(formula.step_s[0])


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
    """The neighbours of a plan by formulas, all at once: most of them are not worth a plan of their own."""
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


def _first_that_fit(changes: Sequence[Change]) -> list[str]:
    """The changes that are worth a plan of their own: the cheapest by formulas, and what other sums would save."""
    fitting = sorted((c for c in changes if c.fits), key=lambda c: (not c.runs, c.step_s))
    keys = [c.keys for c in fitting]
    return keys[:PLANNED] + [k for k in keys[PLANNED:] if k == "numerics=fast"]


def _record(change: Change) -> dict[str, Any]:
    """Null for what a change that cannot be has not: JSON has no NaN."""
    return {
        "keys": change.keys, "step_s": None if change.error else change.step_s,
        "tokens_per_s": None if change.error else change.tokens_per_s,
        "device_bytes": None if change.error else change.device_bytes, "fits": change.fits,
        "runs_now": change.runs, "measured": change.measured, "error": change.error,
    }  # fmt: skip


def _write(
    found: Plan, assumed: Sequence[str], more: Sequence[str], html_file: str | None, png_file: str | None
) -> None:
    try:
        if html_file:
            Path(html_file).write_text(as_html(found, assumed=assumed, more=more), encoding="utf-8")
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
