"""Saves beside the training that do not end: after each fault the newest committed step is there bit for bit, and the
next attempt saves on.

    keepers alone       SIGKILL at every effect, in the middle of every write; loss of power at every effect
    trainers, keepers   SIGKILL of one keeper, of the trainers, of both, at every effect of a keeper; of the trainers at
                        every stage of a snapshot; with node tiers as well
    system calls        SIGKILL, torn and short writes, ENOSPC at the n-th byte, EIO, EDQUOT, slow ones (fault_shim.c)

Each campaign has a long form, which takes every point, and a short one: the first and the last point of every kind and
one of five in between, others for each kind of run.
"""

import errno
import random
import shutil
from pathlib import Path

import pytest

from sirara.checkpoint.arena import Arena
from sirara.checkpoint.job import fault_from
from sirara.checkpoint.keeping import KeeperProcess
from sirara.checkpoint.stage import Stager
from sirara.checkpoint.steps import incomplete_steps, step_name
from sirara.errors import StorageError
from tests.faults.campaign import (
    COUNT,
    FAIL,
    FAIL_FSYNC,
    FAIL_READ,
    FULL,
    KILL,
    SHORT,
    SLOW,
    TORN,
    WORLD,
    AtPoint,
    Cases,
    Counting,
    Fault,
    PowerLoss,
    Prepared,
    Shim,
    ShimmedKeepers,
    Stop,
    Training,
    before_a_save,
    compiled,
    goes_on,
    in_child,
    kill_me,
    sampled,
    scratch,
    seed_in,
    was_killed,
)

pytestmark = pytest.mark.timeout(300)
KINDS = {"new step": False, "step reached again": True}


@pytest.fixture(scope="module")
def root():
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def case(request):
    cases = Cases()
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nasynchronous saves: {cases}")


@pytest.fixture(scope="module")
def prepared(root):
    made = Prepared(root / "prepared")
    yield made
    made.close()


@pytest.fixture(scope="module", params=KINDS)
def before(request, root) -> Path:
    return before_a_save(root / request.param.replace(" ", "-"), again=KINDS[request.param])


LONG = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(params=[False, pytest.param(True, marks=LONG)], ids=["sampled", "every point"])
def every(request) -> bool:
    return request.param


@pytest.fixture
def copy(before, root):
    """Makes copies of the run as it was before the save, and removes each when the next is asked for."""
    folder = root / "case"  # always the same: another one would be another copy of the run

    def fresh() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(before, folder))

    yield fresh
    shutil.rmtree(folder, ignore_errors=True)


def old_seed(before: Path) -> int:
    return 22 if (before / step_name(2)).exists() else 1


# ---- keepers alone


def test_a_keeper_killed_at_any_effect_leaves_the_newest_committed_step(before, copy, prepared, case, every):
    counting = Counting()
    prepared.keep(copy(), counting)
    effects = counting.effects
    assert {"mkdir", "open", "allocate", "write", "fsync", "rename", "unlink", "rmtree"} <= {
        e for e, _ in effects
    }
    points = [(n, False) for n in range(len(effects))]
    points += [(n, True) for n, (effect, _) in enumerate(effects) if effect == "write"]
    seeds = []

    def kind(point: tuple[int, bool]) -> tuple[str, str, bool]:
        effect, name = effects[point[0]]
        return effect, Path(name).suffix, point[1]

    chosen = sampled(points, every, kind=kind, shift=old_seed(before))
    for i, (n, torn) in enumerate(chosen):
        folder = copy()
        status = in_child(lambda n=n, f=folder, t=torn: prepared.keep(f, Counting(n, kill_me, torn=t)))
        case("kills of keepers" if not torn else "kills in the middle of a write", was_killed(status))
        seeds.append(seed_in(folder))
        if i % 6 == 0:
            goes_on(folder)
    assert set(seeds) == {old_seed(before), 2}


