"""The device that a rank computes on: choice, memory counters, determinism.  On the CPU all of it is trivial."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

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

    def synchronize(self) -> None:
        """Waits until all queued work of the device is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)


def open_device(*, local_rank: int, exact: bool) -> Device:
    """The device of this rank: its own GPU when CUDA is there, else the CPU.

    Args:  exact: turn on torch's deterministic algorithms on CUDA, and on the CPU MKL's reproducible mode.
    """
    if os.environ.get("SIRARA_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        mode = reproducible_mkl(Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")
        if exact and mode:
            # MKL reads it at its first call; products of this process that came before keep their own way.
            os.environ.setdefault("MKL_CBWR", mode)
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


def reproducible_mkl(cpuinfo: str) -> str:
    """The value of MKL_CBWR with which fp32 products have equal bits for any number of threads; "" where none is known.

    MKL splits long sums over threads otherwise: a [1024, 4096] by [4096, 512] product differs between 1 and 2.
    The strict mode exists on Intel's processors alone; each is given its widest instructions that have one.
    """
    flags = set(cpuinfo.partition("flags")[2].partition("\n")[0].split())
    if "GenuineIntel" not in cpuinfo:
        return ""
    for flag, mode in (("avx512_vnni", "AVX512_E1"), ("avx512f", "AVX512"), ("avx2", "AVX2")):
        if flag in flags:
            return f"{mode},STRICT"
    return ""
