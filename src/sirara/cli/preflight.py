"""Before any process is started: are files, tokenizers and vocabularies there, and do they fit the model?"""

import os
from pathlib import Path

from sirara.config.load import model_shape
from sirara.config.schema import RunConfig
from sirara.data.sources import check_vocab, open_sources, tokenizer_of
from sirara.data.store import TokenStore
from sirara.errors import DataError, StorageError
from sirara.pure.families import ModelShape


def preflight(config: RunConfig) -> ModelShape:
    """The sizes of the model, after everything that a run reads has been opened once.

    Raises:  ConfigError, DataError or StorageError for what would fail in every worker.
    """
    _, vocab = tokenizer_of(config.data)
    shape = model_shape(config, vocab)
    open_sources(config.data, vocab=shape.vocab)
    for source in config.data.eval:
        store = TokenStore.open(source.path)
        check_vocab(store, shape.vocab)
        if store.tokens < 2:
            raise DataError(
                f"{store.path} has {store.tokens} tokens; there is nothing to predict", code="SR306"
            )
    _check_writable(Path(config.run_dir))
    return shape


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
