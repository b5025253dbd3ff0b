"""The device that a rank computes on: choice, memory counters, determinism.  On the CPU all of it is trivial."""

import ctypes
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

    def allocated_bytes(self) -> int:
        """Bytes that are allocated now: by torch on an accelerator, by malloc (glibc's count) on the CPU.

        Raises:  ConfigError on the CPU where the C library does not count.
        """
        if self.kind == "cuda":
            return torch.cuda.memory_allocated(self.torch_device)
        count = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if count is None:
            raise ConfigError("this C library does not count what is allocated", try_=["glibc 2.33 or newer"])
        count.restype = _Mallinfo2
        found = count()
        return found.uordblks + found.hblkhd

    def reserved_and_used_bytes(self) -> tuple[int, int]:
        """Of an accelerator: bytes that torch's allocator held at most since the last `peak` began, and bytes in use on
        the device now, other processes included."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return torch.cuda.max_memory_reserved(self.torch_device), total - free

    @contextmanager
    def peak(self, *, every_s: float = 0.5e-3) -> Iterator["Peak"]:
        """Watches allocated bytes inside the block; `Peak.bytes` is the most there was above those at its start.

        An accelerator counts exactly; on the CPU a thread looks every `every_s`, which may miss what lives shorter.
        """
        found = Peak(start_bytes=self.allocated_bytes())
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            yield found
            found.bytes = torch.cuda.max_memory_allocated(self.torch_device) - found.start_bytes
            return
        done = threading.Event()

        def look() -> None:
            while not done.wait(every_s):
                found.bytes = max(found.bytes, self.allocated_bytes() - found.start_bytes)

        thread = threading.Thread(target=look, name="peak memory", daemon=True)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()

    def peak_bytes(self) -> int:
        """Peak memory: allocated bytes on an accelerator, peak resident set of the process on the CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(slots=True, kw_only=True)
class Peak:
    """The most bytes that were allocated above `start_bytes`."""

    start_bytes: int
    bytes: int = 0


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


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
