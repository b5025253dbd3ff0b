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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.generation import GenerationStore, Held
from sirara.checkpoint.image import Image
from sirara.checkpoint.storage import Disk
from sirara.config.schema import TierConfig

_log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """What became of one tier of one rank's save. fault: a sentence that names the peer, "" when ok."""

    ok: bool
    fault: str = ""
    bytes: int = 0
    seconds: float = 0.0


class NodeTiers:
    """The node tiers of one run, seen from one keeper.

    Args:  tiers: of the configuration; those that are not kept by nodes are ignored.  local_size: ranks per node.
           node: rank // local_size.  token: the run's secret; who does not know it is turned away.
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
        raise NotImplementedError

    @property
    def address(self) -> str:
        """host:port of this keeper's server; it serves what is in the node's folders from the start."""
        raise NotImplementedError

    @property
    def stores(self) -> Sequence[GenerationStore]:
        """The folders of this node: shared memory first, then the node's disk."""
        raise NotImplementedError

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Tells where the keepers of all ranks are."""
        raise NotImplementedError

    def keep(
        self, image: Image, data: memoryview, *, tiers: Sequence[str], arena: Path | None
    ) -> dict[str, TierResult]:
        """Keeps this rank's image in the given tiers (names; others than node tiers are ignored).

        Called by the keepers of all ranks at about the same time. Never raises for a peer or a full disk: the result
        of the tier says so.  arena: the file in which `data` lies, None: a copy is kept.
        """
        raise NotImplementedError

    def report(self, uuid: str, raw: bytes, *, failed: bool = False) -> None:
        """Tells rank 0 that this rank's part of save `uuid` is done, or failed and why (`raw` is then a text)."""
        raise NotImplementedError

    def reports(self, uuid: str, ranks: Sequence[int], *, deadline_s: float) -> dict[int, bytes]:
        """On rank 0: the reports of these ranks.

        Raises StorageError with the text of a rank that failed, CommTimeout naming the ranks that did not report.
        """
        raise NotImplementedError

    def commit(self, step: int, uuid: str, manifest: bytes) -> dict[int, str]:
        """From rank 0: the manifest to every node. Returns node -> fault for the nodes that could not take it."""
        raise NotImplementedError

    def inventory(self) -> list[Held]:
        """What this node holds of the run, whatever attempt and layout wrote it."""
        raise NotImplementedError

    def rebuild(self, step: int, uuid: str, rank: int) -> Image:
        """Decodes a rank's image from what other nodes hold (parity and their own images) into this node's memory.

        Every piece is checked. Raises CheckpointError that names what is missing or damaged.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
