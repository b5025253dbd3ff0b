"""Generations: what a node keeps, what counts, what goes."""

import dataclasses
import errno
import os
import re
import shutil

import pytest
import xxhash

from sirara.checkpoint.arena import Arena
from sirara.checkpoint.generation import CHUNK_BYTES, GenerationStore, Held
from sirara.checkpoint.parity_block import Member, ParityBlock
from sirara.checkpoint.storage import Disk
from sirara.errors import CheckpointError, StorageError
from sirara.pure.manifest import MANIFEST
from tests.checkpoints import flip_bit
from tests.generations import RUN, arena_of, image_of, manifest_of, read_image, save_plan

PLAN = save_plan([9000, 5000])


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def store(request, tmp_path):
    return GenerationStore(tmp_path, RUN, durable=request.param)


def keep(store, step, *, ranks=(0, 1), attempt=1, commit=True):
    images = [image_of(PLAN, r, step, world=2, attempt=attempt) for r in (0, 1)]
    for r in ranks:
        store.put_image(images[r][0], memoryview(images[r][1]))
    if commit:
        assert store.put_manifest(step, images[0][0].uuid, manifest_of(PLAN, [i for i, _ in images]))
    return images


def steps(store, kind="image"):
    return sorted({h.step for h in store.inventory() if h.kind == kind})


def test_an_image_is_read_back_bit_for_bit_anywhere(store):
    (image, data), _ = keep(store, 3)
    assert read_image(store, image) == bytes(data)
    a, b = bytearray(100), bytearray(77)
    store.read(3, image.uuid, 0, [memoryview(a), memoryview(b)], 1234)
    assert a + b == data[1234:1411]
    assert store.image(3, image.uuid, 0).to_bytes() == image.to_bytes()
    assert store.bad_pieces(3, image.uuid, 0) == []


def test_the_inventory_tells_what_is_held_and_survives_json(store):
    images = keep(store, 3)
    keep(store, 4, ranks=(1,), commit=False)
    held = store.inventory()
    assert [(h.step, h.rank, h.committed) for h in held] == [(4, 1, False), (3, 0, True), (3, 1, True)]
    assert {h.tier for h in held} == {store.tier} and held[1].size == images[0][0].size
    assert [Held.from_json(h.to_json()) for h in held] == held
    assert store.faults() == []
    assert store.manifest(3, images[0][0].uuid) is not None and store.manifest(4, held[0].uuid) is None


def test_the_newest_two_committed_ones_stay(store):
    for step in range(1, 6):
        keep(store, step)
    assert steps(store) == [4, 5]
    assert len(list(store.folder.iterdir())) == 2


def test_a_save_that_begins_makes_room_so_that_no_more_than_two_are_held(store):
    for step in (1, 2):
        keep(store, step)
    keep(store, 3, commit=False)
    assert steps(store) == [2, 3]


def test_the_last_committed_one_stays_whatever_fails_after_it(store):
    keep(store, 1)
    for step in range(2, 8):
        keep(store, step, commit=False)
    assert steps(store) == [1, 7]
    keep(store, 8)
    assert steps(store) == [1, 8]


def test_the_newest_attempt_counts_before_the_higher_step(store):
    for step in (5, 6):
        keep(store, step, attempt=1)
    keep(store, 3, attempt=2)
    assert steps(store) == [3, 6]
    keep(store, 4, attempt=2)
    assert steps(store) == [3, 4]


def test_a_node_that_holds_nothing_of_a_save_takes_no_manifest(store):
    images = [image_of(PLAN, r, 3, world=2)[0] for r in (0, 1)]
    assert not store.put_manifest(3, images[0].uuid, manifest_of(PLAN, images))
    assert not store.folder.exists()


def test_a_manifest_of_another_save_is_refused(store):
    images = keep(store, 3, commit=False)
    other = [image_of(PLAN, r, 3, world=2, attempt=2)[0] for r in (0, 1)]
    with pytest.raises(CheckpointError, match="not of step 3"):
        store.put_manifest(3, images[0][0].uuid, manifest_of(PLAN, other))
    with pytest.raises(CheckpointError, match="torn"):
        store.put_manifest(3, images[0][0].uuid, b"{}")
    assert not any(h.committed for h in store.inventory())


def test_an_arena_counts_only_while_it_holds_that_save(tmp_path):
    store = GenerationStore(tmp_path, RUN)
    image, data = image_of(PLAN, 0, 3, world=2)
    path = arena_of(store.folder, "arena-0-0", image, data)
    store.note_arena(image, path)
    assert read_image(store, image) == bytes(data) and steps(store, "arena") == [3]
    arena = Arena.open(path)
    arena.mark_writing(4, image_of(PLAN, 0, 4, world=2)[0].uuid)
    assert store.inventory() == [] and store.faults() == []
    assert "is being filled anew by step 4" in store.replaced()[0]
    with pytest.raises(CheckpointError, match="WRITING, step 4"):
        read_image(store, image)
    arena.mark_ready()
    with pytest.raises(CheckpointError, match="READY, step 4"):
        read_image(store, image)
    arena.close()
    path.unlink()
    with pytest.raises(CheckpointError, match="gone"):
        read_image(store, image)


def test_a_copy_replaces_a_pointer(tmp_path):
    store = GenerationStore(tmp_path, RUN)
    image, data = image_of(PLAN, 0, 3, world=2)
    store.note_arena(image, tmp_path / "nowhere")
    store.put_image(image, memoryview(data))
    assert read_image(store, image) == bytes(data) and steps(store) == [3]


