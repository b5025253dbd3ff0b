"""What a node's generations look like, from the node itself and from another one: one set of methods for both.

    LocalNode      the stores of this node
    RemoteNode     another node's, over a link          restore, rebuild and the tools take either

Bytes that travel carry an xxh3-128 per chunk, checked on arrival; whether they are right, the hashes of the pieces say.
No torch here.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Held
from sirara.checkpoint.image import Image
from sirara.checkpoint.link import Connection, Peer
from sirara.checkpoint.parity_block import ParityBlock
from sirara.errors import CheckpointError, CommError, SiraraError, StorageError

T = TypeVar("T")


class Inventory(NamedTuple):
    """What a node has of a run.

    held: what can be read, newest first.  faults: one sentence for everything that cannot.  replaced: one for every
    image whose arena serves a later save, which is how arenas are used and no fault.
    """

    held: list[Held]
    faults: list[str]
    replaced: list[str]


class NodeView(Protocol):
    """The generations that a node holds. Every method raises CheckpointError or StorageError for what is not there
    or not right, CommError when the node cannot be reached."""

    name: str

    def inventory(self) -> Inventory: ...

    def manifest(self, step: int, uuid: str) -> bytes | None: ...

    def image(self, step: int, uuid: str, rank: int) -> Image: ...

    def read(self, step: int, uuid: str, rank: int, buffers: Sequence[memoryview], position: int) -> None:
        """Fills the buffers from an image, from `position` on."""
        ...

    def bad_pieces(self, step: int, uuid: str, rank: int) -> list[int]:
        """Places of the image's pieces that do not match their hash, found where the image lies."""
        ...

    def parity(self, step: int, uuid: str, name: str) -> ParityBlock: ...

    def read_parity(self, block: ParityBlock, chunk: int, buffer: memoryview) -> None: ...


class LocalNode:
    """This node; an image is read from the first of its stores that has it."""

    def __init__(self, stores: Sequence[GenerationStore], *, name: str) -> None:
        self.stores, self.name = tuple(stores), name

    def inventory(self) -> Inventory:
        held = [h for store in self.stores for h in store.inventory()]
        held.sort(key=lambda h: (h.attempt, h.step), reverse=True)
        faults = [fault for store in self.stores for fault in store.faults()]
        return Inventory(held, faults, [text for store in self.stores for text in store.replaced()])

    def manifest(self, step: int, uuid: str) -> bytes | None:
        found = (store.manifest(step, uuid) for store in self.stores)
        return next((raw for raw in found if raw is not None), None)

    def image(self, step: int, uuid: str, rank: int) -> Image:
        return self._first(lambda store: store.image(step, uuid, rank))

    def read(self, step: int, uuid: str, rank: int, buffers: Sequence[memoryview], position: int) -> None:
        self._first(lambda store: store.read(step, uuid, rank, buffers, position))

    def bad_pieces(self, step: int, uuid: str, rank: int) -> list[int]:
        return self._first(lambda store: store.bad_pieces(step, uuid, rank))

    def parity(self, step: int, uuid: str, name: str) -> ParityBlock:
        return self._first(lambda store: store.parity(step, uuid, name))

    def read_parity(self, block: ParityBlock, chunk: int, buffer: memoryview) -> None:
        self._first(lambda store: store.read_parity(block, chunk, buffer))

    def _first(self, read: Callable[[GenerationStore], T]) -> T:
        faults: list[CheckpointError | StorageError] = []
        for store in self.stores:
            try:
                return read(store)
            except (CheckpointError, StorageError) as fault:
                faults.append(fault)
        # That a store never had it says less than what is wrong where it is.
        raise (
            min(faults, key=lambda f: f.code == "SR521")
            if faults
            else CheckpointError(f"{self.name} keeps nothing")
        )

    # ---- the same, asked by another node

    def answer(self, request: dict[str, Any], connection: Connection) -> bool:
        """Answers a request of RemoteNode; False when it is something else."""
        ask = request.get("ask")
        if ask == "inventory":
            found = self.inventory()
            fields = {"faults": found.faults, "replaced": found.replaced}
            text = json.dumps({"held": [h.to_json() for h in found.held], **fields}).encode()
            connection.send({}, [memoryview(text)])
        elif ask == "read":
            self._send_image(request, connection)
        elif ask == "read_parity":
            self._send_parity(request, connection)
        elif ask in ("manifest", "image", "parity", "bad_pieces"):
            raw = self._raw(request)
            connection.send({"none": raw is None}, [memoryview(raw)] if raw else [])
        else:
            return False
        return True

    def _raw(self, request: dict[str, Any]) -> bytes | None:
        step, uuid = int(request["step"]), str(request["uuid"])
        if request["ask"] == "manifest":
            return self.manifest(step, uuid)
        if request["ask"] == "parity":
            return self.parity(step, uuid, str(request["block"])).to_bytes()
        if request["ask"] == "image":
            return self.image(step, uuid, int(request["rank"])).to_bytes()
        return json.dumps(self.bad_pieces(step, uuid, int(request["rank"]))).encode()

    def _send_image(self, request: dict[str, Any], connection: Connection) -> None:
        step, uuid, rank = int(request["step"]), str(request["uuid"]), int(request["rank"])
        position, left = int(request["position"]), int(request["size"])
        buffer = memoryview(bytearray(min(left, CHUNK_BYTES)))
        while left > 0:
            part = buffer[: min(left, len(buffer))]
            self.read(step, uuid, rank, [part], position)
            connection.send({"hash": xxhash.xxh3_128_hexdigest(part)}, [part])
            position += len(part)
            left -= len(part)
        connection.send({})

    def _send_parity(self, request: dict[str, Any], connection: Connection) -> None:
        block = self.parity(int(request["step"]), str(request["uuid"]), str(request["block"]))
        chunk = int(request["chunk"])
        buffer = memoryview(bytearray(min(CHUNK_BYTES, block.size - chunk * CHUNK_BYTES)))
        self.read_parity(block, chunk, buffer)
        connection.send({}, [buffer])


