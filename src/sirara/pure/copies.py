"""Which nodes keep copies of which, and what survives: peers, groups of parity, their stripes and their odds.

    peers, m copies     m | N: groups of m nodes, each keeps the images of all of them (Gemini's group placement)
                        otherwise the last m + N mod m nodes form a ring: each image on the next m - 1 nodes
    parity k + m        groups of n = k + m nodes; own state stays whole on its node and is cut in k blocks

    stripe s of n       nodes s .. s+m-1 hold parity (row 0 .. m-1), nodes s+m .. s+n-1 give data (column 0 .. k-1)
    group of 2+1        node 0   node 1   node 2
    stripe 0            parity   0's ...  every node gives k blocks, one to each of k stripes, and holds m of parity
    stripe 1            column 1 parity   column 0
    stripe 2            column 0 column 1 parity

Labels of failure domains (rack, power) are obeyed as far as numbers allow: nodes are dealt to the groups domain by
domain, which puts at most ceil(domain / groups) nodes of a domain into one group; fewer is impossible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb

from sirara.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """holders: node -> the other nodes that keep its images.  why: what is less than asked for, "" when nothing is."""

    copies: int
    groups: tuple[tuple[int, ...], ...]
    ring: tuple[int, ...]
    why: str

    @property
    def nodes(self) -> int:
        return sum(map(len, self.groups)) + len(self.ring)

    @property
    def holders(self) -> dict[int, tuple[int, ...]]:
        found = {node: tuple(o for o in group if o != node) for group in self.groups for node in group}
        for i, node in enumerate(self.ring):
            found[node] = tuple(self.ring[(i + c) % len(self.ring)] for c in range(1, self.copies))
        return found

    def survival(self, lost: int) -> float:
        """Probability that every image is left when that many nodes are lost at once."""
        counts = [1]
        for group in self.groups:
            counts = _product(counts, _at_most(len(group), len(group) - 1))
        if self.ring:
            counts = _product(counts, ring_counts(len(self.ring), self.copies))
        return _share(counts, self.nodes, lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLayout:
    """groups of nodes; m nodes of each may be lost.  why: what is less than asked for, "" when nothing is."""

    m: int
    groups: tuple[tuple[int, ...], ...]
    why: str

    def group_of(self, node: int) -> int | None:
        return next((g for g, nodes in enumerate(self.groups) if node in nodes), None)

    def survival(self, lost: int) -> float:
        """Probability that every image is left when that many nodes are lost at once."""
        counts = [1]
        for group in self.groups:
            counts = _product(counts, _at_most(len(group), self.m))
        return _share(counts, sum(map(len, self.groups)), lost)


@dataclass(frozen=True, slots=True)
class Stripes:
    """Who does what in a group of n nodes with m blocks of parity per stripe; nodes by their place in the group."""

    n: int
    m: int

    @property
    def k(self) -> int:
        return self.n - self.m

    def stripe(self, place: int, block: int) -> int:
        """The stripe in which a node's block lies; its column there is the block's number."""
        return (place - self.m - block) % self.n

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Places that hold parity, row 0 first."""
        return tuple((stripe + row) % self.n for row in range(self.m))

    def members(self, stripe: int) -> tuple[int, ...]:
        """Places that give data, column 0 first."""
        return tuple((stripe + self.m + column) % self.n for column in range(self.k))

    def held(self, place: int) -> tuple[tuple[int, int], ...]:
        """(stripe, row) of the parity that a node holds."""
        return tuple(((place - row) % self.n, row) for row in range(self.m))


def peer_layout(nodes: int, copies: int, domains: Sequence[str] = ()) -> PeerLayout:
    """`copies` nodes for every image, its own included."""
    if copies < 2:
        raise ConfigError(f"copies={copies} of an image are not two", code="SR160")
    labels, whys = _labels(nodes, domains)
    m = min(copies, nodes)
    if m < copies:
        whys.append(f"{nodes} nodes can hold {m} copies of an image, not {copies}")
    if nodes < 2:
        return PeerLayout(copies=m, groups=((0,),) if nodes else (), ring=(), why="; ".join(whys))
    number = nodes // m
    sizes = [m] * number
    sizes[-1] += nodes % m
    groups = _deal(labels, sizes, spread=bool(domains))
    if nodes % m:
        layout = PeerLayout(copies=m, groups=groups[:-1], ring=_alternated(groups[-1], labels), why="")
    else:
        layout = PeerLayout(copies=m, groups=groups, ring=(), why="")
    together = [
        node
        for node, others in layout.holders.items()
        if len({labels[n] for n in (node, *others)}) <= len(others)
    ]
    if domains and together:
        whys.append(f"two copies of {len(together)} of {nodes} nodes' images share a failure domain")
    return PeerLayout(copies=m, groups=layout.groups, ring=layout.ring, why="; ".join(whys))


