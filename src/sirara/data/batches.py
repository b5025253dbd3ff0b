"""Batches of a run: microbatch i of the global batch at sample `first`, the same whoever asks, ready in time.

samples first + i * micro_batch ...  ─order─▶ (source, epoch, index)  ─store─▶ rows of tokens and targets

B microbatch (sequences)    L sequence
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from sirara.config.schema import DataConfig
from sirara.data.sources import (
    begin_order,
    check_vocab,
    continue_order,
    open_sources,
    order_digest,
    state_of_order,
    tokenizer_of,
)
from sirara.data.store import TokenStore
from sirara.errors import CheckpointError, DataError
from sirara.pure.rng import key_of

NO_TARGET = -100
AHEAD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch; all int64 [B, L].

    targets_BL: the next token of the stream, -100 where there is none.  positions_BL: 0..L-1.
    documents_BL: the document each token belongs to (-1: padding), None unless asked for.
    """

    tokens_BL: Tensor
    targets_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor | None


class Batches:
    """The training data of a run.

    Args:  data: the section of the configuration.  vocab: the model's, to refuse larger ones.
           state, first: from a checkpoint (`state_at`), with the sample it goes on at; None for a new run.
           documents: whether batches carry document ids.
    Attributes:
           digest: names the data configuration.  change: how the blend differs from the checkpoint's, or "".
    Raises: ConfigError or DataError naming what does not fit.

    One thread asks; one more reads ahead.  A blend that changed takes effect at sample `first`.
    """

    tokenizer_of = staticmethod(tokenizer_of)

    def __init__(
        self,
        data: DataConfig,
        *,
        seed: int,
        micro_batch: int,
        vocab: int | None = None,
        state: dict[str, Any] | None = None,
        first: int | None = None,
        documents: bool = False,
    ) -> None:
        self.micro_batch = micro_batch
        self.seq_len = data.seq_len
        opened = open_sources(data, vocab=vocab)
        self._tokenizer = next((o.store.index.tokenizer for o in opened if o.store.index.tokenizer), "")
        self.change = ""
        if state is None:
            self.order = begin_order(opened, seed=seed, seq_len=data.seq_len)
        else:
            if first is not None and first != state.get("first"):
                raise CheckpointError(
                    f"the data state is that of sample {state.get('first')}, the counters stand at {first}",
                    code="SR542",
                )
            continued = continue_order(state, opened, seed=seed, seq_len=data.seq_len)
            self.order, self.change = continued.order, continued.change
        self.digest = order_digest(self.order, self._tokenizer)
        self._stores = {o.source.id: o.store for o in opened}
        self._id_keys = np.array([key_of("source", s.id) for s in self.order.sources], dtype=np.uint64)
        self._documents = documents
        depth = max(2, AHEAD_BYTES // (micro_batch * data.seq_len * 32))
        self._ahead = _ReadAhead(self._read, depth=depth)
        self._waited_s = 0.0

    def microbatch(self, first: int, i: int) -> Batch:
        """Samples [first + i * micro_batch, first + (i + 1) * micro_batch), read now unless prefetched."""
        begun = time.perf_counter()
        try:
            return self._ahead.take(first, i)
        finally:
            self._waited_s += time.perf_counter() - begun

    def prefetch(self, first: int, mine: Sequence[int]) -> None:
        """Reads microbatches `mine` of the global batch at `first` in the background, 256 MiB at most.

        An error of the reading comes out of `microbatch`.
        """
        self._ahead.want(first, mine)

    def take_waited_s(self) -> float:
        """Seconds that `microbatch` took since the last call of this."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def valid_targets(self, first: int, count: int) -> int:
        """Targets in the samples [first, first + count); nothing is read."""
        return self.order.valid_targets(first, count)

    def ids_digest(self, first: int, count: int) -> str:
        """Names the samples [first, first + count) by source, epoch and index."""
        located = self.order.locate(first, count)
        keys = self._id_keys[located.source].astype("<u8")
        ids = np.stack([keys.view("<i8"), located.epoch.astype("<i8"), located.index.astype("<i8")])
        return xxhash.xxh3_128_hexdigest(ids.tobytes())

    def state_at(self, first: int) -> dict[str, Any]:
        """What a checkpoint stores when `first` samples are consumed; plain JSON, whatever was read ahead."""
        return state_of_order(self.order, first, self._tokenizer)

    def close(self) -> None:
        """Ends the reading thread."""
        self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, first: int, i: int) -> Batch:
        located = self.order.locate(first + i * self.micro_batch, self.micro_batch)
        rows = _Rows(self.micro_batch, self.seq_len, documents=self._documents)
        for row, (source, index) in enumerate(
            zip(located.source.tolist(), located.index.tolist(), strict=True)
        ):
            store = self._stores[self.order.sources[source].id]
            rows.fill(row, store, *self.order.span(source, index))
        return rows.batch()


class EvalBatches:
    """A fixed walk over one store: batch i holds samples i * micro_batch ... in the order of the stream.

    Every token but the first is a target in exactly one batch. All batches have the same shape; the last is
    padded with rows that have no target.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        seq_len: int,
        micro_batch: int,
        vocab: int | None = None,
        documents: bool = False,
    ) -> None:
        store = TokenStore.open(path)
        check_vocab(store, vocab)
        if store.tokens < 2:
            raise DataError(
                f"{store.path} has {store.tokens} tokens; there is nothing to predict", code="SR306"
            )
        self.store = store
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.targets = store.tokens - 1
        self._samples = -(-self.targets // seq_len)
        self._documents = documents

    def __len__(self) -> int:
        return -(-self._samples // self.micro_batch)

    def batch(self, i: int) -> Batch:
        if not 0 <= i < len(self):
            raise IndexError(f"batch {i} of {len(self)}")
        rows = _Rows(self.micro_batch, self.seq_len, documents=self._documents)
        low = i * self.micro_batch
        for row, sample in enumerate(range(low, min(low + self.micro_batch, self._samples))):
            start = sample * self.seq_len
            rows.fill(row, self.store, start, min(self.seq_len, self.targets - start))
        return rows.batch()


class _Rows:
    """The arrays of one batch while they are filled."""

    def __init__(self, rows: int, seq_len: int, *, documents: bool) -> None:
        # Padding is token 0, an id of every vocabulary: it is computed on, but it is no target and, being
        # last, no other token attends to it.
        self.tokens_BL = np.zeros((rows, seq_len), dtype=np.int64)
        self.targets_BL = np.full((rows, seq_len), NO_TARGET, dtype=np.int64)
        self.documents_BL = np.full((rows, seq_len), -1, dtype=np.int64) if documents else None

    def fill(self, row: int, store: TokenStore, start: int, targets: int) -> None:
        ids = store.read(start, start + targets + 1)
        self.tokens_BL[row, :targets] = ids[:-1]
        self.targets_BL[row, :targets] = ids[1:]
        if self.documents_BL is not None:
            self.documents_BL[row, :targets] = store.document_ids(start, start + targets)

    def batch(self) -> Batch:
        rows, seq_len = self.tokens_BL.shape
        return Batch(
            tokens_BL=torch.from_numpy(self.tokens_BL),
            targets_BL=torch.from_numpy(self.targets_BL),
            positions_BL=torch.arange(seq_len).repeat(rows, 1),
            documents_BL=None if self.documents_BL is None else torch.from_numpy(self.documents_BL),
        )


class _ReadAhead:
    """Reads wanted microbatches in one thread, at most `depth` more than were taken.

    Only the asking thread touches the tables; the reading thread runs `read` and nothing else.
    """

    def __init__(self, read: Callable[[int, int], Batch], *, depth: int) -> None:
        self._read = read
        self._depth = depth
        self._wanted: deque[tuple[int, int]] = deque()
        self._ready: dict[tuple[int, int], Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sirara-data")

    def want(self, first: int, mine: Sequence[int]) -> None:
        known = {*self._wanted, *self._ready}
        self._wanted.extend((first, i) for i in mine if (first, i) not in known)
        self._read_on()

    def take(self, first: int, i: int) -> Batch:
        self._forget_before(first)
        ready = self._ready.pop((first, i), None)
        if ready is None:
            self._wanted = deque(key for key in self._wanted if key != (first, i))
            return self._read(first, i)
        self._read_on()
        return ready.result()

    def close(self) -> None:
        self._wanted.clear()
        self._ready.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read_on(self) -> None:
        while self._wanted and len(self._ready) < self._depth:
            key = self._wanted.popleft()
            self._ready[key] = self._thread.submit(self._read, *key)

    def _forget_before(self, first: int) -> None:
        # Left over from a batch that was not finished, or from before a jump back.
        self._wanted = deque(key for key in self._wanted if key[0] >= first)
        for key in [key for key in self._ready if key[0] < first]:
            self._ready.pop(key).cancel()
