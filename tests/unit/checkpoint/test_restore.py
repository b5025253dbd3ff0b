"""The newest step that is complete over all tiers is read; what is bad or absent comes from the next place."""

import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sirara.checkpoint.arena import Arena
from sirara.checkpoint.copies import FolderCopy
from sirara.checkpoint.object import ObjectTier
from sirara.checkpoint.reader import Snapshot
from sirara.checkpoint.restore import Restored, Restorer
from sirara.checkpoint.serve import LocalNode
from sirara.checkpoint.steps import save_uuid, step_name
from sirara.errors import CheckpointError, StorageError
from tests.checkpoints import State, differing, even, flip_bit, in_ranks, load, save, small_state
from tests.tiers import RUN, images_of, keep, store_of, views_of

WORLD = 3


class Run:
    """Steps saved by three ranks, one per node: on disk, or only in the nodes' memory."""

    def __init__(self, root: Path) -> None:
        self.root, self.checkpoints, self.control = root, root / "checkpoints", root / "control"
        self.states: dict[int, State] = {}
        self.elsewhere = root / "elsewhere"
        self.distrusted: list[int] = []

    def save(self, step: int, holders: dict[int, tuple[int, ...]], *, disk: bool, **options: Any) -> Path:
        state = self.states[step] = small_state(step)
        boxes = even(state, WORLD)
        path = save(self.checkpoints if disk else self.elsewhere, step, state, boxes)
        keep(self.root, path, state, boxes, holders, **options)
        return path

    def restore(self, **changes: Any) -> tuple[State, Restored, Snapshot]:
        loaded: list[State] = []

        def read(snapshot: Snapshot) -> None:
            loaded.append(load(snapshot, small_state()))

        settings: dict[str, Any] = {"node": 0, "views": views_of(self.root, WORLD)} | changes
        restorer = Restorer(
            checkpoints=self.checkpoints,
            control=self.control,
            run=RUN,
            attempt=2,
            rank=0,
            agree=lambda fault: fault,
            texts=lambda text: [text],
            **settings,
        )
        found = restorer.restore(read, distrust=lambda step, fault: self.distrusted.append(step))
        assert found is not None
        return loaded[-1], found[1], found[0]


OWN = {0: (0,), 1: (1,), 2: (2,)}
PAIRS = {0: (0, 1), 1: (1, 0), 2: (2,)}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "checkpoints").mkdir()
    return Run(tmp_path)


def test_a_step_that_lies_in_memory_alone_is_restored(run):
    run.save(4, {}, disk=True)
    run.save(5, OWN, disk=False)
    state, restored, snapshot = run.restore()
    assert restored.step == 5 and restored.skipped == ()
    assert differing(run.states[5], state) == []
    assert set(snapshot.taken) == {"memory", "peer on node 1", "peer on node 2"}
    assert not list(run.control.glob("*.manifest"))


def test_a_lost_node_is_replaced_by_its_peer_and_without_one_by_an_older_step(run):
    run.save(4, {}, disk=True)
    run.save(5, PAIRS, disk=False)
    shutil.rmtree(run.root / "node-1")
    state, restored, snapshot = run.restore()
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert set(snapshot.taken) == {"memory", "peer on node 2"}
    shutil.rmtree(run.root / "node-2")
    state, restored, snapshot = run.restore()
    assert restored.step == 4 and differing(run.states[4], state) == []
    assert [r.why for r in restored.table if (r.step, r.tier) == (5, "memory")] == [
        "the images of ranks 2 are nowhere"
    ]


def test_what_was_never_committed_does_not_count(run):
    run.save(4, {}, disk=True)
    run.save(5, OWN, disk=False, commit=False)
    _, restored, _ = run.restore()
    assert restored.step == 4
    assert any(r.why == "it was never committed" for r in restored.table if r.step == 5)


def test_a_bad_piece_in_memory_is_taken_from_the_peer_then_from_the_disk(run):
    run.save(5, PAIRS, disk=True)
    image = store_of(run.root, 0)
    held = next(h for h in image.inventory() if h.rank == 0)
    description = image.image(5, held.uuid, 0)
    flip_bit(run.root / "node-0" / RUN / f"gen-{5:09d}-{held.uuid}" / "image-0", int(description.position[2]))
    state, restored, snapshot = run.restore()
    assert differing(run.states[5], state) == []
    assert [n.taken_from for n in snapshot.notes] == ["peer on node 1"]
    assert any("1 pieces were bad in one copy" in r.what for r in restored.table)
    flip_bit(run.root / "node-1" / RUN / f"gen-{5:09d}-{held.uuid}" / "image-0", int(description.position[2]))
    state, restored, snapshot = run.restore()
    assert differing(run.states[5], state) == []
    assert [n.taken_from for n in snapshot.notes] == ["disk", "disk"]
    assert restored.step == 5 and run.distrusted == []


