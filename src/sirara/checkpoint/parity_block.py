"""Descriptions of parity: which images a block of it was made of, and where in its stripe it stands. No torch here."""

import json
from dataclasses import dataclass
from typing import Any

from sirara.checkpoint.image import Image
from sirara.errors import CheckpointError
from sirara.pure.manifest import HASH_BYTES
from sirara.pure.sealed import open_sealed, seal

FORMAT = "sirara-parity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's part in a stripe of parity: the image of one rank, cut into k blocks of `block` bytes (the last ones
    are short or empty); `image` is the description of the image."""

    rank: int
    block: int
    image: Image


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityBlock:
    """Description of one block of parity: row `row` of stripe `stripe` of a group of k + m nodes.

    members: column j of the stripe is block j of the image of members[j].  size: of the longest block; shorter ones
    count as filled up with zeros.  hashes: xxh3-128 of each generation.CHUNK_BYTES of the parity, 16 bytes each.
    """

    uuid: str
    run: str
    attempt: int
    step: int
    group: str
    stripe: int
    row: int
    k: int
    m: int
    size: int
    members: tuple[Member, ...]
    hashes: bytes

    @property
    def name(self) -> str:
        return f"{self.group}-{self.stripe}-{self.row}"

    def hash(self, chunk: int) -> bytes:
        return self.hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]

    def to_bytes(self) -> bytes:
        fields: dict[str, Any] = {
            "format": FORMAT,
            "uuid": self.uuid,
            "run": self.run,
            "attempt": self.attempt,
            "step": self.step,
            "group": self.group,
            "stripe": self.stripe,
            "row": self.row,
            "k": self.k,
            "m": self.m,
            "size": self.size,
            "members": [
                {"rank": m.rank, "block": m.block, "image": m.image.to_bytes().decode()} for m in self.members
            ],
            "hash": self.hashes.hex(),
        }
        return seal(json.dumps(fields, separators=(",", ":"))[:-1].encode())

    @staticmethod
    def from_bytes(raw: bytes, *, where: str) -> "ParityBlock":
        """Raises CheckpointError naming `where` when the bytes are not what was written."""
        body = open_sealed(raw, where=where, code="SR550")
        try:
            f = json.loads(body + b"}")
            if f["format"] != FORMAT:
                raise CheckpointError(f"{where} is in format {f['format']!r}", code="SR511")
            names = ("uuid", "run", "attempt", "step", "group", "stripe", "row", "k", "m", "size")
            return ParityBlock(
                **{name: f[name] for name in names},
                members=tuple(
                    Member(
                        rank=m["rank"],
                        block=m["block"],
                        image=Image.from_bytes(m["image"].encode(), where=where),
                    )
                    for m in f["members"]
                ),
                hashes=bytes.fromhex(f["hash"]),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise CheckpointError(f"{where} lacks fields: {fault!r}", code="SR511") from fault
