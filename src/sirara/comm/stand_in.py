"""Communication on paper: groups of any size of which one rank is played, nothing moves and everything is counted.

The peers are taken to say what this rank says, so that ranks agree; what they would send is left as it is.  Counted
is by the very calls of `Comm` and `Mail` that count bytes in a real run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sirara.comm.group import Comm, Transfer
from sirara.comm.header import Header
from sirara.comm.mail import Letter, Mail
from sirara.comm.world import AXIS_OF, Comms

Tensor = torch.Tensor


@dataclass(slots=True)
class Count:
    """Calls of one kind and the payload bytes that this rank sent in them."""

    calls: int = 0
    bytes: int = 0


class StandIn(Comm):
    """A rank's place in a group of which no other rank is there.

    Attributes:  counts: calls and bytes by kind, such as "reduce", "publish" or "sum".
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        super().__init__(ranks, rank, group=None, timeout_s=0.0)
        self.counts: dict[str, Count] = {}

    @property
    def calls(self) -> int:
        """All calls so far."""
        return sum(count.calls for count in self.counts.values())

    def exchange(
        self,
        what: str,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        *,
        tag: int,
    ) -> Transfer:
        self.note(what, sum(t.numel() * t.element_size() for _, t in sends))
        return Transfer(self, what)

    def gather_rows(self, what: str, row_N: Tensor) -> Tensor:
        if self.size > 1:
            self.note(what, row_N.numel() * row_N.element_size() * (self.size - 1))
        return row_N.unsqueeze(0).expand(self.size, -1)

    def reduce_scatter_sum(self, what: str, full_P: Tensor, out_S: Tensor) -> None:
        self.note(what, full_P.numel() * full_P.element_size())

    def note(self, what: str, sent_bytes: int) -> None:
        super().note(what, sent_bytes)
        count = self.counts.setdefault(kind_of(what), Count())
        count.calls += 1
        count.bytes += sent_bytes


class StandInMail(Mail):
    """Letters that are counted when they are sent and come at once, of unspecified content."""

    def __init__(self, comm: Comm, *, device: torch.device | None = None, slots: int = 512) -> None:
        self.comm, self.device = comm, device
        self._carrier = _NoCarrier()

    def receive(self, letter: Letter) -> Tensor:
        return torch.empty(letter.shape, dtype=letter.dtype, device=self.device)


class _NoCarrier:
    """Carries nothing anywhere."""

    def post(self, peer: int, words: list[int], tensor: Tensor) -> None:
        return

    def expect(self, peer: int) -> None:
        return

    def next(self, peer: int) -> list[int]:
        raise NotImplementedError

    def fetch(self, peer: int, header: Header) -> Tensor:
        raise NotImplementedError

    def release(self) -> None:
        return

    def mark(self) -> list[int]:
        return []

    def settle(self, mark: Sequence[int]) -> None:
        return


def stand_in_axes(rank: int, world: int, peers: Mapping[str, Sequence[int]]) -> Comms:
    """The groups of one rank of `world`, without the others.

    peers: per axis ("dp", "tp", "pp"), and for "plane", the ranks of this rank's group.
    """
    groups = {name: StandIn(peers[axis], rank) for name, axis in AXIS_OF.items()}
    return Comms(world=StandIn(range(world), rank), **groups)


def kind_of(what: str) -> str:
    """The kind of a call: what is done, without the name of the group, stage or axis that it is done to."""
    return what.removesuffix(" over tp") if what.endswith(" over tp") else what.partition(" ")[0]