def test_an_arena_that_serves_a_later_save_is_no_fault_and_the_table_says_so(run):
    run.save(4, OWN, disk=False)
    run.save(5, OWN, disk=True)
    store = store_of(run.root, 0)
    uuid = next(h.uuid for h in store.inventory() if h.step == 4)
    image = store.image(4, uuid, 0)
    (store.folder / f"gen-{4:09d}-{uuid}" / "image-0").unlink()
    arena = Arena.create(store.folder, "arena-0-0", image.size, run=RUN)
    arena.mark_writing(6, save_uuid(RUN, 1, 6, 9))
    store.note_arena(image, arena.path)
    arena.close()
    _, restored, _ = run.restore()
    assert restored.step == 5
    told = [str(row) for row in restored.table if "node 0" in row.what]
    assert len(told) == 1 and "1 older images on node 0 made room for later saves" in told[0]
    assert not any("unusable" in row.what for row in restored.table)
    arena = Arena.create(store.folder, "arena-0-0", image.size + 4096, run=RUN)
    arena.mark_writing(3, save_uuid(RUN, 1, 3, 9))  # an older one than the description says: this is a fault
    arena.close()
    told = [row.what for row in run.restore()[1].table if row.step is None]
    assert told == ["unusable on node 0"]


def put_in_store(url: str, path: Path) -> ObjectTier:
    tier = ObjectTier(url, {}, RUN, attempt=1)
    raw = (path / "manifest.json").read_bytes()
    tier.upload_part(path, Snapshot(path).manifest, 0, 1)
    tier.commit(raw, world=1, deadline_s=20)
    return tier


def test_a_step_that_only_the_object_store_has_is_read_from_there(run):
    run.save(4, {}, disk=True)
    tier = put_in_store(f"file://{run.root}/store", run.save(5, {}, disk=False))
    state, restored, snapshot = run.restore(objects=tier)
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert set(snapshot.taken) == {"object"}


def test_pieces_that_are_bad_on_the_disk_come_from_the_store_and_the_folder_is_not_trusted(run):
    path = run.save(5, {}, disk=True)
    tier = put_in_store(f"file://{run.root}/store", path)
    m = Snapshot(path).manifest
    flip_bit(path / m.files[int(m.pieces.file[3])].name, int(m.pieces.position[3]))
    state, restored, snapshot = run.restore(objects=tier)
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert [(n.copy, n.taken_from) for n in snapshot.notes] == [("disk", "object")]
    assert run.distrusted == [5]


def test_images_on_the_disks_of_nodes_come_after_memory_and_are_no_part_of_the_folder(run):
    path = run.save(5, {}, disk=False)
    keep(run.root, path, run.states[5], even(run.states[5], WORLD), OWN, durable=True)
    stores = {n: LocalNode([store_of(run.root, n, durable=True)], name=f"node {n}") for n in OWN}
    state, restored, snapshot = run.restore(views=stores)
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert set(snapshot.taken) == {"disk of this node", "disk on node 1", "disk on node 2"}


def test_a_damaged_manifest_on_the_disk_is_replaced_by_the_nodes_copy(run):
    path = run.save(5, OWN, disk=True)
    raw = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(raw.replace(b'"tokens":500', b'"tokens":501'))
    state, restored, snapshot = run.restore()
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert "disk" not in snapshot.taken
    assert any(r.tier == "disk" and r.what == "not usable" for r in restored.table)


def test_images_of_another_save_of_the_same_step_are_not_mixed_in(run):
    run.save(5, OWN, disk=False)
    state = run.states[5] = small_state(55)
    save(run.checkpoints, 5, state, even(state, 2), attempt=2)
    loaded, restored, snapshot = run.restore()
    assert differing(run.states[5], loaded) == [] and set(snapshot.taken) == {"disk"}
    assert len([r for r in restored.table if r.step == 5 and r.tier == "memory"]) == 1


def test_a_step_that_is_bad_everywhere_is_skipped_with_its_reason(run):
    run.save(4, {}, disk=True)
    path = run.save(5, {}, disk=True)
    flip_bit(path / "optim-0-0.safetensors", int(Snapshot(path).manifest.pieces.position[-1]))
    _, restored, _ = run.restore(views={})
    assert restored.step == 4 and run.distrusted == [5]
    assert [step for step, _ in restored.skipped] == [5]
    assert "its bytes hash to" in restored.skipped[0][1]


