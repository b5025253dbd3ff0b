"""The parity tier: this rank's blocks go to the nodes of its group, theirs are added to the parity held here.

No torch here.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import xxhash

from sirara.checkpoint.colleagues import Colleagues
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore
from sirara.checkpoint.image import Image
from sirara.checkpoint.link import Connection
from sirara.checkpoint.parity import ParityBuilder, StripeName, block_range
from sirara.checkpoint.serve import one_line, receive_chunk, send_chunks
from sirara.errors import CheckpointError, CommError, SiraraError
from sirara.pure.copies import ParityLayout, Stripes

_log = logging.getLogger("sirara")


class ParityGroup:
    """One rank's part in the parity of its group of nodes."""

    def __init__(self, layout: ParityLayout, colleagues: Colleagues, store: GenerationStore) -> None:
        self._layout, self._colleagues, self._store = layout, colleagues, store
        self._me = colleagues.me
        self._builders: dict[str, ParityBuilder] = {}
        self._lock = threading.Lock()

    def expect(self, image: Image) -> None:
        """Makes the blocks of parity that this node holds of a save, whether or not somebody has given to them yet."""
        with contextlib.suppress(SiraraError):  # the same fault is met, and told, where the parity is kept
            _, nodes, stripes = self._group()
            for stripe, row in stripes.held(nodes.index(self._me.node)):
                self._builder(self._stripe_name(image, stripe, row))

    def keep(self, image: Image, data: memoryview, until: float) -> int:
        """Gives this rank's blocks to their holders and waits for the parity that it holds; returns the bytes sent."""
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
                self._colleagues.peer(self._colleagues.on(node)).ask(request, [raw], until=until, talk=talk)

        # Everybody begins with another node than the others of the group.
        order = sorted(sends, key=lambda node: (nodes.index(node) - place) % len(nodes))
        faults: list[SiraraError] = []
        try:
            self._colleagues.each(send, order)
        except SiraraError as fault:
            faults.append(fault)
            self.tell_failed(image, fault)
        for stripe, row in stripes.held(place):
            builder = self._builder(self._stripe_name(image, stripe, row))
            try:
                builder.wait(until - time.monotonic())
            except SiraraError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return image.size * stripes.m

    def take(self, request: Mapping[str, Any], size: int, connection: Connection) -> None:
        """Adds the block that another rank sends, chunk by chunk."""
        raw = bytes(connection.receive_payload(size))
        image = self._colleagues.announced(raw, connection)
        name = self._stripe_name(image, int(request["stripe"]), int(request["row"]))
        column = int(request["block"])
        builder = self._builder(name)
        try:
            length = builder.begin(column, image)
            buffer = memoryview(bytearray(min(length, CHUNK_BYTES)))
            at = 0
            while at < length:
                size, digest = receive_chunk(connection, at, buffer[: length - at])
                part = buffer[:size]
                if xxhash.xxh3_128_hexdigest(part) != digest:
                    raise CommError(
                        f"bytes {at} to {at + size} of a block of rank {image.rank}'s image of step "
                        f"{image.step} arrived damaged",
                        code="SR713",
                    )
                builder.add(column, at, part)
                at += size
            builder.end(column, image)
        except (SiraraError, KeyError, TypeError, ValueError) as fault:
            builder.give_up(
                fault
                if isinstance(fault, SiraraError)
                else CommError(f"{connection.name}: {fault!r}", code="SR710")
            )
            raise
        connection.send({})

    def tell_failed(self, image: Image, fault: SiraraError) -> None:
        """Tells the nodes of the group that this rank's blocks will not come, so that they need not wait for them."""
        text = f"{self._me} cannot give its blocks: {one_line(fault)}"
        request = {"tell": "give_up", "uuid": image.uuid}

        def tell(node: int) -> None:
            if node == self._me.node:
                self.give_up(image.uuid, text)
                return
            until = time.monotonic() + self._colleagues.idle_s
            try:
                # Another connection: the one for the blocks may be what hangs.
                with contextlib.closing(self._colleagues.new_peer(self._colleagues.on(node))) as peer:
                    peer.ask(request, [memoryview(text.encode())], until=until)
            except SiraraError as lost:
                _log.debug("%s", lost.what)

        with contextlib.suppress(CheckpointError):
            self._colleagues.each(tell, self._group()[1])

    def give_up(self, uuid: str, text: str) -> None:
        """Ends the waiting for a save's blocks, because somebody has said that one of them will not come."""
        with self._lock:
            builders = [b for b in self._builders.values() if b.name.uuid == uuid]
        for builder in builders:
            builder.give_up(CommError(text, code="SR711"))

    def close(self) -> None:
        with self._lock:
            builders = list(self._builders.values())
            self._builders.clear()
        for builder in builders:
            builder.give_up(CommError(f"{self._me} ends", code="SR711"))

    def _group(self) -> tuple[int, tuple[int, ...], Stripes]:
        """(number, nodes, stripes) of this node's group. Raises when it has none."""
        number = self._layout.group_of(self._me.node)
        if number is None:
            raise CheckpointError("no group of nodes makes parity", code="SR553", why=self._layout.why)
        nodes = self._layout.groups[number]
        return number, nodes, Stripes(len(nodes), self._layout.m)

    def _stripe_name(self, image: Image, stripe: int, row: int) -> StripeName:
        number, nodes, stripes = self._group()
        return StripeName(
            uuid=image.uuid,
            step=image.step,
            attempt=image.attempt,
            group=f"{number}.{self._colleagues.place}",
            stripe=stripe,
            row=row,
            k=stripes.k,
            m=stripes.m,
            ranks=tuple(self._colleagues.on(nodes[place]) for place in stripes.members(stripe)),
        )

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
            self._builders[name.block] = ParityBuilder(self._store, name)
            return self._builders[name.block]
