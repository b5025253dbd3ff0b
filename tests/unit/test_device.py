"""The memory counter counts what tensors take, and what is gone again by the end."""

import torch

from sirara.device import Device

CPU = Device(torch_device=torch.device("cpu"))


def test_allocated_bytes_follow_tensors() -> None:
    before = CPU.allocated_bytes()
    x = torch.empty(4_000_000)
    assert 0 <= CPU.allocated_bytes() - before - 16_000_000 < 100_000
    del x
    assert abs(CPU.allocated_bytes() - before) < 100_000


def test_the_peak_is_what_lived_together() -> None:
    with CPU.peak() as peak:
        for _ in range(20):
            x = torch.ones(4_000_000)
            x = x @ x.new_ones(4_000_000, 1)
            del x
        y = [torch.ones(3_000_000).cumsum(0) for _ in range(3)]
        del y
    assert 36_000_000 <= peak.bytes < 50_000_000
