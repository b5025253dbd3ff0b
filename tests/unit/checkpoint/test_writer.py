"""An image in the files of a step: equal bytes whatever the way, room reserved first, faults named."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from sirara.checkpoint import writer
from sirara.checkpoint.image import BLOCK, image_plan
from sirara.checkpoint.ranges import NamedRange, Sources
from sirara.checkpoint.report import Report, report_name
from sirara.checkpoint.storage import Disk
from sirara.checkpoint.writer import DIRECT_BYTES, hash_image, stretches_of, write_image, write_part
from sirara.errors import StorageError
from sirara.pure.layout import range_boxes, whole
from sirara.pure.saveplan import PlannedTensor, plan_save
from tests.checkpoints import even, plan_of, ranges_of, small_state

SAVE = {"uuid": "u" * 36, "attempt": 3, "step": 7}


class CountingDisk(Disk):
    """Notes every effect and every call that reaches the kernel."""

    def __init__(self):
        super().__init__()
        self.effects = []
        self.calls = []

    def touch(self, effect, path):
        self.effects.append((effect, path.name))

    def pwrite(self, fd, buffers, position):
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.calls.append((direct, position, sum(map(len, buffers))))
        return super().pwrite(fd, buffers, position)


def large_plan(world=2, mib=3):
    """A weight and two moments per rank, of odd sizes, so that stretches begin and end inside of blocks."""
    n = (mib << 18) + 1001
    boxes = {r: range_boxes((n,), r * n // world, (r + 1) * n // world) for r in range(world)}
    names = ("a", "a/m", "b", "b/m", "scale/value")
    shapes = {name: () if name.startswith("scale") else (n,) for name in names}
    return plan_save(
        [
            PlannedTensor(
                name=name,
                dtype="F32",
                shape=shape,
                boxes=boxes if shape else {r: (whole(()),) for r in range(world)},
            )
            for name, shape in shapes.items()
        ],
        node_of=lambda r: 0,
    )


def aligned(image, seed):
    memory = mmap.mmap(-1, max(image.size, BLOCK))
    memory[: image.size] = np.random.default_rng(seed).bytes(image.size)
    return memoryview(memory)[: image.size]


def written(tmp_path, plan, rank, data, disk=None):
    image = image_plan(plan, rank)
    write_image(
        disk or Disk(),
        tmp_path,
        plan=plan,
        rank=rank,
        data=data,
        image=image,
        uuid=SAVE["uuid"],
        step=SAVE["step"],
    )
    return image


def pieces_on_disk(tmp_path, plan, rank):
    return [
        np.fromfile(tmp_path / plan.files[p.file].name, "u1", p.length, offset=p.position).tobytes()
        for p in plan.pieces_of[rank]
    ]


@pytest.mark.parametrize("shift", [0, 1], ids=["past the page cache", "through it"])
def test_every_piece_of_an_image_lands_at_its_place(tmp_path, shift):
    plan = large_plan()
    for rank in (1, 0):
        image = image_plan(plan, rank)
        data = aligned(image, rank)
        if shift:
            data = memoryview(bytearray(shift) + bytes(data))[shift:]
        disk = CountingDisk()
        written(tmp_path, plan, rank, data, disk)
        assert any(direct for direct, _, _ in disk.calls) == (not shift)
        expected = [bytes(data[a : a + n]) for a, n in zip(image.position, image.length, strict=True)]
        assert pieces_on_disk(tmp_path, plan, rank) == expected
    for file in plan.files:
        raw = (tmp_path / file.name).read_bytes()
        assert len(raw) == file.size and raw.startswith(file.header(uuid=SAVE["uuid"], step=SAVE["step"]))


def test_a_stretch_is_few_calls_and_whole_blocks_go_directly(tmp_path):
    plan = large_plan()
    disk = CountingDisk()
    image = written(tmp_path, plan, 0, aligned(image_plan(plan, 0), 0), disk)
    assert len(stretches_of(plan, image)) <= 4 < len(image.index) + 4
    for direct, position, length in disk.calls:
        if direct:
            assert position % BLOCK == length % BLOCK == 0 and length >= DIRECT_BYTES
    assert sum(n for direct, _, n in disk.calls if direct) > 0.9 * image.length.sum()


def test_room_is_reserved_before_anything_is_written(tmp_path):
    disk = CountingDisk()
    written(tmp_path, large_plan(), 0, aligned(image_plan(large_plan(), 0), 0), disk)
    names = [effect for effect, _ in disk.effects]
    assert names.index("write") > max(i for i, name in enumerate(names) if name == "allocate")


def test_a_full_disk_is_told_before_a_byte_is_written(tmp_path):
    class Full(CountingDisk):
        def fallocate(self, fd, position, length):
            raise OSError(errno.ENOSPC, "no space")

    disk = Full()
    with pytest.raises(StorageError, match="no space left") as fault:
        written(tmp_path, large_plan(), 0, aligned(image_plan(large_plan(), 0), 0), disk)
    assert fault.value.code == "SR601" and "bytes asked" in fault.value.why
    assert disk.calls == []


def test_a_file_system_that_cannot_reserve_or_write_directly_gets_the_same_bytes(tmp_path):
    class Plain(CountingDisk):
        refused = 0

        def fallocate(self, fd, position, length):
            raise OSError(errno.EOPNOTSUPP, "not supported")

        def pwrite(self, fd, buffers, position):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                self.refused += 1
                raise OSError(errno.EINVAL, "invalid")
            return super().pwrite(fd, buffers, position)

    plan, disk = large_plan(), Plain()
    data = aligned(image_plan(plan, 0), 0)
    image = written(tmp_path, plan, 0, data, disk)
    assert disk.refused > 0
    expected = [bytes(data[a : a + n]) for a, n in zip(image.position, image.length, strict=True)]
    assert pieces_on_disk(tmp_path, plan, 0) == expected


def test_an_image_and_the_ranges_themselves_give_the_same_files_and_hashes(tmp_path):
    state = small_state()
    boxes = even(state, 3)
    plan = plan_save(plan_of(state, boxes), node_of=lambda r: r // 2)
    one, two = tmp_path / "ranges", tmp_path / "image"
    for folder in (one, two):
        folder.mkdir()
    for rank in range(3):
        sources = Sources(ranges_of(state, boxes, rank))
        write_part(Disk(), one, plan=plan, rank=rank, sources=sources, **SAVE)
        image = image_plan(plan, rank)
        data = memoryview(bytearray(image.size))
        for i, at, n in zip(image.index, image.position, image.length, strict=True):
            piece = plan.pieces[i]
            data[at : at + n] = sources.bytes_of(plan.tensors[piece.tensor].name, piece.box)
        written(two, plan, rank, data)
        assert Report.from_bytes((one / report_name(rank)).read_bytes()).hashes == hash_image(image, data)
    for name in sorted(f.name for f in plan.files):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def large_ranges(plan, rank):
    """This rank's ranges of `large_plan`."""
    out = []
    for t in plan.tensors:
        boxes = t.boxes[rank]
        g = torch.Generator().manual_seed(len(out))
        data = torch.randn(sum(b.volume for b in boxes), generator=g)
        out.append(NamedRange(tensor=t.name, shape=t.shape, boxes=boxes, data=data))
    return out


