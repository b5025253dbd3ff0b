"""Before any training: does the object store of a run take what a commit needs?

list ─► create an object ─► create it again with other bytes, which must be refused ─► read ─► delete
"""

import secrets
from collections.abc import Mapping

from sirara.checkpoint.bucket import Bucket
from sirara.errors import CheckpointError, StorageError

PATIENCE_S = 10.0
"""How long a store that does not answer is waited for; saves wait longer."""

UNREACHABLE = "SR660"
"""Code of a fault that time may cure; every other one stays until somebody corrects url, keys or bucket."""


def check_store(url: str, options: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
    """Does with a small object of its own name what uploads and commits do; it is gone afterwards.

    Raises:  ConfigError when the URL or an option cannot be used; StorageError with the server's answer when the store
             is away (SR660), refuses (SR662), or has no such bucket or no conditional PUT (SR661).
    """
    bucket = Bucket(url, options, patience_s=patience_s)
    key = f"sirara-check-{secrets.token_hex(8)}"
    bucket.objects(f"{key}/")
    bucket.create(key, b"1")
    try:
        bucket.create(key, b"2")
    except CheckpointError:
        pass  # that is what makes one commit of a save the only one
    else:
        raise StorageError(
            "the object store writes over an object that exists",
            code="SR661",
            where=bucket.url,
            why="it was asked to create it (If-None-Match: *); a commit must not replace another one",
            try_="a store with conditional PUT, or a newer version of this one",
        )
    finally:
        bucket.delete([key])
