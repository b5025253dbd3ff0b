"""Saves beside the training, on real ranks with real keepers: what is saved, who may die, what stays flat."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sirara.checkpoint.arena import ArenaState, arena_head
from sirara.checkpoint.digest import digest_of
from sirara.checkpoint.manager import State
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.reader import Snapshot
from sirara.config.processes import ProcessId, wait_for_processes
from sirara.config.run_folder import RunFolder
from sirara.config.schema import TierConfig
from sirara.errors import RunBusyError, StorageError
from tests.checkpoints import (
    differing,
    even,
    flat_cuts,
    load,
    manager,
    plan_of,
    ranges_of,
    replicated,
    small_state,
)
from tests.harness import RankFailed, run_ranks
from tests.seaweed import KEYS, seaweed

LAYOUTS = {"even": even, "uneven": lambda state, world: flat_cuts(state, [0.1]), "replicas": replicated}
ROOT = Path(__file__).parents[2]
STORE = {"region": "us-east-1", "allow_http": "true", **KEYS}


def where() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def agree(row: bytes) -> list[bytes]:
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(where()[1])]
    dist.all_gather(rows, mine)
    return [bytes(r.tolist()) for r in rows]


class Rank:
    """One rank with a state of its own, which it saves and changes."""

    def __init__(self, folder: str, layout: str = "even", **options: Any) -> None:
        rank, world = where()
        self.state = small_state()
        self.boxes = LAYOUTS[layout](self.state, world)
        settings = {"asynchronous": True, "memory": Path(folder) / "shm", "agree": agree} | options
        self.manager = manager(Path(folder) / "checkpoints", rank=rank, world=world, **settings)
        self.ranges = ranges_of(self.state, self.boxes, rank)
        self.plan = plan_of(self.state, self.boxes)

    def saved(self, step: int) -> State:
        record = {"step": step, "tokens": 100 * step}
        return State(
            plan=self.plan, ranges=self.ranges, record=record, hf_files={"config.json": b"{}\n"}, aliases={}
        )

    def start(
        self, step: int, *, patient: bool = False, tiers: tuple[str, ...] = ("disk",), **more: Any
    ) -> bool:
        return self.manager.start(step, self.saved(step), tiers=tiers, patient=patient, **more)

    def add(self, value: float) -> None:
        """Trains: every element changes in place."""
        for r in self.ranges:
            r.data.add_(value)

    @property
    def keeper(self) -> int:
        assert self.manager.beside.background is not None
        pid = self.manager.beside.background.keeper.pid
        assert pid is not None
        return pid

    def ready(self) -> None:
        """The keeper has started and waits."""
        self.manager.prepare(self.plan)
        assert self.manager.beside.background is not None
        self.manager.beside.background.keeper.hello()


def expected_digest(state: dict[str, torch.Tensor]) -> str:
    return str(digest_of((name, 0, t.reshape(-1)) for name, t in state.items() if t.numel()))


# ---- what is saved


def save_and_train_on(folder: str, layout: str) -> tuple[str, list[str], str]:
    rank = Rank(folder, layout)
    before = {name: t.clone() for name, t in rank.state.items()}
    assert rank.start(5)
    rank.add(1.0)
    outcome = rank.manager.wait()
    rank.manager.close(clean=True)
    assert outcome is not None and outcome.fault is None
    found = load(rank.manager.open(5), before)
    return outcome.digest, differing(before, found), expected_digest(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_committed_is_the_state_of_the_step_while_the_training_went_on(tmp_path, layout):
    for digest, different, expected in run_ranks(2, save_and_train_on, str(tmp_path), layout):
        assert different == []
        assert digest == expected
    assert not any((tmp_path / "shm").iterdir())


def both_ways(folder: str) -> list[tuple[str, list[bytes]]]:
    found = []
    for name, options in (("in line", {"asynchronous": False}), ("beside", {})):
        rank = Rank(f"{folder}/{name}", **options)
        for step in (1, 2):
            assert rank.start(step, patient=True)
            outcome = rank.manager.wait()
            assert outcome is not None and outcome.fault is None, outcome
            rank.add(0.5)
        rank.manager.close(clean=True)
        path = Path(folder) / name / "checkpoints" / "step-000000002"
        files = sorted(p for p in path.glob("*.safetensors"))
        # The headers hold the uuid, which names the count of saves: the same here.
        found.append(("".join(p.name for p in files), [p.read_bytes() for p in files]))
    return found


def test_a_save_beside_the_training_has_the_bytes_of_one_in_line(tmp_path):
    for in_line, beside in run_ranks(2, both_ways, str(tmp_path)):
        assert in_line == beside


# ---- who may die


def a_keeper_is_killed(folder: str, victim: int) -> list[Any]:
    rank = Rank(folder)
    mine = where()[0] == victim
    rank.ready()
    killed = rank.keeper
    if mine:
        os.kill(killed, signal.SIGSTOP)
    rank.start(5)
    if mine:
        os.kill(killed, signal.SIGKILL)
    first = rank.manager.wait()
    assert first is not None and first.fault is not None
    told = rank.manager.poll()
    due = rank.manager.save_due()
    again = rank.start(6, patient=True)
    second = rank.manager.wait()
    assert second is not None and second.fault is None, second
    starts = rank.manager.beside.background.keeper.starts if rank.manager.beside.background else 0
    rank.manager.close(clean=True)
    return [str(first.fault), [o.kind for o in told], due, again, starts, rank.manager.newest(), killed]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_keeper_reaches_the_run_with_its_cause_and_the_next_save_works(tmp_path, victim):
    answers = run_ranks(2, a_keeper_is_killed, str(tmp_path), victim)
    for text, _, _, again, starts, newest, _ in answers:
        assert f"the writer of rank {victim} (process {answers[victim][6]}) was killed by SIGKILL" in text
        assert again and newest == [6]
        assert starts in (1, 2)
    assert answers[victim][4] == 2 and answers[1 - victim][4] == 1
    assert answers[0][1] == ["failed"]
    assert answers[0][2] is False  # not before the time of the next try


def stop(pid: int) -> None:
    """Stops a process; a thread that the signal has not reached yet would still take a job."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    end = time.monotonic() + 30
    while any((t / "stat").read_text().rpartition(")")[2].split()[0] != "T" for t in tasks.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.005)