@pytest.mark.parametrize("survives", ["nothing", "some"])
def test_a_power_loss_at_any_effect_of_a_keeper_leaves_a_committed_step(
    before, copy, prepared, root, case, survives, every
):
    counted = PowerLoss(folder := copy())
    prepared.keep(folder, counted)
    assert counted.direct, "nothing was written past the page cache"
    rng = random.Random(11)
    found = root / "found"
    seeds = []

    def losses(disk: PowerLoss) -> None:
        for _ in range(1 if survives == "nothing" else 4):
            disk.after(found, None if survives == "nothing" else rng)
            seeds.append(seed_in(found))
            if not len(seeds) % 40:
                goes_on(found)
            shutil.rmtree(found)
            case("losses of power")

    for n in sampled(range(counted.count), every, shift=old_seed(before) + len(survives)):
        with pytest.raises(Stop):
            prepared.keep(folder := copy(), PowerLoss(folder, n, losses=losses))
    assert set(seeds) == {old_seed(before), 2}


def test_a_save_that_a_keeper_has_ended_survives_a_power_loss(copy, prepared, root, case):
    disk = PowerLoss(folder := copy())
    prepared.keep(folder, disk)
    disk.after(root / "ended", None)
    case("losses of power")
    assert seed_in(root / "ended") == 2
    shutil.rmtree(root / "ended")


# ---- trainers and their keepers


def effects_of(training: Training) -> list[int]:
    """How many effects each keeper's part of a save has."""
    after = training.disturbed(Fault())
    assert after.status == 0 and [s["kind"] for s in after.said] == ["saved"], after.said
    counts = after.board.counts()
    assert min(counts) > 8
    return counts


def fresh_run(root: Path, name: str, *tiers: dict, on_disk: bool = True, **shape) -> Training:
    """A run with step 1 on the disk, or with nothing yet."""
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).mkdir()
    training = Training(root / name, *tiers, **shape)
    if on_disk:
        before_a_save(training.folder, again=False)
    return training


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("victim", ["keeper", "trainer", "both"])
def test_a_kill_of_keeper_trainer_or_both_at_any_effect_of_a_save(root, case, victim, rank, every):
    counts = effects_of(fresh_run(root, "kill"))
    seeds = set()
    for i, n in enumerate(sampled(range(counts[rank]), every, shift=rank + len(victim))):
        training = fresh_run(root, "kill")
        again = 3 if victim == "keeper" and i % 4 == 0 else None
        after = training.disturbed(Fault(victim, rank, n), again=again)
        case(f"kills of {victim}", after.board.fired)
        seeds.add(check_what_is_left(training, after, victim, again, on=i % 4 == 1))
    if victim == "trainer":
        assert seeds == {2}  # keepers end what they have begun
    else:
        # The last effect of a rank that does not commit is its report: without it there is no step 2.
        assert seeds == ({1, 2} if rank == 0 else {1})


def check_what_is_left(training: Training, after, victim: str, again: int | None, *, on: bool) -> int:
    """The seed of the state that is found.  on: the next attempt saves on."""
    assert was_killed(after.status) == (victim != "keeper"), after.said
    if victim == "keeper":
        ended = after.said[0]
        assert ended["kind"] == "saved" or "was killed by SIGKILL" in ended["fault"], ended
        if again is not None:
            assert after.said[1]["kind"] == "saved", after.said
            assert training.folder.joinpath(step_name(3)).exists() and incomplete_steps(training.folder) == []
            return {"saved": 2, "failed": 1}[ended["kind"]]
    seed = seed_in(training.folder)
    if victim == "keeper":
        assert seed == {"saved": 2, "failed": 1}[ended["kind"]]
    if victim == "trainer":
        # Nobody would read the arenas any more.
        assert not list(training.memory(0).iterdir())
    if on:
        goes_on(training.folder)
    return seed


STAGES = [
    (Arena, "mark_writing", "before"),
    (Arena, "mark_writing", "after"),
    (Stager, "copy", "after"),
    (Arena, "mark_ready", "before"),
    (Arena, "mark_ready", "after"),
    (KeeperProcess, "give", "before"),
    (KeeperProcess, "give", "after"),
    (KeeperProcess, "poll", "before"),
]
MEMORY = {"tier": "memory"}