def test_parity_is_decoded_for_what_is_nowhere_and_for_what_is_bad(run, monkeypatch):
    path = run.save(5, OWN, disk=False)
    images = images_of(path, run.states[5], even(run.states[5], WORLD))
    uuid = images[0][0].uuid
    shutil.rmtree(run.root / "node-1")
    flip_bit(run.root / "node-2" / RUN / f"gen-{5:09d}-{uuid}" / "image-2", int(images[2][0].position[0]))
    decoded = []

    def decode(node: int, step: int, uuid: str, rank: int) -> None:
        decoded.append((node, rank))
        store_of(run.root, node).put_image(images[rank][0], memoryview(images[rank][1]))

    views = views_of(run.root, WORLD)
    plain = views[0].inventory

    def with_parity() -> Any:
        held, faults, replaced = plain()
        h = held[0].to_json() | {"kind": "parity", "rank": -1, "world": 0, "block": "0-0-0", "covers": [1, 2]}
        return [*held, type(held[0]).from_json(h)], faults, replaced

    monkeypatch.setattr(views[0], "inventory", with_parity)
    state, restored, snapshot = run.restore(views=views, decode=decode)
    assert restored.step == 5 and differing(run.states[5], state) == []
    assert decoded == [(0, 1), (0, 2)]
    assert {n.taken_from for n in snapshot.notes} == {"parity"}
    assert any(r.tier == "parity" and "ranks 1 are to be decoded" in r.what for r in restored.table)


def test_a_place_that_cannot_be_asked_is_not_an_empty_one(run, monkeypatch):
    views = views_of(run.root, 1)

    def gone() -> Any:
        raise StorageError("node 0 is gone")

    monkeypatch.setattr(views[0], "inventory", gone)
    with pytest.raises(StorageError, match="nobody knows which steps can be restored: node 0 is gone"):
        run.restore(views=views)
    run.save(4, {}, disk=True)
    _, restored, _ = run.restore(views=views)
    assert restored.step == 4
    assert any(r.what == "node 0 cannot be asked" and r.why == "node 0 is gone" for r in restored.table)


def test_nothing_anywhere_is_none_and_a_foreign_run_is_an_error(run):
    with pytest.raises(AssertionError):
        run.restore()
    run.save(4, {}, disk=True)
    shutil.move(run.checkpoints / step_name(4), run.checkpoints / step_name(9))
    with pytest.raises(CheckpointError, match="none of the 1 steps that were found"):
        run.restore()


def test_a_folder_copy_and_the_images_hold_the_same_pieces(run):
    path = run.save(5, OWN, disk=True)
    m = Snapshot(path).manifest
    _, _, snapshot = run.restore()
    folder = FolderCopy(path, m)
    for i in range(len(m.pieces)):
        raw = []
        for copy in (folder, *snapshot.copies):
            at = copy.locate(i)
            if at is not None:
                buffer = bytearray(int(m.pieces.length[i]))
                copy.read(at[0], [memoryview(buffer)], at[1])
                raw.append(bytes(buffer))
        assert len(raw) == 3 and len(set(raw)) == 1


class Talk:
    """`agree` and `texts` among threads that play ranks."""

    def __init__(self, size: int) -> None:
        self.barrier, self.said = threading.Barrier(size), [""] * size

    def texts(self, rank: int, text: str) -> Sequence[str]:
        self.said[rank] = text
        self.barrier.wait(60)
        heard = tuple(self.said)
        self.barrier.wait(60)
        return heard


class CountedNode(LocalNode):
    """Counts who asks it for which description."""

    def __init__(self, view: LocalNode, asked: "Counter[tuple[str, int]]", *, lost: bool = False) -> None:
        super().__init__(view.stores, name=view.name)
        self.asked, self.lost = asked, lost

    def image(self, step: int, uuid: str, rank: int) -> Any:
        self.asked[self.name, rank] += 1
        if self.lost:
            raise CheckpointError(f"{self.name} has lost it")
        return super().image(step, uuid, rank)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("lost", [False, True])
def test_each_description_is_asked_for_once_however_many_ranks_there_are(run, ranks, lost):
    run.save(5, {0: (0, 1), 1: (1, 0), 2: (2, 1)}, disk=False)
    asked: Counter[tuple[str, int]] = Counter()
    talk = Talk(ranks)

    def restore(rank: int) -> tuple[list[str], int]:
        views = {n: CountedNode(v, asked, lost=lost and n == 1) for n, v in views_of(run.root, WORLD).items()}
        loaded: list[State] = []
        found = Restorer(
            checkpoints=run.checkpoints,
            control=run.control,
            run=RUN,
            attempt=2,
            rank=rank,
            node=rank % WORLD,
            agree=lambda fault: next((t for t in talk.texts(rank, fault) if t), ""),
            texts=lambda text: talk.texts(rank, text),
            views=views,
        ).restore(lambda s: loaded.append(load(s, small_state())), distrust=lambda *_: None)
        assert found is not None
        return differing(run.states[5], loaded[-1]), found[1].step

    assert in_ranks(ranks, restore) == [([], 5)] * ranks
    # Images 0 and 1 lie on the node that has lost its descriptions, and elsewhere.
    assert {image for _, image in asked} == {0, 1, 2}
    assert WORLD < asked.total() <= WORLD + 2 if lost else asked.total() == WORLD
    assert not list(run.control.glob("*.images*")) and not list(run.control.glob("*.manifest"))
