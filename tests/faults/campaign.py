"""What the campaigns of faults share: saves through keepers, faults in them, and what must be true after each.

Prepared   images of one save in arenas and the jobs for them: keepers without a trainer
Training   trainers of all ranks in one process, the real managers; their keepers are forked from it
Shim       real system calls that are counted, killed, cut short or failed (fault_shim.c)
restored, goes_on   the newest committed step is there bit for bit; the next attempt saves on
"""

import contextlib
import functools
import json
import mmap
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from sirara.checkpoint import keeper as keeper_module
from sirara.checkpoint import phases
from sirara.checkpoint.arena import Arena, arena_name
from sirara.checkpoint.image import image_plan
from sirara.checkpoint.job import KeeperSettings, SaveJob
from sirara.checkpoint.keeping import KeeperProcess
from sirara.checkpoint.manager import CheckpointManager
from sirara.checkpoint.manager import State as Saved
from sirara.checkpoint.node_views import open_nodes
from sirara.checkpoint.phases import Keeper
from sirara.checkpoint.restore import Restored, Restorer
from sirara.checkpoint.stage import Stager
from sirara.checkpoint.steps import incomplete_steps, save_uuid
from sirara.checkpoint.storage import Disk
from sirara.config.schema import TierConfig
from sirara.pure.saveplan import plan_save
from tests.checkpoints import (
    State,
    differing,
    even,
    in_ranks,
    load,
    manager,
    plan_of,
    ranges_of,
    restore,
    small_state,
)

RUN, WORLD = "run-1", 2


def wide_state(seed: int) -> State:
    """Small tensors, and one whose shares are long enough to go past the page cache."""
    g = torch.Generator().manual_seed(1000 + seed)
    return {"wide.weight": torch.randn(160, 1024, generator=g), **small_state(seed)}


STATES = {step: wide_state(step) for step in (1, 2, 3)}
REPLACED = wide_state(22)  # what step 2 held before, in runs that reach it again


class Cases:
    """Counts the faults that happened."""

    def __init__(self) -> None:
        self.fired: dict[str, int] = {}

    def __call__(self, kind: str, fired: object = True) -> None:
        assert fired, f"{kind}: the fault did not happen"
        self.fired[kind] = self.fired.get(kind, 0) + 1

    def __str__(self) -> str:
        each = ", ".join(f"{n} {kind}" for kind, n in self.fired.items())
        return f"{sum(self.fired.values())} fault cases: {each}"


T = TypeVar("T")


