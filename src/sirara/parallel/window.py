"""ZeRO 3's window: where gathered weights lie, for as long as a unit computes.

    unit         embed   block.0  block.1  block.2  head           forward, and backward from right to left
    place          0        1        0        1       0
                   [use]    [gathering]                            the next unit is gathered while this one computes

Each unit has one fixed place, so its parameters are bound to views of it once, and what autograd saved in forward is
right again when backward has gathered the same unit anew.  Two places, each as large as its largest unit, are all the
memory; with `keep` every unit has a place of its own and is gathered once per step.  Embedding and head, the largest
units, share a place where a rank has both; with an even number of blocks between them the last two blocks share the
other one, and one gather per direction is not hidden behind a unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sirara.comm.group import Comm, Transfer
from sirara.errors import InvariantError
from sirara.pure.groups import ALIGN

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Load:
    """One group of a unit: the shard [S] that this rank holds and where the gathered weights [P] go."""

    name: str
    shard_S: Tensor
    full_P: Tensor
    tag: int


class Window:
    """The gathered weights of one rank's units.

    Args:  shards: per unit (ascending) its groups' (name, weights_S, tag).  ends_share: first and last unit of the
           rank are embedding and head, the largest units: they share a place.
    """

    def __init__(
        self,
        shards: Mapping[int, Sequence[tuple[str, Tensor, int]]],
        *,
        comm: Comm,
        keep: bool,
        ends_share: bool,
    ) -> None:
        self.comm = comm
        order = sorted(shards)
        self.place = {unit: n if keep else n % 2 for n, unit in enumerate(order)}
        if ends_share and not keep and len(order) > 2 and self.place[order[-1]] != self.place[order[0]]:
            self.place[order[-1]], self.place[order[-2]] = self.place[order[0]], 1 - self.place[order[0]]
        sizes: dict[int, int] = {}
        for unit, groups in shards.items():
            length = sum(self._length(shard_S) for _, shard_S, _ in groups)
            sizes[self.place[unit]] = max(length, sizes.get(self.place[unit], 0))
        device = next((s.device for groups in shards.values() for _, s, _ in groups), torch.device("cpu"))
        self.buffers = {p: torch.zeros(n, dtype=torch.uint8, device=device) for p, n in sizes.items()}
        self.loads = {unit: self._loads(unit, groups) for unit, groups in shards.items()}
        self.resident: dict[int, int | None] = dict.fromkeys(self.buffers)
        self.transfers: dict[int, list[Transfer]] = {p: [] for p in self.buffers}
        self.order: list[int] = []
        self.at = 0
        self.gathers = 0

    @property
    def bytes(self) -> int:
        """Bytes of all places."""
        return sum(buffer.numel() for buffer in self.buffers.values())

    def begin(self, order: Sequence[int]) -> None:
        """Tells the units in the order of their use, so that each next one is gathered ahead."""
        self.order, self.at = list(order), 0

    def enter(self, unit: int) -> None:
        """Returns when the unit's weights may be read, and starts gathering the unit after it."""
        place = self.place[unit]
        if self.resident[place] != unit:
            self._start(unit)
        for transfer in self.transfers[place]:
            transfer.wait()
        self.transfers[place] = []
        if self.at < len(self.order):
            if self.order[self.at] != unit:
                raise InvariantError(
                    f"unit {unit} is used where unit {self.order[self.at]} was due, use {self.at} of this pass"
                )
            self.at += 1
            if self.at < len(self.order):
                following = self.order[self.at]
                if self.place[following] != place and self.resident[self.place[following]] != following:
                    self._start(following)

    def forget(self) -> None:
        """After an update: what is gathered is not the weights any more."""
        for place, transfers in self.transfers.items():
            for transfer in transfers:
                transfer.wait()
            self.transfers[place] = []
            self.resident[place] = None
        self.order, self.at = [], 0

    def _start(self, unit: int) -> None:
        place = self.place[unit]
        self.resident[place] = unit
        self.gathers += 1
        with torch.no_grad():
            for load in self.loads[unit]:
                low = self.comm.rank * load.shard_S.numel()
                load.full_P[low : low + load.shard_S.numel()].copy_(load.shard_S)
                self.transfers[place].append(
                    self.comm.all_gather_shards(f"gather {load.name}", load.full_P, tag=load.tag)
                )

    def _length(self, shard_S: Tensor) -> int:
        return -(-shard_S.numel() * self.comm.size * shard_S.element_size() // ALIGN) * ALIGN

    def _loads(self, unit: int, groups: Sequence[tuple[str, Tensor, int]]) -> list[Load]:
        loads: list[Load] = []
        at, buffer = 0, self.buffers[self.place[unit]]
        for name, shard_S, tag in groups:
            nbytes = shard_S.numel() * self.comm.size * shard_S.element_size()
            loads.append(Load(name, shard_S, buffer[at : at + nbytes].view(shard_S.dtype), tag))
            at += self._length(shard_S)
        return loads