def parity_layout(nodes: int, k: int, m: int, domains: Sequence[str] = ()) -> ParityLayout:
    """Groups of at most k + m nodes, of about equal size.

    A smaller group has fewer blocks of data, not less parity; only when there are no more than m nodes there is less.
    """
    if k < 1 or m < 1 or k + m > 256:
        raise ConfigError(f"parity {k}+{m} is no Reed-Solomon code", why="data, parity >= 1, together <= 256")
    labels, whys = _labels(nodes, domains)
    if nodes <= m:
        whys.append(f"{nodes} nodes cannot lose {m}: parity of {k}+{m} needs {m + 1} nodes or more")
        m = nodes - 1
    if m < 1:
        return ParityLayout(m=0, groups=(), why="; ".join(whys))
    number = max(1, min(-(-nodes // (k + m)), nodes // (m + 1)))
    sizes = [nodes // number + (g < nodes % number) for g in range(number)]
    if max(sizes) > 256:
        raise ConfigError(
            f"parity {k}+{m} over {nodes} nodes needs a group of {max(sizes)}", why="256 at most"
        )
    if set(sizes) != {k + m} and not whys:
        forms = " and ".join(f"{size - m}+{m}" for size in sorted(set(sizes), reverse=True))
        whys.append(f"{nodes} nodes make groups of {forms}, not of {k}+{m}")
    groups = _deal(labels, sizes, spread=bool(domains))
    worst = max((_most_alike(group, labels) for group in groups), default=0)
    if domains and worst > m:
        whys.append(f"a failure domain has {worst} nodes of one group, which survives the loss of {m}")
    return ParityLayout(m=m, groups=groups, why="; ".join(whys))


# ---- placement


def _labels(nodes: int, domains: Sequence[str]) -> tuple[list[str], list[str]]:
    """A label per node, and what is wrong with them."""
    if not domains:
        return [str(node) for node in range(nodes)], []
    whys = [] if len(domains) == nodes else [f"{len(domains)} failure domains are named for {nodes} nodes"]
    return [domains[n] if n < len(domains) else f"\0{n}" for n in range(nodes)], whys


def _deal(labels: Sequence[str], sizes: Sequence[int], *, spread: bool) -> tuple[tuple[int, ...], ...]:
    """Nodes in groups of these sizes: neighbours together, or with labels one after the other to each group."""
    nodes = range(len(labels))
    if not spread:
        return tuple(tuple(nodes[a:b]) for a, b in pairwise(accumulate(sizes, initial=0)))
    order = sorted(nodes, key=lambda n: (-list(labels).count(labels[n]), labels[n], n))
    groups: list[list[int]] = [[] for _ in sizes]
    for node in order:
        alike = [sum(labels[n] == labels[node] for n in group) for group in groups]
        room = [size - len(group) for size, group in zip(sizes, groups, strict=True)]
        # Where fewest of its domain are, then where most room is.
        choice = [(alike[g], -room[g], g) for g in range(len(groups)) if room[g]]
        groups[min(choice)[-1]].append(node)
    return tuple(tuple(sorted(group)) for group in groups)


def _alternated(group: Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """In an order in which nodes of one domain lie far from each other."""
    rows: dict[str, list[int]] = {}
    for node in group:
        rows.setdefault(labels[node], []).append(node)
    largest = sorted(rows.values(), key=lambda row: (-len(row), row))
    flat = [node for row in largest for node in row]
    # Largest domains first into every (size of the largest)-th place: the usual way to keep equals apart.
    stride = len(largest[0])
    columns: list[list[int]] = [[] for _ in range(stride)]
    for i, node in enumerate(flat):
        columns[i % stride].append(node)
    return tuple(node for column in columns for node in column)


def _most_alike(group: Sequence[int], labels: Sequence[str]) -> int:
    found = [labels[node] for node in group]
    return max(map(found.count, found), default=0)


# ---- odds


def ring_counts(n: int, copies: int) -> list[int]:
    """How many sets of f lost nodes (f = 0 .. n) of a ring leave every image: no `copies` neighbours are in the set."""
    counts = [0] * (n + 1)
    # Walk around the ring; state: (lost so far, lost at its beginning, lost just before, a survivor was met).
    states = {(0, 0, 0, False): 1}
    for _ in range(n):
        following: dict[tuple[int, int, int, bool], int] = {}
        for (lost, first, run, met), ways in states.items():
            survives = (lost, first, 0, True)
            following[survives] = following.get(survives, 0) + ways
            if run + 1 < copies:
                fails = (lost + 1, first + (not met), run + 1, met)
                following[fails] = following.get(fails, 0) + ways
        states = following
    for (lost, first, run, met), ways in states.items():
        if (first + run if met else lost) < copies:
            counts[lost] += ways
    return counts


def _at_most(n: int, tolerated: int) -> list[int]:
    """How many sets of f lost nodes (f = 0 .. n) of a group it survives."""
    return [comb(n, f) if f <= tolerated else 0 for f in range(n + 1)]


def _product(a: Sequence[int], b: Sequence[int]) -> list[int]:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return out


def _share(counts: Sequence[int], nodes: int, lost: int) -> float:
    return counts[lost] / comb(nodes, lost) if 0 <= lost <= nodes else 0.0