def sampled(
    points: Sequence[T], every: bool, *, kind: Callable[[T], object] = lambda _: None, shift: int = 0
) -> list[T]:
    """All points, or of each kind the first and the last and one of every five in between, from `shift` on."""
    kinds = [kind(point) for point in points]
    first = {k: i for i, k in reversed(list(enumerate(kinds)))}
    last = {k: i for i, k in enumerate(kinds)}
    ends = {*first.values(), *last.values()}
    chosen = [p for i, p in enumerate(points) if every or i in ends or i % 5 == shift % 5]
    assert {kind(point) for point in chosen} == set(kinds) and 5 * len(chosen) >= len(points)
    return chosen


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is such a place: a campaign makes thousands of fsyncs."""
    root = tempfile.mkdtemp(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="sirara-faults-"
    )
    try:
        yield Path(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


# ---- what must be true after a fault


def state_in(folder: Path, *, attempt: int = 2) -> tuple[int, State]:
    """The step that the next attempt loads, and its state: one that was committed, whole."""
    got: State = {}
    found = restore(manager(folder, attempt=attempt), lambda s: got.update(load(s, STATES[1])))
    assert found is not None and found.skipped == ()
    check_state(found.step, got)
    return found.step, got


def check_state(step: int, got: State) -> None:
    known = [STATES[2], REPLACED] if step == 2 else [STATES[step]]
    assert any(differing(state, got) == [] for state in known), step


def seed_in(folder: Path, *, attempt: int = 2) -> int:
    """Which of the states is found: 1, 2, 3 or 22."""
    return int(state_in(folder, attempt=attempt)[1]["scale/value"])


def save_in_line(folder: Path, step: int, *, state: State | None = None, attempt: int = 1) -> None:
    state = STATES[step] if state is None else state
    boxes = even(state, WORLD)
    for rank in reversed(range(WORLD)):
        m = manager(folder, rank=rank, world=WORLD, attempt=attempt, keep_last=1)
        m.save(step, plan=plan_of(state, boxes), ranges=ranges_of(state, boxes, rank), **extras(step, state))


def extras(step: int, state: State) -> dict[str, Any]:
    record = {"step": step, "seed": int(state["scale/value"])}
    return {"record": record, "hf_files": {"config.json": b"{}\n"}, "aliases": {}}


def goes_on(folder: Path, *, attempt: int = 2) -> None:
    """The next attempt saves step 3 and leaves nothing behind."""
    manager(folder, attempt=attempt)  # clears what the former attempt left
    save_in_line(folder, 3, attempt=attempt)
    assert seed_in(folder, attempt=attempt + 1) == 3
    assert incomplete_steps(folder) == []
    assert manager(folder, rank=1, world=2).newest() == [3]


def before_a_save(folder: Path, *, again: bool) -> Path:
    """A run with step 1 committed; `again`: and step 2, in another state."""
    save_in_line(folder, 1)
    if again:
        save_in_line(folder, 2, state=REPLACED)
    return folder


# ---- keepers without trainers


class Prepared:
    """Step 2 of two ranks on one node in arenas, and the jobs that keepers get for it."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory / RUN
        self.memory.mkdir(parents=True)
        state, boxes = STATES[2], even(STATES[2], WORLD)
        plan = plan_save(plan_of(state, boxes), node_of=lambda rank: 0)
        self._plan = plan.to_bytes()
        self.uuid = save_uuid(RUN, 1, 2, 0)
        self._arenas = []
        for rank in range(WORLD):
            layout = image_plan(plan, rank)
            arena = Arena.create(self.memory, arena_name(rank, 0), layout.total, run=RUN)
            arena.mark_writing(2, self.uuid)
            Stager(plan, layout, ranges_of(state, boxes, rank)).copy(arena.data[: layout.total])
            arena.mark_ready()
            self._arenas.append(arena)

    def settings(self, folder: Path, rank: int) -> KeeperSettings:
        plan = self.memory / f"plan-{rank}"
        plan.write_bytes(self._plan)  # a keeper that has read it takes it away
        return KeeperSettings(
            folder=str(folder),
            run=RUN,
            run_folder=None,
            rank=rank,
            world=WORLD,
            node=0,
            ranks_per_node=WORLD,
            attempt=1,
            plan=str(plan),
            memory=str(self.memory),
            keep_last=1,
            keep_every=None,
            tiers=[{"tier": "disk"}],
        )

    def job(self, rank: int) -> SaveJob:
        return SaveJob(
            step=2,
            uuid=self.uuid,
            attempt=1,
            arena=str(self._arenas[rank].path),
            tiers=("disk",),
            deadline_s=0.3,
            **(extras(2, STATES[2]) if rank == 0 else {}),
        )

    def keep(self, folder: Path, disk: Disk) -> None:
        """Both keepers in this process, one after the other; the fault of rank 0's is raised."""
        for rank in reversed(range(WORLD)):
            keeper = Keeper(self.settings(folder, rank), disk=disk)
            try:
                end = keeper.keep(self.job(rank))
            finally:
                keeper.close()
        if end.fault is not None:
            raise end.fault

    def case(self, folder: Path) -> dict[str, Any]:
        """The same for `shimmed_keepers`."""
        ranks = tuple(reversed(range(WORLD)))
        return {
            "settings": [json.loads(self.settings(folder, rank).to_line()) for rank in ranks],
            "jobs": [json.loads(self.job(rank).to_line()) for rank in ranks],
        }

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


