"""Flat groups: the parameters of one unit laid end to end, gathered, reduced and updated together.

    unit "block.3"      q_proj | k_proj | v_proj | o_proj | gate | up | down       group "block.3/decay"
                        input_norm | post_norm                                     group "block.3/plain"
    one group           [tensor 0 ....][pad][tensor 1 ...][pad] ... [end padding]
                        ^ starts are multiples of ALIGN         ^ to a multiple of GRAIN, then of GRAIN * dp

A group's layout is a function of the model and its place on the tensor-parallel axis alone: only the padding at the
very end depends on the data-parallel degree.  So shard boundaries, norm sums, update cuts and disk pieces fall on
grains whatever the layout, which is what makes their arithmetic independent of it.  A tied tensor has a group of its
own with one use per leaf.

Under tensor parallelism a slot holds one box of its tensor (several slots where a tensor is several packs), and
tensors share a group only when the same number of ranks holds each element and their gradients are reduced alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from sirara.pure.families import TensorSpec, UnitSpec
from sirara.pure.layout import Box, box_runs, range_boxes
from sirara.pure.placement import Shard, held_boxes, holders, is_partial

GRAIN = 1024
"""Elements: shard boundaries, norm sums and update cuts are multiples of it."""
ALIGN = 64
"""Elements: every tensor of a group starts at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One box of a logical tensor inside its group: elements [start, start + numel) in C order of the box."""

    tensor: TensorSpec
    box: Box
    start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One parameter of a module as a strided view of the group.

    Packs (several slots of one tensor) are a dimension of their own before the one that is split: what a rank holds
    of q, k, v side by side in [in, 3 * out] is [in, 3, out / tp].
    """

    tensor: TensorSpec
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a whole group by one unit: leaf i of the group is the unit's parameter `leaves[i]`."""

    unit: int
    leaves: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a slot's box in C order, lying at [flat, flat + stop - start) of its group."""

    slot: Slot
    start: int
    stop: int
    flat: int

    @property
    def tensor(self) -> TensorSpec:
        return self.slot.tensor

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Where the elements lie in the logical tensor, in order."""
        box = self.slot.box
        return tuple(b.moved(box.offset) for b in range_boxes(box.size, self.start, self.stop))

    def runs(self) -> Iterator[tuple[int, int]]:
        """The same as runs [start, stop) of the flattened logical tensor."""
        for box in self.boxes:
            yield from box_runs(self.tensor.shape, box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A flat group of `numel` elements (a multiple of GRAIN) with one setting of the optimizer.

    unit: the unit that uses it first.  dtype: of its weights where it is not the model's.
    copies: tensor-parallel ranks, neighbours, that hold the same elements.
    partial: the gradient of one of them is one term of the sum over all of them.
    """

    name: str
    unit: int
    decay: bool
    trainable: bool
    dtype: str | None
    copies: int
    partial: bool
    slots: tuple[Slot, ...]
    leaves: tuple[Leaf, ...]
    uses: tuple[Use, ...]
    numel: int

    def shard_numel(self, dp: int) -> int:
        """Elements per shard over dp owners: a multiple of GRAIN; the last shards may be padding alone."""
        return GRAIN * -(-self.numel // (GRAIN * dp))

    def pieces(self, lo: int, hi: int) -> Iterator[Piece]:
        """The parts of logical tensors inside flat elements [lo, hi), in order; padding belongs to nothing."""
        for slot in self.slots:
            start, stop = max(lo, slot.start), min(hi, slot.start + slot.numel)
            if start < stop:
                yield Piece(slot=slot, start=start - slot.start, stop=stop - slot.start, flat=start)


def flat_groups(
    units: Sequence[UnitSpec], *, tp: int = 1, tp_rank: int = 0, sequence: bool = False
) -> tuple[Group, ...]:
    """All flat groups of a model, in the order of its units; tensors that decay apart from those that do not.

    The list has the same length, names and order on every tensor-parallel rank.
    sequence: norms and the like see only their rank's tokens (sequence parallelism).
    """
    owners: dict[str, list[Use]] = {}
    for index, unit in enumerate(units):
        for tensor in unit.tensors:
            if tensor.tied_to is not None:
                owners.setdefault(tensor.tied_to, []).append(Use(unit=index, leaves=(tensor.local,)))
    groups: list[Group] = []

    def add(index: int, kind: str, members: list[TensorSpec], others: Sequence[Use] = ()) -> None:
        copies = holders(members[0].placement, degree=tp)
        partial = is_partial(members[0].placement, degree=tp, sequence=sequence)
        name = f"{units[index].name}/{kind}"
        name += f":{members[0].dtype}" if members[0].dtype else ""
        name += "" if members[0].trainable else ":frozen"
        name += f":{copies} copies" if copies > 1 else ""
        name += ":partial" if partial else ""
        slots, leaves, numel = _lay_out(members, tp, tp_rank)
        groups.append(
            Group(
                name=name,
                unit=index,
                decay=members[0].decay,
                trainable=members[0].trainable,
                dtype=members[0].dtype,
                copies=copies,
                partial=partial,
                slots=slots,
                leaves=leaves,
                uses=(Use(unit=index, leaves=tuple(t.local for t in members)), *others),
                numel=numel,
            )
        )

    def kind_of(tensor: TensorSpec) -> tuple[bool, str, bool, int, bool]:
        copies = holders(tensor.placement, degree=tp)
        partial = is_partial(tensor.placement, degree=tp, sequence=sequence)
        return (not tensor.decay, tensor.dtype or "", not tensor.trainable, copies, partial)

    for index, unit in enumerate(units):
        own = [t for t in unit.tensors if t.tied_to is None]
        for tensor in (t for t in own if t.name in owners):
            add(index, "tied", [tensor], owners[tensor.name])
        alone = sorted((t for t in own if t.name not in owners), key=kind_of)
        for (plain, *_), members in groupby(alone, key=kind_of):
            add(index, "plain" if plain else "decay", list(members))
    return tuple(groups)


def _lay_out(
    tensors: Sequence[TensorSpec], tp: int, tp_rank: int
) -> tuple[tuple[Slot, ...], tuple[Leaf, ...], int]:
    """The slots and leaves of a group, and its size."""
    slots: list[Slot] = []
    leaves: list[Leaf] = []
    end = 0
    for tensor in tensors:
        boxes = held_boxes(tensor.placement, tensor.shape, degree=tp, rank=tp_rank)
        starts: list[int] = []
        for box in boxes:
            starts.append(ALIGN * -(-end // ALIGN))
            slots.append(Slot(tensor=tensor, box=box, start=starts[-1], numel=box.volume))
            end = starts[-1] + box.volume
        size = boxes[0].size
        stride = tuple(prod(size[d + 1 :]) for d in range(len(size)))
        if len(boxes) > 1 and isinstance(tensor.placement, Shard):
            dim, gap = tensor.placement.dim, starts[1] - starts[0]
            size, stride = _insert(size, dim, len(boxes)), _insert(stride, dim, gap)
        leaves.append(Leaf(tensor=tensor, start=starts[0], size=size, stride=stride))
    return tuple(slots), tuple(leaves), GRAIN * -(-max(end, 1) // GRAIN)


def _insert(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])
