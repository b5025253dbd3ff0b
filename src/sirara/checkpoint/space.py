"""Space for checkpoints, counted before it is needed: bytes and inodes on every file system that a tier uses.

    before training   all that the retention plan will hold at one time, less what lies there already: PlanError
    before a save     what this save writes: StorageError, and the run goes on without the save

Tiers that share a file system are added up. Free space is no promise (others write as well, quotas and the servers
of a parallel file system have limits of their own), so a save also allocates its files before it writes to them.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.arena import memory_root
from sirara.config.schema import RunConfig, TierConfig
from sirara.errors import PlanError, StorageError
from sirara.pure.families import UnitSpec
from sirara.pure.retain import Rules, most_steps

MARGIN = 1.05
"""File systems need space of their own for what is written."""
FILE_BYTES = 2 << 30
SMALL_FILES = 10
"""Of a step folder: manifest, marks, config.json and its kind."""
GENERATIONS = 3
"""Copies of an image on a node: the two newest committed ones and the one that arrives."""
ARENAS = 2
_BYTES_OF = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "fp8": (1, 4)}
_DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
_STATES = {"adamw": 2, "lion": 1, "muon": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one tier will hold in one folder: `times` copies of `each` bytes in `files` files each.

    why: what the copies are for.  last: `keep_last`, where a smaller one would need less.  try_: other settings
    that need less.
    """

    tier: str
    folder: Path
    times: int
    each: int
    files: int
    why: str = ""
    last: int = 0
    try_: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.times * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a file system still takes; inodes: None where it does not count them."""

    place: Path
    device: int
    bytes: int
    inodes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Who saves: processes of the job and of this node, the number of nodes, and the number of this one."""

    world: int = 1
    local: int = 1
    nodes: int = 1
    node: int = 0


def room_at(path: Path) -> Room | None:
    """The file system of the nearest existing parent; None when the system does not say."""
    for place in (path, *path.parents):
        try:
            device, found = os.stat(place).st_dev, os.statvfs(place)
        except OSError:
            continue
        inodes = found.f_favail if found.f_files else None
        return Room(place=place, device=device, bytes=found.f_bavail * found.f_frsize, inodes=inodes)
    return None


def used(folder: Path) -> tuple[int, int]:
    """Bytes on disk and number of files under a folder; 0, 0 when there is none."""
    size = count = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue  # it went while we looked
            count += 1
    return size, count


# ---- before training


def check_before_training(needs: Sequence[Need]) -> None:
    """Refuses a run whose checkpoints cannot fit, however long it trains.

    What lies in the folders already counts as room that the plan has; room for one more step must always be free.
    Raises:  PlanError naming the file system, the copies, what is missing and settings that need less.
    """
    for room, here in _by_file_system(needs):
        size = files = 0
        for folder in dict.fromkeys(need.folder for need in here):
            inside = [need for need in here if need.folder == folder]
            lies, count = used(folder)
            # A step is written before an older one goes; images take the place of older ones.
            one_more = sum(need.each for need in inside if need.last)
            size += max(one_more, sum(need.bytes for need in inside) - lies)
            files += max(0, sum(need.times * need.files for need in inside) - count)
        fault = _fault(room, here, size=int(size * MARGIN), files=files)
        if fault is not None:
            what, why, missing = fault
            advice = [s for need in here for s in (*_less(need, missing), *need.try_)]
            raise PlanError(
                what, code="SR260", where=str(room.place), why=why, try_=[*advice, _free(missing)]
            )


