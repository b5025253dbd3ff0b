"""The device that a rank computes on: choice, memory counters, determinism.  On the CPU all of it is trivial."""

import os
import resource
from dataclasses import dataclass

import torch

from sirara.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device; `torch_device` is what tensors are made on."""

    torch_device: torch.device

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def model(self) -> str:
        """Whose kernels compute: the accelerator's model, or "cpu"."""
        return torch.cuda.get_device_name(self.torch_device) if self.kind == "cuda" else "cpu"

    def peak_bytes(self) -> int:
        """Peak memory: allocated bytes on an accelerator, peak resident set of the process on the CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_device(*, local_rank: int, exact: bool) -> Device:
    """The device of this rank: its own GPU when CUDA is there, else the CPU.

    Args:  exact: turn on torch's deterministic algorithms on CUDA; the CPU's are deterministic as they are.
    """
    if os.environ.get("SIRARA_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        return Device(torch_device=torch.device("cpu"))
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this node has {count}", try_=[f"launch.nproc={count}"]
        )
    torch.cuda.set_device(local_rank)
    if exact:
        # cuBLAS reads this at its first call; without it deterministic mode refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return Device(torch_device=torch.device("cuda", local_rank))
