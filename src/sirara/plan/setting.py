"""What a plan is made for: machines, their table, fitted constants, prices, a measured profile if there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sirara.plan.constants import Constants, fitted
from sirara.plan.from_config import cluster_of
from sirara.plan.goodput import Reliability
from sirara.plan.hardware import Cluster, Table, table
from sirara.plan.points import Points
from sirara.plan.profile import Here, Profile, here
from sirara.plan.residuals import MARGIN, memory_margins


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a plan is made for.  table: row 0 is the cluster's accelerator, others those of unlike nodes.

    counts: devices of each row; (): all of row 0.  profile: measured on the machines that are planned for.
    """

    cluster: Cluster
    table: Table
    constants: Constants
    counts: tuple[int, ...] = ()
    price_per_hour: float | None = None
    reliability: Reliability = field(default_factory=Reliability)
    ceiling_bytes: float | None = None
    """Of device memory; None: the device's own."""
    profile: Profile | None = None
    formulas_off: float = 1.0
    """What formulas are multiplied by where they stand beside measured times: how far off they were there."""
    keep_free: bool = True
    """Whether what is chosen leaves the mean error of predicted memory free."""

    @property
    def capacity_bytes(self) -> float:
        own = float(self.table.hbm_bytes.min())
        return own if self.ceiling_bytes is None else min(own, self.ceiling_bytes)

    @property
    def machines(self) -> str:
        """`64 x h100-sxm`, `32 x a100-80gb + 32 x h100-sxm`"""
        counts = self.counts or (self.cluster.gpus,)
        return " + ".join(f"{n:,} x {name}" for n, name in zip(counts, self.table.names, strict=True))

    @property
    def on_cpu(self) -> bool:
        """No published run says how far off predictions for a CPU are."""
        return self.table.on_cpu[0] if self.profile is None else self.profile.machine.device == "cpu"

    def margins(self, p: Points) -> NDArray[np.float64]:
        """[n]: share that predicted memory is off on average; 0 with a ceiling, which is the user's own number."""
        if self.ceiling_bytes is not None:
            return np.zeros(len(p))
        return np.full(len(p), MARGIN) if self.on_cpu else memory_margins(p)

    def limits(self, p: Points) -> NDArray[np.float64]:
        """[n]: device bytes up to which a layout is chosen."""
        return self.capacity_bytes / (1 + self.margins(p) * self.keep_free)


def setting_here(
    device_type: Literal["cpu", "cuda"],
    *,
    workers: int,
    per_node: int | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[Setting, Here]:
    """What a run of `workers` ranks on machines like this one is planned for, and how this machine is known.

    per_node: ranks of one node; None: all of them.
    """
    per_node = per_node or workers
    found = here(device_type, workers=per_node, env=env)
    setting = Setting(
        cluster=cluster_of(found.accelerator, gpus=workers, per_node=per_node),
        table=table([found.accelerator]),
        constants=fitted(),
        profile=found.profile,
    )
    return setting, found
