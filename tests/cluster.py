"""A cluster on one machine: nodes with folders of their own, the keepers of their ranks as objects in one process."""

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sirara.checkpoint.generation import GenerationStore
from sirara.checkpoint.image import Image
from sirara.checkpoint.job import TierResult
from sirara.checkpoint.nodes import NodeTiers
from sirara.config.schema import TierConfig
from tests.checkpoints import in_ranks
from tests.generations import RUN, arena_of, image_of, manifest_of, save_plan

SIZES = [90_000, 50_001, 90_007, 1, 70_000, 88_888]


@contextlib.contextmanager
def clusters() -> Iterator:
    """Makes clusters in shared memory, as nodes keep them, and ends them."""
    made: list[Cluster] = []
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))

    def make(*tiers, **options) -> Cluster:
        made.append(Cluster(root, tiers, **options))
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.close()
        shutil.rmtree(root)


class Cluster:
    """nodes x local_size ranks; rank r holds sizes[r % len] bytes of a tensor."""

    def __init__(
        self, root: Path, tiers, *, nodes=6, local_size=1, sizes=SIZES, attempt=1, idle_s=5.0, deadline_s=20.0
    ):
        self.root, self.nodes, self.local_size, self.attempt = root, nodes, local_size, attempt
        self.world = nodes * local_size
        self.plan = save_plan([sizes[r % len(sizes)] for r in range(self.world)], local_size=local_size)
        self.tiers = [self._tier(t) for t in tiers]
        self._times = {"idle_s": idle_s, "deadline_s": deadline_s}
        self.keepers: dict[int, NodeTiers] = {}
        for node in range(nodes):
            self.start(node)
        self.meet()

    def _tier(self, tier) -> TierConfig:
        fields = {"tier": tier} if isinstance(tier, str) else dict(tier)
        if fields["tier"] == "disk":
            fields["path"] = str(self.root / "disk-{node}")
        return TierConfig(**fields)

    def memory(self, node: int) -> Path:
        return self.root / f"memory-{node}"

    def store(self, node: int) -> GenerationStore:
        return GenerationStore(self.memory(node), RUN)

    def ranks_of(self, node: int) -> range:
        return range(node * self.local_size, (node + 1) * self.local_size)

    def start(self, node: int) -> None:
        for rank in self.ranks_of(node):
            self.keepers[rank] = NodeTiers(
                self.tiers,
                run=RUN,
                rank=rank,
                world=self.world,
                local_size=self.local_size,
                node=node,
                attempt=self.attempt,
                token="secret",
                memory=self.memory(node),
                **self._times,
            )

    def meet(self) -> None:
        addresses = {rank: keeper.address for rank, keeper in self.keepers.items()}
        for keeper in self.keepers.values():
            keeper.meet(addresses)

    def image(self, rank: int, step: int) -> tuple[Image, bytearray]:
        image, data = self._image(rank, step)
        return image, bytearray(data)

    @functools.cache  # noqa: B019  a cluster lives as long as its test
    def _image(self, rank: int, step: int) -> tuple[Image, bytearray]:
        return image_of(
            self.plan, rank, step, world=self.world, local_size=self.local_size, attempt=self.attempt
        )

    def keep(self, step: int, *, tiers=None, ranks=None, keep=None) -> dict[int, dict[str, TierResult]]:
        """All ranks keep their image of a step, at the same time. keep: rank -> what it does instead."""
        names = [t.tier for t in self.tiers] if tiers is None else tiers
        ranks = list(range(self.world)) if ranks is None else ranks

        def one(i: int):
            rank = ranks[i]
            if keep and rank in keep:
                return keep[rank](*self.image(rank, step))
            return self.keep_own(rank, step, names)

        return dict(zip(ranks, in_ranks(len(ranks), one), strict=True))

    def keep_own(self, rank: int, step: int, tiers) -> dict[str, TierResult]:
        image, data = self.image(rank, step)
        folder = self.memory(rank // self.local_size) / RUN
        arena = arena_of(folder, f"arena-{rank}-{step % 2}", image, data)
        return self.keepers[rank].keep(image, memoryview(data), tiers=tiers, arena=arena)

    def manifest(self, step: int) -> bytes:
        return manifest_of(self.plan, [self.image(r, step)[0] for r in range(self.world)])

    def commit(self, step: int) -> dict[int, str]:
        return self.keepers[0].commit(step, self.image(0, step)[0].uuid, self.manifest(step))

    def save(self, step: int, **options) -> None:
        results = self.keep(step, **options)
        bad = {r: t for r, t in results.items() if not all(x.ok for x in t.values())}
        assert not bad, bad
        assert self.commit(step) == {}

    def kill(self, node: int) -> None:
        """The keepers end; what is in the folders stays."""
        for rank in self.ranks_of(node):
            self.keepers.pop(rank).close()

    def lose(self, node: int) -> None:
        """The machine is gone, with all that was on it."""
        self.kill(node)
        shutil.rmtree(self.memory(node))
        shutil.rmtree(self.root / f"disk-{node}", ignore_errors=True)

    def replace(self, *nodes: int) -> None:
        """Empty machines take the places of lost ones."""
        for node in nodes:
            self.start(node)
        self.meet()

    def generation(self, node: int, step: int) -> Path:
        return self.memory(node) / RUN / f"gen-{step:09d}-{self.image(0, step)[0].uuid}"

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.close()
