"""The state digest of tensors, on the host and on devices; its definition is in pure/digest.py."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sirara.pure.digest import TABLE, TABLES, UNSIGNED, WORD, Digest, digest_run, keyed
from sirara.pure.layout import Box, box_runs

__all__ = ["TABLE", "Digest", "digest_boxes", "digest_of", "digest_slice"]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_slice(name: str, start: int, data: torch.Tensor) -> Digest:
    """The digest of elements [start, start + len(data)) of the tensor `name` in C order; data is 1-D, contiguous."""
    if data.is_cuda:
        return _on_device(name, start, data)
    bits = data.view(_SIGNED[data.element_size()]).numpy()
    return digest_run(name, start, bits.view(UNSIGNED[data.element_size()]))


def digest_boxes(name: str, shape: Sequence[int], boxes: Sequence[Box], data: torch.Tensor) -> Digest:
    """The digest of some boxes of a tensor; data is 1-D: box after box, each in C order."""
    total, at = Digest(), 0
    for box in boxes:
        part = data[at : at + box.volume]
        at += box.volume
        runs = box_runs(shape, box)
        if len(runs) == 1:
            total += digest_slice(name, runs[0][0], part)
        elif runs:
            total += _on_runs(name, np.array([start for start, _ in runs]), part.view(len(runs), -1))
    return total


def digest_of(parts: Iterable[tuple[str, int, torch.Tensor]]) -> Digest:
    """The joint digest of (name, start, data) parts."""
    return sum((digest_slice(*part) for part in parts), Digest())


def _on_runs(name: str, starts_R: NDArray[np.int64], data_RN: torch.Tensor) -> Digest:
    """Runs of equal length in rows, run r from element starts[r] on."""
    width, sums = data_RN.element_size(), [0, 0]
    mask = (1 << (8 * width)) - 1
    first, last = int(starts_R[0]) // TABLE, (int(starts_R[-1]) + data_RN.shape[1] - 1) // TABLE + 1
    keys = [torch.from_numpy(c.view(np.int64)).to(data_RN.device) for c in keyed(name, first, last)]
    tables = [torch.from_numpy(a.view(np.int64)).to(data_RN.device) for a in TABLES]
    starts = torch.from_numpy(starts_R).to(data_RN.device)
    within = torch.arange(data_RN.shape[1], device=data_RN.device)
    step = max(1, TABLE // data_RN.shape[1])
    for low in range(0, len(starts_R), step):
        at = starts[low : low + step, None] + within
        wide = data_RN[low : low + step].view(_SIGNED[width]).to(torch.int64)
        if width < 8:
            wide = wide & mask
        for k in (0, 1):
            factors = tables[k][at & (TABLE - 1)] * keys[k][(at >> 16) - first]
            sums[k] += int((wide * factors).sum())
    return Digest(sums[0] & WORD, sums[1] & WORD)


def _on_device(name: str, start: int, data: torch.Tensor) -> Digest:
    """The same in torch's int64, whose products and sums wrap modulo 2^64."""
    width = data.element_size()
    stop = start + data.numel()
    first = start // TABLE
    keys = keyed(name, first, -(-stop // TABLE))
    tables = [torch.from_numpy(a.view(np.int64)).to(data.device) for a in TABLES]
    mask = (1 << (8 * width)) - 1
    sums = [0, 0]
    for block in range(first, -(-stop // TABLE)):
        lo, hi = max(start, block * TABLE), min(stop, (block + 1) * TABLE)
        at = lo - block * TABLE
        wide = data[lo - start : hi - start].view(_SIGNED[width]).to(torch.int64)
        if width < 8:
            wide = wide.bitwise_and_(mask)
        for k in (0, 1):
            part = int((wide * tables[k][at : at + hi - lo]).sum())
            sums[k] += (part & WORD) * int(keys[k][block - first])
    return Digest(sums[0] & WORD, sums[1] & WORD)
