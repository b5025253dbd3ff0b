"""A Hugging Face folder as a weights-only checkpoint: step 0 of no run, with a manifest, verified.

The folder that comes out loads with from_pretrained like the one that went in; in addition every byte has a
hash.
"""

import secrets
from pathlib import Path

import numpy as np
import torch

from sirara.checkpoint.export import Exported, new_folder
from sirara.checkpoint.hf import HfReader, StoredTensor
from sirara.checkpoint.manager import CheckpointManager
from sirara.checkpoint.ranges import NamedRange, dtype_name
from sirara.checkpoint.retention import VERIFIED
from sirara.pure.layout import whole
from sirara.pure.manifest import MANIFEST
from sirara.pure.saveplan import INDEX, PlannedTensor, plan_save

_BESIDE = (".json", ".txt", ".jinja", ".model")
_MOST_BYTES = 64 << 20  # a vocabulary may be large, weights are not meant


def import_folder(source: Path, out: Path, *, dry_run: bool = False) -> Exported:
    """Makes the step folder `out` (which must not exist) from the Hugging Face folder `source`.

    Raises:  CheckpointError for weights that are missing, torn, unexpected or pickled; ConfigError for a
             config.json that is not supported, or when `out` exists; StorageError.
    """
    reader = HfReader(source)
    names = [name for name, spec in reader.specs.items() if spec.tied_to is None]
    aliases = {name: spec.tied_to for name, spec in reader.specs.items() if spec.tied_to is not None}
    plan = [
        PlannedTensor(
            name=name,
            dtype=dtype_name(reader.dtype(name)),
            shape=reader.specs[name].shape,
            boxes={0: (whole(reader.specs[name].shape),)},
        )
        for name in names
    ]
    small = _beside(source)
    done = Exported(
        out=out,
        files=(*(f.name for f in plan_save(plan, node_of=lambda r: r).files), INDEX, *small, MANIFEST),
        tensors=len(names),
        total_bytes=sum(t.nbytes for t in reader.tensors.values()) + sum(map(len, small.values())),
        dtype=", ".join(sorted({str(reader.dtype(n)).removeprefix("torch.") for n in names})),
    )
    with new_folder(out, dry_run=dry_run) as temp:
        if temp is None:
            return done
        manager = CheckpointManager(
            temp,
            run=f"import-{secrets.token_hex(4)}",
            rank=0,
            world=1,
            node=0,
            attempt=1,
            keep_last=1,
            keep_every=None,
        )
        step = manager.save(
            0,
            plan=plan,
            ranges=[_mapped(source, reader.tensors[name], reader.specs[name].shape, name) for name in names],
            record={"step": 0, "tokens": 0, "weights_only": True, "source": str(source.absolute())},
            hf_files=small,
            aliases=aliases,
        )
        for path in sorted(step.iterdir()) if step else ():
            path.rename(temp / path.name)
        if step:
            step.rmdir()
    return done


def _mapped(source: Path, stored: StoredTensor, shape: tuple[int, ...], name: str) -> NamedRange:
    """The tensor as mapped memory: the system reads it when it is written, and may forget it afterwards."""
    data = torch.empty(0, dtype=stored.dtype)
    if stored.nbytes:
        raw = np.memmap(source / stored.file, np.uint8, "c", stored.start, (stored.nbytes,))
        data = torch.from_numpy(raw).view(stored.dtype)
    return NamedRange(tensor=name, shape=shape, boxes=(whole(shape),) if stored.nbytes else (), data=data)


def _beside(source: Path) -> dict[str, bytes]:
    """config.json, tokenizer and generation files."""
    left_out = {INDEX, MANIFEST, VERIFIED}
    return {
        path.name: path.read_bytes()
        for path in sorted(source.iterdir())
        if path.suffix in _BESIDE
        and path.name not in left_out
        and not path.name.startswith(".")
        and path.is_file()
        and path.stat().st_size <= _MOST_BYTES
    }
