"""The tensor-parallel axis over a communicator: sums and gathers that move data and add in rank order.

    sum, 2 ranks       every rank receives the other's whole x and adds it                x bytes, one exchange
    sum, more          part r of x goes to rank r, which adds them; the sums travel back  2 (t-1)/t x bytes, two
    scatter_sum        rows of rank r go to rank r, which adds them                       (t-1)/t x bytes
    gather_tokens      rows of rank r go to all                                           (t-1) x bytes

No library reduction: the bits of a sum depend on the degree alone, and are the same on all ranks.  Lower dtypes are
added in fp32 and rounded once.  Every kind of exchange has a tag of its own, and what is started is waited for in
the order in which it was started, on all ranks.

Shape letters: T tokens, D features, S = T / t tokens of one rank, N any length, t ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sirara.comm.group import Comm, Transfer
from sirara.errors import InvariantError
from sirara.model.ops import wide

Tensor = torch.Tensor

SUM, SHARE, SPREAD, GATHER, SMALL = range(8000, 8005)
"""Tags of the axis's exchanges on its communicator; nothing else there may use them."""


@dataclass(slots=True)
class Coming:
    """A tensor that `finish` makes once its transfer has arrived."""

    transfer: Transfer
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The complete tensor."""
        self.transfer.wait()
        return self.finish()


class TensorAxis:
    """`sirara.model.split.Axis` over `comm`.

    sequence: between linear layers every rank holds its share of the tokens.
    """

    def __init__(self, comm: Comm, *, sequence: bool = False) -> None:
        self.comm, self.sequence = comm, sequence
        self.size, self.rank = comm.size, comm.rank
        self._peers = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
        self._landing = Landing()

    def sum(self, x_TD: Tensor) -> Coming:
        """[T, D] summed over the ranks, in the memory of x."""
        x_TD = x_TD.contiguous()
        if self.size == 2:
            return self._sum_of_two(x_TD)
        flat = x_TD.view(-1)
        cuts = [flat.numel() * i // self.size for i in range(self.size + 1)]
        parts = [flat[low:high] for low, high in pairwise(cuts)]
        own = parts[self.rank]
        landing = self._landing.take((self.size - 1, own.numel()), x_TD)
        transfer = self._exchange("sum over tp", [(p, parts[p]) for p in self._peers], landing, SUM)

        def finish() -> Tensor:
            own.copy_(self._added(own, landing))
            self._landing.give(landing)
            receives = [(p, parts[p]) for p in reversed(self._peers)]
            self.comm.exchange(
                "spread sum over tp", [(p, own) for p in self._peers], receives, tag=SPREAD
            ).wait()
            return x_TD

        return Coming(transfer, finish)

    def scatter_sum(self, x_TD: Tensor) -> Coming:
        """[S, D]: this rank's rows of the sum over the ranks, in memory of its own."""
        self._check_rows(x_TD)
        parts = x_TD.contiguous().chunk(self.size)
        landing = x_TD.new_empty(self.size - 1, *parts[0].shape)
        transfer = self._exchange("scatter sum over tp", [(p, parts[p]) for p in self._peers], landing, SHARE)
        if self.size == 2:
            return Coming(transfer, lambda: landing[0].add_(parts[self.rank]))
        return Coming(transfer, lambda: self._added(parts[self.rank], landing))

    def gather_tokens(self, x_SD: Tensor) -> Coming:
        """[T, D] from every rank's [S, D], all of one size."""
        x_SD = x_SD.contiguous()
        full_TD = x_SD.new_empty(self.size * x_SD.shape[0], *x_SD.shape[1:])
        parts = full_TD.chunk(self.size)
        receives = [(p, parts[p]) for p in reversed(self._peers)]
        transfer = self.comm.exchange(
            "gather tokens over tp", [(p, x_SD) for p in self._peers], receives, tag=GATHER
        )
        # While the others' rows are on their way.
        parts[self.rank].copy_(x_SD)
        return Coming(transfer, lambda: full_TD)

    def gather_small(self, row_N: Tensor) -> Tensor:
        """[t, N]: every rank's row."""
        rows = row_N.new_empty(self.size, row_N.numel())
        rows[self.rank].copy_(row_N)
        sends = [(p, rows[self.rank]) for p in self._peers]
        receives = [(p, rows[p]) for p in reversed(self._peers)]
        self.comm.exchange("gather rows over tp", sends, receives, tag=SMALL).wait()
        return rows

    def _sum_of_two(self, x_TD: Tensor) -> Coming:
        landing = self._landing.take(x_TD.shape, x_TD)
        transfer = self.comm.exchange(
            "sum over tp", [(1 - self.rank, x_TD)], [(1 - self.rank, landing)], tag=SUM
        )

        def finish() -> Tensor:
            # Two addends have one order, whoever adds them.
            x_TD.add_(landing)
            self._landing.give(landing)
            return x_TD

        return Coming(transfer, finish)

    def _exchange(self, what: str, sends: list[tuple[int, Tensor]], landing: Tensor, tag: int) -> Transfer:
        """The part of the n-th next rank lands in landing[n - 1]."""
        receives = [(p, landing[i]) for i, p in enumerate(self._peers)]
        return self.comm.exchange(what, sends, receives[::-1], tag=tag)

    def _added(self, own: Tensor, landing: Tensor) -> Tensor:
        """Own part and those that landed, added in rank order."""
        by_rank = {p: landing[i] for i, p in enumerate(self._peers)} | {self.rank: own}
        total = by_rank[0].to(wide(own.dtype), copy=True)
        for rank in range(1, self.size):
            total += by_rank[rank]
        return total.to(own.dtype)

    def _check_rows(self, x_TD: Tensor) -> None:
        if x_TD.shape[0] % self.size:
            raise InvariantError(
                f"{x_TD.shape[0]} tokens of a microbatch cannot be spread evenly over {self.size} ranks",
                why="mesh.sequence_parallel needs data.seq_len * train.micro_batch divisible by mesh.tp",
            )


class Landing:
    """Memory that receives what is added at once; one use at a time keeps the same pages, others get their own."""

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def take(self, dims: Sequence[int], like: Tensor) -> Tensor:
        """Uninitialised, of the dtype and device of `like`."""
        free, self._free = self._free, None
        if free is not None and free.shape == torch.Size(dims) and free.dtype == like.dtype:
            return free
        return like.new_empty(*dims)

    def give(self, tensor: Tensor) -> None:
        """Takes it back; nothing may read it any more."""
        self._free = tensor
