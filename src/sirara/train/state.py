"""TrainState: the one owner of all that a resume needs.  What is not in it is not resumed; what is, is saved.

counters     steps, updates, samples, tokens, skipped steps
tensors      weights, masters where the weights' dtype is lower, optimizer state: ranges of logical tensors
the rest     is a function of these and of the configuration: lr, dropout, data order
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash

from sirara.checkpoint.digest import Digest, digest_boxes, digest_of
from sirara.checkpoint.partial import MASTER, WeightsReport, load_weights
from sirara.checkpoint.ranges import DTYPES, NamedRange, dtype_name, host_bytes
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.share import Agree, read_together
from sirara.comm.group import Comm
from sirara.errors import CheckpointError
from sirara.mesh import Mesh
from sirara.parallel.flat import FlatGroup
from sirara.parallel.parallelize import Stage
from sirara.parallel.zero import Zero
from sirara.pure.groups import Group, Piece
from sirara.pure.layout import Box
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
    """Counters and the flat groups' tensors of one rank, as named ranges of logical tensors.

    state_names: the optimizer's tensors for a group.
    """

    stage: Stage
    mesh: Mesh
    state_names: Callable[[Group], tuple[str, ...]]
    counters: Counters

    @property
    def zero(self) -> Zero:
        return self.stage.zero

    def reset_optimizer(self) -> None:
        """Zero optimizer state for every group that is trained."""
        for flat in self.zero.trained:
            if flat.master_U is not None:
                flat.state = {name: torch.zeros_like(flat.master_U) for name in self.state_names(flat.group)}

    def ranges(self) -> list[NamedRange]:
        """What this rank holds and may save; `data` are views of the live tensors."""
        return [
            NamedRange(
                tensor=piece.tensor.name + suffix, shape=piece.tensor.shape, boxes=piece.boxes, data=data
            )
            for flat in self.zero.owned
            for piece, suffix, data in self._parts(flat)
        ]

    def plan(self) -> list[PlannedTensor]:
        """What every rank holds; the same on all ranks, without communication."""
        mesh, stage = self.mesh, self.stage
        boxes: dict[str, dict[int, tuple[Box, ...]]] = {}
        owned: list[Group] = []
        for index, group in enumerate(stage.groups[mesh.coordinate("tp")]):
            owned.append(group)
            for tp in range(mesh.tp):
                for dp in range(mesh.dp):
                    rank = mesh.rank_at(pp=stage.homes[group.unit], dp=dp, tp=tp)
                    there = stage.groups[tp][index]
                    shard = there.shard_numel(mesh.dp)
                    for piece in there.pieces(dp * shard, (dp + 1) * shard):
                        held = boxes.setdefault(piece.tensor.name, {})
                        held[rank] = held.get(rank, ()) + piece.boxes
        return [
            PlannedTensor(
                name=leaf.tensor.name + suffix,
                dtype=dtype_name(dtype),
                shape=leaf.tensor.shape,
                boxes=boxes.get(leaf.tensor.name, {}),
            )
            for group in owned
            for suffix, dtype in self._kinds(group)
            for leaf in group.leaves
        ]

    def digest(self) -> Digest:
        """The state digest over all ranks; of several copies of the same elements one is counted."""
        self.zero.wait_all()
        total = Digest()
        for flat in self.zero.owned:
            if self.mesh.coordinate("tp") % flat.group.copies == 0:
                for piece, suffix, data in self._parts(flat):
                    total += digest_boxes(piece.tensor.name + suffix, piece.tensor.shape, piece.boxes, data)
        return Digest.from_rows(
            self.stage.comms.world.gather_rows("state digest", self._word(total)).tolist()
        )

    def check_replicas(self) -> None:
        """Compares what several ranks hold alike: over dp, over tp copies, and tied weights over stages.

        Raises:  CheckpointError naming the first group whose copies differ; they never should.
        """
        self.zero.wait_all()
        comms = self.stage.comms
        self._compare(
            comms.dp, [(flat, self._full(flat)) for flat in self.zero.groups], lambda _: comms.dp.ranks
        )
        copied = [flat for flat in self.zero.owned if flat.group.copies > 1]
        self._compare(
            comms.copies,
            [(flat, [(s, data) for _, s, data in self._parts(flat)]) for flat in copied],
            lambda flat: _copies(comms.copies.ranks, comms.copies.rank, flat.group.copies),
        )
        tied = [
            (index, {self.stage.homes[use.unit] for use in group.uses})
            for index, group in enumerate(self.stage.groups[self.mesh.coordinate("tp")])
        ]
        self._compare_ties([index for index, homes in tied if len(homes) > 1])

    def _full(self, flat: FlatGroup) -> list[tuple[str, Tensor]]:
        """What every data-parallel rank holds alike."""
        held = [] if flat.weights_P is None else [("", flat.weights_P)]
        if flat.trained and flat.updated != flat.shard and flat.master_U is not None:
            held += [("/master", flat.master_U), *((f"/{n}", t) for n, t in flat.state.items())]
        return held

    def _compare(
        self,
        comm: Comm,
        held: Sequence[tuple[FlatGroup, Sequence[tuple[str, Tensor]]]],
        alike: Callable[[FlatGroup], Sequence[int]],
    ) -> None:
        """One gather over `comm` of the digests of all groups in `held`; `alike`: the ranks that must agree."""
        if comm.size == 1 or not held:
            return
        words = [self._fingerprint(f.group.name, parts) for f, parts in held]
        rows = comm.gather_rows("compare replicas", torch.cat(words)).view(comm.size, -1, 2).tolist()
        for n, (flat, _) in enumerate(held):
            first, *others = alike(flat)
            for rank in others:
                there, here = rows[comm.ranks.index(rank)][n], rows[comm.ranks.index(first)][n]
                self._check(flat.group.name, (rank, there), (first, here))

    def _compare_ties(self, indices: Sequence[int]) -> None:
        """Tied weights that several stages hold; every pipeline rank takes part, whether it holds them or not."""
        comm = self.stage.comms.ties
        if comm.size == 1 or not indices:
            return
        held = {flat.index: flat for flat in self.zero.groups}
        words = [
            self._fingerprint("", [("", held[i].weights_S)])
            if i in held
            else torch.zeros(2, dtype=torch.int64)
            for i in indices
        ]
        row = torch.cat([w.to(self.zero.device) for w in words])
        rows = comm.gather_rows("compare tied weights", row).view(comm.size, -1, 2).tolist()
        for n, index in enumerate(indices):
            group = self.stage.groups[0][index]
            homes = sorted({self.stage.homes[use.unit] for use in group.uses})
            first = (comm.ranks[homes[0]], rows[homes[0]][n])
            for home in homes[1:]:
                self._check(group.name, (comm.ranks[home], rows[home][n]), first)

    def _check(self, name: str, one: tuple[int, list[int]], first: tuple[int, list[int]]) -> None:
        if one[1] != first[1]:
            raise CheckpointError(
                f"replicas of group {name} differ: rank {one[0]} is not equal to rank {first[0]}",
                code="SR520",
                where=f"step {self.counters.step}",
                why=f"their digests are {one[1]} and {first[1]}",
                try_=["resume from the last checkpoint", "check the memory of that machine"],
            )

    def load(
        self,
        snapshot: Snapshot,
        *,
        agree: Agree = lambda fault: fault,
    ) -> None:
        """Fills counters and tensors from a checkpoint of any layout; weights are the rounding of their masters.

        A checkpoint in another precision is read through its full-precision values.  Each byte is read by one rank
        and passed on; `complete` follows once all have agreed on the step.  Collective.
        Args:    agree: given this rank's fault, "" when there is none, the first fault of any rank.
        Raises:  CheckpointError naming what is missing or wrong; the state is then undefined.
        """
        self._load_counters(snapshot.record)
        planned = self.plan()
        sources = self._sources(planned, snapshot)
        ranges: list[NamedRange] = []
        converted: list[tuple[Tensor, Tensor]] = []
        for r in self.ranges():
            source = sources[r.tensor]
            if source is None:
                continue
            name, dtype = source
            data = r.data
            if dtype != dtype_name(data.dtype):
                data = torch.empty_like(r.data, dtype=DTYPES[dtype])
                converted.append((r.data, data))
            ranges.append(replace(r, tensor=name, data=data))
        plan = [
            replace(t, name=source[0], dtype=source[1])
            for t in planned
            if (source := sources[t.name]) is not None
        ]
        read_together(
            snapshot,
            plan,
            ranges,
            comm=self.stage.comms.world,
            agree=agree,
            device=self.zero.device,
        )
        for target, data in converted:
            target.copy_(data)
        self.zero.round_masters()

    def _sources(
        self, planned: Sequence[PlannedTensor], snapshot: Snapshot
    ) -> dict[str, tuple[str, str] | None]:
        """Which saved tensor fills which of ours, and its dtype; None: nothing, it follows from others."""
        saved = {entry.name: entry.dtype for entry in snapshot.manifest.tensors}
        ours = {t.name for t in planned}
        full_dtype = dtype_name(self.zero.sum_dtype)
        sources: dict[str, tuple[str, str] | None] = {}
        for t in planned:
            name, _, kind = t.name.partition("/")
            full = f"{name}/master"
            if not kind and full in ours:
                sources[t.name] = None  # the rounding of its master
            elif not kind and full in saved and t.dtype == full_dtype:
                sources[t.name] = (full, t.dtype)
            elif kind == "master" and full not in saved:
                sources[t.name] = (name, t.dtype)
            elif not kind:
                # A frozen weight has no master, whatever the precision that it was saved in.
                sources[t.name] = (t.name, saved.get(t.name, t.dtype))
            else:
                sources[t.name] = (t.name, t.dtype)
        return sources

    def load_weights(
        self,
        snapshot: Snapshot,
        *,
        names: Sequence[str] = ("*",),
        strict: bool = True,
        grow: bool = False,
        agree: Agree = lambda fault: fault,
    ) -> WeightsReport:
        """Fills weights, and their masters, from a checkpoint that may be of another model; nothing else changes.

        Args, Raises:  as in checkpoint/partial.py; agree as in `load`.  Collective; `complete` follows.
        """
        read = partial(
            read_together, snapshot, comm=self.stage.comms.world, agree=agree, device=self.zero.device
        )
        report = load_weights(
            snapshot,
            [r for r in self.ranges() if _is_values(r.tensor)],
            plan=[t for t in self.plan() if _is_values(t.name)],
            names=names,
            strict=strict,
            grow=grow,
            read=read,
        )
        self.zero.round_masters()
        return report

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

    def _parts(self, flat: FlatGroup) -> Iterator[tuple[Piece, str, Tensor]]:
        """(piece, kind of state, its elements) of everything that this rank owns of a group."""
        held: list[tuple[str, Tensor]] = [("", flat.weights_S)]
        if flat.has_master and flat.master_U is not None:
            held.append(("/master", self.zero.shard_of(flat, flat.master_U)))
        if flat.trained:
            held += [(f"/{name}", self.zero.shard_of(flat, flat.state[name])) for name in flat.state]
        for suffix, shard_S in held:
            for piece in flat.group.pieces(*flat.shard):
                at = piece.flat - flat.shard[0]
                yield piece, suffix, shard_S[at : at + piece.stop - piece.start]

    def _kinds(self, group: Group) -> list[tuple[str, torch.dtype]]:
        """Kinds of state of a group and their dtypes, in the order of `_parts`."""
        weights, sums = self.zero.dtype_of(group), self.zero.sum_dtype
        kinds = [("", weights)]
        if group.trainable:
            kinds += [("/master", sums)] if weights != sums else []
            kinds += [(f"/{name}", sums) for name in self.state_names(group)]
        return kinds

    def _fingerprint(self, name: str, parts: Sequence[tuple[str, Tensor]]) -> Tensor:
        """[2] words that are equal where the bits of `parts` are: a fast hash on the host, the digest on a device."""
        if self.zero.device.type != "cpu":
            return self._word(digest_of((name + suffix, 0, data) for suffix, data in parts))
        hasher = xxhash.xxh3_128()
        for _, data in parts:
            hasher.update(host_bytes(data).data)
        return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.int64)

    def _word(self, digest: Digest) -> Tensor:
        return torch.tensor(digest.signed(), dtype=torch.int64, device=self.zero.device)


def _is_values(name: str) -> bool:
    """Whether a tensor of the state is a weight or a master."""
    return "/" not in name or name.endswith(MASTER)


def _copies(ranks: Sequence[int], place: int, copies: int) -> Sequence[int]:
    """The ranks that hold the same elements as the one at `place`."""
    first = place // copies * copies
    return ranks[first : first + copies]
