"""Manifests without a checkpoint, of any number of pieces."""

from typing import Any

import numpy as np

from sirara.pure.manifest import FileEntry, Manifest, Pieces, TensorEntry


def grid_manifest(n: int, tensors: int = 10, record: dict[str, Any] | None = None) -> Manifest:
    """n pieces of 2-D tensors, one file for each tensor."""
    per = n // tensors
    return Manifest(
        uuid="u",
        run="r",
        step=12,
        tokens=34,
        attempt=1,
        layout={"dp": 2},
        versions={"sirara": "0"},
        aliases={"lm_head.weight": "embed.weight"},
        record={"lr": 0.1 + 0.2, "data": {"cursor": 2**60}} if record is None else record,
        files=tuple(
            FileEntry(name=f"f{i}", size=4096 + per * 1024, head=4096, hash="0" * 32) for i in range(tensors)
        ),
        tensors=tuple(TensorEntry(name=f"t{i}", dtype="F32", shape=(64 * per, 4)) for i in range(tensors)),
        pieces=Pieces(
            tensor=np.repeat(np.arange(tensors), per),
            offset=np.stack([np.tile(np.arange(per) * 64, tensors), np.zeros(n, np.int64)], 1).reshape(-1),
            size=np.tile([64, 4], n),
            file=np.repeat(np.arange(tensors), per),
            position=np.tile(np.arange(per) * 1024 + 4096, tensors),
            length=np.full(n, 1024),
            hashes=np.random.default_rng(0).bytes(16 * n),
        ),
    )
