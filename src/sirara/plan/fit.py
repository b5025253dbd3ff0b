"""Fits `Constants` to measured steps: damped Gauss-Newton on logarithms, every source with the same weight.

    residual of a row       log(predicted / measured), large ones counted less (Huber)
    residual of a constant  log(value / its starting value) / how far it may go: keeps what the rows do not say

All fitted numbers are positive, so their logarithms are what moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sirara.plan.constants import TIME, Constants
from sirara.plan.cost import step_time
from sirara.plan.hardware import Table
from sirara.plan.points import Points

Floats = NDArray[np.float64]

SPREAD = {
    "matmul": 0.3, "sync_s": 0.7, "quantised": 0.5, "grouped": 0.4, "attention": 0.4, "traffic": 0.4,
    "host_s": 0.7, "network": 0.4, "all_to_all": 0.5, "tp_hidden": 0.4, "slowed": 0.5, "jitter": 0.7,
}  # fmt: skip
"""How far, in logarithms, a constant is thought to be from where it starts."""
_FACTOR_SPREAD = (0.12, 0.12)
_HUBER = 0.2
_CAPS = {"matmul": 1.0, "quantised": 1.0, "grouped": 1.2, "attention": 1.4, "network": 0.95, "all_to_all": 0.95,
         "tp_hidden": 0.95, "jitter": 0.05}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    constants: Constants
    rows: int
    loss_before: float
    loss_after: float


def fit(
    p: Points,
    measured_s: Floats,
    groups: Sequence[str],
    hardware: Table,
    start: Constants,
    *,
    rounds: int = 12,
) -> Fit:
    """Constants that bring predictions nearest to `measured_s` [n]; `groups` [n]: rows of one group weigh as one.

    Accelerators without rows keep a factor of 1.
    """
    names = [hardware.names[i] for i in sorted(set(p.accelerator.tolist()))]
    weight = _weights(groups)
    x0 = np.zeros(len(TIME) + 2 * len(names))
    spread = np.array([SPREAD[n] for n in TIME] + [s for _ in names for s in _FACTOR_SPREAD])

    def at(x: Floats) -> Constants:
        values = {n: getattr(start, n) * float(np.exp(v)) for n, v in zip(TIME, x, strict=False)}
        values = {n: min(v, _CAPS.get(n, np.inf)) for n, v in values.items()}
        tail = np.exp(x[len(TIME) :]).reshape(-1, 2)
        return Constants(
            **values,
            fragmentation=start.fragmentation,
            flat_buffer_bytes=start.flat_buffer_bytes,
            by_accelerator={n: (float(a), float(b)) for n, (a, b) in zip(names, tail, strict=True)},
        )

    def residuals(x: Floats) -> Floats:
        return np.log(step_time(p, hardware, at(x)).step_s / measured_s)

    def loss(x: Floats, e: Floats) -> float:
        a = np.abs(e)
        robust = np.where(a <= _HUBER, 0.5 * a**2, _HUBER * (a - 0.5 * _HUBER))
        return float((weight * robust).sum() / _HUBER**2 + 0.5 * ((x / spread) ** 2).sum())

    x, e = x0, residuals(x0)
    now = before = loss(x, e)
    damping, done = 1.0, False
    for _ in range(rounds):
        jacobian = np.stack([(residuals(x + 1e-3 * d) - e) / 1e-3 for d in np.eye(len(x))], axis=1)
        w = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(e), 1e-9)) / _HUBER**2
        hessian = (jacobian * w[:, None]).T @ jacobian + np.diag(1 / spread**2)
        gradient = jacobian.T @ (w * e) + x / spread**2
        for _ in range(8):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            tried = x - np.clip(step, -0.5, 0.5)
            e_tried = residuals(tried)
            value = loss(tried, e_tried)
            if value < now:
                done = value > now * (1 - 1e-4)
                x, e, now, damping = tried, e_tried, value, damping * 0.3
                break
            damping *= 4
        else:
            break
        if done:
            break
    return Fit(constants=at(x), rows=len(p), loss_before=before, loss_after=now)


def _weights(groups: Sequence[str]) -> Floats:
    """A group of n rows counts as n^0.2, less below ten: many rows of one machine repeat its habits, few say little."""
    size = {g: groups.count(g) for g in set(groups)}
    weight = np.array([size[g] ** -0.8 * min(1.0, size[g] / 10) for g in groups])
    return weight * (sum(n**0.5 for n in size.values()) / weight.sum())