def in_child(body: Callable[[], None]) -> int:
    """The wait status of a forked process that runs `body`."""
    pid = os.fork()
    if pid == 0:
        code = 17
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class Counting(Disk):
    """Counts effects; at the one with number `at` comes `fault`, or half of a write before it when `torn`."""

    def __init__(self, at: int = -1, fault: Callable[[], None] = lambda: None, *, torn: bool = False) -> None:
        super().__init__()
        self.effects: list[tuple[str, str]] = []
        self._at, self._fault, self._torn = at, fault, torn

    @property
    def _now(self) -> bool:
        return len(self.effects) - 1 == self._at

    def touch(self, effect: str, path: Path) -> None:
        self.effects.append((effect, path.name))
        if self._now and not self._torn:
            self._fault()

    def pwrite(self, fd: int, buffers: Sequence[memoryview], position: int) -> int:
        if self._now and self._torn:
            half = sum(map(len, buffers)) // 2
            left = b"".join(buffers)[:half]
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # past O_DIRECT's alignment
                os.pwrite(file.fileno(), left, position)
            self._fault()
        return super().pwrite(fd, buffers, position)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a loss of power


class Stop(BaseException):
    """Ends everything in the middle."""


class PowerLoss(Disk):
    """Remembers what is durable and what is not yet: at the effect with number `at` the power goes.

    Durable: bytes and size of a file at its fsync, names of a folder at its fsync. What came later may or may not be
    found: of each file any of the blocks that were written and any of the sizes it had (also with O_DIRECT: the bytes
    are on the device, the extents that say so may not be), of each folder's changes the first few (a journal keeps
    their order, and a rename whole). `losses` are the trees that may be found.
    """

    BLOCK = 4096

    def __init__(
        self, root: Path, at: int = -1, *, losses: Callable[["PowerLoss"], None] = lambda disk: None
    ) -> None:
        super().__init__()
        self.root, self.count, self.direct, self._at, self._losses = root, 0, 0, at, losses
        self.durable: dict[int, bytes] = {}
        self.pending: dict[int, list[tuple[int, bytes | None]]] = {}  # (position, block) or (size, None)
        self.names: dict[int, list[dict[str, int]]] = {}  # the durable names of a folder, then later ones
        for folder, _, files in os.walk(root):
            for file in files:
                path = Path(folder) / file
                self.durable[path.stat().st_ino] = path.read_bytes()
        self._look()

    def touch(self, effect: str, path: Path) -> None:
        self._look()
        if self.count >= self._at >= 0:
            if self.count == self._at:
                self.count += 1
                self._losses(self)
            raise Stop
        self.count += 1

    def open(self, path: Path, *, size: int | None = None) -> int:
        fd = super().open(path, size=size)
        self._note(fd, os.fstat(fd).st_size, None)
        return fd

    def fallocate(self, fd: int, position: int, length: int) -> None:
        super().fallocate(fd, position, length)
        self._note(fd, os.fstat(fd).st_size, None)

    def pwrite(self, fd: int, buffers: Sequence[memoryview], position: int) -> int:
        self.direct += bool(_flags(fd) & os.O_DIRECT)
        done = super().pwrite(fd, buffers, position)
        data, at = b"".join(buffers)[:done], 0
        while at < done:
            size = self.BLOCK - (position + at) % self.BLOCK
            self._note(fd, position + at, data[at : at + size])
            at += size
        return done

    def fsync(self, fd: int, path: Path) -> None:
        super().fsync(fd, path)
        inode = os.fstat(fd).st_ino
        self.durable[inode] = path.read_bytes()
        self.pending.pop(inode, None)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._look()
        inode = path.stat().st_ino
        self.names[inode] = self.names[inode][-1:]

    def after(self, target: Path, rng: random.Random | None) -> None:
        """The tree that is found; without `rng` nothing is there that was not durable."""
        self._build(self.root.stat().st_ino, target, rng)

    def _note(self, fd: int, position: int, data: bytes | None) -> None:
        self.pending.setdefault(os.fstat(fd).st_ino, []).append((position, data))

    def _look(self) -> None:
        for folder, folders, files in os.walk(self.root):
            names = {name: (Path(folder) / name).stat().st_ino for name in (*folders, *files)}
            # A new folder is durably empty.
            seen = self.names.setdefault(Path(folder).stat().st_ino, [{}] if self.count else [names])
            if seen[-1] != names:
                seen.append(names)

    def _build(self, folder: int, target: Path, rng: random.Random | None) -> None:
        target.mkdir()
        versions = self.names[folder]
        for name, inode in (rng.choice(versions) if rng else versions[0]).items():
            if inode in self.names:
                self._build(inode, target / name, rng)
            else:
                (target / name).write_bytes(self._content(inode, rng))

    def _content(self, inode: int, rng: random.Random | None) -> bytes:
        content = bytearray(self.durable.get(inode, b""))
        likely = rng.choice((0.0, 0.5, 0.95, 1.0)) if rng else 0.0
        for position, data in self.pending.get(inode, ()):
            if not rng or rng.random() >= likely:
                continue
            end = position + len(data or b"")
            content.extend(bytes(max(0, end - len(content))))
            if data is not None:
                content[position:end] = data
        return bytes(content)


