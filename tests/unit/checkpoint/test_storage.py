import errno
import os
import re

import numpy as np
import pytest
import torch

from sirara.checkpoint.ranges import DTYPES, NamedRange, dtype_name, host_bytes
from sirara.checkpoint.storage import Disk, read_at, storage_error
from sirara.errors import CheckpointError, Exit, InvariantError, StorageError


def test_a_full_disk_is_said_with_path_bytes_asked_and_bytes_free(tmp_path):
    for number in (errno.ENOSPC, errno.EDQUOT):
        error = storage_error(OSError(number, "full"), tmp_path / "x", asked=123)
        assert error.code == "SR601" and error.exit_code == Exit.STORAGE
        assert str(tmp_path / "x") in error.what
        # Others write to the same disk, so the number is a number.
        why, advice = r"123 bytes asked, \d+ bytes free", error.try_[0]
        if number == errno.EDQUOT:  # bytes that are free help nobody then
            assert "the quota for " in error.what and advice.startswith("raise the quota")
            why = f"EDQUOT; {why} on the device.*"
        assert re.fullmatch(why, error.why)


def test_another_fault_is_said_with_its_cause(tmp_path):
    error = storage_error(OSError(errno.EIO, "Input/output error"), tmp_path, asked=5)
    assert error.code == "SR602" and "EIO" in error.why and "Input/output error" in error.what


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_many_buffers_are_written_and_read_whatever_the_system_takes_at_once(tmp_path, most):
    class Short(Disk):
        def pwrite(self, fd, buffers, position):
            return os.pwrite(fd, b"".join(buffers)[:most], position)

    data = np.arange(200, dtype=np.uint8)
    disk, path = Short(), tmp_path / "x"
    fd = disk.open(path, size=300)
    end = disk.write(fd, path, [data[:7].data, data[7:7].data, data[7:].data], 50)
    os.close(fd)
    assert end == 250 and path.stat().st_size == 300
    back = [np.empty(n, np.uint8) for n in (1, 150, 49)]
    fd = os.open(path, os.O_RDONLY)
    read_at(fd, path, [b.data for b in back], 50)
    assert (np.concatenate(back) == data).all()
    with pytest.raises(CheckpointError, match="x is truncated") as caught:
        read_at(fd, path, [np.empty(80, np.uint8).data], 250)
    assert caught.value.why == "it ends at byte 300, 30 more are planned"
    os.close(fd)


def test_more_buffers_than_one_call_takes_are_written(tmp_path):
    disk, path = Disk(), tmp_path / "x"
    fd = disk.open(path)
    disk.write(fd, path, [bytes([i % 251]) * 2 for i in range(3000)], 0)
    os.close(fd)
    assert path.read_bytes() == b"".join(bytes([i % 251]) * 2 for i in range(3000))


def test_a_small_file_appears_whole_under_its_name(tmp_path):
    class Stops(Disk):
        def rename(self, source, target):
            raise StorageError("stopped")

    with pytest.raises(StorageError):
        Stops().write_file(tmp_path / "x", b"abc")
    assert not (tmp_path / "x").exists()
    Disk().write_file(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_a_folder_that_may_not_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    for effect in (
        lambda d: d.make_folder(tmp_path / "file" / "a"),
        lambda d: d.open(tmp_path / "file" / "a"),
        lambda d: d.sync_folder(tmp_path / "file"),
        lambda d: d.rename(tmp_path / "none", tmp_path / "b"),
        lambda d: d.remove(tmp_path / "file" / "a"),
        lambda d: d.remove_tree(tmp_path / "file"),
    ):
        with pytest.raises(StorageError, match="cannot use"):
            effect(Disk())


def test_every_dtype_has_its_safetensors_name_and_its_bytes():
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        t = torch.zeros(3, dtype=dtype)
        assert host_bytes(t).nbytes == 3 * t.element_size()
        assert t.numel() == 0 or host_bytes(t).ctypes.data == t.data_ptr()
    with pytest.raises(InvariantError, match="complex64 has no safetensors name"):
        dtype_name(torch.complex64)


def test_a_range_may_be_empty():
    NamedRange(tensor="x", shape=(0, 3), boxes=(), data=torch.empty(0)).check()
