"""The first bytes of a step's files, made again when they are lost: a guess from the manifest, proven by its hash.

The header of a safetensors file follows from the plan of the save, which no checkpoint keeps. Most of it can be read
off the pieces; another step of the same run, saved by the same plan, has it but for uuid and step.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import xxhash

from sirara.checkpoint.step_folder import file_owner
from sirara.pure.layout import Box
from sirara.pure.manifest import FileEntry, Manifest
from sirara.pure.saveplan import INDEX, ITEM_BYTES, Entry, safetensors_header


def find_head(m: Manifest, f: int, others: list[Path]) -> tuple[bytes, str] | None:
    """The first `head` bytes of file f and where they come from; None when no guess has the right hash.

    others: folders of other steps, or of replicas of this one.
    """
    entry = m.files[f]
    for raw, source in _guesses(m, f, others):
        if len(raw) == entry.head and xxhash.xxh3_128_hexdigest(raw) == entry.hash:
            return raw, source
    return None


def _guesses(m: Manifest, f: int, others: list[Path]) -> Iterator[tuple[bytes, str]]:
    entry = m.files[f]
    if entry.name == INDEX:
        yield _index(m), "the manifest"
    elif entry.name.endswith(".safetensors"):
        for entries in _entries(m, f):
            yield safetensors_header(entries, uuid=m.uuid, step=m.step), "the manifest"
    for folder in others:
        yield from _elsewhere(m, entry, folder)


def _elsewhere(m: Manifest, entry: FileEntry, folder: Path) -> Iterator[tuple[bytes, str]]:
    path = folder / entry.name
    try:
        with path.open("rb") as file:
            raw = file.read(entry.head)
    except OSError:
        return
    owner = file_owner(path) if entry.name.endswith(".safetensors") else None
    if owner is not None:
        uuid, step = owner
        raw = raw.replace(uuid.encode(), m.uuid.encode(), 1).replace(
            f"{step:012d}".encode(), f"{m.step:012d}".encode(), 1
        )
    yield raw, str(folder)


def _entries(m: Manifest, f: int) -> Iterator[list[Entry]]:
    """What the header may list: whole weights, or boxes of state, of which one entry may be cut into pieces."""
    if m.files[f].name.startswith("model"):
        yield _weights(m, f)
        return
    rows = [
        (m.tensors[int(m.pieces.tensor[i])], m.box(i), int(m.pieces.position[i]), int(m.pieces.length[i]))
        for i in _pieces(m, f)
    ]
    start = m.files[f].head
    for merge in (_follow, None):
        entries: list[Entry] = []
        last: Box | None = None
        for tensor, box, position, length in rows:
            joined = None
            if (
                merge is not None
                and entries
                and last is not None
                and entries[-1].name.startswith(f"{tensor.name}[")
            ):
                joined = merge(last, box)
            if joined is not None:
                head = entries.pop()
                box, position = joined, head.start + start
                length += head.stop - head.start
            at = position - start
            entries.append(Entry(f"{tensor.name}{box}", tensor.dtype, box.size, at, at + length))
            last = box
        yield entries


def _follow(a: Box, b: Box) -> Box | None:
    """The box of which `a` and then `b` are the beginning, in C order; None when they make no box."""
    differing = [d for d in range(len(a.size)) if a.offset[d] != b.offset[d] or a.size[d] != b.size[d]]
    if not differing:
        return None
    d = differing[0]
    if len(differing) > 1 or a.offset[d] + a.size[d] != b.offset[d] or any(n != 1 for n in a.size[:d]):
        return None
    return Box(a.offset, (*a.size[:d], a.size[d] + b.size[d], *a.size[d + 1 :]))


def _weights(m: Manifest, f: int) -> list[Entry]:
    """Whole tensors in their order in the file. An empty one has no piece: it is put where the model has it."""
    first: dict[int, int] = {}
    for i in _pieces(m, f):
        first.setdefault(int(m.pieces.tensor[i]), int(m.pieces.position[i]))
    weights = [t for t in range(len(m.tensors)) if "/" not in m.tensors[t].name]
    files = sorted(
        {entry.name for entry in m.files if entry.name.startswith("model") and entry.name != INDEX}
    )
    empty = [t for t in weights if not prod(m.tensors[t].shape)] if len(files) == 1 else []
    inside = sorted([*first, *empty], key=lambda t: (-ITEM_BYTES[m.tensors[t].dtype], t))
    entries, at = [], 0
    for t in inside:
        size = prod(m.tensors[t].shape) * ITEM_BYTES[m.tensors[t].dtype]
        entries.append(Entry(m.tensors[t].name, m.tensors[t].dtype, m.tensors[t].shape, at, at + size))
        at += size
    return entries


def _index(m: Manifest) -> bytes:
    where: dict[str, str] = {}
    total = 0
    for f, entry in enumerate(m.files):
        if entry.name.startswith("model") and entry.name.endswith(".safetensors"):
            for e in _weights(m, f):
                where[e.name] = entry.name
                total += e.stop - e.start
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode() + b"\n"


def _pieces(m: Manifest, f: int) -> list[int]:
    """Indices of a file's pieces, by position."""
    mine = (m.pieces.file == f).nonzero()[0]
    return mine[m.pieces.position[mine].argsort(kind="stable")].tolist()
