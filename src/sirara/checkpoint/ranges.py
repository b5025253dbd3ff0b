"""What the training state gives to a checkpoint and takes from it: named ranges of logical tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sirara.errors import InvariantError
from sirara.pure.layout import Box, box_runs
from sirara.pure.saveplan import ITEM_BYTES, SavePlan

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype: "F32", "BF16", ..."""
    if dtype not in DTYPE_NAMES:
        raise InvariantError(f"{dtype} has no safetensors name, so it cannot be saved")
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRange:
    """The elements of one logical tensor that this rank holds.

    tensor: name of the Hugging Face tensor for weights, "<name>/<kind>" for other state ("/master",
    "/exp_avg", ...). shape: global.  boxes: where the elements lie.  data: 1-D, contiguous: box after box,
    each in C order.
    """

    tensor: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    data: torch.Tensor

    def check(self) -> None:
        """Raises InvariantError unless `data` is what the boxes say."""
        want = sum(box.volume for box in self.boxes)
        if self.data.dim() != 1 or not self.data.is_contiguous() or self.data.numel() != want:
            raise InvariantError(
                f"{self.tensor}: a range needs 1-D contiguous data, the {want} elements of its boxes",
                why=f"its shape is {tuple(self.data.shape)}, its stride {self.data.stride()}",
            )


def host_bytes(data: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as uint8; a view when it lives on the host, otherwise a copy."""
    return data.detach().cpu().view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)


class Sources:
    """Finds the memory of a piece among a rank's ranges."""

    def __init__(self, ranges: Sequence[NamedRange]) -> None:
        self._parts: dict[str, list[tuple[Box, np.ndarray]]] = {}
        self._item: dict[str, int] = {}
        for r in ranges:
            r.check()
            item = ITEM_BYTES[dtype_name(r.data.dtype)]
            raw, at = host_bytes(r.data), 0
            for box in r.boxes:
                size = box.volume * item
                self._parts.setdefault(r.tensor, []).append((box, raw[at : at + size]))
                at += size
            self._item[r.tensor] = item

    def bytes_of(self, tensor: str, box: Box) -> memoryview:
        for held, raw in self._parts.get(tensor, ()):
            if not box.within(held):
                continue
            item = self._item[tensor]
            runs = box_runs(held.size, box.relative_to(held))
            if len(runs) == 1:
                return raw[runs[0][0] * item : runs[0][1] * item].data
            return np.concatenate([raw[a * item : b * item] for a, b in runs]).data
        raise InvariantError(f"{tensor}{box} is planned for this rank, but it gave no range that holds it")


def check_ranges(plan: SavePlan, rank: int, ranges: Sequence[NamedRange]) -> None:
    """Raises InvariantError when a range differs from what the plan says about its tensor."""
    planned: Mapping[str, tuple[str, tuple[int, ...]]] = {t.name: (t.dtype, t.shape) for t in plan.tensors}
    for r in ranges:
        found = (dtype_name(r.data.dtype), tuple(r.shape))
        if planned.get(r.tensor) != found:
            raise InvariantError(
                f"rank {rank} gives {r.tensor} as {found}, "
                f"the plan has {planned.get(r.tensor, 'no such tensor')}"
            )