@pytest.mark.parametrize("tiers", [(), (MEMORY,)], ids=["disk", "memory and disk"])
def test_trainers_killed_at_any_stage_of_a_snapshot_leave_the_step_before(root, case, tiers, every):
    for i, (kind, method, when) in enumerate(STAGES):
        # One rank at each stage, the other one in the other kind of run; or both.
        for nth in (1, 2) if every else ((i + len(tiers)) % 2 + 1,):
            training = fresh_run(root, "snapshot", *tiers, on_disk=not tiers)
            if tiers:
                training.saved(1, tiers=["memory"])
            after = training.disturbed(AtPoint(kind, method, when, nth))
            case("kills of trainers in a snapshot", after.board.fired and was_killed(after.status))
            step, found = training.restored()
            if method == "give" and when == "before":
                assert step == 1  # one rank's keeper was never told
            if tiers and step == 1:
                assert any(row.tier == "memory" and "taken from" in row.what for row in found.table)
            goes_on(training.folder)


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_kill_at_effects_of_a_save_into_memory_and_disk(root, case, rank, every):
    """Whatever is committed, in memory or on the disk, is found; the arena of the step before is never touched."""
    counts = effects_of(saved_in_memory(root))
    steps = []
    points = range(rank, counts[rank], 2)
    late = 3 * counts[rank] // 4  # around the commit every one of them
    for n in sampled(points, every, kind=lambda n: max(n, late), shift=rank):
        victim = ("keeper", "both")[n // 2 % 2]
        training = saved_in_memory(root)
        after = training.disturbed(Fault(victim, rank, n))
        if n >= counts[rank] - 3 and not after.board.fired:
            continue  # who removes what is old is not the same each time
        case("kills with a memory tier", after.board.fired)
        assert was_killed(after.status) == (victim == "both")
        step, found = training.restored()
        steps.append(step)
        assert found.skipped == ()
        assert any(row.tier == "memory" and "taken from" in row.what for row in found.table), found.table
    # Beside the committer a rank reports last of all, unless it is the one that removes what is old.
    assert set(steps) == {1, 2} or (rank == 1 and set(steps) == {1})


@pytest.mark.parametrize("victim", ["keeper", "both"])
def test_the_death_of_a_keeper_ends_a_save_into_memory_alone_long_before_its_deadline(root, case, victim):
    training = fresh_run(root, "alone", MEMORY, on_disk=False, deadline_s=1000.0)
    training.saved(1, tiers=["memory"])
    after = training.disturbed(Fault(victim, 1, 3), tiers=["memory"], again=3 if victim == "keeper" else None)
    case("kills with a memory tier", after.board.fired)
    if victim == "keeper":
        failed, saved = after.said
        assert failed["kind"] == "failed" and "was killed by SIGKILL" in failed["fault"], failed
        assert saved["kind"] == "saved" and saved["tiers"] == {"memory": True, "disk": True}
    assert training.restored()[0] == (3 if victim == "keeper" else 1)


def saved_in_memory(root: Path) -> Training:
    training = fresh_run(root, "tiers", MEMORY, on_disk=False)
    training.saved(1, tiers=["memory"])
    return training


NODE_TIERS = {
    "peer": (MEMORY, {"tier": "peer", "copies": 2}),
    "parity": (MEMORY, {"tier": "parity", "data": 2, "parity": 2}),
}
SOME, ALL = (0.1, 0.5, 0.8), tuple(i / 64 for i in range(64))


@pytest.mark.parametrize("kind", NODE_TIERS)
@pytest.mark.parametrize(
    "where",
    [SOME, pytest.param(ALL, marks=LONG)],
    ids=["some", "all"],
)
def test_a_node_lost_in_the_middle_of_a_save_leaves_one_of_both_steps_to_the_others(root, case, kind, where):
    """Four nodes; one dies at an effect of its keeper, with all that is on it; its trainers die as well."""
    shape = {"world": 4, "per_node": 1, "on_disk": False}
    counts = effects_of(fresh_run(root, kind, *NODE_TIERS[kind], **shape))
    for i, n in enumerate(sorted({int(part * min(counts)) for part in where})):
        victim = i % 4
        training = fresh_run(root, kind, *NODE_TIERS[kind], **shape)
        training.saved(1, tiers=["memory", kind])
        after = training.disturbed(Fault("both", victim, n))
        case("nodes lost in a save", after.board.fired and was_killed(after.status))
        shutil.rmtree(training.memory(victim))
        step, found = training.restored(lost=[victim])
        assert found.skipped == () and step in (1, 2)
        assert any(row.tier in ("memory", "peer") and "taken from" in row.what for row in found.table)


def test_memory_alone_does_not_outlive_its_node_and_the_disk_is_taken(root, case):
    training = fresh_run(root, "no-copy", MEMORY, world=4, per_node=1, on_disk=False)
    training.saved(1, tiers=["disk"])
    training.saved(2, attempt=2, tiers=["memory"])
    shutil.rmtree(training.memory(1))
    step, found = training.restored(attempt=3, lost=[1])
    case("lost nodes without a copy")
    assert step == 1
    assert any(row.step == 2 and "the images of ranks 1 are nowhere" in row.why for row in found.table)


# ---- system calls


@pytest.fixture(scope="module")
def shim(root):
    library = compiled(root)
    if library is None:
        pytest.skip("there is no C compiler for fault_shim.c")
    return Shim(library, root)


@pytest.fixture(scope="module")
def keepers(shim):
    process = ShimmedKeepers(shim)
    yield process
    process.close()


@pytest.fixture
def calls(shim, keepers, prepared, copy):
    """Does a save of which the calls are counted: (folder, wait status, fault of rank 0 or None)."""

    def save(action: int, at: int = -1, arg: int = 0):
        folder = copy()
        shim.arm(folder, action, at, arg)
        try:
            status, ends = keepers.keep(prepared.case(folder))
        finally:
            shim.disarm()
        fault = ends[-1]["fault"] if ends else None
        return folder, status, None if fault is None else fault_from(fault)

    return save


@pytest.fixture
def counted(calls, shim):
    """A save in peace, of which the calls are counted."""
    _, status, fault = calls(COUNT)
    assert status == 0 and fault is None, fault
    assert shim.effects > 40 and shim.fsyncs > 6 and shim.reads > 6 and shim.bytes > 600_000
    return shim.effects, shim.fsyncs, shim.reads, shim.bytes


def test_a_kill_at_any_system_call_leaves_the_newest_committed_step(
    before, calls, shim, counted, case, every
):
    effects = counted[0]
    seeds = []
    for action in (KILL, TORN):
        for i, n in enumerate(sampled(range(effects), every, shift=action + old_seed(before))):
            folder, status, _ = calls(action, n)
            case("kills at system calls", shim.fired == 1 and was_killed(status))
            seeds.append(seed_in(folder))
            if i % 10 == 0:
                goes_on(folder)
    assert set(seeds) == {old_seed(before), 2}


def test_writes_that_the_system_cuts_short_are_continued(before, calls, shim, counted, case, every):
    for n in (*sampled(range(counted[0]), every, shift=old_seed(before)), -1):
        folder, status, fault = calls(SHORT, n)
        assert status == 0 and fault is None
        if shim.fired:
            case("short writes")
        assert seed_in(folder) == 2
    assert shim.fired > 10  # the last one: every write


def test_a_device_that_is_full_at_any_byte_keeps_the_old_step(before, calls, shim, counted, case):
    size = counted[3]
    for budget in sorted({0, 1, 4095, 4096, 4097, size - 2000, *(size * i // 20 for i in range(20))}):
        folder, status, fault = calls(FULL, budget, errno.ENOSPC)
        case("full devices", shim.fired)
        assert status == 0
        check_a_failed_save(folder, before, fault, "no space left", committed_at=None)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_of_any_system_call_is_named_and_keeps_a_committed_step(
    before, calls, shim, counted, case, code, every
):
    points = range(0 if code == errno.EIO else code % 3, counted[0], 1 if code == errno.EIO else 3)
    for i, n in enumerate(sampled(points, every, shift=old_seed(before))):
        folder, status, fault = calls(FAIL, n, code)
        case(f"calls that fail with {errno.errorcode[code]}", shim.fired == 1)
        assert status == 0
        check_a_failed_save(folder, before, fault, None, committed_at=2)
        if i % 10 == 0:
            goes_on(folder)


def check_a_failed_save(folder: Path, before: Path, fault, words, *, committed_at):
    """Either the save failed and says why, and the old step is there, or it is committed in spite of it."""
    seed = seed_in(folder)
    if fault is None:
        assert seed == 2 == committed_at
        return
    assert seed in (old_seed(before), committed_at)
    said = f"{fault.what} {fault.why}"
    if words is not None:
        assert words in said, said
    assert isinstance(fault, StorageError) or "lacks 1 of 2 ranks" in said, said
    assert str(folder) in f"{fault.where} {said}"


def test_an_fsync_or_a_read_that_fails_costs_the_step_or_nothing(before, calls, shim, counted, case, every):
    _, fsyncs, reads, _ = counted
    for n in sampled(range(fsyncs), every, shift=old_seed(before)):
        folder, status, fault = calls(FAIL_FSYNC, n, errno.EIO)
        case("fsyncs that fail", shim.fired == 1 and status == 0)
        check_a_failed_save(folder, before, fault, None, committed_at=2)
    for n in sampled(range(reads), every, shift=old_seed(before)):
        folder, status, fault = calls(FAIL_READ, n, errno.EIO)
        case("reads that fail", shim.fired == 1 and status == 0)
        check_a_failed_save(folder, before, fault, None, committed_at=2)


def test_a_slow_device_costs_time_alone(calls, shim, case):
    folder, status, fault = calls(SLOW, -1, 2000)
    case("slow devices", shim.fired > 40)
    assert status == 0 and fault is None and seed_in(folder) == 2


@pytest.fixture
def one(root, shim, monkeypatch):
    """A run on one rank whose keeper is the real program, started under the shim."""
    training = fresh_run(root, "one", world=1, per_node=1)
    (m,) = training.managers()
    with monkeypatch.context() as patch:
        for name in ("LD_PRELOAD", "FAULT_STATE"):
            patch.setenv(name, shim.environment[name])
        training.prepare([m], 2)
        yield training, m
    shim.disarm()
    m.close(clean=True)


def test_a_real_keeper_that_is_killed_in_a_system_call_is_named_and_the_next_one_saves(one, shim, case):
    training, m = one
    shim.arm(training.folder, KILL, 30)
    ended = training.save([m], 2)
    case("kills at system calls", shim.fired == 1)
    assert ended.kind == "failed" and "was killed by SIGKILL" in ended.fault.what
    shim.disarm()
    assert seed_in(training.folder) == 1
    assert training.save([m], 3).kind == "saved"
    assert seed_in(training.folder) == 3 and incomplete_steps(training.folder) == []


def test_training_goes_on_beside_a_slow_device_and_saves_that_come_meanwhile_wait(one, shim, case):
    training, m = one
    shim.arm(training.folder, SLOW, -1, 60_000)
    assert training.begin(m, 2)
    assert not training.begin(m, 3)
    assert [(o.kind, o.step) for o in m.poll()] == [("queued", 3)] and m.ledger.counts.queued == 1
    assert m.wait().kind == "saved"
    case("slow devices", shim.fired > 30)
    shim.disarm()
    assert m.save_due() and training.begin(m, 3) and m.wait().kind == "saved"
    assert seed_in(training.folder) == 3
