"""Reads a committed step from end to end and names everything that is not as it was written."""

import json
from collections.abc import Iterator
from dataclasses import replace

from safetensors import SafetensorError, safe_open

from sirara.checkpoint.readback import Fault, faulty_pieces
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.step_folder import file_owner, size_faults
from sirara.checkpoint.steps import named_step
from sirara.pure.manifest import MANIFEST
from sirara.pure.reshard import collisions

__all__ = ["Fault", "scrub", "scrub_pieces"]


def scrub(snapshot: Snapshot) -> list[Fault]:
    """Every fault of a step: sizes, headers and small files, every piece, coverage, the Hugging Face side."""
    m = snapshot.manifest
    sizes = [Fault(file=file, what=what) for file, what in size_faults(snapshot.path, m)]
    absent = {fault.file for fault in sizes if fault.what == "is missing"}
    return [
        *_misplaced(snapshot),
        *sizes,
        *(_with_owner(snapshot, fault) for fault in scrub_pieces(snapshot) if fault.file not in absent),
        *_overlapping(snapshot),
        *_foreign(snapshot),
        *(fault for fault in _weights_side(snapshot) if fault.file not in absent),
    ]


def scrub_pieces(snapshot: Snapshot) -> Iterator[Fault]:
    """Reads every piece, header and small file once from the disk (not from the page cache) and compares
    hashes."""
    return faulty_pieces(snapshot.path, snapshot.manifest)


def _misplaced(snapshot: Snapshot) -> Iterator[Fault]:
    """A step in the folder of another one is good in itself, and no resume takes it for that step."""
    named, step = named_step(snapshot.path.name), snapshot.manifest.step
    if named is not None and named != step:
        yield Fault(file=MANIFEST, what=f"is of step {step}: the folder was renamed or copied over")


def _with_owner(snapshot: Snapshot, fault: Fault) -> Fault:
    """A header that does not match may say from which save the whole file is."""
    owner = None if fault.tensor else file_owner(snapshot.path / fault.file)
    if owner is None or owner[0] == snapshot.manifest.uuid:
        return fault
    return replace(fault, what=f"{fault.what}; it belongs to another save (step {owner[1]}, uuid {owner[0]})")


def _overlapping(snapshot: Snapshot) -> Iterator[Fault]:
    m = snapshot.manifest
    for t, tensor in enumerate(m.tensors):
        index, saved = m.boxes_of(t)
        boxes = [m.box(int(i)) for i in index]
        for i, j in collisions(saved, boxes):
            file = m.files[int(m.pieces.file[index[i]])].name
            yield Fault(file=file, tensor=tensor.name, box=str(boxes[i]), what=f"overlaps {boxes[j]}")


def _foreign(snapshot: Snapshot) -> Iterator[Fault]:
    """Tensor files that do not belong here: a loader that takes every file would mix them in."""
    known = {f.name for f in snapshot.manifest.files}
    for path in sorted(snapshot.path.glob("*.safetensors")):
        if path.name not in known:
            yield Fault(file=path.name, what="is not part of this step")


def _weights_side(snapshot: Snapshot) -> Iterator[Fault]:
    """The safetensors library finds every weight, with its shape, where the index says."""
    m = snapshot.manifest
    shapes = {t.name: t.shape for t in m.tensors if "/" not in t.name}
    index = snapshot.path / "model.safetensors.index.json"
    if not shapes:
        return
    try:
        where: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError) as fault:
        yield Fault(file=index.name, what=f"cannot be read: {fault!r}")
        return
    if where.keys() != shapes.keys():
        yield Fault(file=index.name, what=f"names {len(where)} weights, the manifest {len(shapes)}")
    for file in sorted(set(where.values())):
        try:
            with safe_open(snapshot.path / file, "np") as opened:
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as fault:
            yield Fault(file=file, what=f"safetensors cannot read it: {fault}")
            continue
        for name in (n for n, f in where.items() if f == file):
            if found.get(name) != shapes.get(name):
                yield Fault(
                    file=file,
                    tensor=name,
                    what=f"has shape {found.get(name)}, the manifest {shapes.get(name)}",
                )
