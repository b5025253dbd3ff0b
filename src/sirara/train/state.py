"""TrainState: the one owner of all that a resume needs.  What is not in it is not resumed; what is, is saved.

counters     steps, updates, samples, tokens, skipped steps
tensors      weights, masters where the weights' dtype is lower, optimizer state: ranges of logical tensors
the rest     is a function of these and of the configuration: lr, dropout, data order
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sirara.checkpoint.digest import Digest, digest_of
from sirara.checkpoint.ranges import NamedRange, dtype_name
from sirara.checkpoint.reader import Snapshot
from sirara.comm.group import Comm
from sirara.errors import CheckpointError
from sirara.parallel.zero import FlatGroup, Zero
from sirara.pure.layout import range_boxes
from sirara.pure.saveplan import PlannedTensor

Tensor = torch.Tensor


@dataclass(slots=True)
class Counters:
    """`step` counts batches; `updates` batches that were not skipped; samples and target tokens as consumed so far."""

    step: int = 0
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Counters and the flat groups' tensors of one rank, as named ranges of logical tensors."""

    zero: Zero
    comm: Comm
    state_names: tuple[str, ...]
    counters: Counters

    def reset_optimizer(self) -> None:
        """Zero optimizer state for every group."""
        for flat in self.zero.groups:
            flat.state = {name: torch.zeros_like(flat.master_U) for name in self.state_names}

    def ranges(self) -> list[NamedRange]:
        """What this rank owns and saves; `data` are views of the live tensors."""
        out: list[NamedRange] = []
        for flat in self.zero.groups:
            for suffix, shard_S in self._shards(flat):
                for piece in flat.group.pieces(*flat.shard):
                    at = piece.flat - flat.shard[0]
                    out.append(
                        NamedRange(
                            tensor=piece.tensor.name + suffix,
                            shape=piece.tensor.shape,
                            boxes=range_boxes(piece.tensor.shape, piece.start, piece.stop),
                            data=shard_S[at : at + piece.stop - piece.start],
                        )
                    )
        return out

    def plan(self) -> list[PlannedTensor]:
        """What every rank owns; the same on all ranks, without communication."""
        out: list[PlannedTensor] = []
        for flat in self.zero.groups:
            boxes: dict[str, dict[int, Any]] = {slot.tensor.name: {} for slot in flat.group.slots}
            shard = flat.group.shard_numel(self.comm.size)
            for rank in range(self.comm.size):
                for piece in flat.group.pieces(rank * shard, (rank + 1) * shard):
                    boxes[piece.tensor.name][rank] = range_boxes(piece.tensor.shape, piece.start, piece.stop)
            for suffix, shard_S in self._shards(flat):
                out.extend(
                    PlannedTensor(
                        name=slot.tensor.name + suffix,
                        dtype=dtype_name(shard_S.dtype),
                        shape=slot.tensor.shape,
                        boxes=boxes[slot.tensor.name],
                    )
                    for slot in flat.group.slots
                )
        return out

    def digest(self) -> Digest:
        """The state digest over all ranks."""
        self.zero.wait_all()
        parts = (
            (
                piece.tensor.name + suffix,
                piece.start,
                shard_S[piece.flat - flat.shard[0] :][: piece.stop - piece.start],
            )
            for flat in self.zero.groups
            for suffix, shard_S in self._shards(flat)
            for piece in flat.group.pieces(*flat.shard)
        )
        return Digest.from_rows(self.comm.gather_rows("state digest", self._word(digest_of(parts))))

    def check_replicas(self) -> None:
        """Compares what several ranks hold in full by digest.

        Raises:  CheckpointError naming the first group whose copies differ; they never should.
        """
        self.zero.wait_all()
        for flat in self.zero.groups:
            held = [("", flat.weights_P)]
            if flat.updated != flat.shard and self.comm.size > 1:
                held += [("/master", flat.master_U), *((f"/{n}", t) for n, t in flat.state.items())]
            own = self._word(digest_of((flat.group.name + suffix, 0, tensor) for suffix, tensor in held))
            rows = self.comm.gather_rows("compare replicas", own).tolist()
            for rank, row in enumerate(rows):
                if row != rows[0]:
                    raise CheckpointError(
                        f"replicas of group {flat.group.name} differ: rank {rank} is not equal to rank 0",
                        code="SR520",
                        where=f"step {self.counters.step}",
                        why=f"their digests are {row} and {rows[0]}",
                        try_=["resume from the last checkpoint", "check the memory of that machine"],
                    )

    def load(self, snapshot: Snapshot) -> None:
        """Fills counters and tensors from a checkpoint of any layout; weights are the rounding of their masters.

        A checkpoint in another precision is read through its full-precision values.  No rank talks to another here:
        `complete` follows once all have agreed on the step.
        Raises:  CheckpointError naming what is missing or wrong; the state is then undefined.
        """
        self._load_counters(snapshot.record)
        saved = {entry.name for entry in snapshot.manifest.tensors}
        ranges: list[NamedRange] = []
        for r in self.ranges():
            name, _, kind = r.tensor.partition("/")
            if not kind and f"{name}/master" in saved:
                if r.data.dtype == self.zero.sum_dtype:
                    ranges.append(replace(r, tensor=f"{name}/master"))
            elif kind == "master" and r.tensor not in saved:
                ranges.append(replace(r, tensor=name))
            elif kind or r.data.dtype == self.zero.sum_dtype:
                ranges.append(r)
        snapshot.read_into(ranges)
        self.zero.round_masters()

    def complete(self) -> None:
        """After every rank has loaded: gathers what this layout holds in full."""
        self.zero.share_loaded()

    def record(self) -> dict[str, Any]:
        """The counters as JSON."""
        return asdict(self.counters)

    def _load_counters(self, record: dict[str, Any]) -> None:
        # A missing counter is an error, never a zero.
        missing = [name for name in asdict(self.counters) if name not in record]
        if missing:
            raise CheckpointError(f"the checkpoint's training record lacks {', '.join(missing)}")
        for name in asdict(self.counters):
            setattr(self.counters, name, int(record[name]))

    def _shards(self, flat: FlatGroup) -> Iterator[tuple[str, Tensor]]:
        yield "", flat.weights_P[slice(*flat.shard)]
        if flat.has_master:
            yield "/master", self.zero.shard_of(flat, flat.master_U)
        for name in self.state_names:
            yield f"/{name}", self.zero.shard_of(flat, flat.state[name])

    def _word(self, digest: Digest) -> Tensor:
        return digest.as_int64().to(self.zero.pool.device)
