"""What must hold between the tiers of checkpoints, their intervals and what is kept; and which stores there are.

Each raises a ConfigError whose `where` is the dotted key at fault; `config.load` adds the file and line.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from sirara.config.check import as_yaml
from sirara.errors import ConfigError

if TYPE_CHECKING:
    from sirara.config.schema import RunConfig, TierConfig

STORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "file", "memory")
"""Of URLs that the object tier can open (checkpoint/bucket.py)."""
STORE_URLS = ("s3://BUCKET/PREFIX", "gs://BUCKET/PREFIX", "az://CONTAINER/PREFIX", "file:///FOLDER")

MOST_BLOCKS = 255
"""Of a Reed-Solomon group over GF(2^8): data and parity."""

_KEYS_OF_TIERS = {
    "copies": ("peer",),
    "data": ("parity",),
    "parity": ("parity",),
    "domains": ("peer", "parity"),
    "url": ("object",),
    "options": ("object",),
    "path": ("memory", "peer", "parity", "disk"),
}


def tiers_fit(config: "RunConfig") -> None:
    """Checks of the section `checkpoint` that need no file and no machine.

    Raises:  ConfigError naming the key and what would fit.
    """
    for test in (_tiers, _intervals, _keeping):
        test(config)


def check_nodes(config: "RunConfig", nodes: int) -> None:
    """Whether a run that starts has the nodes that its tiers ask for. One that goes on may have lost some.

    Raises:  ConfigError naming the tier and the numbers.
    """
    for i, tier in enumerate(config.checkpoint.tiers):
        where, peer = f"checkpoint.tiers.{i}", tier.tier == "peer"
        asked = tier.copies if peer else tier.data + tier.parity if tier.tier == "parity" else 1
        if asked > nodes:
            fitting = [f"copies: {nodes}"] if peer else [f"data: {nodes - 1}, parity: 1"]
            raise ConfigError(
                f"the tier {tier.tier} asks for {asked} nodes, the run has {nodes}",
                where=where,
                why=f"copies={tier.copies}, each on another node"
                if peer
                else f"data={tier.data} + parity={tier.parity}, each block on another node",
                try_=[*(fitting if nodes > 1 else []), f"leave {tier.tier} out"],
            )
        if tier.domains and len(tier.domains) != nodes:
            raise ConfigError(
                f"the tier {tier.tier} has {len(tier.domains)} domains for {nodes} nodes",
                where=f"{where}.domains",
                why="each node has one, in the order of their numbers",
                try_=[f"{nodes} domains"],
            )


def _tiers(config: "RunConfig") -> None:
    seen: dict[str, int] = {}
    for i, tier in enumerate(config.checkpoint.tiers):
        where = f"checkpoint.tiers.{i}"
        if tier.tier in seen:
            raise ConfigError(
                f"checkpoint.tiers names {tier.tier} twice",
                where=where,
                why=f"checkpoint.tiers.{seen[tier.tier]} is {tier.tier} too",
                try_=["one of them"],
            )
        seen[tier.tier] = i
        for key, names in _KEYS_OF_TIERS.items():
            value, default = getattr(tier, key), type(tier).model_fields[key].default
            if tier.tier not in names and value != default:
                raise ConfigError(
                    f"{key}={as_yaml(value)} has no meaning for the tier {tier.tier}",
                    where=f"{where}.{key}",
                    try_=["leave it out", *(f"tier: {name}" for name in names)],
                )
        _values_of_tier(where, tier)
    if "disk" not in seen:
        raise ConfigError(
            "checkpoint.tiers has no disk",
            where="checkpoint.tiers",
            why="a run ends, stops and resumes by the steps in its folder; the other tiers are copies",
            try_=[f"checkpoint.tiers={as_yaml([*seen, 'disk'])}"],
        )


def _values_of_tier(where: str, tier: "TierConfig") -> None:
    if tier.path is not None and set("{}") & set(str(tier.path).replace("{node}", "")):
        raise ConfigError(
            f"path={tier.path} has another word in braces than {{node}}",
            where=f"{where}.path",
            why="{node} becomes the number of the node; nothing else is replaced",
            try_=["path: /dev/shm/sirara/{node}"],
        )
    if tier.path is not None and not Path(tier.path).is_absolute():
        raise ConfigError(
            f"path={tier.path} is not absolute",
            where=f"{where}.path",
            why="every node looks for the copies there, whatever folder its processes were started in",
            try_=[f"path: {Path(tier.path).expanduser().absolute()}"],
        )
    if tier.tier == "object":
        _url(f"{where}.url", tier.url)
    if tier.tier == "parity" and tier.data + tier.parity > MOST_BLOCKS:
        raise ConfigError(
            f"parity {tier.data}+{tier.parity} asks for more than {MOST_BLOCKS} nodes in a group",
            where=f"{where}.data",
            why="the code works in a field of 256 elements",
            try_=["data: 8, parity: 2"],
        )


def _url(where: str, url: str | None) -> None:
    scheme, found, rest = (url or "").partition("://")
    if not found:
        raise ConfigError(
            f"the tier object needs a url, not {as_yaml(url)}",
            where=where,
            try_=[f"{{tier: object, url: {STORE_URLS[0]}}}"],
        )
    if scheme.lower() in STORE_SCHEMES:
        _place(where, str(url), scheme.lower(), rest)
        return
    # A server of one's own is S3 at another endpoint; its bare address would be taken for WebDAV.
    own = [f"url: {STORE_URLS[0]}, options: {{endpoint: {url}}}"] if scheme.lower() == "http" else []
    raise ConfigError(
        f"url={url} is of no store that is known",
        where=where,
        why=f"known are {', '.join(f'{s}://' for s in STORE_SCHEMES)}",
        try_=own or [f"url: {u}" for u in STORE_URLS],
    )


def _place(where: str, url: str, scheme: str, rest: str) -> None:
    """What follows the scheme: a bucket, or for a folder its path."""
    if scheme == "memory":
        return
    bucket, _, path = rest.partition("/")
    if scheme == "file" and (bucket or not path):
        raise ConfigError(
            f"url={url} names no folder from the root on",
            where=where,
            try_=[f"url: file://{Path(rest or 'FOLDER').absolute()}"],
        )
    if scheme != "file" and (not bucket or set(bucket) & set(" \t\\")):
        raise ConfigError(
            f"url={url} names no bucket",
            where=where,
            why="it stands between the two slashes and the next one",
            try_=[f"url: {scheme}://BUCKET/{path or 'PREFIX'}"],
        )


def _intervals(config: "RunConfig") -> None:
    checkpoint = config.checkpoint
    every = {t.tier: t.every or checkpoint.every for t in checkpoint.tiers}
    disk, store = every["disk"], every.get("object")
    if store and (disk is None or store % disk):
        raise ConfigError(
            f"the tier object saves every {store} steps, the tier disk "
            + (f"every {disk}" if disk else "at the end and on request only"),
            where=next(f"checkpoint.tiers.{i}" for i, t in enumerate(checkpoint.tiers) if t.tier == "object"),
            why="what goes to the object store is read from the step's folder",
            try_=[f"every: {-(-store // disk) * disk}" if disk else f"checkpoint.every={store}"],
        )


def _keeping(config: "RunConfig") -> None:
    best = config.checkpoint.keep_best
    if best is None:
        return
    known = [f"eval/{source.name}/loss" for source in config.data.eval]
    if best not in known:
        raise ConfigError(
            f"checkpoint.keep_best={best} is no metric of this run",
            where="checkpoint.keep_best",
            why=f"there are {', '.join(known)}" if known else "data.eval is empty",
            try_=[f"checkpoint.keep_best={k}" for k in get_close_matches(best, known, n=3, cutoff=0.0)],
        )
    if config.train.eval_every is None:
        raise ConfigError(
            f"checkpoint.keep_best={best} needs evaluations beside the last one",
            where="checkpoint.keep_best",
            why="train.eval_every=null",
            try_=[f"train.eval_every={config.checkpoint.every}"] if config.checkpoint.every else [],
        )
