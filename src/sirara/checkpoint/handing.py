"""What some ranks have found out is handed to all of them through the run's control folder, which all nodes see.

    descriptions of images     rank r asks for images r, r + ranks, ..   ─► <stem>-<r>
                               rank 0 joins them                         ─► <stem>
                               all ranks read that

So a job asks once for each image, however many ranks it has, and reads one file per rank.  When the layout has not
changed, rank r's own node has image r: nothing travels.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from sirara.checkpoint.image import Image
from sirara.checkpoint.storage import Disk, read_file
from sirara.errors import CheckpointError, CommError, StorageError

_log = logging.getLogger("sirara")

_SEEN_S = 30.0  # how long a file that another rank has written may take to appear on another machine
_FAULTS = (CheckpointError, StorageError, CommError)
_LENGTH = 8  # bytes before each description


def share_descriptions(
    holders: Mapping[int, Sequence[int]],
    *,
    ask: Callable[[int, int], Image],
    rank: int,
    node: int,
    texts: Callable[[str], Sequence[str]],
    stem: Path,
    disk: Disk,
) -> dict[int, Image]:
    """The descriptions of a save's images by the rank that saved them, without those that no holder can give.

    Collective, and nothing that goes wrong is raised: what cannot be read here is read from elsewhere, or the step is
    not taken.
    Args:  holders: image -> nodes that have it, best first, the same on all ranks.  ask: (node, image).
           rank, node: which this is.  texts: this rank's text to all, in rank order.  stem: of files to hand over by.
    """
    size = len(texts(""))  # and what others do before they come here is done
    found: list[Image] = []
    for image in sorted(holders):
        if image % size == rank:
            found += _first(sorted(holders[image], key=lambda at: at != node), image, ask)
    if size == 1:
        return {image.rank: image for image in found}
    raw = b"".join(_framed(image.to_bytes()) for image in found)
    checks = texts(_write(_part(stem, rank), raw, disk))
    whole = ""
    if rank == 0:
        parts = [_read(_part(stem, r), check) for r, check in enumerate(checks)]
        whole = _write(stem, b"".join(parts), disk)
    check = texts(whole)[0]
    _remove(_part(stem, rank), disk)
    return {image.rank: image for image in _images(_read(stem, check), str(stem))}


def appeared(path: Path, check: str = "") -> bytes:
    """The bytes of a file that another rank has just written; a shared file system may show it a little later.

    check: their xxh3-128 in hex, "" where any will do.  Raises StorageError when it has not come.
    """
    until = time.monotonic() + _SEEN_S
    while True:
        if path.exists():
            raw = read_file(path)
            if not check or xxhash.xxh3_128_hexdigest(raw) == check:
                return raw
        if time.monotonic() > until:
            raise StorageError(
                f"{path} has not appeared within {_SEEN_S:g} s, though another rank has written it",
                try_="run_dir must be one folder, visible to all nodes",
            )
        time.sleep(0.05)


def _first(nodes: Sequence[int], image: int, ask: Callable[[int, int], Image]) -> list[Image]:
    """The description from the first node that can give it; none when no one can."""
    for node in nodes:
        try:
            return [ask(node, image)]
        except _FAULTS as fault:
            _log.warning("the image of rank %d on node %d: %s", image, node, fault.what)
    return []


def _part(stem: Path, rank: int) -> Path:
    return stem.with_name(f"{stem.name}-{rank}")


def _write(path: Path, raw: bytes, disk: Disk) -> str:
    """Writes a message and returns its check; "" when there is nothing in it or it could not be written."""
    if not raw:
        return ""
    try:
        disk.make_folder(path.parent)
        disk.write_file(path, raw, durable=False)
    except StorageError as fault:
        _log.warning("descriptions of images are not handed over: %s", fault.what)
        return ""
    return xxhash.xxh3_128_hexdigest(raw)


def _read(path: Path, check: str) -> bytes:
    if not check:
        return b""
    try:
        return appeared(path, check)
    except StorageError as fault:
        _log.warning("descriptions of images were handed over and cannot be read: %s", fault.what)
        return b""


def _remove(path: Path, disk: Disk) -> None:
    try:
        disk.remove(path)
    except StorageError as fault:
        _log.warning("%s", fault.what)


def _framed(raw: bytes) -> bytes:
    return len(raw).to_bytes(_LENGTH, "little") + raw


def _images(raw: bytes, where: str) -> list[Image]:
    images, at = [], 0
    while at < len(raw):
        begin = at + _LENGTH
        at = begin + int.from_bytes(raw[at:begin], "little")
        images.append(Image.from_bytes(raw[begin:at], where=where))
    return images
