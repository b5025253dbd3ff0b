"""The peer tier: copies of a rank's image in the memory of other nodes. No torch here."""

from sirara.checkpoint.colleagues import Colleagues
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore
from sirara.checkpoint.image import Image
from sirara.checkpoint.link import Connection
from sirara.checkpoint.serve import receive_chunk, send_chunks
from sirara.errors import CheckpointError
from sirara.pure.copies import PeerLayout


class PeerCopies:
    """Sends this rank's image to the nodes that hold its copies, and takes those of others."""

    def __init__(self, layout: PeerLayout, colleagues: Colleagues, store: GenerationStore) -> None:
        self._layout, self._colleagues, self._store = layout, colleagues, store
        self._me = colleagues.me

    def keep(self, image: Image, data: memoryview, until: float) -> int:
        """Sends this rank's image to its holders; returns the bytes sent."""
        holders = self._layout.holders.get(self._me.node, ())
        if not holders:
            raise CheckpointError("no other node can hold a copy", code="SR553", why=self._layout.why)
        raw = memoryview(image.to_bytes())

        def send(node: int) -> None:
            def talk(connection: Connection) -> None:
                send_chunks(connection, data[: image.size], hashed=False)

            self._colleagues.peer(self._colleagues.on(node)).ask(
                {"tell": "image"}, [raw], until=until, talk=talk
            )

        self._colleagues.each(send, holders)
        return image.size * len(holders)

    def take(self, size: int, connection: Connection) -> None:
        """Keeps the image that another rank sends, once all its pieces match their hashes."""
        raw = bytes(connection.receive_payload(size))
        image = self._colleagues.announced(raw, connection)
        store = self._store
        slot = store.new_image(image)
        try:
            at = 0
            while at < image.size:
                part = slot.data[at : at + CHUNK_BYTES]
                try:
                    at += receive_chunk(connection, at, part)[0]
                finally:
                    part.release()
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