def _flags(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return int(next(line for line in file if line.startswith("flags")).split()[1], 8)


# ---- trainers and their keepers


class Board:
    """Numbers that forked processes share. Effects are counted per rank; names of effects only in a count."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._memory = mmap.mmap(-1, 4096)

    def get(self, place: int) -> int:
        return struct.unpack_from("<q", self._memory, 8 * place)[0]

    def set(self, place: int, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * place, value)

    @property
    def fired(self) -> bool:
        return bool(self.get(0))

    def counts(self) -> list[int]:
        return [self.get(1 + rank) for rank in range(self.world)]

    def given(self) -> bool:
        return all(self.get(100 + rank) for rank in range(self.world))


class Armed(Disk):
    """A keeper's disk: counts on the board; at one effect of one rank comes the fault."""

    def __init__(self, board: Board, rank: int, at: int, fault: Callable[[], None]) -> None:
        super().__init__()
        self._board, self._rank, self._at, self._fault = board, rank, at, fault
        self._lock = threading.Lock()

    def touch(self, effect: str, path: Path) -> None:
        board, rank = self._board, self._rank
        if board.fired:
            return
        if not board.get(1 + rank):
            # The trainers have given all jobs, so that the keepers can end the save without them.
            wait_for(board.given)
        with self._lock:
            n = board.get(1 + rank)
            board.set(1 + rank, n + 1)
            if n == self._at and not board.fired:
                board.set(0, 1)
                self._fault()


class Forked:
    """A forked process where a Popen is expected."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        wait_for(lambda: self.poll() is not None, timeout or 30.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    until, nap_s = time.monotonic() + timeout_s, 0.0005
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(nap_s)
        nap_s = min(0.02, 1.5 * nap_s)


class Training:
    """A run of `world` ranks with `per_node` on each node; `root` has its checkpoints and its nodes' memory.

    tiers: as configured; {node} paths are not needed, every node has `memory(node)`.
    """

    def __init__(
        self,
        root: Path,
        *tiers: dict[str, Any],
        world: int = WORLD,
        per_node: int = WORLD,
        deadline_s: float = 8.0,
    ) -> None:
        self.root, self.world, self.per_node, self.deadline_s = root, world, per_node, deadline_s
        self.folder = root / "checkpoints"
        self.tiers = [TierConfig.model_validate(t) for t in (*tiers, {"tier": "disk"})]

    @property
    def nodes(self) -> range:
        return range(self.world // self.per_node)

    def memory(self, node: int) -> Path:
        return self.root / f"memory-{node}"

    def managers(self, *, attempt: int = 1, **options: Any) -> list[CheckpointManager]:
        rows = _Together(self.world)
        settings = {"keep_last": 1, "deadline_s": self.deadline_s, "asynchronous": True, "token": "secret"}
        settings |= options
        return [
            manager(
                self.folder,
                rank=rank,
                world=self.world,
                node=rank // self.per_node,
                ranks_per_node=self.per_node,
                attempt=attempt,
                tiers=self.tiers,
                memory=self.memory(rank // self.per_node),
                agree=functools.partial(rows, rank),
                **settings,
            )
            for rank in range(self.world)
        ]

    def save(
        self,
        managers: Sequence[CheckpointManager],
        step: int,
        *,
        tiers: Collection[str] | None = None,
        given: Callable[[int], None] = lambda rank: None,
    ) -> Any:
        """All ranks save; how it ended, as rank 0 knows."""
        state = STATES[step]
        boxes = even(state, self.world)
        plan = plan_of(state, boxes)
        due = [t.tier for t in self.tiers] if tiers is None else tiers

        def one(rank: int) -> Any:
            m = managers[rank]
            saved = Saved(plan=plan, ranges=ranges_of(state, boxes, rank), **extras(step, state))
            m.start(step, saved, tiers=due, patient=True)
            given(rank)
            ended = m.wait()
            m.poll()
            return ended

        return in_ranks(self.world, one)[0]

    def saved(self, step: int, *, attempt: int = 1, tiers: Collection[str] | None = None) -> None:
        """A save in peace, with keepers that end after it."""
        managers = self.managers(attempt=attempt)
        with forked_keepers():
            self.prepare(managers, step)
            ended = self.save(managers, step, tiers=tiers)
            for m in managers:
                m.close()
        assert ended.kind == "saved" and all(t.ok for t in ended.tiers.values()), ended

    def begin(self, m: CheckpointManager, step: int) -> bool:
        """One rank alone begins a save to the disk, if no other one is being written."""
        state = STATES[step]
        boxes = even(state, 1)
        saved = Saved(plan=plan_of(state, boxes), ranges=ranges_of(state, boxes, 0), **extras(step, state))
        return m.start(step, saved, tiers=["disk"])

    def disturbed(
        self, fault: "Fault", *, again: int | None = None, tiers: Collection[str] | None = None
    ) -> "After":
        """Trainers in a process of their own save step 2; `fault` comes. again: a step that is saved afterwards by
        the same trainers, if they live. tiers: of the save, all by default."""
        board = Board(self.world)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 18
            try:
                os.close(ours)
                self._train(board, fault, again, tiers, theirs)
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        said = _read_until_all_are_gone(ours, [pid])
        status = os.waitpid(pid, 0)[1]
        return After(board=board, status=status, said=[json.loads(line) for line in said.splitlines()])

    def _train(
        self, board: Board, fault: "Fault", again: int | None, tiers: Collection[str] | None, out: int
    ) -> None:
        fault.trainer = os.getpid()
        fault.arm_trainer(board)
        managers = self.managers()
        with forked_keepers(board, fault, out, wait=False):
            self.prepare(managers, 2)
            ended = self.save(managers, 2, tiers=tiers, given=lambda rank: board.set(100 + rank, 1))
            os.write(out, _told(ended))
            if again is not None:
                os.write(out, _told(self.save(managers, again)))
            for m in managers:
                m.close()

    def prepare(self, managers: Sequence[CheckpointManager], step: int) -> None:
        """Keepers are forked before there are other threads."""
        plan = plan_of(STATES[step], even(STATES[step], self.world))
        for m in managers:
            m.prepare(plan)

    def restored(self, *, attempt: int = 2, lost: Collection[int] = ()) -> tuple[int, Restored]:
        """What as many ranks on as many nodes, less `lost` ones, find in all tiers; checked bit for bit."""
        world = self.world - len(lost) * self.per_node
        nodes = [node for node in self.nodes if node not in lost]
        rows = _Together(world)
        got: State = {name: torch.full_like(t, 55) for name, t in STATES[1].items()}
        boxes = even(STATES[1], world)

        def one(rank: int) -> Restored | None:
            def texts(text: str) -> list[str]:
                return [row.decode() for row in rows(rank, text.encode())]

            def agree(fault: str) -> str:
                return next((t for t in texts(fault) if t), "")

            def read(snapshot: Any) -> None:
                ranges = ranges_of(STATES[1], boxes, rank, filled=False)
                snapshot.read_into(ranges)
                for r in ranges:
                    at = 0
                    for box in r.boxes:
                        got[r.tensor][box.slices] = r.data[at : at + box.volume].reshape(box.size)
                        at += box.volume

            node = rank // self.per_node
            with open_nodes(
                self.tiers,
                run=RUN,
                rank=rank,
                world=world,
                local_size=self.per_node,
                node=node,
                attempt=attempt,
                token="secret",
                memory=self.memory(nodes[node]),
                texts=texts,
            ) as opened:
                found = Restorer(
                    checkpoints=self.folder,
                    control=self.root / "control",
                    run=RUN,
                    attempt=attempt,
                    rank=rank,
                    node=node,
                    agree=agree,
                    texts=texts,
                    views=opened.views,
                    decode=opened.decode,
                    leads=rank % self.per_node == 0,
                ).restore(read, distrust=lambda step, fault: None)
                agree("")
            return None if found is None else found[1]

        found = in_ranks(world, one)[0]
        assert found is not None, "no tier has any step"
        check_state(found.step, got)
        return found.step, found


class _Together:
    """Rows of all ranks, which are threads."""

    def __init__(self, world: int) -> None:
        self._rows: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world, timeout=60)

    def __call__(self, rank: int, row: bytes) -> list[bytes]:
        self._rows[rank] = row
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


class Fault:
    """Kills at the effect `at` of the keeper of `rank`: "keeper", "trainer" or "both"."""

    trainer = 0

    def __init__(self, victim: str = "", rank: int = -1, at: int = -1) -> None:
        self.victim, self.rank, self.at = victim, rank, at

    def disk(self, board: Board, rank: int) -> Disk:
        return Armed(board, rank, self.at if rank == self.rank else -1, self._fire)

    def arm_trainer(self, board: Board) -> None:
        """For faults of the trainer's own."""

    def _fire(self) -> None:
        if self.victim != "keeper":
            os.kill(self.trainer, signal.SIGKILL)
        if self.victim != "trainer":
            kill_me()


class AtPoint(Fault):
    """Kills the trainers before, or after, one of them calls `method` of `kind` for the nth time."""

    def __init__(self, kind: type, method: str, when: str, nth: int) -> None:
        super().__init__()
        self._kind, self._method, self._when, self._nth = kind, method, when, nth

    def arm_trainer(self, board: Board) -> None:
        real, calls, lock = getattr(self._kind, self._method), [0], threading.Lock()

        def called(*args: Any, **options: Any) -> Any:
            with lock:
                calls[0] += 1
                now = calls[0] == self._nth
            if now and self._when == "before":
                board.set(0, 1)
                kill_me()
            done = real(*args, **options)
            if now:
                board.set(0, 1)
                kill_me()
            return done

        setattr(self._kind, self._method, called)


class After:
    """What is known after a disturbed save: the wait status of the trainers, and what they said of their saves."""

    def __init__(self, *, board: Board, status: int, said: list[dict[str, Any]]) -> None:
        self.board, self.status, self.said = board, status, said


def _told(ended: Any) -> bytes:
    fault = ended.fault
    fields = {
        "kind": ended.kind,
        "fault": "" if fault is None else f"{fault.what} {fault.why}",
        "tiers": {name: tier.ok for name, tier in ended.tiers.items()},
    }
    return json.dumps(fields).encode() + b"\n"


def _read_until_all_are_gone(fd: int, pids: Sequence[int], timeout_s: float = 60.0) -> bytes:
    """What was said, once nobody is left who could say more: trainers and keepers hold the other end."""
    said, until = b"", time.monotonic() + timeout_s
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while time.monotonic() < until:
            if not select.select([pipe], [], [], 1.0)[0]:
                continue
            part = pipe.read(1 << 16)
            if not part:
                return said
            said += part
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"processes still live after {timeout_s:g} s; they said {said!r}")