def damage(store, image, what):
    folder = store.folder / f"gen-{image.step:09d}-{image.uuid}"
    file, description = folder / "image-0", folder / "rank-0.json"
    if what == "truncated":
        os.truncate(file, image.size - 1)
    elif what == "no file":
        file.unlink()
    elif what == "torn description":
        os.truncate(description, 50)
    elif what == "flipped description":
        flip_bit(description, 40)
    elif what == "never completed":
        description.unlink()
    elif what == "stale uuid":
        other, data = image_of(PLAN, 0, 3, world=2, attempt=2)
        store.put_image(other, memoryview(data))
        moved = store.folder / f"gen-{other.step:09d}-{other.uuid}"
        shutil.copy(moved / "rank-0.json", description)
        shutil.rmtree(moved)
    elif what == "foreign run":
        description.write_bytes(dataclasses.replace(image, run="run-2").to_bytes())
    elif what == "swapped ranks":
        shutil.copy(folder / "rank-1.json", description)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("truncated", "12287 bytes, 12288 were written"),
        ("no file", "image-0 is missing|arena-0 is missing"),
        ("torn description", "torn"),
        ("flipped description", "torn or damaged"),
        ("never completed", "never completed"),
        ("stale uuid", "belongs to another save"),
        ("foreign run", "belongs to run 'run-2'"),
        ("swapped ranks", "describes the image of rank 1"),
    ],
)
def test_what_cannot_be_used_is_left_out_and_named(store, what, says):
    (image, _), _ = keep(store, 3)
    damage(store, image, what)
    assert [h.rank for h in store.inventory()] == [1]
    assert len(store.faults()) == 1
    assert re.search(says, store.faults()[0])
    with pytest.raises(CheckpointError):
        read_image(store, image)


def test_a_flipped_bit_is_found_by_its_piece(store):
    (image, _), _ = keep(store, 3)
    flip_bit(store.folder / f"gen-000000003-{image.uuid}" / "image-0", int(image.position[1]) + 7)
    assert store.bad_pieces(3, image.uuid, 0) == [1]


def test_a_torn_manifest_is_no_commit(store):
    (image, _), _ = keep(store, 3)
    os.truncate(store.folder / f"gen-000000003-{image.uuid}" / MANIFEST, 200)
    assert [h.committed for h in store.inventory()] == [False, False]
    assert "manifest.json is torn" in store.faults()[0]
    assert store.manifest(3, image.uuid) is None


def test_an_image_of_another_run_is_not_taken(store):
    image, data = image_of(PLAN, 0, 3, world=2, run="run-2")
    with pytest.raises(CheckpointError, match="belongs to run 'run-2'"):
        store.put_image(image, memoryview(data))


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    store = GenerationStore(tmp_path, RUN)
    (kept, data), _ = keep(store, 1)
    fired = []

    def full(fd, offset, length):
        fired.append(length)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    image, more = image_of(PLAN, 0, 2, world=2)
    with pytest.raises(StorageError, match="no space left"):
        store.put_image(image, memoryview(more))
    assert fired == [image.size]
    assert store.faults() == [] and read_image(store, kept) == bytes(data)


def test_a_disk_is_fsynced_and_memory_is_not_asked_to(tmp_path):
    class Counting(Disk):
        def __init__(self):
            super().__init__()
            self.effects = []

        def touch(self, effect, path):
            self.effects.append((effect, path.name))

    disk = Counting()
    keep(GenerationStore(tmp_path, RUN, durable=True, disk=disk), 3, ranks=(0,))
    order = [e for e in disk.effects if e[0] in ("fsync", "rename")]
    assert order.index(("fsync", "image-0.part")) < order.index(("rename", "image-0.part"))
    assert order.index(("rename", "image-0.part")) < order.index(("rename", "rank-0.json.part"))
    assert order.index(("rename", "rank-0.json.part")) < order.index(("rename", MANIFEST + ".part"))


def parity_block(size=CHUNK_BYTES + 1000):
    image = image_of(PLAN, 0, 3, world=2)[0]
    data = os.urandom(size)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
    block = ParityBlock(
        uuid=image.uuid,
        run=RUN,
        attempt=1,
        step=3,
        group="0.1",
        stripe=4,
        row=0,
        k=1,
        m=1,
        size=size,
        members=(Member(rank=0, block=0, image=image),),
        hashes=b"".join(map(xxhash.xxh3_128_digest, chunks)),
    )
    return block, data, chunks


def test_parity_is_checked_chunk_by_chunk(store):
    block, data, chunks = parity_block()
    slot = store.new_parity(3, block.uuid, block.name, 1000)
    slot.data[:] = data[:1000]
    slot.grow(block.size)
    assert bytes(slot.data[1000:]) == bytes(block.size - 1000)
    slot.data[:] = data
    store.keep_parity(block, slot)
    (held,) = store.inventory()
    assert (held.kind, held.block, held.covers) == ("parity", "0.1-4-0", (0,))
    assert store.parity(3, block.uuid, block.name).to_bytes() == block.to_bytes()
    out = [bytearray(len(c)) for c in chunks]
    for i in range(2):
        store.read_parity(block, i, memoryview(out[i]))
    assert out == chunks
    flip_bit(store.folder / f"gen-000000003-{block.uuid}" / "parity-0.1-4-0", CHUNK_BYTES + 5)
    store.read_parity(block, 0, memoryview(out[0]))
    with pytest.raises(CheckpointError, match=r"block 0.1-4-0 .* is damaged"):
        store.read_parity(block, 1, memoryview(out[1]))


def test_a_slot_that_is_discarded_leaves_nothing(store):
    block, *_ = parity_block()
    slot = store.new_parity(3, block.uuid, block.name, 1000)
    slot.discard()
    slot.discard()
    assert list(store.folder.rglob("parity*")) == []
