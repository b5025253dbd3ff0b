"""An object store, one method per effect: every request of the object tier goes through `Bucket`.

    request ──► obstore: signs, retries 5xx, resets and time-outs by itself ──► server
       ▲                                                    │ still failed
       └────────── again, until `patience_s` is over ◄──────┘  what a repetition cannot cure is raised at once

obstore gives up where a repetition might do the thing twice, and after its own time; here all requests may be
repeated, because every object has one writer and a name that is never used again.  Single parts, whole small
objects and ranges carry a checksum that the server compares, so bytes changed on the way do not arrive.
"""

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from sirara.checkpoint.multipart import Multiparts
from sirara.config.check_tiers import STORE_URLS
from sirara.errors import CheckpointError, ConfigError, StorageError

HAVE_OBSTORE = importlib.util.find_spec("obstore") is not None
if TYPE_CHECKING or HAVE_OBSTORE:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotSupportedError,
        UnknownConfigurationKeyError,
    )
    from obstore.store import S3Store, from_url

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Of a multipart upload; larger objects have at most 10,000 parts."""

_MOST_PARTS = 10_000
_AT_ONCE = 4  # parts on their way, each held in memory
_RANGE_BYTES = 8 << 20  # a read of more is several requests at once
_CLIENT_OPTIONS = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
_FINAL = {301, 307, 401, 403, 405, 411, 412, 501}  # statuses that the same request will get again
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_SAID = re.compile(r"<Message>([^<]*)</Message>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object in the store; key: below the bucket's prefix.  tag: differs after every write of the key."""

    key: str
    size: int
    modified: datetime
    tag: str


