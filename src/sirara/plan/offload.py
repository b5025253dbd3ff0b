"""Step times with weights, optimizer state and activations on the host or its disks, and on unlike nodes.

Weights of a unit come for its forward and for its backward, what a microbatch keeps goes and comes back, and its
gradients go where they are summed and the update reads them.  All run beside computation, over the host link and, where
that is their place, over the disks that a node's devices share:

    exposed = max(0, max((2 m (W + A) + m G) / link, 2 m (W + A on disk) / disk) - OVERLAP * computation)
                     W: weights that a rank holds.  G: its gradients.  A: what one microbatch keeps on the busiest stage
    state on disk is read and written once a step, beside the host's update, which `cost.py` has:

    exposed = max(0, 2 S / disk - update)                                                        S: optimizer state

Source of the rules: ZeRO-Infinity, arXiv:2104.07857, section 4.2: full efficiency where computation outlasts traffic.
"""

from dataclasses import fields, replace

import numpy as np

from sirara.plan.constants import Constants
from sirara.plan.cost import Times, step_time
from sirara.plan.hardware import Table
from sirara.plan.memory import memory
from sirara.plan.points import Points

OVERLAP = 0.9
"""Share of computation that copies can run beside: an assumption; none of it has been measured here."""
HOST, DISK = 1, 2
"""Places, as `Points` has them."""


def timed(p: Points, hardware: Table, constants: Constants) -> Times:
    """`cost.step_time`, the traffic of host links and disks included."""
    times = step_time(p, hardware, constants)
    which = (p.offload_activations > 0) | (p.offload_params > 0) | (p.offload_optimizer > 0)
    if not which.any():
        return times
    away = p.take(which)
    # One microbatch alive, nothing offloaded: what it keeps, and what the rank holds.
    alone = away.with_(
        offload_activations=0, offload_params=0, offload_optimizer=0, schedule=1, vpp=1,
        global_batch=away.micro_batch * away.dp,
    )  # fmt: skip
    held = memory(alone, hardware, constants)
    at, each = away.accelerator, 2 * away.microbatches
    disk = hardware.disk_bytes_per_s[at] / np.minimum(away.per_node, away.gpus)
    gradients = away.microbatches * held.weights / np.where(away.zero == 2, away.shards, 1.0)
    moved = [
        (away.offload_params, each * held.weights),
        (away.offload_activations, each * held.activations),
        # Sums are made where the update reads them, whatever its state lies on.
        (np.minimum(away.offload_optimizer, HOST), gradients),
    ]
    link_s = sum((place > 0) * size for place, size in moved) / hardware.host_bytes_per_s[at]
    disk_s = sum((place == DISK) * size for place, size in moved) / disk
    work = (times.matmul + times.attention + times.memory_bound + times.recompute)[which]
    state_s = (away.offload_optimizer == DISK) * 2 * held.optimizer / disk
    exposed = np.zeros(len(p))
    exposed[which] = np.maximum(0.0, np.maximum(link_s, disk_s) - OVERLAP * work)
    exposed[which] += np.maximum(0.0, state_s - times.offload[which])
    return replace(times, offload=times.offload + exposed, step_s=times.step_s + exposed)


def slowest(p: Points, hardware: Table, constants: Constants) -> Times:
    """The times on the slowest accelerator of the table: all ranks of a step wait for each other."""
    each = [timed(p.with_(accelerator=row), hardware, constants) for row in range(len(hardware.names))]
    if len(each) == 1:
        return each[0]
    at = np.argmax([t.step_s for t in each], axis=0)
    names = [f.name for f in fields(each[0])]
    return replace(
        each[0], **{n: np.choose(at, [np.broadcast_to(getattr(t, n), at.shape) for t in each]) for n in names}
    )
