"""The training sources of a run: opened, checked against each other, and continued from a checkpoint.

A source is known by its content (and by a number when the same content stands in the blend twice), so it may
move to another path. Of a run that goes on, the blend may change and sources may come and go; seed, sequence
length, tokenizer and the content behind a path may not, because the samples seen so far would mean nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sirara.config.schema import DataConfig
from sirara.data.pieces import MappedFiles
from sirara.data.store import TOKENIZER, TokenStore
from sirara.data.tokenizer import read_tokenizer, tokenizer_digest, tokenizer_file, tokenizer_vocab
from sirara.errors import CheckpointError, ConfigError, DataError
from sirara.pure.order import PERIOD, SampleOrder, Segment, Source, apportion

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """One store of the blend; `source` is what the order knows of it."""

    source: Source
    store: TokenStore
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The order of the run from here on; `change` says how the blend differs from before, or is empty."""

    order: SampleOrder
    change: str


def tokenizer_of(data: DataConfig) -> tuple[Path | None, int]:
    """(tokenizer.json to keep with the model, its vocabulary): data.tokenizer or that of the first source."""
    if data.tokenizer is not None:
        file = tokenizer_file(data.tokenizer)
        return file, tokenizer_vocab(file)
    first = TokenStore.open(data.train[0].path)
    file = first.path / TOKENIZER
    return (file if file.exists() else None), first.index.vocab


def open_sources(data: DataConfig, *, vocab: int | None = None) -> list[OpenSource]:
    """The stores of data.train.

    Raises ConfigError when they do not fit each other, data.eval, data.tokenizer or the model's `vocab`.
    """
    maps = MappedFiles()
    stores = [TokenStore.open(given.path, maps=maps) for given in data.train]
    seen: Counter[str] = Counter()
    opened = []
    for given, store in zip(data.train, stores, strict=True):
        check_vocab(store, vocab)
        if store.tokens < 2:
            raise DataError(
                f"{store.path} has {store.tokens} tokens; there is nothing to predict", code="SR306"
            )
        digest = store.index.digest
        source = Source(id=f"{digest}#{seen[digest]}", name=str(given.path), tokens=store.tokens)
        seen[digest] += 1
        opened.append(OpenSource(source=source, store=store, weight=given.weight))
    _check_tokenizers(data, [*stores, *(TokenStore.open(given.path) for given in data.eval)])
    return opened


def check_vocab(store: TokenStore, vocab: int | None) -> None:
    """Raises ConfigError when the store may hold ids that a model of `vocab` tokens does not know."""
    if vocab is not None and store.index.vocab > vocab:
        raise ConfigError(
            f"the vocabulary of {store.path} has {store.index.vocab} tokens, the model only {vocab}",
            code="SR108",
            where="model.vocab",
            try_=("model.vocab=tokenizer", f"model.vocab={store.index.vocab}"),
        )


def begin_order(opened: Sequence[OpenSource], *, seed: int, seq_len: int) -> SampleOrder:
    """The order of a new run."""
    return SampleOrder.begin([o.source for o in opened], _counts(opened), seed=seed, seq_len=seq_len)


def continue_order(
    state: dict[str, Any], opened: Sequence[OpenSource], *, seed: int, seq_len: int
) -> Continued:
    """The order of a run that goes on from `state`; a changed blend takes effect at its sample `first`.

    Raises ConfigError naming the difference when the data are not those of the run.
    """
    old = order_of_state(state)
    _refuse_differences(state, opened, seed=seed, seq_len=seq_len)
    places = {source.id: number for number, source in enumerate(old.sources)}
    added = [o.source for o in opened if o.source.id not in places]
    # The path of today, for messages; the identity is the content's.
    names = {o.source.id: o.source.name for o in opened}
    sources = [
        Source(id=source.id, name=names.get(source.id, source.name), tokens=source.tokens)
        for source in (*old.sources, *added)
    ]
    given = dict(zip((o.source.id for o in opened), _counts(opened), strict=True))
    counts = tuple(given.get(source.id, 0) for source in sources)
    before = old.counts + (0,) * len(added)
    if counts == before:
        order = SampleOrder(sources, old.segments, seed=seed, seq_len=seq_len)
        return Continued(order=order, change="")
    order = old.reblended(state["first"], sources, counts)
    shares = [
        f"{source.name} {was / PERIOD:.4g} -> {now / PERIOD:.4g}"
        for source, was, now in zip(sources, before, counts, strict=True)
        if was != now
    ]
    return Continued(order=order, change=f"from sample {state['first']} on: {', '.join(shares)}")


