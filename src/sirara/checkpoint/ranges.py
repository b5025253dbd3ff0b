"""What the training state gives to a checkpoint and takes from it: named ranges of logical tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from sirara.errors import InvariantError
from sirara.pure.layout import Box

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
