"""What one rank measures of its steps, and what it hears of the others': memory, and where the time went.

    facts      a rank's numbers of its last step; they travel in the gather by which ranks agree on a step (agree.py),
               so nothing more is sent, and rank 0 knows of step n - 1 when step n has agreed
    base       what is allocated beside the model, and taken off: on the CPU what libraries keep after their first step,
               so that step's memory is not known there; on an accelerator what was there before the model
    watched    steps 1, 2, 4, 8, ...: on the CPU a thread samples what is allocated; on an accelerator, whose queue the
               host runs ahead of, each phase ends with a wait for it
    clean      steps whose time counts: not watched, which costs time, not among the first, and nothing else went on

    begin . inputs ......... accumulate ........ reduce, agree ..... update, publish .
          data               forward, backward   dp                  update

Waits inside these phases are taken off them, and go to tp, pipeline or dp by the group that was waited for.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from sirara.comm.world import Comms
from sirara.device import Device
from sirara.errors import ConfigError
from sirara.mesh import Mesh
from sirara.plan.grading import Measured, StageMeasured

PARTS = ("computation", "tp", "pipeline", "dp", "update")
FACTS = ("peak_bytes", "between_bytes", "reserved_bytes", "device_bytes", "data_s", *PARTS)
"""The numbers of a rank; nan where its device does not count."""
LOOK_S = 5e-3
"""Between two samples of what is allocated, on the CPU."""
WARM_STEPS, COMPILED_WARM_STEPS = 2, 5
"""First steps of an attempt whose time does not count: buffers are made, kernels chosen and compiled."""
KEPT_STEPS = 256
"""The median is of so many steps at most, the last ones."""
WAITED = 0.02
"""Share of a step that waits for data, above which its time does not count."""

Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Waits:
    """Seconds that this rank has waited in groups so far."""

    tp: float
    pp: float
    dp: float
    world: float

    def since(self, before: "_Waits") -> "_Waits":
        return _Waits(
            self.tp - before.tp, self.pp - before.pp, self.dp - before.dp, self.world - before.world
        )

    @property
    def total(self) -> float:
        return self.tp + self.pp + self.dp + self.world


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that the others have not told of yet."""

    step_s: float
    clean: bool
    watched: bool


