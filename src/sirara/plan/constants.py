"""The fitted numbers, 14 that hold for all configurations and two per kind of accelerator, and those read from sources.

A fitted number corrects a formula; none belongs to a source of measurements.  `benchmarks/fit_planner.py` writes
`constants.json`, which says what each was fitted to.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Read, not fitted.  Half-saturation of bus bandwidth: tables of stas00/ml-engineering, network README (8 x A100:
# 18 GB/s at 1 MiB, 110 at 8, 171 at 64, 229 at 1 GiB; 4 x 8 B200: 157 at 64 MiB, 362 at 1 GiB).
UP_HALF_BYTES = 1.5e6
OUT_HALF_BYTES = 2e6
"""Times the ranks of the group: a ring is at half of its rate when each rank's piece has this size."""
UP_LATENCY_S = 6e-6
OUT_LATENCY_S = 12e-6
"""A message to another device, over links and over the network."""
RING_S = 10e-6
UP_STEP_S = 1.9e-6
OUT_STEP_S = 4e-6
"""A ring's start, and each of its steps over links and over the network: what NCCL's own choice of algorithms takes
for rings of its LL128 protocol (src/graph/tuning.cc)."""
WAVE_S = 1.4e-6
"""What a wave of tiles takes beside its products: first loads and last stores."""
KERNEL_S = 2.5e-6
"""A kernel's way in and out of the device."""
UPDATE_S = 2e-3
"""Host time of an update: norm, clip, one fused kernel per group."""
CPU_ADAM_PER_S = 1.6e9
"""Parameters per second and node of an optimizer on the host: ZeRO-Offload's tutorial, 10 B in 6.2 to 6.5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What was fitted.  `by_accelerator`: [16-bit, 8-bit] factors on the rate of matmuls."""

    matmul: float = 0.9
    """Share of the achievable rate (a single large matmul's) that matmuls of a training step reach."""
    quantised: float = 0.7
    """How much of the loss of unfilled tiles and waves is real: exponent, 0 none, 1 all."""
    grouped: float = 0.95
    """Share of the table's rate of grouped matmuls that experts reach."""
    attention: float = 0.9
    """Share of the table's attention rate that is reached."""
    traffic: float = 1.3
    """Bytes that element-wise operations move, over those that they must."""
    sync_s: float = 0.03e-3
    """What ranks wait for each other at a blocking collective, per other rank."""
    host_s: float = 0.6e-3
    """Host time to launch one block's forward, one kernel per operation."""
    network: float = 0.6
    """Share of the scale-out rate that collectives reach."""
    all_to_all: float = 0.5
    """Share of link rates that all-to-all reaches."""
    tp_hidden: float = 0.6
    """Share of tensor-parallel traffic hidden where it is overlapped."""
    slowed: float = 0.15
    """How much computation slows while traffic runs beside it."""
    jitter: float = 0.01
    """Slow-down per doubling of nodes."""
    fragmentation: float = 0.05
    """Reserved over allocated memory, minus one, where every operation allocates for itself."""
    flat_buffer_bytes: float = 8e9
    """What DeepSpeed of 2022 takes beyond closed forms: flat buffers, buckets, caches."""
    by_accelerator: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def factors(self, names: tuple[str, ...]) -> Floats:
        """[A, 2]: factors of 16-bit and of 8-bit matmuls on each accelerator of a table, 1 where none was fitted."""
        return np.array([self.by_accelerator.get(n, (1.0, 1.0)) for n in names], dtype=np.float64)

    def changed(self, values: Mapping[str, float]) -> "Constants":
        """The same with other global values, by name."""
        return replace(self, **values)


TIME = (
    "matmul", "quantised", "grouped", "attention", "traffic", "sync_s", "host_s", "network", "all_to_all",
    "tp_hidden", "slowed", "jitter",
)  # fmt: skip
MEMORY = ("fragmentation", "flat_buffer_bytes")


@cache
def fitted() -> Constants:
    """The constants that ship with the package."""
    text = files("sirara.plan").joinpath("constants.json").read_text(encoding="utf-8")
    data = json.loads(text)
    factors = {name: (float(m), float(a)) for name, (m, a) in data["by_accelerator"].items()}
    return Constants(
        **{n: float(data["global"][n]["value"]) for n in TIME + MEMORY if n in data["global"]},
        by_accelerator=factors,
    )