@pytest.mark.parametrize("batch", [1 << 19, 1 << 24], ids=["many buffers", "one buffer"])
def test_ranges_go_past_the_page_cache_through_aligned_buffers(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(writer, "BATCH_BYTES", batch)
    plan = large_plan()
    for rank in (1, 0):
        disk = CountingDisk()
        sources = Sources(large_ranges(plan, rank))
        write_part(disk, tmp_path, plan=plan, rank=rank, sources=sources, **SAVE)
        assert sum(n for direct, _, n in disk.calls if direct) > 0.9 * plan.bytes_of(rank)
        assert all(position % BLOCK == 0 for direct, position, _ in disk.calls if direct)
        pieces = plan.pieces_of[rank]
        expected = [bytes(sources.bytes_of(plan.tensors[p.tensor].name, p.box)) for p in pieces]
        assert pieces_on_disk(tmp_path, plan, rank) == expected


def test_a_fault_in_the_thread_that_writes_is_raised_with_the_files_closed_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_BYTES", 1 << 19)

    class Bad(CountingDisk):
        def pwrite(self, fd, buffers, position):
            if len(self.calls) == 2:
                raise OSError(errno.EIO, "bad sector")
            return super().pwrite(fd, buffers, position)

    plan, disk = large_plan(), Bad()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="bad sector"):
        write_part(disk, tmp_path, plan=plan, rank=0, sources=Sources(large_ranges(plan, 0)), **SAVE)
    assert len(disk.calls) == 2 and len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / report_name(0)).exists()


def test_a_rank_with_nothing_to_save_touches_nothing(tmp_path):
    disk = CountingDisk()
    written(tmp_path, large_plan(world=1), 5, memoryview(b""), disk)
    assert disk.effects == [] and list(tmp_path.iterdir()) == []


def test_the_writer_does_without_torch():
    code = "import sys, sirara.checkpoint.writer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
