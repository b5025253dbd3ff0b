"""Random numbers as functions of what they are for, never of who draws them or in which order.

    initial value    f(seed, tensor name, element)               normals, Philox, blocks of 65,536 elements
    dropout          f(seed, step, microbatch, layer, site, j)   integer words, SplitMix64
    anything keyed   key_of("shuffle", seed, epoch, ...)         one stable 64-bit key

So any layout, any number of ranks and any resume point sees the same numbers. The dropout functions use
integers only and are written a second time in torch (model/dropout.py); a test holds the two together.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

BLOCK = 65_536
"""Normals are drawn in blocks of this many elements; a slice draws only the blocks it touches."""

GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def key_of(*parts: int | str) -> int:
    """A stable key in [0, 2^64) of a tuple of names and integers: `key_of("shuffle", seed, epoch)`.

    The 64-bit BLAKE2b of the parts, each with its type and length: ("ab", "c"), ("a", "bc") and (1,), ("1",)
    all differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        digest.update(b"%c%d:" % (b"s" if isinstance(part, str) else b"i", len(text)))
        digest.update(text)
    return int.from_bytes(digest.digest(), "little")


def normal_slice(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of the standard normals (float32) that belong to the tensor `name`.

    Block b is the stream of numpy's Philox with the 128-bit key (key_of("normal", seed, name), b).
    """
    out = np.empty(max(0, stop - start), dtype=np.float32)
    key = key_of("normal", seed, name)
    for block in range(start // BLOCK, -(-stop // BLOCK) if out.size else 0):
        low, high = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
        stream = np.random.Generator(np.random.Philox(key=np.array([key, block], dtype=np.uint64)))
        drawn = stream.standard_normal(high - block * BLOCK, dtype=np.float32)
        out[low - start : high - start] = drawn[low - block * BLOCK :]
    return out


def splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output for each uint64 state; number n of stream `key` is splitmix64(key + n * GAMMA)."""
    x = x + np.uint64(GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def words(key: int, start: int, stop: int) -> np.ndarray:
    """Numbers start..stop-1 of the SplitMix64 stream `key`, uint64."""
    n = np.arange(start, stop, dtype=np.uint64)
    return splitmix64(n * np.uint64(GAMMA) + np.uint64(key & _WORD))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """What the dropout masks of one microbatch depend on."""

    seed: int
    step: int
    microbatch: int

    def stream(self, layer: int, site: str) -> int:
        """The key of the words of one dropout site; layer -1 is the embedding."""
        return key_of("dropout", self.seed, self.step, self.microbatch, layer, site)


def drop_threshold(p: float) -> int:
    """An element is dropped when its 32 random bits are below this: p in steps of 2^-32."""
    return round(p * (1 << 32))


def dropout_keep(stream: int, p: float, count: int) -> np.ndarray:
    """Which of elements 0..count-1 of a site stay (bool).

    Element j looks at the low half of word j/2 when it is even, else at the high half.
    """
    halves = words(stream, 0, -(-count // 2)).astype("<u8").view("<u4")[:count]
    return halves >= np.uint64(drop_threshold(p))
