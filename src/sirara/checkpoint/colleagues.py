"""Colleagues: the keepers of the other ranks, as one keeper reaches them. No torch here."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sirara.checkpoint.image import Image
from sirara.checkpoint.link import Connection, Peer, Who
from sirara.errors import CheckpointError, InvariantError

_SENDERS = 8


class Colleagues:
    """Who is where. Ranks are numbered node by node; colleagues of a rank have the same place on other nodes.

    me: this keeper.  nodes: how many there are.  size: how many of them have a rank with this one's place (the last
    node may be short of ranks).
    """

    def __init__(self, me: Who, *, world: int, local_size: int, token: str, idle_s: float) -> None:
        self.me, self.local_size, self.idle_s = me, local_size, idle_s
        self.place = me.rank % local_size
        self.nodes = -(-world // local_size)
        self.size = len(range(self.place, world, local_size))
        self._world, self._token = world, token
        self._addresses: dict[int, str] = {}
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()

    def meet(self, addresses: Mapping[int, str]) -> None:
        with self._lock:
            moved = [rank for rank in self._peers if addresses.get(rank) != self._addresses.get(rank)]
            gone = [self._peers.pop(rank) for rank in moved]
            self._addresses = dict(addresses)
        for peer in gone:
            peer.close()

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    def knows(self, rank: int) -> bool:
        return rank in self._addresses

    def on(self, node: int) -> int:
        """The colleague's rank on a node."""
        return node * self.local_size + self.place

    def ranks_on(self, node: int) -> range:
        return range(node * self.local_size, min((node + 1) * self.local_size, self._world))

    def peer(self, rank: int) -> Peer:
        """The connection to a rank that all use in turn."""
        with self._lock:
            if rank not in self._peers:
                self._peers[rank] = self.new_peer(rank)
            return self._peers[rank]

    def new_peer(self, rank: int) -> Peer:
        """A connection of its own: not held up by what goes through the other one."""
        if rank not in self._addresses:
            raise InvariantError(f"rank {self.me.rank} was not told where rank {rank} is")
        name = f"rank {rank} on node {rank // self.local_size}"
        return Peer(self._addresses[rank], me=self.me, name=name, token=self._token, idle_s=self.idle_s)

    def each(self, send: Callable[[int], None], nodes: Sequence[int]) -> None:
        """Calls send(node) for all at once, and raises the first fault when all have ended."""
        with ThreadPoolExecutor(max_workers=_SENDERS) as pool:
            futures = [pool.submit(send, node) for node in nodes]
            faults = [fault for future in futures if (fault := future.exception()) is not None]
        if faults:
            raise faults[0]

    def announced(self, raw: bytes, connection: Connection) -> Image:
        """The description of what a rank is about to send: its own image, of this run."""
        image = Image.from_bytes(raw, where=f"the description of an image from {connection.name}")
        if image.run != self.me.run or connection.peer is None or image.rank != connection.peer.rank:
            raise CheckpointError(
                f"{connection.name} sends the image of rank {image.rank} of run {image.run!r}",
                code="SR512",
                why=f"its own image, of run {self.me.run!r}, is what it may send",
            )
        return image