class Bucket:
    """The objects below a URL.

    Args:    url: s3://bucket/prefix, gs://..., az://..., file:///folder.  options: endpoint, region, timeout and the
             like, as obstore calls them; credentials come from the environment.  patience_s: how long one effect is
             tried while the server is away or says no.
    Raises:  ConfigError when the URL or an option cannot be used, or obstore is not installed.  Every method raises
             StorageError naming the URL, what was asked, and the server's last answer.
    """

    def __init__(self, url: str, options: Mapping[str, str], *, patience_s: float = 120.0) -> None:
        if not HAVE_OBSTORE:
            raise ConfigError(
                f"the object store {url} needs obstore", code="SR160", try_="pip install 'sirara[s3]'"
            )
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._store = _open(url, options, patience_s)

    def put(self, key: str, data: bytes) -> None:
        self._patiently(f"write {key}", lambda: obstore.put(self._store, key, data, use_multipart=False))

    def create(self, key: str, data: bytes) -> None:
        """Writes an object that must not exist; one with these very bytes is an earlier try that did arrive.

        Raises:  CheckpointError when the object exists with other bytes.
        """

        def once() -> bool:
            try:
                obstore.put(self._store, key, data, mode="create")
            except AlreadyExistsError:
                return False
            return True

        if not self._patiently(f"create {key}", once) and self.get(key) != data:
            raise CheckpointError(
                f"{self.url}/{key} was written by somebody else",
                code="SR560",
                why=f"it exists and differs from the {len(data)} bytes to be written",
                try_="see which process still saves this run; a second one must not",
            )

    def upload(self, key: str, size: int, chunks: Callable[[int], Iterator[memoryview]]) -> None:
        """Writes an object of any size; it appears whole or not at all.

        chunks: gives the bytes in parts of the size it is told, from the beginning at each call; what it raises is
        raised here, and the object does not appear.
        """
        part = max(PART_BYTES, -(-size // (_MOST_PARTS * 4096)) * 4096)
        if size <= part:
            self.put(key, b"".join(chunks(part)))
            return
        before = self.head(key)
        tried = False

        def once() -> None:
            nonlocal tried
            if tried:
                # The former try may have arrived although its answer was lost; if not, its parts are in the way.
                found = self.head(key)
                if found is not None and found.size == size and found != before:
                    return
                with contextlib.suppress(StorageError):
                    self.abort(key)  # what this leaves, the next attempt of the run looks for
            tried = True
            obstore.put(self._store, key, chunks(part), chunk_size=part, max_concurrency=_AT_ONCE)

        self._patiently(f"upload {key} ({size} bytes)", once)

    def head(self, key: str) -> Stored | None:
        """Size and age of an object; None when there is none."""

        def once() -> Stored | None:
            try:
                return _stored(obstore.head(self._store, key))
            except FileNotFoundError:
                return None

        return self._patiently(f"look at {key}", once)

    def get(self, key: str) -> bytes | None:
        """All bytes of a small object; None when there is none."""

        def once() -> bytes | None:
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

        return self._patiently(f"read {key}", once)

    def read(self, key: str, buffers: Sequence[memoryview], position: int) -> None:
        """Fills the buffers from `position` on.  Raises CheckpointError when the object ends before, or is missing."""
        size = sum(map(len, buffers))
        starts = list(range(position, position + size, _RANGE_BYTES))
        ends = [min(start + _RANGE_BYTES, position + size) for start in starts]
        with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(starts)))) as pool:
            parts = pool.map(self._range, [key] * len(starts), starts, ends)
            left = [b for b in buffers if len(b)]
            for part in parts:
                while len(part):
                    n = min(len(part), len(left[0]))
                    left[0][:n] = part[:n]
                    part, left[0] = part[n:], left[0][n:]
                    if not len(left[0]):
                        left.pop(0)

    def objects(self, prefix: str) -> list[Stored]:
        """All objects below a prefix.  A store that cannot be listed is an error, never an empty list."""
        found = self._patiently(
            f"list {prefix}",
            lambda: [m for chunk in obstore.list(self._store, prefix or None) for m in chunk],
        )
        return [_stored(meta) for meta in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that do not exist are no error."""

        def once() -> None:
            try:
                obstore.delete(self._store, list(keys))
            except FileNotFoundError:
                return

        if keys:
            self._patiently(f"delete {keys[0]} and {len(keys) - 1} more", once)

    def multiparts(self, prefix: str) -> list[tuple[str, str]]:
        """(key, upload id) of uploads that neither ended nor were aborted.

        Raises:  StorageError when this store, or what we know of its credentials, does not allow to ask.
        """
        found = self._patiently(
            f"list unfinished uploads of {prefix}", lambda: self._multiparts().unfinished(self._full(prefix))
        )
        cut = len(self._full(""))
        return [(key[cut:], upload) for key, upload in found]

    def abort(self, prefix: str, *, keep: Callable[[str], bool] = lambda key: False) -> list[str]:
        """Throws away unfinished uploads of keys that begin with `prefix`; returns the keys.  A store without a list of
        them is left to clean up by itself."""
        if not self.can_list_multiparts:
            return []
        aborted = []
        for key, upload in self.multiparts(prefix):
            if not keep(key):
                self._patiently(
                    f"abort the upload of {key}",
                    lambda k=key, u=upload: self._multiparts().abort(self._full(k), u),
                )
                aborted.append(key)
        return aborted

    @property
    def can_list_multiparts(self) -> bool:
        """Unfinished uploads can be listed: an S3 store with keys that are known here."""
        return isinstance(self._store, S3Store) and Multiparts.possible(self._store.config)

    def _multiparts(self) -> Multiparts:
        return Multiparts(self._store.config)

    def _full(self, key: str) -> str:
        """The key as the server knows it."""
        prefix = getattr(self._store, "prefix", None)
        return f"{prefix}/{key}" if prefix else key

    def _range(self, key: str, start: int, end: int) -> memoryview:
        def once() -> memoryview:
            try:
                return memoryview(obstore.get_range(self._store, key, start=start, end=end))
            except FileNotFoundError as fault:
                raise CheckpointError(
                    "the object is missing", code="SR521", where=f"{self.url}/{key}"
                ) from fault

        found = self._patiently(f"read {key} from byte {start}", once)
        if len(found) != end - start:
            raise CheckpointError(
                "the object is truncated",
                code="SR521",
                where=f"{self.url}/{key}",
                why=f"bytes {start} to {end} were asked, {len(found)} came",
            )
        return found

    def _patiently(self, what: str, once: Callable[[], T]) -> T:
        """What `once` returns, at last.  The patience counts from the first failure: one try of an upload may take
        longer than all of it."""
        began, pause_s = time.monotonic(), 0.2
        until: float | None = None
        while True:
            try:
                return once()
            except (BaseError, OSError) as fault:
                now = time.monotonic()
                error = self._error(what, fault, now - began)
                until = until or now + self._patience_s
                if error.code != "SR660" or now + pause_s > until:
                    raise error from fault
            time.sleep(pause_s)
            pause_s = min(5.0, 2 * pause_s)

    def _error(self, what: str, fault: Exception, seconds: float) -> StorageError:
        """The error for a failed request; code SR660 when the same request may succeed later."""
        text = str(fault).partition("\n\nDebug source")[0]
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else type(fault).__name__
        said = found[1] if (found := _SAID.search(text)) else text[-300:]
        why = f"{f'status {status}, ' if status else ''}{code}: {said}"
        if status in (401, 403):
            return StorageError(
                f"the object store refuses to {what}",
                code="SR662",
                where=self.url,
                why=why,
                try_="check the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
                "AWS_SESSION_TOKEN) and what they may do",
            )
        if code == "NoSuchBucket" or status in _FINAL or isinstance(fault, NotSupportedError):
            return StorageError(
                f"the object store cannot {what}",
                code="SR661",
                where=self.url,
                why=why,
                try_="check url, endpoint and region of the object tier",
            )
        return StorageError(
            f"the object store did not {what} within {seconds:.1f} s",
            code="SR660",
            where=self.url,
            why=why,
            try_="committed checkpoints are untouched; look at the store, the save is tried again",
        )


def _open(url: str, options: Mapping[str, str], patience_s: float) -> Any:
    client = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    config = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    client.setdefault("timeout", "60s")
    endpoint = config.get("endpoint") or config.get("aws_endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", "true")
    retry = {
        "max_retries": 8,
        "retry_timeout": timedelta(seconds=min(20.0, patience_s)),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2},
    }
    try:
        if url.startswith(("file:", "memory:")):
            return from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        if url.startswith(("s3:", "s3a:")) and config.setdefault("checksum_algorithm", "SHA256") == "none":
            del config["checksum_algorithm"]
        return from_url(url, config=config, client_options=client, retry_config=retry)  # type: ignore[arg-type]
    except UnknownConfigurationKeyError as fault:
        raise ConfigError(
            "an option of the object tier is unknown",
            code="SR160",
            where=url,
            why=str(fault).partition("\n")[0],
        ) from fault
    except (BaseError, ValueError) as fault:
        raise ConfigError(
            f"the object store {url} cannot be used",
            code="SR160",
            why=str(fault).partition("\n")[0],
            try_=[f"url: {u}" for u in STORE_URLS],
        ) from fault


def _stored(meta: Mapping[str, Any]) -> Stored:
    return Stored(
        key=meta["path"], size=meta["size"], modified=meta["last_modified"], tag=meta["e_tag"] or ""
    )
