"""Step times with activations on the host, and on unlike nodes.

What a microbatch keeps crosses the host link twice:

    exposed = max(0, 2 m A / link - OVERLAP * computation)       A: what one microbatch keeps on the busiest stage

Source of the rule: ZeRO-Infinity, arXiv:2104.07857, section 4.2: efficiency is full where computation outlasts traffic.
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


def timed(p: Points, hardware: Table, constants: Constants) -> Times:
    """`cost.step_time`, the host link's traffic for activations included."""
    times = step_time(p, hardware, constants)
    which = p.offload_activations > 0
    if not which.any():
        return times
    away = p.take(which)
    # One microbatch alive, nothing offloaded: what it keeps.
    alone = away.with_(offload_activations=0, schedule=1, vpp=1, global_batch=away.micro_batch * away.dp)
    kept = memory(alone, hardware, constants).activations
    moved = 2 * away.microbatches * kept / hardware.host_bytes_per_s[away.accelerator]
    work = (times.matmul + times.attention + times.memory_bound + times.recompute)[which]
    exposed = np.zeros(len(p))
    exposed[which] = np.maximum(0.0, moved - OVERLAP * work)
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