def a_trainer_that_dies(folder: str, tiers: str) -> None:
    chosen = [TierConfig(tier=name) for name in tiers.split(",")]  # type: ignore[arg-type]
    rank = Rank(folder, agree=lambda row: [row], tiers=chosen)
    rank.ready()
    stop(rank.keeper)
    rank.start(5, tiers=tuple(tiers.split(",")))
    print(rank.keeper, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


def dead_trainer(tmp_path: Path, tiers: str = "disk") -> ProcessId:
    """The keeper, stopped with a job in hand until its trainer was killed.

    The kernel itself may let it go on then: it continues a stopped process whose group has become an orphan.
    """
    program = f"from tests.ranks.test_async_save import *; a_trainer_that_dies({str(tmp_path)!r}, {tiers!r})"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    keeper = ProcessId.of(int(process.stdout.readline()))
    assert keeper.alive
    assert manager(tmp_path / "checkpoints", rank=1, world=2).newest() == []
    process.stdin.close()
    process.stdout.close()
    assert process.wait(30) == -signal.SIGKILL
    return keeper


def send(keeper: ProcessId, number: int) -> None:
    """A signal to a keeper that may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper.pid, number)


def test_a_keeper_commits_what_it_has_after_its_trainer_was_killed_and_leaves_nothing(tmp_path):
    keeper = dead_trainer(tmp_path)
    send(keeper, signal.SIGCONT)
    assert wait_for_processes([keeper], wait_s=30) == []
    snapshot = manager(tmp_path / "checkpoints").open(5)
    assert differing(small_state(), load(snapshot, small_state())) == []
    assert snapshot.record["digest"] == expected_digest(small_state())
    assert not any((tmp_path / "shm").iterdir())


def test_an_image_in_memory_outlives_trainer_and_keeper(tmp_path):
    keeper = dead_trainer(tmp_path, "memory,disk")
    send(keeper, signal.SIGCONT)
    assert wait_for_processes([keeper], wait_s=30) == []
    memory = tmp_path / "shm" / "run-1"
    head = arena_head(memory / "arena-0-0")
    assert (head.state, head.step) == (ArenaState.READY, 5)
    assert (memory / f"gen-000000005-{head.uuid}" / "manifest.json").exists()


def test_a_keeper_that_was_asked_to_end_finishes_its_job_first(tmp_path):
    keeper = dead_trainer(tmp_path)
    for number in (signal.SIGTERM, signal.SIGINT):
        send(keeper, number)
    send(keeper, signal.SIGCONT)
    assert wait_for_processes([keeper], wait_s=30) == []
    # Stopped before it had read the job, it may as well end without it; it never leaves half of a step.
    assert manager(tmp_path / "checkpoints").newest() in ([5], [])


# ---- one at a time


def a_save_is_due_while_one_is_written(folder: str, when_busy: str) -> list[Any]:
    rank = Rank(folder, when_busy=when_busy)
    first = where()[0] == 0
    rank.ready()
    if first:
        stop(rank.keeper)

    def alive() -> None:
        if first:
            os.kill(rank.keeper, signal.SIGCONT)

    began = [rank.start(5), rank.start(6, alive=alive)]
    due = [rank.manager.save_due()]
    alive()
    rank.manager.wait()
    due.append(rank.manager.save_due())
    if due[1] or when_busy == "queue":
        began.append(rank.start(7))
        rank.manager.wait()
    outcomes = [(o.kind, o.step) for o in rank.manager.poll()]
    rank.manager.close(clean=True)
    c = rank.manager.ledger.counts
    return [began, due, outcomes, (c.queued, c.skipped, c.waited), rank.manager.newest()]


@pytest.mark.parametrize(
    ("when_busy", "began", "due", "outcomes", "counts", "newest"),
    [
        (
            "queue",
            [True, False, True],
            [False, True],
            [("queued", 6), ("saved", 5), ("saved", 7)],
            (1, 0, 0),
            [7, 5],
        ),
        ("skip", [True, False], [False, False], [("skipped", 6), ("saved", 5)], (0, 1, 0), [5]),
        ("wait", [True, True], [False, False], [("saved", 5), ("saved", 6)], (0, 0, 1), [6, 5]),
    ],
)
def test_a_save_that_comes_too_early_waits_its_turn_or_not_and_is_counted(
    tmp_path, when_busy, began, due, outcomes, counts, newest
):
    answers = run_ranks(2, a_save_is_due_while_one_is_written, str(tmp_path), when_busy)
    assert answers[0] == [began, due, outcomes, counts, newest]
    assert [a[0] for a in answers] == [began, began] and [a[3] for a in answers] == [counts, counts]


def a_newer_attempt_owns_the_run(folder: str) -> None:
    run = RunFolder(folder)
    rank = Rank(folder, agree=lambda row: [row], run_folder=run)
    rank.ready()
    (run.control / "attempts" / "0002.jsonl").write_text("")
    rank.start(5)
    rank.manager.wait()


def test_a_keeper_of_an_older_attempt_commits_nothing_and_ends_the_run(tmp_path):
    (tmp_path / "control" / "attempts").mkdir(parents=True)
    (tmp_path / "control" / "attempts" / "0001.jsonl").write_text("")
    with pytest.raises((RunBusyError, RankFailed), match="attempt 2 owns the run"):
        a_newer_attempt_owns_the_run(str(tmp_path))
    assert manager(tmp_path / "checkpoints").newest() == []


# ---- two arenas


def saves_with_a_memory_tier(folder: str) -> list[tuple[str, str, str]]:
    """(arena 0, arena 1, what happened) after each save: their steps, where READY."""
    tiers = [TierConfig(tier="memory"), TierConfig(tier="disk")]
    rank = Rank(folder, agree=lambda row: [row], tiers=tiers)
    seen = []

    def note(what: str) -> None:
        steps = []
        for which in (0, 1):
            path = Path(folder) / "shm" / "run-1" / f"arena-{where()[0]}-{which}"
            head = arena_head(path) if path.exists() else None
            steps.append(str(head.step) if head and head.state is ArenaState.READY else "-")
        seen.append((*steps, what))

    rank.ready()
    for step in (1, 2):
        rank.start(step, tiers=("memory",))
        outcome = rank.manager.wait()
        assert outcome is not None and outcome.fault is None and outcome.tiers["memory"].ok
        note("kept")
    os.kill(rank.keeper, signal.SIGSTOP)
    rank.start(3, tiers=("memory",))
    os.kill(rank.keeper, signal.SIGKILL)
    outcome = rank.manager.wait()
    assert outcome is not None and "SIGKILL" in str(outcome.fault)
    note("lost")
    for step in (4, 5):
        rank.start(step, patient=True, tiers=("memory",))
        outcome = rank.manager.wait()
        assert outcome is not None and outcome.fault is None
        note("kept")
    rank.manager.close()
    return seen


def test_the_arena_with_the_newest_committed_image_is_never_overwritten(tmp_path):
    assert saves_with_a_memory_tier(str(tmp_path)) == [
        ("1", "-", "kept"),
        ("1", "2", "kept"),
        ("3", "2", "lost"),
        ("4", "2", "kept"),
        ("4", "5", "kept"),
    ]
    # The next attempt does not begin with the arena that a restart reads.
    rank = Rank(
        str(tmp_path),
        agree=lambda row: [row],
        tiers=[TierConfig(tier="memory"), TierConfig(tier="disk")],
        attempt=2,
    )
    rank.start(6, tiers=("memory",))
    rank.manager.wait()
    memory = tmp_path / "shm" / "run-1"
    assert [arena_head(memory / f"arena-0-{which}").step for which in (0, 1)] == [6, 5]
    rank.manager.close(clean=True)
    assert not memory.exists()


# ---- what stays flat


def footprint(pid: int) -> tuple[int, int]:
    """Private memory in KiB and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    anon = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(anon.split()[1]), len(os.listdir(f"/proc/{pid}/fd"))


def many_saves(folder: str, saves: int) -> list[Any]:
    rank = Rank(folder, keep_last=1)
    seen = []
    for step in range(1, saves + 1):
        assert rank.start(step)
        outcome = rank.manager.wait()
        assert outcome is not None and outcome.fault is None, outcome
        rank.manager.poll()
        rank.add(0.25)
        if step in (saves // 4, saves):
            shared = sum(p.stat().st_blocks for p in (Path(folder) / "shm").rglob("*") if p.is_file())
            seen.append((footprint(os.getpid()), footprint(rank.keeper), shared))
    starts = rank.manager.beside.background.keeper.starts if rank.manager.beside.background else 0
    rank.manager.close(clean=True)
    return [seen, starts, rank.manager.newest()]


def test_memory_shared_memory_and_open_files_stay_flat_over_a_hundred_saves(tmp_path):
    for seen, starts, newest in run_ranks(2, many_saves, str(tmp_path), 100):
        assert starts == 1 and newest == [100]
        (trainer, keeper, shared), (trainer_after, keeper_after, shared_after) = seen
        assert shared_after <= shared
        assert trainer_after[1] <= trainer[1] and keeper_after[1] <= keeper[1]
        assert trainer_after[0] - trainer[0] < 2048 and keeper_after[0] - keeper[0] < 2048


def test_what_a_keeper_meets_on_the_disk_reaches_the_run_in_its_own_words(tmp_path):
    rank = Rank(str(tmp_path), agree=lambda row: [row])
    rank.ready()
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    rank.start(5)
    outcome = rank.manager.wait()
    assert outcome is not None and isinstance(outcome.fault, StorageError)
    assert "checkpoints" in outcome.fault.what
    assert "ENOTDIR" in outcome.fault.why or "EEXIST" in outcome.fault.why
    (tmp_path / "checkpoints").unlink()
    rank.start(6, patient=True)
    rank.manager.wait()
    rank.manager.close(clean=True)
    assert rank.manager.newest() == [6]


# ---- the object store


def saves_with_a_store(folder: str, endpoint: str) -> list[Any]:
    tiers = [
        TierConfig(tier="disk"),
        TierConfig(tier="object", url="s3://bucket/runs", options={**STORE, "endpoint": endpoint}),
    ]
    rank = Rank(folder, tiers=tiers, keep_last=1)
    for step in (1, 2):
        rank.start(step, patient=True, tiers=("disk", "object"))
        rank.add(0.5)
    last = rank.manager.wait()
    assert last is not None and last.fault is None, last
    outcomes = [
        (o.kind, o.step, {t: r.ok or r.fault for t, r in o.tiers.items()}) for o in rank.manager.poll()
    ]
    rank.manager.close(clean=True)
    return outcomes


def test_a_save_goes_to_the_object_store_from_all_ranks_while_the_next_one_is_made(tmp_path):
    with seaweed(tmp_path / "weed") as server:
        store = ObjectTier("s3://bucket/runs", {**STORE, "endpoint": server.endpoint}, "run-1", attempt=2)
        store.bucket.put("made", b"a bucket is there")
        outcomes = run_ranks(2, saves_with_a_store, str(tmp_path), server.endpoint)
        assert sorted(outcomes[0], key=lambda o: (o[1], o[0])) == [
            ("saved", 1, {"disk": True}),
            ("uploaded", 1, {"object": True}),
            ("saved", 2, {"disk": True}),
            ("uploaded", 2, {"object": True}),
        ]
        assert outcomes[1] == []
        assert [save.step for save in store.steps()] == [2]
        manifest, copy = store.open(2)
        assert Snapshot.over(manifest, [copy]).record["step"] == 2
    assert manager(tmp_path / "checkpoints", rank=1, world=2).newest() == [2]
