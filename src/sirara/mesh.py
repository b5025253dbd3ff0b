"""rank <-> (pp, dp, cp, tp): where a rank stands, axes outermost first, so that tp neighbours share a node."""

from dataclasses import dataclass, replace

from sirara.errors import LayoutError

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The degrees of all axes and this rank's coordinates on them."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    rank: int = 0

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def coordinate(self, axis: str) -> int:
        """This rank's place on one axis."""
        rest = self.rank
        for name in reversed(AXES):
            degree = getattr(self, name)
            if name == axis:
                return rest % degree
            rest //= degree
        raise LayoutError(f"no mesh axis is called {axis!r}; the axes are {', '.join(AXES)}")

    def peers(self, axis: str) -> list[int]:
        """The ranks that differ from this one on `axis` alone, in order of their coordinate."""
        stride = 1
        for name in reversed(AXES):
            if name == axis:
                break
            stride *= getattr(self, name)
        first = self.rank - self.coordinate(axis) * stride
        return [first + i * stride for i in range(getattr(self, axis))]

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank with these coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def groups(self) -> dict[str, list[list[int]]]:
        """Per axis all sets of ranks that differ on it alone; "plane": all ranks of one pipeline stage."""
        everyone = [self.at(rank) for rank in range(self.world)]
        found = {axis: [m.peers(axis) for m in everyone if m.coordinate(axis) == 0] for axis in AXES}
        size = self.world // self.pp
        found["plane"] = [list(range(p * size, (p + 1) * size)) for p in range(self.pp)]
        return found

    def at(self, rank: int) -> "Mesh":
        """The same mesh as another rank sees it."""
        return replace(self, rank=rank)


def build_mesh(
    *, world: int, rank: int, pp: int = 1, dp: int | str = "auto", cp: int = 1, tp: int = 1
) -> Mesh:
    """The mesh of one attempt; dp=auto takes what the other axes leave.

    Raises:  LayoutError when the degrees do not multiply to the number of processes.
    """
    others = pp * cp * tp
    if world % others:
        raise LayoutError(
            f"mesh pp={pp} cp={cp} tp={tp} needs a multiple of {others} processes, there are {world}",
            where="mesh",
            try_=[
                f"start {others * -(-world // others)} processes: launch.nproc, or torchrun --nproc-per-node"
            ],
        )
    degree = world // others if dp == "auto" else int(dp)
    if degree * others != world:
        raise LayoutError(
            f"mesh pp={pp} dp={degree} cp={cp} tp={tp} is {degree * others} processes, there are {world}",
            where="mesh",
            try_=[
                f"mesh.dp={world // others}",
                f"start {degree * others} processes: launch.nproc, or torchrun --nproc-per-node",
            ],
        )
    return Mesh(pp=pp, dp=degree, cp=cp, tp=tp, rank=rank)
