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


    def groups(self, axis: str) -> list[list[int]]:
        """All sets of ranks that differ on `axis` alone, in order of their first rank; every rank is in one."""
        firsts = (self.at(rank) for rank in range(self.world))
        return [mesh.peers(axis) for mesh in firsts if mesh.coordinate(axis) == 0]

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
            try_=[f"launch.nproc={others * max(1, world // others)}"],
        )
    degree = world // others if dp == "auto" else int(dp)
    if degree * others != world:
        raise LayoutError(
            f"mesh pp={pp} dp={degree} cp={cp} tp={tp} is {degree * others} processes, there are {world}",
            try_=["mesh.dp=auto", f"launch.nproc={degree * others}"],
        )
    return Mesh(pp=pp, dp=degree, cp=cp, tp=tp, rank=rank)
