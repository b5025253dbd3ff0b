"""Sealed JSON: an object whose last line is a hash of all bytes before it.

    {"format":...,
     ...
    ,"check":"xxh3-128 of everything before this line"}

It stays plain JSON, and a file that was cut or changed anywhere is told from a whole one.
"""

import xxhash

from sirara.errors import CheckpointError

_CHECK = b'\n,"check":"'


def seal(body: bytes) -> bytes:
    """The whole file. body: a JSON object with at least one field, without the brace that closes it."""
    return body + _CHECK + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def open_sealed(raw: bytes, *, where: str, code: str) -> bytes:
    """The body that was sealed. Raises CheckpointError with this code, naming `where`, unless it is whole."""
    body, mark, check = raw.rpartition(_CHECK)
    if not mark:
        raise CheckpointError(f"{where} is torn: its last line with the check is missing", code=code)
    found = xxhash.xxh3_128_hexdigest(body)
    if check.strip() != f'{found}"}}'.encode():
        raise CheckpointError(
            f"{where} is torn or damaged: its bytes do not match its check",
            code=code,
            why=f"they hash to {found}",
        )
    return body