class Meter:
    """The measurements of one rank.  Every rank has one; what rank 0 hears is enough for the grade.

    Made before the model is.

    Args:  held_bytes: of all tensors that the model, its optimizer and its sums keep between steps.
           compiled: kernels are compiled in the first steps.
    """

    def __init__(
        self, device: Device, comms: Comms, mesh: Mesh, *, held_bytes: Callable[[], int], compiled: bool
    ) -> None:
        self._device, self._comms, self._mesh, self._held = device, comms, mesh, held_bytes
        self._base = _allocated_or_none(device) if device.kind == "cuda" else None
        self._warm = COMPILED_WARM_STEPS if compiled else WARM_STEPS
        self._steps, self._disturbed, self._watched = 0, False, False
        self._laps: list[tuple[float, _Waits]] = []
        self._facts = np.full(len(FACTS), np.nan)
        self._heard: Rows | None = None
        self._most: Rows | None = None
        self._last: _Done | None = None
        self._times: deque[float] = deque(maxlen=KEPT_STEPS)
        self._parts: deque[Rows] = deque(maxlen=KEPT_STEPS)
        self._peak_before = 0

    @property
    def facts(self) -> Sequence[float]:
        """This rank's FACTS of the last step, for the row of the next one."""
        return self._facts.tolist()

    @property
    def peak_bytes(self) -> int:
        """Peak memory since the process began: allocated on an accelerator, resident on the CPU."""
        return max(self._peak_before, self._device.peak_bytes())

    def disturb(self) -> None:
        """Something besides training goes on around the present or the next step: its time does not count."""
        self._disturbed = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one whole step; `lap` is called in it after the inputs, after accumulate and by `hear`."""
        self._steps += 1
        self._watched = not self._steps & (self._steps - 1)
        self._heard, self._laps = None, []
        cuda = self._device.kind == "cuda"
        with ExitStack() as stack:
            peak = None
            if self._base is not None and (cuda or self._watched):
                self._peak_before = self.peak_bytes if cuda else 0
                peak = stack.enter_context(self._device.peak(every_s=LOOK_S))
            self.lap()
            yield
            self.lap()
        if peak is not None and self._base is not None:
            self._take_memory(peak.start_bytes + peak.bytes - self._base, self._base)
        elif self._steps == 1:
            allocated = _allocated_or_none(self._device)
            self._base = None if allocated is None else allocated - self._held()

    def lap(self) -> None:
        """A phase of the step ends."""
        if self._watched and self._device.kind == "cuda":
            torch.cuda.synchronize(self._device.torch_device)
        c = self._comms
        waits = _Waits(
            tp=c.tp.waited_s + c.copies.waited_s,
            pp=c.pp.waited_s,
            dp=c.dp.waited_s + c.plane.waited_s + c.ties.waited_s,
            world=c.world.waited_s,
        )
        self._laps.append((time.perf_counter(), waits))

    def hear(self, rows: Rows) -> None:
        """When ranks have agreed.

        rows: [ranks, FACTS] of the step before.
        """
        self.lap()
        self._heard = rows

    def close_step(self, *, step_s: float, data_s: float) -> None:
        """The step has ended; what was heard in it belongs to the one before."""
        if self._heard is not None and self._last is not None:
            self._count(self._heard, self._last)
        clean = self._steps > self._warm and not self._disturbed and data_s <= WAITED * step_s
        self._last = _Done(step_s, clean, self._watched)
        self._facts[FACTS.index("data_s")] = data_s
        self._facts[-len(PARTS) :] = self._parts_of_step()
        self._disturbed = False

    def measured(self) -> Measured:
        """What is known so far, on rank 0."""
        times = list(self._times)
        if self._last is not None and self._last.clean and not self._last.watched:
            times.append(self._last.step_s)
        # What is told in the next step, rank 0 knows of itself already.
        rows = self._most
        if rows is None and self._mesh.world == 1 and self._steps:
            rows = self._facts[None, :]
        return Measured(
            steps=len(times),
            step_s=median(times) if times else None,
            parts_s=self._median_parts(),
            stages=() if rows is None else self._stages(rows),
            load=os.getloadavg()[0] if self._device.kind == "cpu" else None,
            cores=len(os.sched_getaffinity(0)) if self._device.kind == "cpu" else None,
            ranks=self._mesh.world,
        )

    # ---- one step

    def _take_memory(self, peak_bytes: int, base_bytes: int) -> None:
        self._facts[0] = np.fmax(self._facts[0], peak_bytes)
        self._facts[1] = self._device.allocated_bytes() - base_bytes
        if self._device.kind == "cuda":
            reserved, used = self._device.reserved_and_used_bytes() if self._watched else (0, 0)
            self._facts[2:4] = np.fmax(self._facts[2:4], (reserved, used))

    def _parts_of_step(self) -> list[float]:
        """Seconds of this rank's last step by PARTS."""
        (t1, w1), (t2, w2), (t3, w3), (t4, w4) = self._laps[1:5]
        inside, between, after = w2.since(w1), w3.since(w2), w4.since(w3)
        return [
            t2 - t1 - inside.total,
            inside.tp + between.tp + after.tp,
            inside.pp + between.pp + after.pp + between.world,
            inside.dp + after.dp + t3 - t2 - between.world - between.tp - between.pp,
            t4 - t3 - after.total,
        ]

    # ---- all ranks

    def _count(self, rows: Rows, done: _Done) -> None:
        memory = rows[:, :4]
        self._most = memory.copy() if self._most is None else np.fmax(self._most, memory)
        waited = np.nanmax(rows[:, 4]) > WAITED * done.step_s
        cuda = self._device.kind == "cuda"
        if done.clean and not waited and not done.watched:
            self._times.append(done.step_s)
        if done.clean and not waited and done.watched == cuda:
            parts = rows[:, -len(PARTS) :]
            self._parts.append(parts[np.argmax(parts[:, 0])])

    def _median_parts(self) -> dict[str, float]:
        if not self._parts:
            return {}
        medians = np.median(np.stack(self._parts), axis=0)
        found: dict[str, float] = {name: float(s) for name, s in zip(PARTS, medians, strict=True)}
        if self._device.kind == "cuda" and self._mesh.world > 1:
            # The host does not wait for what a stream waits for.
            whole = found["computation"] + found["tp"] + found["pipeline"]
            return {"forward and backward": whole, "dp": found["dp"], "update": found["update"]}
        return found

    def _stages(self, rows: Rows) -> tuple[StageMeasured, ...]:
        if np.isnan(rows[:, 0]).all():
            return ()
        per_stage = self._mesh.world // self._mesh.pp
        found: list[StageMeasured] = []
        for stage in range(self._mesh.pp):
            first = stage * per_stage
            mine = rows[first : first + per_stage]
            at = int(np.nanargmax(mine[:, 0]))
            peak, between, reserved, used = (None if np.isnan(v) else float(v) for v in mine[at, :4])
            found.append(
                StageMeasured(
                    stage=stage,
                    rank=first + at,
                    peak_bytes=peak or 0.0,
                    between_bytes=between or 0.0,
                    reserved_bytes=reserved,
                    device_bytes=used,
                )
            )
        return tuple(found)


def _allocated_or_none(device: Device) -> int | None:
    """Bytes that are allocated now; None where nobody counts."""
    try:
        return device.allocated_bytes()
    except ConfigError:
        return None
