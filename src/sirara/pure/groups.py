"""Flat groups: the parameters of one unit laid end to end, gathered, reduced and updated together.

    unit "block.3"      q_proj | k_proj | v_proj | o_proj | gate | up | down       group "block.3/decay"
                        input_norm | post_norm                                     group "block.3/plain"
    one group           [tensor 0 ....][pad][tensor 1 ...][pad] ... [end padding]
                        ^ starts are multiples of ALIGN         ^ to a multiple of GRAIN, then of GRAIN * dp

A group's layout is a function of the model alone: only the padding at the very end depends on the data-parallel
degree.  So shard boundaries, norm sums, update cuts and disk pieces fall on grains whatever the layout, which is what
makes their arithmetic independent of it.  A tied tensor has a group of its own with one use per leaf.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sirara.pure.families import TensorSpec, UnitSpec

GRAIN = 1024
"""Elements: shard boundaries, norm sums and update cuts are multiples of it."""
ALIGN = 64
"""Elements: every tensor of a group starts at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One logical tensor inside its group: elements [start, start + numel)."""

    tensor: TensorSpec
    start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a whole group by one unit: the leaf of slot i is the unit's parameter `leaves[i]`."""

    unit: int
    leaves: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a logical tensor, lying at [flat, flat + stop - start) of its group."""

    tensor: TensorSpec
    start: int
    stop: int
    flat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A flat group of `numel` elements (a multiple of GRAIN) with one setting of the optimizer."""

    name: str
    decay: bool
    slots: tuple[Slot, ...]
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
                yield Piece(tensor=slot.tensor, start=start - slot.start, stop=stop - slot.start, flat=start)


def flat_groups(units: Sequence[UnitSpec]) -> tuple[Group, ...]:
    """All flat groups of a model, in the order of its units; tensors that decay apart from those that do not."""
    owners: dict[str, list[Use]] = {}
    for index, unit in enumerate(units):
        for tensor in unit.tensors:
            if tensor.tied_to is not None:
                owners.setdefault(tensor.tied_to, []).append(Use(unit=index, leaves=(tensor.local,)))
    groups: list[Group] = []
    for index, unit in enumerate(units):
        own = [t for t in unit.tensors if t.tied_to is None]
        for tensor in (t for t in own if t.name in owners):
            uses = (Use(unit=index, leaves=(tensor.local,)), *owners[tensor.name])
            groups.append(_group(f"{unit.name}/tied", [tensor], uses))
        for decay in (True, False):
            members = [t for t in own if t.decay is decay and t.name not in owners]
            if members:
                uses = (Use(unit=index, leaves=tuple(t.local for t in members)),)
                groups.append(_group(f"{unit.name}/{'decay' if decay else 'plain'}", members, uses))
    return tuple(groups)


def _group(name: str, tensors: Sequence[TensorSpec], uses: tuple[Use, ...]) -> Group:
    slots: list[Slot] = []
    end = 0
    for tensor in tensors:
        start = ALIGN * -(-end // ALIGN)
        slots.append(Slot(tensor=tensor, start=start, numel=prod(tensor.shape)))
        end = start + slots[-1].numel
    numel = GRAIN * -(-max(end, 1) // GRAIN)
    return Group(name=name, decay=tensors[0].decay, slots=tuple(slots), uses=uses, numel=numel)
