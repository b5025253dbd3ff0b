"""Where the steps of a run can be read: what all tiers hold, put together.  A pure choice; no torch here.

    inventories of the nodes   images in memory, on the nodes' disks, blocks of parity
    the run's folder           committed steps
    the object store           committed saves
        ─► sources: one per save, newest first, each complete over all the ranks that saved it
        ─► rows of a table: what was found where, and why something does not count

Of a save, the images of all ranks must be somewhere: the sets of what nodes hold are joined, not the newest of each
taken.  An image that is nowhere may be decoded from parity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sirara.checkpoint.generation import Held

TIERS = ("memory", "peer", "parity", "disk", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One line of what a resume did: a step, a tier, what was found there or done with it, and why."""

    step: int | None
    tier: str
    what: str
    why: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else str(self.step)
        return f"{step:>10}  {self.tier:<7} {self.what}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlace:
    """The image of one rank of a save on one node.  tier: "memory" or "disk" of that node; home: staged there."""

    rank: int
    node: int
    tier: str
    home: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One save and where it can be read.

    uuid: "" when only the run's folder knows it.  world: ranks that saved it (0: not known).  images: where they lie.
    parity: (rank, node): images that can be decoded from parity, and the node that is to do it.
    folder, stored: the run's folder and the object store hold it.
    """

    step: int
    uuid: str = ""
    world: int = 0
    images: tuple[ImagePlace, ...] = ()
    parity: tuple[tuple[int, int], ...] = ()
    folder: bool = False
    stored: bool = False

    @property
    def attempt(self) -> int:
        return int(self.uuid[:8], 16) if self.uuid else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def absent(self) -> tuple[tuple[int, int], ...]:
        """Of `parity`, the images that are nowhere."""
        there = {place.rank for place in self.images}
        return tuple((rank, node) for rank, node in self.parity if rank not in there)

    @staticmethod
    def from_json(f: Mapping[str, Any]) -> "Source":
        return Source(
            step=f["step"],
            uuid=f["uuid"],
            world=f["world"],
            images=tuple(ImagePlace(**place) for place in f["images"]),
            parity=tuple((rank, node) for rank, node in f["parity"]),
            folder=f["folder"],
            stored=f["stored"],
        )


def choose(
    held: Mapping[int, Sequence[Held]],
    *,
    folder: Mapping[int, str],
    stored: Sequence[tuple[int, str]] = (),
) -> tuple[list[Source], list[TierRow]]:
    """The saves that can be read, newest first, and what was found.

    Args:  held: node -> its inventory.  folder: step -> uuid of the committed folder ("" when nobody needs to know).
           stored: (step, uuid) in the object store.
    """
    saves: dict[tuple[int, str], list[tuple[int, Held]]] = {}
    for node in sorted(held):
        for h in held[node]:
            saves.setdefault((h.step, h.uuid), []).append((node, h))
    keys = {*saves, *((step, uuid) for step, uuid in stored)}
    keys |= {(step, uuid) for step, uuid in folder.items() if uuid or not any(k[0] == step for k in keys)}
    sources: list[Source] = []
    rows: list[TierRow] = []
    for step, uuid in sorted(keys, reverse=True):
        found = saves.get((step, uuid), [])
        on_disk, in_store = folder.get(step) == uuid, (step, uuid) in stored
        images, world, parity, lost = _images(found, sorted(held))
        committed = on_disk or in_store or any(h.committed for _, h in found)
        rows += _rows(step, found, world, images, parity, lost, committed)
        if on_disk:
            rows.append(TierRow(step=step, tier="disk", what="committed"))
        if in_store:
            rows.append(TierRow(step=step, tier="object", what="committed"))
        if on_disk or in_store or (committed and world and not lost):
            sources.append(
                Source(
                    step=step,
                    uuid=uuid,
                    world=world,
                    images=images if committed else (),
                    parity=parity if committed else (),
                    folder=on_disk,
                    stored=in_store,
                )
            )
    return sources, rows


def _images(
    found: Sequence[tuple[int, Held]], nodes: Sequence[int]
) -> tuple[tuple[ImagePlace, ...], int, tuple[tuple[int, int], ...], list[int]]:
    """(images, ranks that saved, what can be decoded and where, ranks whose image is lost)."""
    places = [
        ImagePlace(rank=h.rank, node=node, tier=h.tier, home=h.node == node)
        for node, h in found
        if h.kind != "parity"
    ]
    # Memory before disk, its own node before others: the order in which they are read.
    places.sort(key=lambda p: (p.rank, p.tier != "memory", not p.home, p.node))
    covered = {rank for _, h in found if h.kind == "parity" for rank in h.covers}
    world = max((h.world for _, h in found), default=0)
    if not world and covered:
        world = 1 + max(covered)
    missing = sorted(set(range(world)) - {p.rank for p in places})
    holders = sorted({node for node, h in found if h.kind == "parity"}) or list(nodes)
    # Those that are nowhere first, so that their decoding is spread over the nodes.
    order = sorted(covered, key=lambda rank: (rank not in missing, rank))
    parity = tuple((rank, holders[n % len(holders)]) for n, rank in enumerate(order))
    return tuple(places), world, parity, [rank for rank in missing if rank not in covered]


def _rows(
    step: int,
    found: Sequence[tuple[int, Held]],
    world: int,
    images: Sequence[ImagePlace],
    parity: Sequence[tuple[int, int]],
    lost: Sequence[int],
    committed: bool,
) -> list[TierRow]:
    if not found:
        return []
    rows = []
    home = {p.rank for p in images if p.home and p.tier == "memory"}
    peer = {p.rank for p in images if not p.home and p.tier == "memory"} - home
    disk = {p.rank for p in images if p.tier == "disk"}
    why = [] if committed else ["it was never committed"]
    if lost:
        why.append(f"the images of ranks {_some(lost)} are nowhere")
    reason = "; ".join(why)
    rows.append(TierRow(step=step, tier="memory", what=f"{len(home)} of {world} images", why=reason))
    if peer:
        rows.append(TierRow(step=step, tier="peer", what=f"images of ranks {_some(sorted(peer))}"))
    absent = [rank for rank, _ in parity if all(rank != p.rank for p in images)]
    if absent:
        what = f"images of ranks {_some(absent)} are to be decoded"
        rows.append(TierRow(step=step, tier="parity", what=what))
    if disk:
        rows.append(TierRow(step=step, tier="disk", what=f"{len(disk)} of {world} images on disks of nodes"))
    return rows


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
