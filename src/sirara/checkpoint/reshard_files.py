"""A step written anew as if other nodes had saved it, or with files of another size; the state stays what it is.

    pieces of the step (hash checked) ─► boxes of the new plan ─► files, one after the other ─► manifest ─► rename

Any layout reads any step, so a run never needs this. It is for file systems and tools that want fewer, more,
or smaller files, and for steps whose pieces have become many.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
import xxhash

from sirara.checkpoint.export import Exported, new_folder
from sirara.checkpoint.ranges import DTYPES, NamedRange, host_bytes
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.report import Report, assemble
from sirara.checkpoint.steps import fresh_uuid
from sirara.checkpoint.storage import Disk, read_file
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.layout import Box, range_boxes
from sirara.pure.manifest import MANIFEST, FileEntry, TensorEntry
from sirara.pure.saveplan import (
    FILE_BYTES,
    HEADER_ALIGN,
    INDEX,
    ITEM_BYTES,
    PIECE_BYTES,
    PlannedPiece,
    PlannedTensor,
    SavePlan,
    plan_save,
    weight_index,
)

MOST_NODES = 100_000
BATCH_BYTES = 32 << 20


def reshard_step(
    snapshot: Snapshot,
    out: Path,
    *,
    nodes: int = 1,
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
    dry_run: bool = False,
) -> Exported:
    """Writes the step folder `out` (which must not exist) with the tensors and the record of `snapshot`.

    Args:  nodes: how many share the state that is not weights, by bytes.  file_bytes: about the size of a file.
           piece_bytes: the most that one hash covers, at most 16 MiB.
    Raises:  ConfigError when `out` exists or a size makes no sense; CheckpointError naming a bad piece; StorageError.
    """
    _check(nodes, file_bytes, piece_bytes)
    m = snapshot.manifest
    plan = plan_save(
        deal(m.tensors, nodes), node_of=lambda rank: rank, file_bytes=file_bytes, piece_bytes=piece_bytes
    )
    beside = [f for f in m.files if not f.name.endswith(".safetensors") and f.name != INDEX]
    names = [f.name for f in plan.files] + [f.name for f in beside]
    has_weights = any(t.is_weight for t in plan.tensors)
    done = Exported(
        out=out,
        files=tuple(sorted([*names, *([INDEX] if has_weights else []), MANIFEST])),
        tensors=len(m.tensors),
        total_bytes=plan.total_bytes + sum(f.size for f in beside),
        dtype=", ".join(sorted({t.dtype for t in m.tensors})),
    )
    with new_folder(out, dry_run=dry_run) as temp:
        if temp is not None:
            small = {f.name: _small_file(snapshot, f) for f in beside}
            if has_weights:
                small[INDEX] = weight_index(plan)
            _fill(snapshot, temp, plan, small)
    return done


def deal(tensors: Sequence[TensorEntry], nodes: int) -> list[PlannedTensor]:
    """The tensors laid end to end and cut into `nodes` stretches of equal bytes, each held by one rank."""
    item = [ITEM_BYTES[t.dtype] for t in tensors]
    ends = list(accumulate(prod(t.shape) * size for t, size in zip(tensors, item, strict=True)))
    cuts = [(ends[-1] if ends else 0) * n // nodes for n in range(nodes)]
    planned = []
    for t, size, end in zip(tensors, item, ends, strict=True):
        volume = prod(t.shape)
        start = end - volume * size
        boxes: dict[int, tuple[Box, ...]] = {}
        at, rank = 0, max(0, bisect_right(cuts, start) - 1)
        while at < volume:
            # The first element that begins at or after the next rank's cut is that rank's.
            limit = volume if rank + 1 >= nodes else min(volume, -(-(cuts[rank + 1] - start) // size))
            if limit > at:
                boxes[rank] = range_boxes(t.shape, at, limit)
                at = limit
            rank += 1
        planned.append(PlannedTensor(name=t.name, dtype=t.dtype, shape=t.shape, boxes=boxes))
    return planned


def _check(nodes: int, file_bytes: int, piece_bytes: int) -> None:
    if not 1 <= nodes <= MOST_NODES:
        raise ConfigError(f"a step cannot be cut for {nodes} nodes", why=f"1 to {MOST_NODES} make sense")
    if file_bytes < HEADER_ALIGN:
        raise ConfigError(
            f"files of {file_bytes} bytes are too small", why=f"the header of a file alone has {HEADER_ALIGN}"
        )
    if not 8 <= piece_bytes <= PIECE_BYTES:
        raise ConfigError(f"a piece cannot have {piece_bytes} bytes", why=f"8 to {PIECE_BYTES} are allowed")


def _small_file(snapshot: Snapshot, entry: FileEntry) -> bytes:
    data = read_file(snapshot.path / entry.name)
    if xxhash.xxh3_128_hexdigest(data) != entry.hash:
        raise CheckpointError(
            f"{entry.name} does not match its hash",
            code="SR523",
            where=str(snapshot.path),
            try_=f"sirara ckpt repair {snapshot.path}",
        )
    return data


def _fill(snapshot: Snapshot, temp: Path, plan: SavePlan, small: dict[str, bytes]) -> None:
    m, disk = snapshot.manifest, Disk()
    uuid = fresh_uuid(m.attempt)
    hashes: dict[int, list[bytes]] = {}
    lengths: dict[int, list[int]] = {}
    by_file: dict[int, list[int]] = {}
    for i, piece in enumerate(plan.pieces):
        by_file.setdefault(piece.file, []).append(i)
    for f, file in enumerate(plan.files):
        path = temp / file.name
        fd = disk.open(path, size=file.size)
        try:
            disk.write(fd, path, [memoryview(file.header(uuid=uuid, step=m.step))], 0)
            for batch in _batches(by_file.get(f, []), plan):
                for i, data in zip(batch, _read(snapshot, [plan.pieces[i] for i in batch]), strict=True):
                    piece = plan.pieces[i]
                    disk.write(fd, path, [data], piece.position)
                    hashes.setdefault(piece.rank, []).append(xxhash.xxh3_128_digest(data))
                    lengths.setdefault(piece.rank, []).append(piece.length)
            disk.fsync(fd, path)
        finally:
            os.close(fd)
    extras = []
    for name, data in small.items():
        disk.write_file(temp / name, data)
        check = xxhash.xxh3_128_hexdigest(data)
        extras.append(FileEntry(name=name, size=len(data), head=len(data), hash=check))
    reports = {
        rank: Report(
            uuid=uuid,
            attempt=m.attempt,
            step=m.step,
            rank=rank,
            plan=plan.digest,
            lengths=tuple(lengths[rank]),
            hashes=b"".join(hashes[rank]),
        )
        for rank in hashes
    }
    manifest = assemble(
        plan,
        reports,
        extras,
        uuid=uuid,
        run=m.run,
        attempt=m.attempt,
        step=m.step,
        record=m.record,
        aliases=m.aliases,
    )
    disk.write_file(temp / MANIFEST, manifest.to_bytes())


def _batches(pieces: Sequence[int], plan: SavePlan) -> Iterator[list[int]]:
    """Neighbours, together at most BATCH_BYTES: a saved piece that meets several of them is read once."""
    batch: list[int] = []
    total = 0
    for i in pieces:
        if batch and total + plan.pieces[i].length > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += plan.pieces[i].length
    if batch:
        yield batch


def _read(snapshot: Snapshot, pieces: Sequence[PlannedPiece]) -> list[memoryview]:
    entries = [snapshot.manifest.tensors[p.tensor] for p in pieces]
    ranges = [
        NamedRange(
            tensor=entry.name,
            shape=entry.shape,
            boxes=(piece.box,),
            data=torch.empty(piece.box.volume, dtype=DTYPES[entry.dtype]),
        )
        for piece, entry in zip(pieces, entries, strict=True)
    ]
    snapshot.read_into(ranges)
    return [host_bytes(r.data).data for r in ranges]