class RemoteNode:
    """Another node, through the server of one of its keepers. deadline_s: for each request."""

    def __init__(self, peer: Peer, *, deadline_s: float = 600.0) -> None:
        self.name, self._peer, self._deadline_s = peer.name, peer, deadline_s

    def inventory(self) -> Inventory:
        answer = self._ask("inventory")[1]
        try:
            found = json.loads(answer)
            held = [Held.from_json(h) for h in found["held"]]
            return Inventory(held, list(found["faults"]), list(found["replaced"]))
        except (KeyError, TypeError, ValueError) as fault:
            raise CommError(f"{self.name} sent an inventory that is none: {fault!r}", code="SR710") from fault

    def manifest(self, step: int, uuid: str) -> bytes | None:
        header, raw = self._ask("manifest", step=step, uuid=uuid)
        return None if header.get("none") else bytes(raw)

    def image(self, step: int, uuid: str, rank: int) -> Image:
        raw = bytes(self._ask("image", step=step, uuid=uuid, rank=rank)[1])
        return Image.from_bytes(raw, where=f"the description of rank {rank}'s image from {self.name}")

    def read(self, step: int, uuid: str, rank: int, buffers: Sequence[memoryview], position: int) -> None:
        def receive(connection: Connection) -> None:
            for part in _chunks(buffers):
                header, size = connection.receive()
                if size != sum(map(len, part)):
                    raise CommError(f"{self.name} sent {size} bytes of rank {rank}'s image", code="SR710")
                for piece in part:
                    connection.receive_into(piece)
                if header.get("hash") != _hash(part):
                    raise CommError(
                        f"bytes of rank {rank}'s image arrived damaged from {self.name}", code="SR713"
                    )

        size = sum(map(len, buffers))
        self._ask("read", receive, step=step, uuid=uuid, rank=rank, position=position, size=size)

    def bad_pieces(self, step: int, uuid: str, rank: int) -> list[int]:
        raw = self._ask("bad_pieces", patient=True, step=step, uuid=uuid, rank=rank)[1]
        return [int(n) for n in json.loads(raw)]

    def parity(self, step: int, uuid: str, name: str) -> ParityBlock:
        raw = bytes(self._ask("parity", step=step, uuid=uuid, block=name)[1])
        return ParityBlock.from_bytes(raw, where=f"the description of parity {name} from {self.name}")

    def read_parity(self, block: ParityBlock, chunk: int, buffer: memoryview) -> None:
        raw = self._ask("read_parity", step=block.step, uuid=block.uuid, block=block.name, chunk=chunk)[1]
        if len(raw) != len(buffer) or xxhash.xxh3_128_digest(raw) != block.hash(chunk):
            raise CheckpointError(
                f"block {block.name} of the parity of step {block.step} arrived damaged from {self.name}",
                code="SR550",
            )
        buffer[:] = raw

    def rebuild(self, step: int, uuid: str, rank: int) -> Image:
        """Has the node decode an image from parity into its own memory; see `NodeTiers.rebuild`."""
        raw = bytes(self._ask("rebuild", patient=True, step=step, uuid=uuid, rank=rank)[1])
        return Image.from_bytes(raw, where=f"the description of rank {rank}'s image from {self.name}")

    def _ask(
        self,
        what: str,
        talk: Callable[[Connection], None] | None = None,
        *,
        patient: bool = False,
        **fields: Any,
    ) -> tuple[dict[str, Any], bytearray]:
        return self._peer.ask(
            {"ask": what, **fields},
            until=time.monotonic() + self._deadline_s,
            talk=talk,
            idle_s=self._deadline_s if patient else None,
        )


def send_chunks(connection: Connection, data: memoryview, *, hashed: bool) -> None:
    """Sends bytes in frames of CHUNK_BYTES, each with its place; stops when the other end has already answered."""
    for at in range(0, len(data), CHUNK_BYTES):
        if connection.has_answer():
            return
        part = data[at : at + CHUNK_BYTES]
        connection.send({"at": at, "hash": xxhash.xxh3_128_hexdigest(part) if hashed else ""}, [part])


def receive_chunk(connection: Connection, at: int, buffer: memoryview) -> tuple[int, str]:
    """One frame of `send_chunks`, that of byte `at`, into the beginning of the buffer; returns (bytes, hash or "")."""
    header, size = connection.receive(most=len(buffer))
    if int(header["at"]) != at or not size:
        raise CommError(f"{connection.name} sends byte {header['at']}, {at} is next", code="SR710")
    connection.receive_into(buffer[:size])
    return size, str(header["hash"])


def one_line(fault: SiraraError) -> str:
    """A fault as one sentence: what, where and the numbers."""
    where = f" [{fault.where}]" if fault.where else ""
    return fault.what + (f": {fault.why}" if fault.why else "") + where


def _chunks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers cut as the sender cuts the stretch that fills them: CHUNK_BYTES at a time."""
    part: list[memoryview] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        while len(rest):
            part.append(rest[:room])
            room -= len(part[-1])
            rest = rest[len(part[-1]) :]
            if not room:
                yield part
                part, room = [], CHUNK_BYTES
    if part:
        yield part


def _hash(part: Sequence[memoryview]) -> str:
    hasher = xxhash.xxh3_128()
    for piece in part:
        hasher.update(piece)
    return hasher.hexdigest()
