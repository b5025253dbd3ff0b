"""What the link between two processes must not rely on, without a second process."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sirara.comm import direct
from sirara.comm.direct import DirectTransfer


def test_another_process_namespace_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two containers of one host: the same boot, but a pid names another process in each.
    seen = []
    for namespace in ("pid:[4026531836]", "pid:[4026532999]"):
        monkeypatch.setattr(os, "readlink", lambda path, namespace=namespace: namespace)
        seen.append(direct._machine())
    assert seen[0] != seen[1]
    assert all(0 <= number < 1 << 62 for number in seen)


class TornLink:
    """A peer whose entry was copied while it was written: the new count of posts beside the old address."""

    def __init__(self) -> None:
        self.board = np.zeros((2, 2, 4), dtype=np.int64)
        self.comm = SimpleNamespace(ranks=[0, 1], rank=0, timeout_s=1.0, alarm=None)
        self.copies = [np.array([1, 111, 8, 0]), np.array([1, 222, 16, 0])]
        self.fetched: list[int] = []

    def entry(self, tag: int, peer: int) -> np.ndarray:
        return self.copies.pop(0) if len(self.copies) > 1 else self.copies[0]

    def fetch(self, peer: int, address: int, tensor: torch.Tensor) -> None:
        self.fetched.append(address)


def test_an_entry_is_read_again_once_its_post_is_seen() -> None:
    link: Any = TornLink()
    DirectTransfer(link, 1, [], [(1, torch.zeros(4))]).wait()
    assert link.fetched == [222]
    assert link.board[1, 1].tolist() == [0, 0, 0, 1]
