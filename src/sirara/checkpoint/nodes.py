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

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from sirara.checkpoint.arena import memory_root
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Held
from sirara.checkpoint.image import Image
from sirara.checkpoint.job import TierResult
from sirara.checkpoint.link import Connection, Peer, Server, Who
from sirara.checkpoint.parity import ParityBuilder, StripeName, block_range, rebuild
from sirara.checkpoint.serve import LocalNode, NodeView, RemoteNode, one_line, send_chunks
from sirara.checkpoint.storage import Disk
from sirara.config.schema import TierConfig
from sirara.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    InvariantError,
    SiraraError,
    StorageError,
)
from sirara.pure.copies import ParityLayout, PeerLayout, Stripes, parity_layout, peer_layout

__all__ = ["NodeTiers", "TierResult", "is_node_tier"]

_log = logging.getLogger("sirara")
_SENDERS = 8
_SAVES = 4  # whose reports are remembered


def is_node_tier(tier: TierConfig) -> bool:
    """Whether a tier is kept by nodes: all but the object store and the shared run folder."""
    return tier.tier in ("memory", "peer", "parity") or (tier.tier == "disk" and tier.path is not None)


class NodeTiers:
    """The node tiers of one run, seen from one keeper.

    Args:  tiers: of the configuration, each with its interval; those that are not kept by nodes are ignored.
           local_size: ranks per node.  node: rank // local_size.  token: the run's secret; who does not know it is turned away.
           memory: folder in shared memory for tiers without a path; the run's folder in it is <memory>/<run>.
           host: where the others reach this node.  idle_s: a peer that moves no byte for so long has failed.
           deadline_s: for all that one call does.
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
        self._world, self._local_size, self._token = world, local_size, token
        self._idle_s, self._deadline_s = idle_s, deadline_s
        self._tiers = {tier.tier: tier for tier in tiers if is_node_tier(tier)}
        self._store_of = self._make_stores(memory, disk)
        stores = list(dict.fromkeys(self._store_of.values()))
        self._stores = sorted(stores, key=lambda store: store.durable)
        self._local = LocalNode(self._stores, name=f"node {node}")
        # The nodes on which there is a rank with this one's place; the last node may be short of ranks.
        self._nodes = len(range(rank % local_size, world, local_size))
        self._peers_layout, self._parity_layout = self._plan()
        self._own_copy = self._wants_own_copy(tiers)
        self._peers: dict[int, Peer] = {}
        self._addresses: dict[int, str] = {}
        self._builders: dict[str, ParityBuilder] = {}
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

    @property
    def warnings(self) -> list[str]:
        """What the tiers survive less of than asked for, and why: too few nodes, too large failure domains."""
        found = {
            "peer": self._peers_layout and self._peers_layout.why,
            "parity": self._parity_layout and self._parity_layout.why,
        }
        return [f"checkpoint tier {tier}: {why}" for tier, why in found.items() if why]

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Tells where the keepers of all ranks are."""
        with self._lock:
            for rank, address in addresses.items():
                if self._addresses.get(rank) != address and rank in self._peers:
                    self._peers.pop(rank).close()
            self._addresses = dict(addresses)

    def close(self) -> None:
        """Serves nobody any more. What is in the folders stays."""
        self._server.close()
        with self._lock:
            peers, builders = list(self._peers.values()), list(self._builders.values())
            self._peers.clear()
            self._builders.clear()
        for peer in peers:
            peer.close()
        for builder in builders:
            builder.give_up(CommError(f"{self._me} ends", code="SR711"))

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
        actions: dict[str, Callable[[], int]] = {
            "memory": lambda: image.size,
            "peer": lambda: self._keep_at_peers(image, data, until),
            "parity": lambda: self._keep_parity(image, data, until),
            "disk": lambda: self._keep_copy(self._store_of["disk"], image, data),
        }
        results: dict[str, TierResult] = {}
        if "parity" in due:
            self._expect(image)
        if set(due) - {"disk"}:
            # Own state stays whole on its node, whichever of these tiers is due.
            own = self._timed(lambda: self._keep_own(image, data, arena, due))
            if not own.ok:
                if "parity" in due:
                    self._tell_group(image, StorageError(own.fault, code="SR602"))
                results = {name: own for name in due if name != "disk"}
        with ThreadPoolExecutor(max_workers=4) as pool:
            running = {name: pool.submit(self._timed, actions[name]) for name in due if name not in results}
            results |= {name: future.result() for name, future in running.items()}
        return results

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
            store.put_image(image, data)
        else:
            store.note_arena(image, arena)
        return image.size

    def _keep_copy(self, store: GenerationStore, image: Image, data: memoryview) -> int:
        store.put_image(image, data)
        return image.size

    # ---- peers

    def _keep_at_peers(self, image: Image, data: memoryview, until: float) -> int:
        layout = self._peers_layout
        holders = layout.holders.get(self._me.node, ()) if layout else ()
        if not holders:
            raise CheckpointError(
                "no other node can hold a copy", code="SR553", why=layout.why if layout else ""
            )
        raw = memoryview(image.to_bytes())

        def send(node: int) -> None:
            def talk(connection: Connection) -> None:
                send_chunks(connection, data[: image.size], hashed=False)

            self._peer(self._colleague(node)).ask({"tell": "image"}, [raw], until=until, talk=talk)

        self._each(send, holders)
        return image.size * len(holders)

    def _take_image(self, size: int, connection: Connection) -> None:
        raw = bytes(connection.receive_payload(size))
        image = self._announced(raw, connection)
        store = self._store_of["peer"]
        slot = store.new_image(image)
        try:
            at = 0
            while at < image.size:
                header, length = connection.receive(most=min(CHUNK_BYTES, image.size - at))
                if int(header["at"]) != at or not length:
                    raise CommError(
                        f"{connection.name} sends byte {header['at']}, {at} is next", code="SR710"
                    )
                part = slot.data[at : at + length]
                try:
                    connection.receive_into(part)
                finally:
                    part.release()
                at += length
            bad = image.faults(slot.data)
            if bad:
                raise CheckpointError(
                    f"{len(bad)} of {len(image.index)} pieces of rank {image.rank}'s image of step {image.step} "
                    f"arrived damaged, the first is piece {image.index[bad[0]]}",
                    code="SR550",
                )
            store.keep_image(image, slot)
        finally:
            slot.discard()
        connection.send({})

    def _announced(self, raw: bytes, connection: Connection) -> Image:
        """The description of what a rank is about to send: its own image, of this run."""
        image = Image.from_bytes(raw, where=f"the description of an image from {connection.name}")
        if image.run != self._me.run or connection.peer is None or image.rank != connection.peer.rank:
            raise CheckpointError(
                f"{connection.name} sends the image of rank {image.rank} of run {image.run!r}",
                code="SR512",
                why=f"its own image, of run {self._me.run!r}, is what it may send",
            )
        return image

    # ---- parity

    def _group(self) -> tuple[int, tuple[int, ...], Stripes]:
        """(number, nodes, stripes) of this node's group. Raises when it has none."""
        layout = self._parity_layout
        number = layout.group_of(self._me.node) if layout else None
        if layout is None or number is None:
            raise CheckpointError(
                "no group of nodes makes parity", code="SR553", why=layout.why if layout else ""
            )
        nodes = layout.groups[number]
        return number, nodes, Stripes(len(nodes), layout.m)

    def _stripe_name(self, image: Image, stripe: int, row: int) -> StripeName:
        number, nodes, stripes = self._group()
        return StripeName(
            uuid=image.uuid,
            step=image.step,
            attempt=image.attempt,
            group=f"{number}.{self._me.rank % self._local_size}",
            stripe=stripe,
            row=row,
            k=stripes.k,
            m=stripes.m,
            ranks=tuple(self._colleague(nodes[place]) for place in stripes.members(stripe)),
        )

    def _expect(self, image: Image) -> None:
        """Makes the blocks of parity that this node holds of a save, whether or not somebody has given to them yet."""
        with contextlib.suppress(SiraraError):  # the same fault is met, and told, where the parity is kept
            _, nodes, stripes = self._group()
            for stripe, row in stripes.held(nodes.index(self._me.node)):
                self._builder(self._stripe_name(image, stripe, row))

    def _builder(self, name: StripeName) -> ParityBuilder:
        with self._lock:
            known = self._builders.get(name.block)
            if known is not None and known.name.uuid == name.uuid:
                return known
            if known is not None and (name.attempt, name.step) < (known.name.attempt, known.name.step):
                raise CheckpointError(
                    f"the save of step {name.step} is over, that of {known.name.step} began"
                )
            if known is not None:
                known.give_up(CheckpointError(f"the save of step {name.step} began", code="SR550"))
            self._builders[name.block] = ParityBuilder(self._store_of["parity"], name)
            return self._builders[name.block]

    def _keep_parity(self, image: Image, data: memoryview, until: float) -> int:
        _, nodes, stripes = self._group()
        place = nodes.index(self._me.node)
        raw = memoryview(image.to_bytes())
        sends: dict[int, list[tuple[int, int, int]]] = {}  # node -> (block, stripe, row)
        for block in range(stripes.k):
            stripe = stripes.stripe(place, block)
            for row, holder in enumerate(stripes.holders(stripe)):
                sends.setdefault(nodes[holder], []).append((block, stripe, row))

        def send(node: int) -> None:
            for block, stripe, row in sends[node]:
                start, length = block_range(image.size, stripes.k, block)
                part = data[start : start + length]

                def talk(connection: Connection, part: memoryview = part) -> None:
                    send_chunks(connection, part, hashed=True)

                request = {"tell": "block", "block": block, "stripe": stripe, "row": row}
                self._peer(self._colleague(node)).ask(request, [raw], until=until, talk=talk)

        # Everybody begins with another node than the others of the group.
        order = sorted(sends, key=lambda node: (nodes.index(node) - place) % len(nodes))
        faults: list[SiraraError] = []
        try:
            self._each(send, order)
        except SiraraError as fault:
            faults.append(fault)
            self._tell_group(image, fault)
        for stripe, row in stripes.held(place):
            builder = self._builder(self._stripe_name(image, stripe, row))
            try:
                builder.wait(until - time.monotonic())
            except SiraraError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return image.size * stripes.m

    def _tell_group(self, image: Image, fault: SiraraError) -> None:
        """Tells the nodes of the group that this rank's blocks will not come, so that they need not wait for them."""
        text = f"{self._me} cannot give its blocks: {one_line(fault)}"
        request = {"tell": "give_up", "uuid": image.uuid}

        def tell(node: int) -> None:
            if node == self._me.node:
                self._give_up(image.uuid, text)
                return
            try:
                until = time.monotonic() + self._idle_s
                self._new_peer(self._colleague(node)).ask(request, [memoryview(text.encode())], until=until)
            except SiraraError as lost:
                _log.debug("%s", lost.what)

        with contextlib.suppress(CheckpointError):
            self._each(tell, self._group()[1])

    def _give_up(self, uuid: str, text: str) -> None:
        with self._lock:
            builders = [b for b in self._builders.values() if b.name.uuid == uuid]
        for builder in builders:
            builder.give_up(CommError(text, code="SR711"))

    def _take_block(self, request: dict[str, Any], size: int, connection: Connection) -> None:
        raw = bytes(connection.receive_payload(size))
        image = self._announced(raw, connection)
        name = self._stripe_name(image, int(request["stripe"]), int(request["row"]))
        column = int(request["block"])
        builder = self._builder(name)
        try:
            length = builder.begin(column, image)
            buffer = memoryview(bytearray(min(length, CHUNK_BYTES)))
            at = 0
            while at < length:
                header, length_here = connection.receive(most=min(len(buffer), length - at))
                part = buffer[:length_here]
                connection.receive_into(part)
                if int(header["at"]) != at or not length_here:
                    raise CommError(
                        f"{connection.name} sends byte {header['at']}, {at} is next", code="SR710"
                    )
                if xxhash.xxh3_128_hexdigest(part) != header["hash"]:
                    raise CommError(
                        f"bytes {at} to {at + length_here} of a block of rank {image.rank}'s image of step "
                        f"{image.step} arrived damaged",
                        code="SR713",
                    )
                builder.add(column, at, part)
                at += length_here
            builder.end(column, image)
        except (SiraraError, KeyError, TypeError, ValueError) as fault:
            builder.give_up(
                fault
                if isinstance(fault, SiraraError)
                else CommError(f"{connection.name}: {fault!r}", code="SR710")
            )
            raise
        connection.send({})

    # ---- reports and commit

    def report(self, uuid: str, raw: bytes, *, failed: bool = False) -> None:
        """Tells rank 0 that this rank's part of save `uuid` is done, or failed and why (`raw` is then a text)."""
        if self._me.rank == 0:
            self._note_report(uuid, 0, failed, raw)
        else:
            until = time.monotonic() + self._deadline_s
            self._peer(0).ask(
                {"tell": "report", "uuid": uuid, "failed": failed}, [memoryview(raw)], until=until
            )

    def _note_report(self, uuid: str, rank: int, failed: bool, raw: bytes) -> None:
        with self._news:
            self._reports.setdefault(uuid, {})[rank] = (failed, raw)
            for old in list(self._reports)[:-_SAVES]:
                del self._reports[old]
            self._news.notify_all()

    def reports(self, uuid: str, ranks: Sequence[int], *, deadline_s: float) -> dict[int, bytes]:
        """On rank 0: the reports of these ranks.

        Raises StorageError with the text of a rank that failed, CommTimeout naming the ranks that did not report.
        """
        until = time.monotonic() + deadline_s
        with self._news:
            while True:
                known = self._reports.get(uuid, {})
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
                left = until - time.monotonic()
                if left <= 0:
                    raise CommTimeout(
                        f"the save lacks {len(missing)} of {len(ranks)} ranks: {', '.join(map(str, missing))}",
                        why=f"no report within {deadline_s:g} s",
                        try_="look at the logs of these ranks; committed checkpoints are untouched",
                    )
                self._news.wait(left)

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

        nodes = range(-(-self._world // self._local_size))
        with ThreadPoolExecutor(max_workers=_SENDERS) as pool:
            list(pool.map(tell, nodes))
        return faults

    def _tell_node(self, node: int, request: dict[str, Any], payload: bytes, until: float) -> None:
        """Tells any one keeper of a node; the first that can be reached."""
        first = node * self._local_size
        ranks = range(first, min(first + self._local_size, self._world))
        for rank in ranks:
            try:
                self._peer(rank).ask(request, [memoryview(payload)], until=until)
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
        return self._local.inventory()[0]

    def nodes(self) -> list[NodeView]:
        """Every node that is known, this one as it is, the others through their first keeper."""
        views: list[NodeView] = []
        for node in range(-(-self._world // self._local_size)):
            rank = node * self._local_size
            if node == self._me.node:
                views.append(self._local)
            elif rank in self._addresses:
                # A connection of its own: a save that sends through the other one is not held up.
                views.append(RemoteNode(self._new_peer(rank), deadline_s=self._deadline_s))
        return views

    def _unknown_nodes(self) -> list[int]:
        others = range(-(-self._world // self._local_size))
        return [n for n in others if n != self._me.node and n * self._local_size not in self._addresses]

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
        if tell == "image":
            self._take_image(size, connection)
        elif tell == "block":
            self._take_block(request, size, connection)
        elif tell == "report":
            raw = bytes(connection.receive_payload(size))
            if connection.peer is not None:
                self._note_report(str(request["uuid"]), connection.peer.rank, bool(request["failed"]), raw)
            connection.send({})
        elif tell == "commit":
            raw = bytes(connection.receive_payload(size))
            self._put_manifest(int(request["step"]), str(request["uuid"]), raw)
            connection.send({})
        elif tell == "give_up":
            text = connection.receive_payload(size).decode(errors="replace")
            self._give_up(str(request["uuid"]), text)
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

    def _plan(self) -> tuple[PeerLayout | None, ParityLayout | None]:
        peer, parity = self._tiers.get("peer"), self._tiers.get("parity")
        return (
            peer_layout(self._nodes, peer.copies, peer.domains) if peer else None,
            parity_layout(self._nodes, parity.data, parity.parity, parity.domains) if parity else None,
        )

    def _wants_own_copy(self, tiers: Sequence[TierConfig]) -> bool:
        """An arena serves the next save but one. Copies and parity on other nodes need the own images beside them, so
        where another tier is saved at other steps (without an interval it never is), the image is copied as well."""
        return any(
            other.every is not None and (tier.every is None or other.every % tier.every != 0)
            for name, tier in self._tiers.items()
            if name in ("peer", "parity")
            for other in tiers
        )

    def _colleague(self, node: int) -> int:
        """The rank with this one's place on another node."""
        return node * self._local_size + self._me.rank % self._local_size

    def _peer(self, rank: int) -> Peer:
        with self._lock:
            if rank not in self._peers:
                self._peers[rank] = self._new_peer(rank)
            return self._peers[rank]

    def _new_peer(self, rank: int) -> Peer:
        if rank not in self._addresses:
            raise InvariantError(f"rank {self._me.rank} was not told where rank {rank} is")
        name = f"rank {rank} on node {rank // self._local_size}"
        return Peer(self._addresses[rank], me=self._me, name=name, token=self._token, idle_s=self._idle_s)

    def _each(self, send: Callable[[int], None], nodes: Sequence[int]) -> None:
        """Calls send(node) for all at once, and raises the first fault when all have ended."""
        with ThreadPoolExecutor(max_workers=min(_SENDERS, len(nodes))) as pool:
            futures = [pool.submit(send, node) for node in nodes]
            faults = [fault for future in futures if (fault := future.exception()) is not None]
        if faults:
            raise faults[0]