def planned_needs(
    config: RunConfig,
    units: Sequence[UnitSpec],
    *,
    checkpoints: Path,
    run: str,
    seats: Seats,
    pinned: int = 0,
) -> list[Need]:
    """What the tiers of a run hold at most, on the file systems that this node sees.

    Args:  units: the model's, frozen tensors marked.  checkpoints: <run>/checkpoints.  run: its id.
    """
    settings, step = config.checkpoint, state_bytes(config, units)
    rules = Rules(last=settings.keep_last, every=settings.keep_every, best=settings.keep_best)
    shared = next((t for t in settings.tiers if t.tier == "disk" and t.path is None), None)
    every = (shared.every if shared else None) or settings.every
    times = most_steps(every=every, steps=config.train.steps, rules=rules, pinned=pinned)
    held = [f"keep_last {settings.keep_last}", "one being written"]
    held += [f"keep_every {settings.keep_every}"] if settings.keep_every else []
    held += ["keep_best"] if settings.keep_best else []
    held += [f"{pinned} pinned"] if pinned else []
    needs = [
        Need(
            tier="disk",
            folder=checkpoints,
            times=times,
            each=step,
            files=step_files(step, world=seats.world, nodes=seats.nodes),
            why=", ".join(held),
            last=settings.keep_last,
            try_=("checkpoint.keep_every=null",) if settings.keep_every else (),
        )
    ]
    share = -(-step * seats.local // seats.world)
    # Without these tiers a snapshot need not outlive its process: where shared memory is small it lies elsewhere.
    if any(t.tier in ("memory", "peer", "parity") for t in settings.tiers):
        arenas = memory_folder(settings.tiers, node=seats.node) / run
        needs.append(_image_need("memory", arenas, ARENAS, share, seats, why="two snapshots in turn"))
    for tier in settings.tiers:
        needs += _tier_needs(tier, settings.tiers, run, share, seats)
    return needs


def memory_folder(tiers: Sequence[TierConfig], *, node: int) -> Path:
    """Where snapshots of this node lie, see `memory_path`."""
    return memory_root(memory_path(tiers), node)


def memory_path(tiers: Sequence[TierConfig]) -> str | None:
    """The path of the memory tier; without that tier the one of peer or parity; None: shared memory.

    Nodes whose copies lie in folders of their own must not share the folder of their snapshots either.
    """
    named = [t for t in tiers if t.tier == "memory"]
    named += [t for t in tiers if t.tier in ("peer", "parity") and t.path is not None]
    return named[0].path if named else None


def state_bytes(config: RunConfig, units: Sequence[UnitSpec]) -> int:
    """Bytes of one saved step: weights, masters where weights are of lower precision, optimizer state."""
    weights, sums = _BYTES_OF[config.train.precision]
    name, total = config.train.optimizer.name, 0
    for unit in units:
        for tensor in unit.tensors:
            if tensor.tied_to is not None:
                continue
            numel = 1
            for size in tensor.shape:
                numel *= size
            own = _DTYPE_BYTES.get(tensor.dtype or "", weights)
            matrix = name == "muon" and len(tensor.shape) == 2 and unit.name.startswith("block.")
            copies = (own != sums) + (1 if matrix else _STATES[name]) if tensor.trainable else 0
            total += numel * (own + copies * sums)
    return total


def step_files(size: int, *, world: int, nodes: int) -> int:
    """The most files of one step folder, the reports of the ranks while it is written included."""
    return nodes * -(-max(size, 1) // FILE_BYTES) * 2 + SMALL_FILES + world


def _tier_needs(
    tier: TierConfig, tiers: Sequence[TierConfig], run: str, share: int, seats: Seats
) -> list[Need]:
    kept = "two newest ones and one being written"
    if tier.tier == "disk" and tier.path is not None:
        folder = memory_root(tier.path, seats.node) / run
        return [_image_need("disk", folder, GENERATIONS, share, seats, why=kept)]
    if tier.tier not in ("peer", "parity"):
        return []
    path = memory_root(tier.path, seats.node) if tier.path else memory_folder(tiers, node=seats.node)
    if tier.tier == "peer":
        advice = (f"tiers: peer with copies: {tier.copies - 1}",) if tier.copies > 2 else ()
        images = GENERATIONS * (tier.copies - 1)
        why = f"images of {tier.copies - 1} other nodes, {kept}"
        return [_image_need("peer", path / run, images, share, seats, why=why, try_=advice)]
    each = -(-share * tier.parity // tier.data)
    why = f"parity {tier.data}+{tier.parity}, {kept}"
    return [_image_need("parity", path / run, GENERATIONS, each, seats, why=why)]


def _image_need(
    tier: str, folder: Path, times: int, each: int, seats: Seats, *, why: str, try_: tuple[str, ...] = ()
) -> Need:
    return Need(
        tier=tier, folder=folder, times=times, each=each, files=2 * seats.local + 2, why=why, try_=try_
    )


def _less(need: Need, missing: int) -> list[str]:
    """A smaller `keep_last` that would do."""
    last = need.last - -(-missing // max(1, need.each))
    return [f"checkpoint.keep_last={last}"] if missing and last >= 1 else []


# ---- before a save


def check_before_save(needs: Sequence[Need]) -> None:
    """Refuses a save that cannot be written; called before any rank has begun, on behalf of all ranks that
    share the folders.

    Raises:  StorageError naming the file system, the bytes asked and the bytes free.
    """
    for room, here in _by_file_system(needs):
        size, files = sum(need.bytes for need in here), sum(need.times * need.files for need in here)
        fault = _fault(room, here, size=size, files=files)
        if fault is not None:
            what, why, missing = fault
            raise StorageError(
                what,
                code="SR601",
                where=str(room.place),
                why=why,
                try_=[_free(missing), "lower checkpoint.keep_last; committed checkpoints are untouched"],
            )


# ---- the arithmetic of both


def _by_file_system(needs: Sequence[Need]) -> list[tuple[Room, list[Need]]]:
    found: dict[int, tuple[Room, list[Need]]] = {}
    for need in needs:
        room = room_at(need.folder)
        if room is not None:
            found.setdefault(room.device, (room, []))[1].append(need)
    return list(found.values())


def _fault(room: Room, needs: Sequence[Need], *, size: int, files: int) -> tuple[str, str, int] | None:
    """(what, why, missing bytes) when a file system has too few bytes or inodes left."""
    tiers = " and ".join(dict.fromkeys(need.tier for need in needs))
    asked = "; ".join(
        f"{need.tier}: {need.times} x {need.each} bytes ({need.why})"
        if need.why
        else f"{need.tier}: {need.bytes} bytes"
        for need in needs
    )
    if size > room.bytes:
        what = f"no space left for checkpoints ({tiers}) at {room.place}"
        why = f"{size} bytes asked, {room.bytes} bytes free, {size - room.bytes} missing; {asked}"
        return what, why, size - room.bytes
    if room.inodes is not None and files > room.inodes:
        what = f"no inodes left for checkpoints ({tiers}) at {room.place}"
        return what, f"{files} files asked, {room.inodes} inodes free; {asked}", 0
    return None


def _free(missing: int) -> str:
    if not missing:
        return "remove small files there"
    unit, name = ((1 << 30), "GiB") if missing >= 1 << 30 else ((1 << 20), "MiB")
    return f"free {math.ceil(10 * missing / unit) / 10:.1f} {name} there"
