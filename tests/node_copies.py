"""Images and parity of a step folder, one rank per node, under the step's own run: for tests of what reads them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore
from sirara.checkpoint.parity import block_range
from sirara.checkpoint.parity_block import Member, ParityBlock
from sirara.pure.copies import Stripes
from sirara.pure.erasure import encode
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import Boxes, State
from tests.tiers import images_of


def keep_images(
    root: Path, step: Path, state: State, boxes: Boxes, *, nodes: Sequence[int] | None = None, commit=True
) -> None:
    """Rank r's image on node r, <root>/node-<r>; on some nodes or on all."""
    images = images_of(step, state, boxes)
    for node in range(len(images)) if nodes is None else nodes:
        image, data = images[node]
        store = GenerationStore(root / f"node-{node}", image.run)
        store.put_image(image, memoryview(data))
        if commit:
            store.put_manifest(image.step, image.uuid, (step / MANIFEST).read_bytes())


def keep_parity(root: Path, step: Path, state: State, boxes: Boxes, m: int) -> None:
    """m blocks of parity per stripe over all nodes."""
    images = images_of(step, state, boxes)
    stripes, first = Stripes(len(images), m), images[0][0]
    k = stripes.k
    for s in range(len(images)):
        members = stripes.members(s)
        parts = []
        for column, place in enumerate(members):
            start, length = block_range(images[place][0].size, k, column)
            parts.append(np.frombuffer(images[place][1][start : start + length], np.uint8))
        size = max(map(len, parts))
        data = [np.pad(part, (0, size - len(part))) for part in parts]
        for row, (place, parity) in enumerate(zip(stripes.holders(s), encode(data, m), strict=True)):
            store = GenerationStore(root / f"node-{place}", first.run)
            raw = parity.tobytes()
            slot = store.new_parity(first.step, first.uuid, f"0-{s}-{row}", size)
            slot.data[:] = raw
            block = ParityBlock(
                uuid=first.uuid,
                run=first.run,
                attempt=first.attempt,
                step=first.step,
                group="0",
                stripe=s,
                row=row,
                k=k,
                m=m,
                size=size,
                members=tuple(Member(rank=p, block=c, image=images[p][0]) for c, p in enumerate(members)),
                hashes=b"".join(
                    xxhash.xxh3_128_digest(raw[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)
                ),
            )
            store.keep_parity(block, slot)
            store.put_manifest(first.step, first.uuid, (step / MANIFEST).read_bytes())
