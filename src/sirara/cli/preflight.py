"""Before any process is started: are files, tokenizers and vocabularies there, and do they fit the model?"""

import os
from pathlib import Path

import click

from sirara.checkpoint.object_check import UNREACHABLE, check_store
from sirara.checkpoint.space import Seats, check_before_training, planned_needs
from sirara.config.check import SIZES, check_layout, frozen_names, value_of
from sirara.config.check_tiers import check_nodes
from sirara.config.load import model_shape, weights_folder
from sirara.config.run_folder import RunFolder
from sirara.config.schema import RunConfig
from sirara.data.sources import check_vocab, open_sources, tokenizer_of
from sirara.data.store import TokenStore
from sirara.errors import ConfigError, DataError, StorageError
from sirara.pure.families import ModelShape, unit_specs, with_frozen

FIXED = ("model.preset", "model.from", "seed", "data.seq_len", "train.optimizer.name", "train.freeze")


def preflight(config: RunConfig, *, starts: bool) -> ModelShape:
    """The sizes of the model, after everything that a run reads has been opened once.

    Args:    starts: at step 0, with the weights of `model.from`; a run that goes on has its own.
    Raises:  ConfigError, DataError or StorageError for what would fail in every worker.
    """
    _, vocab = tokenizer_of(config.data)
    shape = model_shape(config, vocab)
    check_layout(config, shape)
    open_sources(config.data, vocab=shape.vocab)
    for source in config.data.eval:
        store = TokenStore.open(source.path)
        check_vocab(store, shape.vocab)
        if store.tokens < 2:
            raise DataError(
                f"{store.path} has {store.tokens} tokens; there is nothing to predict", code="SR306"
            )
    folder = config.model.from_
    if starts and folder is not None and not (weights_folder(Path(folder)) / "config.json").is_file():
        raise ConfigError(
            f"model.from={folder} is no Hugging Face folder: there is no config.json", code="SR101"
        )
    _check_writable(Path(config.run_dir))
    return shape


def check_checkpoints(config: RunConfig, shape: ModelShape, *, run: RunFolder | None, seats: Seats) -> None:
    """Whether there are nodes, bytes, inodes and a store for the checkpoints of a run, as far as this node sees.

    Args:    run: None for a new one.
    Raises:  ConfigError for nodes that a new run lacks, PlanError for space that it will lack, StorageError for an
             object store that cannot take checkpoints.
    """
    if run is None:  # one that goes on may have lost nodes
        check_nodes(config, seats.nodes)
    units = unit_specs(shape)
    needs = planned_needs(
        config,
        with_frozen(units, frozen_names(config.train.freeze, units)) if config.train.freeze else units,
        checkpoints=run.checkpoints if run else Path(config.run_dir) / config.name / "checkpoints",
        run=str(run.record().get("run", run.id)) if run else config.name,
        seats=seats,
        pinned=len(list(run.checkpoints.glob("step-*/pinned"))) if run else 0,
    )
    check_before_training(needs)
    _check_stores(config, starts=run is None)


def _check_stores(config: RunConfig, *, starts: bool) -> None:
    """A run that goes on does so without a store that is away: its saves are on the disk, uploads are tried again."""
    for i, tier in enumerate(config.checkpoint.tiers):
        if tier.tier != "object" or tier.url is None:
            continue
        try:
            check_store(tier.url, tier.options)
        except StorageError as fault:
            away = fault.code == UNREACHABLE
            if away and not starts:
                click.echo(
                    f"warning: the object store {tier.url} is away, the run goes on without it: {fault.what}"
                    f" ({fault.why}); uploads are tried with every save that is due there",
                    err=True,
                )
                continue
            raise StorageError(
                f"the object store {tier.url} cannot take checkpoints: {fault.what}",
                code=fault.code,
                where=f"checkpoint.tiers.{i}",
                why=fault.why,
                try_=[
                    "start it, or see that this machine reaches its endpoint"
                    if away
                    else "make the bucket, or correct url, endpoint, region and keys of the tier",
                    "leave the tier object out; `sirara resume RUN checkpoint.tiers=...` adds it later",
                ],
            ) from fault


def check_continues(before: RunConfig, now: RunConfig) -> None:
    """Refuses to resume with what the tensors or the order of the samples of a run hang on.

    Raises:  ConfigError naming the key, its old and its new value.
    """
    for key in (*(f"model.{name}" for name in SIZES), *FIXED):
        _same(key, value_of(before, key), value_of(now, key))
    # Masters are fp32 whatever the weights are, except in a run in fp64.
    precisions = {before.train.precision, now.train.precision}
    if "fp64" in precisions and len(precisions) == 2:
        _same("train.precision", before.train.precision, now.train.precision)


def _same(key: str, before: object, now: object) -> None:
    if before != now:
        raise ConfigError(
            f"{key}={now} cannot be: this run has {key}={before}, and its checkpoints hang on it",
            code="SR121",
            where=key,
            try_=[f"leave {key} as it is", "sirara run starts another run"],
        )


def _check_writable(run_dir: Path) -> None:
    folder = run_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise StorageError(
            f"run_dir={run_dir} cannot be made: {folder} is a file", try_=["run_dir=ANOTHER-FOLDER"]
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(
            f"run_dir={run_dir} cannot be written: no permission in {folder}", try_=["sirara doctor"]
        )
