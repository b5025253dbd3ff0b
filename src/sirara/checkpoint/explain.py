"""Why a run goes on from the step it goes on from: every save in every place, what is whole, and what is not.

    step folders, leftovers ─┐
    images and parity        ├─► per save: which pieces are where ─► whole or not ─► the newest whole one is taken
    objects                  │
    events of the run        ┘   saves that failed, were skipped, are gone; what the last resume said

Sizes, times and descriptions are looked at, not every byte: `ckpt verify` does that. Whether a resume takes a save is
decided by the rule of a resume itself (sources.choose), over the nodes that it asks: 0 to n - 1 when it runs on n.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sirara.checkpoint.copies import Copy
from sirara.checkpoint.generation import Held
from sirara.checkpoint.object_copy import ObjectCopy
from sirara.checkpoint.pins import is_pinned
from sirara.checkpoint.places import NodeStore, Places, copies_of, manifests_of
from sirara.checkpoint.retention import changed_text, read_back, state_text
from sirara.checkpoint.sources import choose
from sirara.checkpoint.step_folder import open_manifest, size_faults
from sirara.checkpoint.steps import committed_steps, incomplete_steps, step_name
from sirara.errors import CheckpointError, StorageError
from sirara.events import BEGINNINGS, Record
from sirara.pure.manifest import MANIFEST, Manifest

MOST_UNSAVED = 10
"""So many of the newest saves that the journal knows and no place has are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One place that has something of a save. pieces: how many of the save's `total` are there.

    asked: whether a resume asks this place.  changed: files that were written after they had been read back.
    """

    place: str
    pieces: int
    total: int
    what: str
    asked: bool = True
    changed: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.pieces == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save of the run: where it is, and whether a resume can take it from there.

    missing: pieces that no place has.  why: when it cannot be taken, the reason.
    """

    step: int
    uuid: str
    attempt: int
    found: tuple[Found, ...]
    missing: int = 0
    why: str = ""

    @property
    def restorable(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Saves newest first; taken: the one that a resume takes now.

    nodes: on so many nodes; None when it is not known and all that are seen count.
    unsaved: newer steps that the journal speaks of and no place has, with the reason.  leftovers: folders of saves or
    deletions that did not end.  resumed: the newest resume event, None when there was none.  unasked: places that could
    not be asked.
    """

    run: str
    folder: Path
    nodes: int | None
    saves: tuple[Save, ...]
    unsaved: tuple[tuple[int, str], ...]
    leftovers: tuple[tuple[str, str], ...]
    resumed: Mapping[str, Any] | None
    unasked: tuple[str, ...]

    @property
    def taken(self) -> Save | None:
        return next((save for save in self.saves if save.restorable), None)


@dataclass
class _Case:
    """What is collected about one save: its manifest and which pieces of it are where."""

    manifest: Manifest
    held: np.ndarray
    beyond: np.ndarray  # pieces on nodes that are not asked
    found: list[Found] = field(default_factory=list)
    on_disk: bool = False
    in_store: bool = False
    folder_fault: str = ""

    def add(
        self, place: str, has: np.ndarray, what: str, *, asked: bool = True, changed: tuple[str, ...] = ()
    ) -> None:
        if asked:
            self.held |= has
        else:
            self.beyond |= has
        pieces, total = int(has.sum()), len(has)
        self.found.append(
            Found(place=place, pieces=pieces, total=total, what=what, asked=asked, changed=changed)
        )


def explain(
    folder: Path, places: Places, events: Sequence[Record] = (), *, nodes: int | None = None
) -> Explanation:
    """Looks at the checkpoints folder of a run, the other places, and the run's events.

    Args:    nodes: on which a resume would run; None: as many as the last attempt had, where the events say so.
    Raises:  StorageError when the folder cannot be read.
    """
    nodes = nodes or _nodes_before(events)
    asked = replace(places, stores=tuple(at for at in places.stores if _asks(at, nodes)))
    beyond = [at for at in places.stores if not _asks(at, nodes)]
    cases: dict[str, _Case] = {}
    broken: list[Save] = []
    for step in committed_steps(folder):
        fault = _folder_case(folder / step_name(step), step, places.run, cases)
        if fault:
            found = Found(place="disk", pieces=0, total=1, what=fault)
            broken.append(Save(step=step, uuid="", attempt=0, found=(found,), why=fault))
    manifests, unasked = manifests_of(places)
    for manifest, _ in manifests:
        if manifest.run == places.run:
            cases.setdefault(manifest.uuid, _new_case(manifest))
    for case in cases.values():
        copies, more = copies_of(asked, case.manifest)
        unasked += more
        for copy in copies:
            case.in_store |= isinstance(copy, ObjectCopy)
            case.add(copy.name, _has(copy, len(case.held)), "committed")
        for at in beyond:
            alone = replace(places, stores=(at,), objects=())
            for copy in copies_of(alone, case.manifest)[0]:
                what = f"committed; not asked by a resume on {nodes} node{'s' if nodes != 1 else ''}"
                place = copy.name if copy.name == at.name else f"{copy.name} of node {at.node}"
                case.add(place, _has(copy, len(case.held)), what, asked=False)
    readable = _readable(asked, cases.values())
    saves = [_judged(case, readable, nodes) for case in cases.values()]
    # A torn manifest on disk is no loss when another place has this step.
    whole = {save.step for save in saves if save.restorable}
    saves += [save for save in broken if save.step not in whole]
    saves.sort(key=lambda save: (save.step, save.attempt), reverse=True)
    taken = next((save.step for save in saves if save.restorable), -1)
    return Explanation(
        run=places.run,
        folder=folder,
        nodes=nodes,
        saves=tuple(saves),
        unsaved=tuple(_unsaved(events, {save.step for save in saves}, newer_than=taken)),
        leftovers=tuple(
            (name, _why_left(name)) for name in (incomplete_steps(folder) if folder.exists() else [])
        ),
        resumed=next((e for e in reversed(events) if e.get("kind") == "resume"), None),
        unasked=tuple(dict.fromkeys([*places.unasked, *unasked])),
    )


def _new_case(manifest: Manifest) -> _Case:
    none = np.zeros(len(manifest.pieces), bool)
    return _Case(manifest=manifest, held=none, beyond=none.copy())


def _asks(at: NodeStore, nodes: int | None) -> bool:
    return nodes is None or at.node is None or at.node < nodes


def _nodes_before(events: Sequence[Record]) -> int | None:
    """Nodes of the last attempt that came as far as its first step."""
    begun = (e.get("nodes") for e in reversed(events) if e.get("kind") in BEGINNINGS)
    nodes = next(begun, None)
    return nodes if isinstance(nodes, int) and nodes > 0 else None


def _readable(places: Places, cases: Collection[_Case]) -> dict[str, str]:
    """uuid -> "" of every save that a resume may read, or why it may not: its own choice over the same inventories."""
    held: dict[int, list[Held]] = {}
    for at in places.stores:
        held.setdefault(at.node or 0, []).extend(at.store.inventory())
    folder = {case.manifest.step: case.manifest.uuid for case in cases if case.on_disk}
    stored = [(case.manifest.step, case.manifest.uuid) for case in cases if case.in_store]
    sources, rows = choose(held, folder=folder, stored=stored)
    known = {source.uuid for source in sources}
    reasons = {row.step: row.why for row in rows if row.why}
    return {
        case.manifest.uuid: ""
        if case.manifest.uuid in known
        else reasons.get(case.manifest.step) or "no place that is asked has all of it"
        for case in cases
    }


def _folder_case(path: Path, step: int, run: str, cases: dict[str, _Case]) -> str:
    """Adds what a step folder holds; returns why it counts as nothing."""
    try:
        manifest = open_manifest(path, run=run or None, step=step, check_sizes=False)
        faults = size_faults(path, manifest)
    except (CheckpointError, StorageError) as fault:
        return fault.what
    case = cases.setdefault(manifest.uuid, _new_case(manifest))
    bad = {name for name, _ in faults}
    good = np.array([f.name not in bad for f in manifest.files], bool)
    mark = read_back(path, manifest)
    changed = mark.changed if mark else ()
    case.on_disk = True
    case.folder_fault = "; ".join(f"{name} {fault}" for name, fault in faults)
    what = case.folder_fault + changed_text(changed) if faults else state_text(mark)
    has = good[manifest.pieces.file] if len(case.held) else case.held
    case.add("disk", has, what + ("; pinned" if is_pinned(path) else ""), changed=changed)
    return ""


def _has(copy: Copy, pieces: int) -> np.ndarray:
    return np.fromiter((copy.locate(i) is not None for i in range(pieces)), bool, pieces)


def _judged(case: _Case, readable: Mapping[str, str], nodes: int | None) -> Save:
    m = case.manifest
    lost = np.flatnonzero(~case.held)
    why = ""
    if lost.size:
        first = int(lost[0])
        tensor = m.tensors[int(m.pieces.tensor[first])].name
        why = f"{lost.size} of {len(case.held)} pieces are nowhere, the first is {tensor}{m.box(first)}"
        if case.beyond[lost].all():
            where = ", ".join(at.place for at in case.found if not at.asked)
            why = (
                f"{lost.size} of {len(case.held)} pieces are only in {where}; a resume on {nodes} asks others"
            )
    elif case.folder_fault and sum(at.asked for at in case.found) == 1:
        why = case.folder_fault  # no piece is missing, but a folder that is not whole is not opened
    else:
        why = readable[m.uuid]
    return Save(
        step=m.step, uuid=m.uuid, attempt=m.attempt, found=tuple(case.found), missing=int(lost.size), why=why
    )


def _unsaved(events: Sequence[Record], known: set[int], *, newer_than: int) -> list[tuple[int, str]]:
    """Newest first: steps that were saved, or should have been, and are in no place."""
    said: dict[int, str] = {}
    for event in events:
        kind, step = event.get("kind"), event.get("step")
        if kind in BEGINNINGS:
            # What an older attempt did beyond the step from which this one went on is no part of the run any more.
            said = {s: why for s, why in said.items() if s <= int(event.get("from_step") or 0)}
        elif not isinstance(step, int):
            continue
        elif kind == "save":
            tiers = event.get("tiers")
            where = f" ({', '.join(map(str, tiers))})" if tiers else ""
            said[step] = f"was saved{where} and is gone: deleted, or lost with the nodes that held it"
        elif kind == "save_failed":
            said[step] = f"could not be saved: {_first_line(event.get('error'))}"
        elif kind == "save_skipped":
            said[step] = f"was not saved: {_first_line(event.get('why')) or 'a save was still running'}"
    gone = sorted((step for step in said if step not in known and step > newer_than), reverse=True)
    return [(step, said[step]) for step in gone[:MOST_UNSAVED]]


def _first_line(text: object) -> str:
    return str(text or "").partition("\n")[0]


def _why_left(name: str) -> str:
    if ".tmp-" in name:
        attempt = int(name.partition(".tmp-")[2][:8], 16)
        return f"a save of attempt {attempt} that did not end, or has not yet"
    if ".gone-" in name:
        return "a deletion that did not end"
    if ".old-" in name:
        return "moved aside by a save of the same step that did not end"
    return f"it has no {MANIFEST}: a deletion that did not end, or somebody removed it"
