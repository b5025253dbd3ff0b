"""Parity of a group of nodes: blocks are added as they arrive, a lost image is decoded from what is left.

    building    one ParityBuilder per block of parity that this node holds; each of the k members of the stripe sends
                its block in chunks:  parity[at] += c_row,column * chunk          in any order, all at once
    rebuilding  for each of the lost image's k blocks: any k of its stripe's k + m blocks, chunk by chunk, then the
                hashes of the image's pieces

No torch here.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import xxhash

from sirara.checkpoint import isal
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore
from sirara.checkpoint.image import Image
from sirara.checkpoint.parity_block import Member, ParityBlock
from sirara.checkpoint.serve import NodeView, one_line
from sirara.checkpoint.slot import Slot
from sirara.errors import CheckpointError, CommTimeout, InvariantError, SiraraError, StorageError
from sirara.pure.erasure import coefficients, decoding

_log = logging.getLogger("sirara")
_ALIGN = 64


def block_range(size: int, k: int, block: int) -> tuple[int, int]:
    """(first byte, bytes) of one of the k blocks of an image; the last ones may be short or empty."""
    length = -(-size // (k * _ALIGN)) * _ALIGN
    start = min(size, block * length)
    return start, min(size - start, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeName:
    """Which block of parity: of which save, group, stripe and row, and the ranks that give its columns."""

    uuid: str
    step: int
    attempt: int
    group: str
    stripe: int
    row: int
    k: int
    m: int
    ranks: tuple[int, ...]

    @property
    def block(self) -> str:
        return f"{self.group}-{self.stripe}-{self.row}"


class ParityBuilder:
    """One block of parity that is being made. Complete when all members have given their block; given up when one of
    them fails in the middle, because what it has added cannot be taken out again."""

    def __init__(self, store: GenerationStore, name: StripeName) -> None:
        self.name = name
        self._store = store
        self._lock = threading.Lock()
        self._slot: Slot | None = store.new_parity(name.step, name.uuid, name.block, 0)
        self._row = coefficients(name.k, name.m)[name.row]
        self._begun: set[int] = set()
        self._members: dict[int, Member] = {}
        self._done = threading.Event()
        self.fault: SiraraError | None = None

    def begin(self, column: int, image: Image) -> int:
        """Announces a member's block; returns its length. Raises when it is not expected."""
        name = self.name
        expected = (name.uuid, name.step, name.ranks[column] if column < name.k else -1)
        if (image.uuid, image.step, image.rank) != expected or image.run != self._store.run:
            raise CheckpointError(
                f"rank {image.rank} of step {image.step} ({image.uuid}) has no part in parity {name.block}",
                code="SR512",
                why=f"column {column} is of rank {expected[2]}, step {name.step} ({name.uuid})",
            )
        _, length = block_range(image.size, name.k, column)
        with self._lock:
            self._open_slot().grow(length)
            if column in self._begun:
                raise InvariantError(f"rank {image.rank} gives its block of parity {name.block} twice")
            self._begun.add(column)
        return length

    def add(self, column: int, at: int, chunk: memoryview) -> None:
        """Adds a part of a member's block."""
        with self._lock:
            slot = self._open_slot()
            target = slot.data[at : at + len(chunk)]
            try:
                isal.encode_update(int(self._row[column]), chunk, target)
            finally:
                target.release()

    def end(self, column: int, image: Image) -> None:
        """A member's block is complete; with the last one the parity is kept."""
        with self._lock:
            slot = self._open_slot()
            self._members[column] = Member(rank=image.rank, block=column, image=image)
            if len(self._members) == self.name.k:
                self._keep(slot)

    def give_up(self, fault: SiraraError) -> None:
        with self._lock:
            if not self._done.is_set():
                self.fault = fault
                self._close()

    def wait(self, timeout_s: float) -> None:
        """Returns when the parity is kept. Raises why it was given up, or who has not given a block in time."""
        if not self._done.wait(max(0.0, timeout_s)):
            missing = [rank for column, rank in enumerate(self.name.ranks) if column not in self._members]
            ranks = ", ".join(map(str, missing))
            self.give_up(
                CommTimeout(
                    f"parity {self.name.block} of step {self.name.step} lacks the blocks of ranks {ranks}",
                    code="SR751",
                )
            )
        if self.fault is not None:
            raise self.fault

    def _open_slot(self) -> Slot:
        if self.fault is not None:
            raise CheckpointError(
                f"parity {self.name.block} of step {self.name.step} was given up: {self.fault.what}",
                code="SR550",
            )
        if self._slot is None:
            raise InvariantError(f"parity {self.name.block} of step {self.name.step} is complete already")
        return self._slot

    def _keep(self, slot: Slot) -> None:
        n = self.name
        hashes = b"".join(
            xxhash.xxh3_128_digest(slot.data[at : at + CHUNK_BYTES])
            for at in range(0, slot.size, CHUNK_BYTES)
        )
        block = ParityBlock(
            uuid=n.uuid,
            run=self._store.run,
            attempt=n.attempt,
            step=n.step,
            group=n.group,
            stripe=n.stripe,
            row=n.row,
            k=n.k,
            m=n.m,
            size=slot.size,
            members=tuple(self._members[column] for column in range(n.k)),
            hashes=hashes,
        )
        try:
            self._store.keep_parity(block, slot)
        except StorageError as fault:
            self.fault = fault
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._slot is not None:
            self._slot.discard()  # nothing, once it is kept
            self._slot = None
        self._done.set()