@contextlib.contextmanager
def forked_keepers(
    board: Board | None = None, fault: Fault | None = None, out: int = -1, *, wait: bool = True
) -> Iterator[None]:
    """Keepers are forked from this process instead of started, which takes a second for each.

    wait: until they have ended, at the end.
    """
    real = KeeperProcess._spawn
    started: list[Forked] = []

    def spawn(self: KeeperProcess, fd: int) -> Forked:
        rank = self._settings.rank
        pid = os.fork()
        if pid:
            started.append(Forked(pid))
            return started[-1]
        code = 19
        try:
            _close_all_but(fd, out)
            disk = Disk() if board is None or fault is None else fault.disk(board, rank)
            keeper_module.Keeper = functools.partial(Keeper, disk=disk)  # type: ignore[misc]
            keeper_module.be_modest = lambda nice: None
            phases.ORPHAN_S = 0.5
            with socket.socket(fileno=fd) as connection:
                keeper_module.serve(connection)
            code = 0
        finally:
            os._exit(code)

    KeeperProcess._spawn = spawn  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        KeeperProcess._spawn = real  # type: ignore[method-assign]
    for keeper in started if wait else ():
        keeper.wait()


def _close_all_but(*kept: int) -> None:
    """A keeper that held its trainer's end would never see it hang up."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


# ---- system calls

OFF, COUNT, KILL, TORN, SHORT, FULL, FAIL, FAIL_FSYNC, FAIL_READ, SLOW = range(10)
_STATE = struct.Struct("<8q1024s")


def compiled(folder: Path) -> Path | None:
    """fault_shim.c as a library; None without a compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        return None
    library = folder / "fault_shim.so"
    source = Path(__file__).with_name("fault_shim.c")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Shim:
    """Arms the library and reads its counters, in the processes that `environment` is given to."""

    def __init__(self, library: Path, folder: Path) -> None:
        path = folder / "fault-state"
        path.write_bytes(bytes(_STATE.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STATE.size)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "FAULT_STATE": str(path)}

    def arm(self, root: Path, action: int, at: int = -1, arg: int = 0) -> None:
        _STATE.pack_into(self._memory, 0, action, at, arg, 0, 0, 0, 0, 0, os.fsencode(root))

    def disarm(self) -> None:
        struct.pack_into("<q", self._memory, 0, OFF)

    @property
    def effects(self) -> int:
        return self._field(3)

    @property
    def fsyncs(self) -> int:
        return self._field(4)

    @property
    def reads(self) -> int:
        return self._field(5)

    @property
    def bytes(self) -> int:
        return self._field(6)

    @property
    def fired(self) -> int:
        return self._field(7)

    def _field(self, n: int) -> int:
        return struct.unpack_from("<q", self._memory, 8 * n)[0]


class ShimmedKeepers:
    """The process of shimmed_keepers.py."""

    def __init__(self, shim: Shim) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("shimmed_keepers.py"))],
            env={**shim.environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def keep(self, case: Mapping[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        """(wait status, how the jobs ended that did), rank 0's last."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["status"], answer["ends"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
