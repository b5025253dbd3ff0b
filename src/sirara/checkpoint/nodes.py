"""Node tiers: copies of a save that need no shared file system.

    memory   the image stays in this node's shared memory                 survives the death of processes
    peer     a copy of each image on other nodes                          survives copies - 1 nodes of a group
    parity   Reed-Solomon blocks of the images of k + m nodes on them     survives m nodes of a group
    disk     with a path of its own: the image on the node's disk         survives the node's restart

Every keeper keeps its own rank's image; the keepers of ranks with the same place on their nodes work together:

    keeper of rank r ── image ──► keepers of the same place on partner nodes          (peer)
                     ── block j of k ──► the m holders of its stripe: parity ^= c_j * block     (parity)
                     ── report ──► rank 0 ── manifest ──► first keeper of every node        (commit)

No torch here.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sirara.checkpoint.arena import memory_root
from sirara.checkpoint.colleagues import Colleagues
from sirara.checkpoint.generation import GenerationStore, Held
from sirara.checkpoint.image import Image
from sirara.checkpoint.job import TierResult
from sirara.checkpoint.link import Connection, Server, Who
from sirara.checkpoint.parity import rebuild
from sirara.checkpoint.parity_group import ParityGroup
from sirara.checkpoint.peers import PeerCopies
from sirara.checkpoint.serve import LocalNode, NodeView, RemoteNode, one_line
from sirara.checkpoint.storage import Disk
from sirara.config.schema import TierConfig
from sirara.errors import CommError, CommTimeout, ConfigError, SiraraError, StorageError
from sirara.pure.copies import parity_layout, peer_layout

_log = logging.getLogger("sirara")
_SAVES = 4  # whose reports are remembered
_LOOK_S = 0.25  # how often it is asked whether there is hope for missing reports


def is_node_tier(tier: TierConfig) -> bool:
    """Whether a tier is kept by nodes: all but the object store and the shared run folder."""
    return tier.tier in ("memory", "peer", "parity") or (tier.tier == "disk" and tier.path is not None)


class NodeTiers:
    """The node tiers of one run, seen from one keeper.

    Args:  tiers: of the configuration, each with its interval; those that are not kept by nodes are ignored.
           local_size: ranks per node.  node: rank // local_size.
           token: the run's secret; who does not know it is turned away.
           memory: folder in shared memory for tiers without a path; the run's folder in it is <memory>/<run>.
           host: where the others reach this node.  idle_s: a peer that moves no byte for so long has failed.
           deadline_s: for all that one call does.
    warnings: what the tiers survive less of than asked for, and why: too few nodes, too large failure domains.
    """

    def __init__(
        self,
        tiers: Sequence[TierConfig],
        *,
        run: str,
        rank: int,
        world: int,
        local_size: int,
        node: int,
        attempt: int,
        token: str,
        memory: Path,
        host: str = "127.0.0.1",
        idle_s: float = 30.0,
        deadline_s: float = 600.0,
        disk: Disk | None = None,
    ) -> None:
        if rank // local_size != node:
            raise ConfigError(f"rank {rank} cannot be on node {node} with {local_size} ranks per node")
        self._me = Who(run=run, rank=rank, node=node, attempt=attempt)
        self._deadline_s = deadline_s
        self._colleagues = Colleagues(
            self._me, world=world, local_size=local_size, token=token, idle_s=idle_s
        )
        self._tiers = {tier.tier: tier for tier in tiers if is_node_tier(tier)}
        self._store_of = self._make_stores(memory, disk)
        stores = list(dict.fromkeys(self._store_of.values()))
        self._stores = sorted(stores, key=lambda store: store.durable)
        self._local = LocalNode(self._stores, name=f"node {node}")
        size, peer, parity = self._colleagues.size, self._tiers.get("peer"), self._tiers.get("parity")
        copies = peer_layout(size, peer.copies, peer.domains) if peer else None
        groups = parity_layout(size, parity.data, parity.parity, parity.domains) if parity else None
        self._copies = copies and PeerCopies(copies, self._colleagues, self._store_of["peer"])
        self._parity = groups and ParityGroup(groups, self._colleagues, self._store_of["parity"])
        found = {"peer": copies.why if copies else "", "parity": groups.why if groups else ""}
        self.warnings = [f"checkpoint tier {tier}: {why}" for tier, why in found.items() if why]
        self._own_copy = self._wants_own_copy(tiers)
        self._reports: dict[str, dict[int, tuple[bool, bytes]]] = {}
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        for warning in self.warnings if rank == 0 else ():
            _log.warning("%s", warning)
        self._server = Server(self._serve, me=self._me, token=token, host=host, idle_s=idle_s)

    @property
    def address(self) -> str:
        """host:port of this keeper's server; it serves what is in the node's folders from the start."""
        return self._server.address

    @property
    def names(self) -> Collection[str]:
        """The tiers that are kept by nodes."""
        return self._tiers.keys()

    @property
    def stores(self) -> Sequence[GenerationStore]:
        """The folders of this node: shared memory first, then the node's disk."""
        return tuple(self._stores)

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Tells where the keepers of all ranks are."""
        self._colleagues.meet(addresses)

    def close(self) -> None:
        """Serves nobody any more. What is in the folders stays."""
        self._server.close()
        self._colleagues.close()
        if self._parity:
            self._parity.close()

    # ---- keeping

    def keep(
        self,
        image: Image,
        data: memoryview,
        *,
        tiers: Sequence[str],
        arena: Path | None,
        deadline_s: float | None = None,
    ) -> dict[str, TierResult]:
        """Keeps this rank's image in the given tiers (names; others than node tiers are ignored).

        Called by the keepers of all ranks at about the same time. Never raises for a peer or a full disk: the result
        of the tier says so.  arena: the file in which `data` lies, None: a copy is kept.
        """
        until = time.monotonic() + (deadline_s or self._deadline_s)
        due = [name for name in ("memory", "peer", "parity", "disk") if name in tiers and name in self._tiers]
        actions = self._actions(image, data, until)
        results: dict[str, TierResult] = {}
        parity = self._parity if "parity" in due else None
        if parity:
            parity.expect(image)
        if set(due) - {"disk"}:
            # Own state stays whole on its node, whichever of these tiers is due.
            own = self._timed(lambda: self._keep_own(image, data, arena, due))
            if not own.ok:
                if parity:
                    parity.tell_failed(image, StorageError(own.fault, code="SR602"))
                results = {name: own for name in due if name != "disk"}
        with ThreadPoolExecutor(max_workers=4) as pool:
            running = {name: pool.submit(self._timed, actions[name]) for name in due if name not in results}
            results |= {name: future.result() for name, future in running.items()}
        return results

    def _actions(self, image: Image, data: memoryview, until: float) -> dict[str, Callable[[], int]]:
        """What is done for each tier that there is, once the own image is kept; returns bytes."""
        actions: dict[str, Callable[[], int]] = {"memory": lambda: image.size}
        copies, parity, disk = self._copies, self._parity, self._store_of.get("disk")
        if copies:
            actions["peer"] = lambda: copies.keep(image, data, until)
        if parity:
            actions["parity"] = lambda: parity.keep(image, data, until)
        if disk:
            actions["disk"] = lambda: self._keep_copy(disk, image, data)
        return actions

    def _timed(self, action: Callable[[], int]) -> TierResult:
        began = time.monotonic()
        try:
            size = action()
        except SiraraError as fault:
            return TierResult(ok=False, fault=one_line(fault), seconds=time.monotonic() - began)
        return TierResult(ok=True, bytes=size, seconds=time.monotonic() - began)

    def _keep_own(self, image: Image, data: memoryview, arena: Path | None, due: Sequence[str]) -> int:
        store = self._store_of["memory"]
        if arena is None or (self._own_copy and {"peer", "parity"} & set(due)):
            return self._keep_copy(store, image, data)
        store.note_arena(image, arena)
        return image.size

    def _keep_copy(self, store: GenerationStore, image: Image, data: memoryview) -> int:
        store.put_image(image, data)
        return image.size

    # ---- reports and commit

    def report(self, uuid: str, raw: bytes, *, failed: bool = False) -> None:
        """Tells rank 0 that this rank's part of save `uuid` is done, or failed and why (`raw` is then a text)."""
        if self._me.rank == 0:
            self._note_report(uuid, 0, failed, raw)
        else:
            until = time.monotonic() + self._deadline_s
            request = {"tell": "report", "uuid": uuid, "failed": failed}
            self._colleagues.peer(0).ask(request, [memoryview(raw)], until=until)

    def _note_report(self, uuid: str, rank: int, failed: bool, raw: bytes) -> None:
        with self._news:
            self._reports.setdefault(uuid, {})[rank] = (failed, raw)
            for old in list(self._reports)[:-_SAVES]:
                del self._reports[old]
            self._news.notify_all()

    def reports(
        self,
        uuid: str,
        ranks: Sequence[int],
        *,
        deadline_s: float,
        hopeless: Callable[[], str] = str,
        patience_s: float = 0.0,
    ) -> dict[int, bytes]:
        """On rank 0: the reports of these ranks.

        Args:    hopeless: why those that are missing will hardly come, "" while there is hope; from then on it waits
                 for patience_s at most.
        Raises:  StorageError with the text of a rank that failed, CommTimeout naming the ranks that did not report.
        """
        until, why = time.monotonic() + deadline_s, ""
        while True:
            with self._news:
                known = dict(self._reports.get(uuid, {}))
            for rank, (failed, raw) in sorted(known.items()):
                if failed:
                    raise StorageError(
                        f"rank {rank} could not keep its part of the save",
                        code="SR603",
                        why=raw.decode(errors="replace"),
                    )
            missing = [rank for rank in ranks if rank not in known]
            if not missing:
                return {rank: known[rank][1] for rank in ranks}
            if not why and (why := hopeless()):
                until = min(until, time.monotonic() + patience_s)
            left = until - time.monotonic()
            if left <= 0:
                raise CommTimeout(
                    f"the save lacks {len(missing)} of {len(ranks)} ranks: {', '.join(map(str, missing))}",
                    why=why or f"no report within {deadline_s:g} s",
                    try_="look at the logs of these ranks; committed checkpoints are untouched",
                )
            with self._news:
                if len(self._reports.get(uuid, {})) == len(known):
                    self._news.wait(min(left, _LOOK_S))

    def commit(
        self, step: int, uuid: str, manifest: bytes, *, deadline_s: float | None = None
    ) -> dict[int, str]:
        """From rank 0: the manifest to every node. Returns node -> fault for the nodes that could not take it."""
        until = time.monotonic() + (deadline_s or self._deadline_s)
        faults: dict[int, str] = {}

        def tell(node: int) -> None:
            try:
                if node == self._me.node:
                    self._put_manifest(step, uuid, manifest)
                else:
                    self._tell_node(node, {"tell": "commit", "step": step, "uuid": uuid}, manifest, until)
            except SiraraError as fault:
                faults[node] = one_line(fault)

        self._colleagues.each(tell, range(self._colleagues.nodes))
        return faults

    def _tell_node(self, node: int, request: dict[str, Any], payload: bytes, until: float) -> None:
        """Tells any one keeper of a node; the first that can be reached."""
        ranks = self._colleagues.ranks_on(node)
        for rank in ranks:
            try:
                self._colleagues.peer(rank).ask(request, [memoryview(payload)], until=until)
            except CommError:
                if rank == ranks[-1]:
                    raise
            else:
                return

    def _put_manifest(self, step: int, uuid: str, manifest: bytes) -> None:
        for store in self._stores:
            store.put_manifest(step, uuid, manifest)

    # ---- reading

    def inventory(self) -> list[Held]:
        """What this node holds of the run, whatever attempt and layout wrote it."""
        return self._local.inventory().held

    def nodes(self) -> list[NodeView]:
        """Every node that is known, this one as it is, the others through their first keeper."""
        views: list[NodeView] = []
        for node in range(self._colleagues.nodes):
            rank = self._colleagues.ranks_on(node)[0]
            if node == self._me.node:
                views.append(self._local)
            elif self._colleagues.knows(rank):
                views.append(RemoteNode(self._colleagues.new_peer(rank), deadline_s=self._deadline_s))
        return views

    def _unknown_nodes(self) -> list[int]:
        known = self._colleagues.knows
        others = [n for n in range(self._colleagues.nodes) if n != self._me.node]
        return [n for n in others if not known(self._colleagues.ranks_on(n)[0])]

    def rebuild(self, step: int, uuid: str, rank: int) -> Image:
        """Decodes a rank's image from what other nodes hold (parity and their own images) into this node's memory.

        Every piece is checked. Raises CheckpointError that names what is missing or damaged.
        """
        views = self.nodes()
        store = self._store_of["memory"]
        unknown = [f"nobody told where node {node} is" for node in self._unknown_nodes()]
        image = rebuild(step, uuid, rank, nodes=views, store=store, notes=unknown)
        for view in views:
            try:
                raw = view.manifest(step, uuid)
            except SiraraError as fault:
                _log.warning(
                    "%s cannot be asked for the manifest of step %d: %s", view.name, step, fault.what
                )
                continue
            if raw is not None:
                store.put_manifest(step, uuid, raw)
                break
        return image

    # ---- serving

    def _serve(self, request: dict[str, Any], size: int, connection: Connection) -> None:
        tell = request.get("tell")
        if tell == "image" and self._copies:
            self._copies.take(size, connection)
        elif tell == "block" and self._parity:
            self._parity.take(request, size, connection)
        elif tell == "report":
            raw = bytes(connection.receive_payload(size))
            if connection.peer is not None:
                self._note_report(str(request["uuid"]), connection.peer.rank, bool(request["failed"]), raw)
            connection.send({})
        elif tell == "commit":
            raw = bytes(connection.receive_payload(size))
            self._put_manifest(int(request["step"]), str(request["uuid"]), raw)
            connection.send({})
        elif tell == "give_up" and self._parity:
            text = connection.receive_payload(size).decode(errors="replace")
            self._parity.give_up(str(request["uuid"]), text)
            connection.send({})
        elif request.get("ask") == "rebuild":
            image = self.rebuild(int(request["step"]), str(request["uuid"]), int(request["rank"]))
            connection.send({}, [memoryview(image.to_bytes())])
        elif not self._local.answer(request, connection):
            raise CommError(f"{connection.name} asks for {request!r}", code="SR710")

    # ---- who and where

    def _make_stores(self, memory: Path, disk: Disk | None) -> dict[str, GenerationStore]:
        made: dict[tuple[Path, bool], GenerationStore] = {}
        stores = {}
        for name in ("memory", "peer", "parity", "disk"):
            tier = self._tiers.get(name)
            if name == "disk" and tier is None:
                continue
            path = tier.path if tier else None
            root = memory if path is None else memory_root(Path(path), self._me.node)
            key = (root, name == "disk")
            if key not in made:
                made[key] = GenerationStore(root, self._me.run, durable=name == "disk", disk=disk)
            stores[name] = made[key]
        return stores

    def _wants_own_copy(self, tiers: Sequence[TierConfig]) -> bool:
        """An arena serves the next save but one. Copies and parity on other nodes need the own images beside them, so
        where another tier is saved at other steps (without an interval it never is), the image is copied as well."""
        return any(
            other.every is not None and (tier.every is None or other.every % tier.every != 0)
            for name, tier in self._tiers.items()
            if name in ("peer", "parity")
            for other in tiers
        )