def state_of_order(order: SampleOrder, first: int, tokenizer: str) -> dict[str, Any]:
    """What a checkpoint at sample `first` stores: plain JSON."""
    past = [segment for segment in order.segments if segment.start <= first]
    return {
        "version": STATE_VERSION,
        "first": first,
        "seed": order.seed,
        "seq_len": order.seq_len,
        "tokenizer": tokenizer,
        "digest": order_digest(order, tokenizer),
        "sources": [{"id": s.id, "path": s.name, "tokens": s.tokens} for s in order.sources],
        "segments": [{"start": s.start, "counts": list(s.counts), "cursors": list(s.cursors)} for s in past],
        "cursors": list(order.cursors(first)),
    }


def order_of_state(state: dict[str, Any]) -> SampleOrder:
    """The order that a checkpoint describes.  Raises CheckpointError when it contradicts itself."""
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"the data state has version {state.get('version')}; this Sirara reads {STATE_VERSION}",
            code="SR540",
        )
    try:
        sources = [Source(id=s["id"], name=s["path"], tokens=s["tokens"]) for s in state["sources"]]
        segments = [
            Segment(start=s["start"], counts=tuple(s["counts"]), cursors=tuple(s["cursors"]))
            for s in state["segments"]
        ]
        order = SampleOrder(sources, segments, seed=state["seed"], seq_len=state["seq_len"])
        cursors = list(order.cursors(state["first"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the data state of the checkpoint lacks {error}", code="SR541") from error
    if cursors != state["cursors"]:
        raise CheckpointError(
            f"the data state contradicts itself: cursors {state['cursors']}, its segments give {cursors}",
            code="SR541",
        )
    return order


def order_digest(order: SampleOrder, tokenizer: str) -> str:
    """Names the data configuration that holds now: tokenizer, seed, length, sources with their shares."""
    blend = [[s.id, n] for s, n in zip(order.sources, order.counts, strict=True) if n]
    content = [STATE_VERSION, tokenizer, order.seed, order.seq_len, blend]
    return xxhash.xxh3_128_hexdigest(repr(content).encode())


def _counts(opened: Sequence[OpenSource]) -> tuple[int, ...]:
    return apportion([o.weight for o in opened], [o.source.name for o in opened])


def _check_tokenizers(data: DataConfig, stores: Sequence[TokenStore]) -> None:
    wanted, holder = stores[0].index.tokenizer, str(stores[0].path)
    if data.tokenizer is not None:
        file = tokenizer_file(data.tokenizer)
        wanted, holder = tokenizer_digest(read_tokenizer(file), str(file)), str(file)
    for store in stores:
        found = store.index.tokenizer
        # Stores made from arrays do not know a tokenizer.
        if found and wanted and found != wanted:
            raise ConfigError(
                f"{store.path} was made by another tokenizer than {holder}",
                code="SR109",
                where="data",
                why=f"tokenizer digests {found} and {wanted}",
                try_=(f"data.tokenizer={store.path / TOKENIZER}", f"build {store.path} again with {holder}"),
            )


def _refuse_differences(
    state: dict[str, Any], opened: Sequence[OpenSource], *, seed: int, seq_len: int
) -> None:
    for key, now, name in (("seed", seed, "seed"), ("seq_len", seq_len, "data.seq_len")):
        if state[key] != now:
            raise _difference(f"{name} is {now}, it was {state[key]}", try_=f"{name}={state[key]}")
    tokenizers = {o.store.index.tokenizer for o in opened} - {""}
    if state["tokenizer"] and tokenizers and tokenizers != {state["tokenizer"]}:
        raise _difference(
            f"the tokenizer is {sorted(tokenizers)[0]}, it was {state['tokenizer']}",
            try_="the sources that the run was started with",
        )
    known = {source["id"] for source in state["sources"]}
    by_path = {source["path"]: source for source in state["sources"]}
    for o in opened:
        before = by_path.get(o.source.name)
        if before and o.source.id not in known:
            raise _difference(
                f"{o.source.name} has other content: {o.source.tokens} tokens, it had {before['tokens']}",
                why=f"digest {o.source.id}, it was {before['id']}",
                try_="build new text into another folder and add that to data.train",
            )


def _difference(what: str, *, try_: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"the data are not those of the run: {what}", code="SR110", where="data", why=why, try_=(try_,)
    )