# ---- rebuilding


@dataclass(slots=True)
class _Found:
    """What the nodes hold of a save; checked: rank -> the node whose copy of its image is right, None: no node's."""

    pool: ThreadPoolExecutor
    images: dict[int, list[NodeView]] = field(default_factory=dict)
    parity: dict[str, tuple[NodeView, ParityBlock]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checked: dict[int, NodeView | None] = field(default_factory=dict)


def rebuild(
    step: int,
    uuid: str,
    rank: int,
    *,
    nodes: Sequence[NodeView],
    store: GenerationStore,
    notes: Sequence[str] = (),
) -> Image:
    """Decodes a rank's image from parity and other ranks' images into `store`; every piece is checked.

    Raises CheckpointError that names all that is missing or damaged.  notes: what is known to be missing already.
    """
    with ThreadPoolExecutor(max_workers=min(16, max(4, len(nodes)))) as pool:
        found = _Found(pool=pool, notes=list(notes))
        image = _rebuild(step, uuid, rank, nodes, store, found)
    for note in found.notes:
        _log.warning("rank %d of step %d was rebuilt in spite of this: %s", rank, step, note)
    return image


def _rebuild(
    step: int, uuid: str, rank: int, nodes: Sequence[NodeView], store: GenerationStore, found: _Found
) -> Image:
    _look(found, step, uuid, rank, nodes)
    stripes: dict[int, list[tuple[NodeView, ParityBlock]]] = {}
    for view, block in found.parity.values():
        column = next((m.block for m in block.members if m.rank == rank), None)
        if column is not None:
            stripes.setdefault(column, []).append((view, block))
    if not stripes:
        raise _cannot(step, rank, ["no node that can be asked holds parity of it", *found.notes])
    first = next(iter(stripes.values()))[0][1]
    image = next(m.image for m in first.members if m.rank == rank)
    others = {m.rank: m.image for _, block in found.parity.values() for m in block.members if m.rank != rank}
    list(found.pool.map(lambda other: _good_image(found, other), others.values()))
    slot = store.new_image(image)
    try:
        for column in range(first.k):
            start, length = block_range(image.size, first.k, column)
            if length:
                target = slot.data[start : start + length]
                try:
                    _decode(image, column, stripes.get(column, []), found, target)
                finally:
                    target.release()
        bad = image.faults(slot.data)
        if bad:
            raise _cannot(
                step, rank, [f"{len(bad)} of its {len(image.index)} pieces come out wrong", *found.notes]
            )
        store.keep_image(image, slot)
    finally:
        slot.discard()
    return image


def _look(found: _Found, step: int, uuid: str, rank: int, nodes: Sequence[NodeView]) -> None:
    """Asks all nodes at once for their inventory and the parity that covers the rank."""

    def ask(view: NodeView) -> tuple[NodeView, list[ParityBlock], list[int], list[str]]:
        blocks: list[ParityBlock] = []
        try:
            found = view.inventory()
            ours = [h for h in found.held if (h.step, h.uuid) == (step, uuid)]
            blocks = [
                view.parity(step, uuid, h.block) for h in ours if h.kind == "parity" and rank in h.covers
            ]
            notes = [f"{view.name}: {fault}" for fault in (*found.faults, *found.replaced) if uuid in fault]
            return view, blocks, [h.rank for h in ours if h.kind != "parity"], notes
        except SiraraError as fault:
            return view, blocks, [], [f"{view.name}: {one_line(fault)}"]

    for view, blocks, ranks, notes in found.pool.map(ask, nodes):
        for block in blocks:
            found.parity[block.name] = (view, block)
        for other in ranks:
            found.images.setdefault(other, []).append(view)
        found.notes += notes


def _good_image(found: _Found, image: Image) -> NodeView | None:
    """A node whose copy of the image matches all its hashes; others are noted. Each is read as a whole once."""
    if image.rank not in found.checked:
        found.checked[image.rank] = None
        for view in found.images.get(image.rank, []):
            try:
                bad = view.bad_pieces(image.step, image.uuid, image.rank)
            except SiraraError as fault:
                found.notes.append(f"rank {image.rank}'s image on {view.name}: {one_line(fault)}")
                continue
            if not bad:
                found.checked[image.rank] = view
                break
            found.notes.append(
                f"rank {image.rank}'s image on {view.name}: {len(bad)} of {len(image.index)} pieces are damaged"
            )
    return found.checked[image.rank]


def _decode(
    image: Image,
    column: int,
    rows: Sequence[tuple[NodeView, ParityBlock]],
    found: _Found,
    target: memoryview,
) -> None:
    """Fills one block of the lost image; a source that fails in the middle is replaced."""
    if not rows:
        raise _cannot(image.step, image.rank, [f"no parity of its block {column} is left", *found.notes])
    block = rows[0][1]
    parity = {block.k + b.row: (view, b) for view, b in rows}
    members = {m.block: m.image for m in block.members if m.rank != image.rank}
    lost: set[int] = set()
    missing: list[str] = []
    for j, other in members.items():
        if _good_image(found, other) is None:
            lost.add(j)
            missing.append(f"the image of rank {other.rank} (node {other.node})")
    at = 0
    buffers = [memoryview(bytearray(min(CHUNK_BYTES, block.size))) for _ in range(block.k + 1)]
    while at < len(target):
        have = [i for i in sorted((*members, *parity)) if i not in lost][: block.k]
        if len(have) < block.k:
            gone = [f"row {r}" for r in range(block.m) if block.k + r not in parity or block.k + r in lost]
            missing += [f"parity {block.group}-{block.stripe}, {row}" for row in gone]
            what = (
                f"stripe {block.stripe} of group {block.group} has {len(have)} of {block.k} blocks that are needed; "
                f"missing: {', '.join(missing)}"
            )
            raise _cannot(image.step, image.rank, [what, *found.notes])
        try:
            at += _decode_chunk(block, column, have, at, members, parity, found, target, buffers)
        except _SourceLost as fault:
            lost.add(fault.source)
            found.notes.append(one_line(fault.fault))
            if fault.source < block.k:
                missing.append(f"the image of rank {members[fault.source].rank}")


class _SourceLost(Exception):
    def __init__(self, source: int, fault: SiraraError) -> None:
        super().__init__(fault.what)
        self.source, self.fault = source, fault


def _decode_chunk(
    block: ParityBlock,
    column: int,
    have: Sequence[int],
    at: int,
    members: Mapping[int, Image],
    parity: Mapping[int, tuple[NodeView, ParityBlock]],
    found: _Found,
    target: memoryview,
    buffers: Sequence[memoryview],
) -> int:
    """Decodes one chunk of the target; returns its length. buffers: one per source and one more."""
    size = min(CHUNK_BYTES, block.size - at)

    def read(source: int, buffer: memoryview) -> memoryview:
        try:
            if source >= block.k:
                view, b = parity[source]
                view.read_parity(b, at // CHUNK_BYTES, buffer)
            else:
                other = members[source]
                start, length = block_range(other.size, block.k, source)
                view, part = found.checked[other.rank], buffer[: max(0, min(size, length - at))]
                if len(part) and view is not None:
                    view.read(other.step, other.uuid, other.rank, [part], start + at)
                buffer[len(part) :] = bytes(size - len(part))
        except SiraraError as fault:
            raise _SourceLost(source, fault) from fault
        return buffer

    reads = [found.pool.submit(read, i, b[:size]) for i, b in zip(have, buffers[: block.k], strict=True)]
    wait(reads)  # all of them, before a fault of one lets the buffers be used again
    sources = [r.result() for r in reads]
    whole = buffers[block.k][:size]
    isal.combine(decoding(block.k, block.m, have, [column]), sources, [whole])
    used = min(size, len(target) - at)
    target[at : at + used] = whole[:used]
    return used


def _cannot(step: int, rank: int, reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the image of rank {rank} of step {step} cannot be rebuilt",
        code="SR552",
        why="; ".join(reasons),
        try_="an older step, or another tier: sirara ckpt why",
    )
