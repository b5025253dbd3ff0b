"""Measures this machine by the executor's own parts, for the planner: see plan/profile.py.

    units     an embedding, one block and a head of the model, forward and backward, as parallel/stage.py runs them
    moves     exchanges, small gathers and letters of comm/, over the links that a run would have
    rates     sums, copies, norms and updates on flat buffers, products and attention of the model's shapes

All ranks of one world call `measure` together.  `active` ranks compute, the others wait for them: so one world tells
how much slower a process is beside others on the same cores.  Times are lower quartiles; a kind is measured as often
as its share of the time budget allows.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from sirara.comm.group import Comm
from sirara.comm.header import Tag
from sirara.comm.mail import Mail
from sirara.comm.world import Comms, World, axis_comm, connect_axes
from sirara.config.schema import RunConfig
from sirara.model.decoder import Decoder
from sirara.parallel.parallelize import Layout, Stage, parallelize
from sirara.parallel.reduce import Pool
from sirara.parallel.stage import Chunk, Inputs
from sirara.plan.profile import Move, Rate, UnitTime, signature_of
from sirara.pure.families import ModelShape, init_slice, unit_specs
from sirara.pure.schedule import schedule
from sirara.pure.tree import Deal
from sirara.train.agree import grain_sums
from sirara.train.optim import make_optimizer
from sirara.train.precision import precision_of
from sirara.train.ranges import Range

Tensor = torch.Tensor
Say = Callable[[str], None]

UNITS = ("embed", "block", "head")
MOST, LEAST = 9, 1
"""Repetitions of one measurement after the first, which is counted where it brings no warm-up."""
ELEMENTS = 1 << 22
"""Of a flat buffer: 16 MiB in fp32, more than a core's cache."""
EXCHANGED = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
"""Bytes that each rank receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one world found; the same on all ranks but for noise, and rank 0's counts.

    bandwidth: bytes per second to and from "disk write" and "disk read", "host link" where there is one.
    """

    units: tuple[UnitTime, ...]
    moves: tuple[Move, ...]
    rates: tuple[Rate, ...]
    bandwidth: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """Where it is measured, and how long it may take."""

    world: World
    comm: Comm
    device: torch.device
    stop_at: float
    say: Say

    def agreed(self, value: float) -> float:
        """The largest value of all ranks."""
        return float(self.comm.gather_rows("agree", torch.tensor([value], device=self.device)).max())

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def repeat(self, run: Callable[[], object], *, share_s: float, active: int) -> list[float]:
        """Seconds of each of several runs on the first `active` ranks, on the others nothing.  Collective."""
        on, times = self.world.rank < active, list[float]()
        self.agreed(0.0)
        began = self.now()
        if on:
            run()
        first = self.agreed(self.now() - began if on else 0.0)
        left = min(share_s, self.stop_at - time.monotonic())
        count = int(self.agreed(min(MOST, max(LEAST, left / max(first, 1e-6)))))
        for _ in range(count if on else 0):
            began = self.now()
            run()
            times.append(self.now() - began)
        self.agreed(0.0)
        return times


def measure(
    config: RunConfig,
    shape: ModelShape,
    *,
    world: World,
    comm: Comm,
    device: torch.device,
    budget_s: float,
    tps: Sequence[int],
    say: Say,
) -> Measured:
    """Measures in this world for about `budget_s` seconds.  Collective.

    Args:  tps: tensor-parallel degrees whose blocks are measured; 1 is always.  say: takes one line per measurement.
    """
    here = _Here(
        world=world, comm=comm, device=device, stop_at=time.monotonic() + budget_s, say=say
    )  # fmt: skip
    actives = sorted({1, world.size} if device.type == "cpu" else {world.size})
    first = [(1, active) for active in actives]
    first += [(tp, world.size) for tp in tps if 1 < tp <= world.size and world.size % tp == 0]
    units = _all_units(here, config, shape, [(*case, "none") for case in first], 0.35 * budget_s)
    moves = _moves(here, config, shape, 0.15 * budget_s) if world.size > 1 else []
    rates = _rates(here, config, shape, 0.15 * budget_s)
    # What is computed again comes last: without its times, formulas stand for it.
    units += _all_units(here, config, shape, [(*case, "selective") for case in first], 0.35 * budget_s)
    bandwidth = {**_disk(say), **_host_link(here)} if world.rank == 0 and world.size == 1 else {}
    return Measured(units=tuple(units), moves=tuple(moves), rates=tuple(rates), bandwidth=bandwidth)


def _all_units(
    here: _Here, config: RunConfig, shape: ModelShape, cases: Sequence[tuple[int, int, str]], share_s: float
) -> list[UnitTime]:
    """Units of each (tp, active processes, recompute), as long as there is time; the first case always."""
    found: list[UnitTime] = []
    for tp, active, recompute in cases:
        late = here.agreed(time.monotonic() - here.stop_at) > 0
        if late and (found or recompute != "none"):
            here.say(f"no time is left for tp {tp}, {active} at once, recompute {recompute}")
            continue
        found += _units(here, _comms(here, tp), config, shape, tp, active, recompute, share_s / len(cases))
        block = found[-2]
        here.say(
            f"block tp {tp}, {active} at once, recompute {recompute}: forward {block.forward_s * 1e3:.1f} ms, "
            f"backward {block.backward_s * 1e3:.1f} ms"
        )
    return found


def _comms(here: _Here, tp: int) -> Comms:
    n = here.world.size
    alone = [[r] for r in range(n)]
    rows = [list(range(low, low + tp)) for low in range(0, n, tp)]
    groups = {"dp": alone, "tp": rows, "pp": alone, "plane": rows}
    return connect_axes(here.world, groups, timeout_s=here.comm.timeout_s)


# ---- units


def _units(
    here: _Here,
    comms: Comms,
    config: RunConfig,
    shape: ModelShape,
    tp: int,
    active: int,
    recompute: str,
    share_s: float,
) -> list[UnitTime]:
    """Times of an embedding, a block and a head, each a chunk of its own over one set of flat groups."""
    train, kind = config.train, precision_of(config.train.precision)
    small = replace(shape, layers=1)
    model = Decoder(small, dropout=config.model.dropout, device="meta", dtype=kind.weights)
    deal = Deal(microbatches=2, dp=1, k=1)
    layout = Layout(
        zero=0,
        deal=deal,
        schedule=schedule("1f1b", ranks=1, chunks=1, microbatches=2),
        split=(range(3),),
        hidden=shape.hidden,
        weights=kind.weights,
        sums=kind.sums,
        sequence=config.mesh.sequence_parallel and tp > 1,
        recompute=recompute,
        compile=train.compile,
    )
    stage = parallelize(model, unit_specs(small), layout, comms=comms, device=here.device)
    stage.zero.initialise(lambda spec, a, b: torch.from_numpy(init_slice(spec, 0, a, b)))
    deferral = model.split_backward()
    modules = {n: module for chunk in stage.chunks.values() for n, module in chunk.units.items()}

    def chunks(again: Sequence[int] = ()) -> list[Chunk]:
        return [
            Chunk(0, {n: m}, stage.zero, model_units=3, recompute=again, deferral=deferral)
            for n, m in modules.items()
        ]

    inputs = _inputs(config, shape, here.device)
    plain, light = chunks(), chunks((1,))
    notes: dict[tuple[str, str], list[float]] = {(u, w): [] for u in UNITS for w in ("f", "l", "b", "i", "w")}

    def timed(at: int, what: str, call: Callable[[], Tensor | None]) -> Tensor | None:
        began = here.now()
        found = call()
        notes[UNITS[at], what].append(here.now() - began)
        return found

    def cycle() -> None:
        _whole(stage, plain, light, inputs, timed)

    # The first run makes buffers and caches; its notes are not kept.
    if here.world.rank < active:
        cycle()
        for times in notes.values():
            times.clear()
    here.repeat(cycle, share_s=share_s, active=active)
    rows: list[UnitTime] = []
    for unit in UNITS:
        at = {w: _typical(here, notes[unit, w]) for w in "flbiw"}
        rows.append(
            UnitTime(
                signature=signature_of(shape), unit=unit, micro_batch=train.micro_batch, seq_len=config.data.seq_len,
                tp=tp, sequence=layout.sequence, dtype=train.precision, threads=torch.get_num_threads(),
                processes=active, recompute=recompute, forward_s=at["f"], light_s=at["l"] or at["f"],
                backward_s=at["b"], input_s=at["i"] or at["b"], weight_s=at["w"] or 1e-9,
            )
        )  # fmt: skip
    return rows


def _whole(
    stage: Stage,
    plain: Sequence[Chunk],
    light: Sequence[Chunk],
    inputs: Inputs,
    timed: Callable[[int, str, Callable[[], Tensor | None]], Tensor | None],
) -> None:
    """Two microbatches through all units: the first backward at once, the second in halves."""
    for i in (0, 1):
        trails, x = [], None
        for at, chunk in enumerate(plain):
            if i == 1 and at == 1 and x is not None:
                copy = x.detach()
                timed(at, "l", lambda c=copy: light[1].forward(c, inputs, None, 1.0)[1])
            made = []

            def forward(chunk: Chunk = chunk, x: Tensor | None = x, made: list[object] = made) -> Tensor:
                trail, y = chunk.forward(x, inputs, None, 1e-3)
                made.append(trail)
                return y

            x = timed(at, "f", forward)
            trails.append(made[0])
        dy: Tensor | None = None
        for at in (2, 1, 0):
            chunk, trail = plain[at], trails[at]
            if i == 0 or at == 0:
                dy = timed(at, "b", lambda c=chunk, t=trail, d=dy, i=i: c.backward(t, d, i))
                continue
            dy = timed(at, "i", lambda c=chunk, t=trail, d=dy, i=i: c.backward_input(t, d, i))
            timed(at, "w", lambda c=chunk, t=trail, i=i: c.backward_weight(t, i))
    stage.zero.release(stage.zero.reduce())


def _typical(here: _Here, times: Sequence[float]) -> float:
    """Of the slowest rank that measured, the lower quartile: what disturbs a run lengthens it.  0 without times."""
    return here.agreed(sorted(times)[(len(times) - 1) // 4] if times else 0.0)


def _inputs(config: RunConfig, shape: ModelShape, device: torch.device) -> Inputs:
    size = (config.train.micro_batch, config.data.seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, size, generator=generator).to(device)
    positions = torch.arange(size[1], device=device).expand(size)
    return Inputs(tokens_BL=tokens, targets_BL=tokens.roll(-1, 1), positions_BL=positions)


# ---- moves


def _moves(here: _Here, config: RunConfig, shape: ModelShape, share_s: float) -> list[Move]:
    """Exchanges and rows among all ranks, letters between the first two."""
    n, rank, comm = here.world.size, here.world.rank, here.comm
    across = here.world.local_size < n
    each_s = share_s / (len(EXCHANGED) + 4)
    found: list[Move] = []
    group = axis_comm(comm, [list(range(n))])
    for size in EXCHANGED:
        part = max(1, size // 4 // (n - 1))
        full = torch.zeros(n * part, device=here.device)

        def exchange(full: Tensor = full) -> None:
            group.all_gather_shards("calibrate", full, tag=1).wait()

        for _ in range(2):
            exchange()
        times = here.repeat(exchange, share_s=each_s, active=n)
        nbytes = part * 4 * (n - 1)
        found.append(
            Move(kind="exchange", ranks=n, across=across, bytes=nbytes, seconds=_typical(here, times))
        )
        here.say(f"exchange of {nbytes:,} bytes among {n} ranks: {found[-1].seconds * 1e3:.2f} ms")
    row = torch.zeros(512, dtype=torch.float64, device=here.device)

    def rows() -> None:
        comm.gather_rows("calibrate", row)

    times = here.repeat(rows, share_s=each_s, active=n)
    found.append(Move(kind="rows", ranks=n, across=across, bytes=4096, seconds=_typical(here, times)))
    mail = Mail(group, device=here.device)
    weights = precision_of(config.train.precision).weights
    boundary = config.train.micro_batch * config.data.seq_len * shape.hidden
    for size in (boundary // 16, boundary):
        tensor = torch.zeros(max(1, size), dtype=weights, device=here.device)
        number = [0]

        def letters(tensor: Tensor = tensor, number: list[int] = number) -> None:
            # To the other rank and back: a letter takes half of it.
            number[0] += 1
            if rank > 1:
                return
            there, back = Tag(False, 0, number[0]), Tag(True, 1, number[0])
            coming = mail.expect(
                1 - rank, back if rank == 0 else there, shape=tensor.shape, dtype=tensor.dtype
            )
            if rank == 0:
                mail.send(1, there, tensor)
                coming.wait()
            else:
                coming.wait()
                mail.send(0, back, tensor)
            mail.finish()

        times = here.repeat(letters, share_s=each_s, active=n)
        half = _typical(here, times if rank == 0 else []) / 2
        nbytes = tensor.numel() * tensor.element_size()
        found.append(Move(kind="letter", ranks=2, across=across, bytes=nbytes, seconds=max(half, 1e-7)))
        here.say(f"letter of {nbytes:,} bytes: {half * 1e3:.2f} ms")
    return found


# ---- rates


def _rates(here: _Here, config: RunConfig, shape: ModelShape, share_s: float) -> list[Rate]:
    """Elements (FLOPs of products and attention) per second of one process, all of them busy."""
    found: list[Rate] = []
    jobs = _jobs(here, config, shape)
    for name, (count, job) in jobs.items():
        times = here.repeat(job, share_s=share_s / len(jobs), active=here.world.size)
        per_s = count / max(_typical(here, times), 1e-9)
        found.append(Rate(kind=name, processes=here.world.size, per_s=per_s))
        here.say(f"{name}, {here.world.size} at once: {per_s / 1e9:.2f} G/s")
    return found


def _jobs(here: _Here, config: RunConfig, shape: ModelShape) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (what one run counts, the run)."""
    device, train = here.device, config.train
    kind = precision_of(train.precision)
    pool = Pool(device)
    a, b = (torch.zeros(ELEMENTS, dtype=kind.sums, device=device) for _ in range(2))
    low = torch.zeros(ELEMENTS, dtype=kind.weights, device=device)
    tokens = train.micro_batch * config.data.seq_len
    x, w = (torch.randn(n, shape.hidden, device=device).to(kind.weights) for n in (tokens, shape.ffn))
    heads = (train.micro_batch, shape.heads, config.data.seq_len, shape.head_dim)
    q = torch.randn(heads, device=device).to(kind.weights)
    jobs: dict[str, tuple[float, Callable[[], object]]] = {
        "add": (ELEMENTS, lambda: a.add_(b)),
        "copy": (ELEMENTS, lambda: a.copy_(b)),
        "norm": (ELEMENTS, lambda: grain_sums([a], [])),
        "product": (2.0 * tokens * shape.hidden * shape.ffn, lambda: x @ w.t()),
        "attention": (
            2.0 * tokens * config.data.seq_len * shape.heads * shape.head_dim,
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
    }
    if kind.weights != kind.sums:
        jobs["add low"] = (ELEMENTS, lambda: pool.add(a, low))
        jobs["round"] = (ELEMENTS, lambda: low.copy_(a))
    o = train.optimizer
    if o.name != "muon":
        optimizer = make_optimizer(name=o.name, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
        states = {name: torch.zeros_like(a) for name in optimizer.state_names}
        part = Range(weights_U=a.clone(), grad_U=b, state=states, decay=True)
        jobs[f"update {o.name}"] = (ELEMENTS, lambda: optimizer.update([part], lr=0.0, update=1, shrink=1.5))
    return jobs


def _disk(say: Say, nbytes: int = 64 << 20) -> dict[str, float]:
    """Bytes per second of a written and fsynced file in the working folder, and of reading it afresh."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".sirara-calibrate-") as file:
        began = time.perf_counter()
        for _ in range(nbytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write = nbytes / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(1 << 20):
            pass
        read = nbytes / (time.perf_counter() - began)
    say(f"disk: written and fsynced at {write / 1e9:.2f} GB/s, read at {read / 1e9:.2f} GB/s")
    return {"disk write": write, "disk read": read}


def _host_link(here: _Here, nbytes: int = 256 << 20) -> dict[str, float]:
    """Bytes per second of a copy from pinned host memory to the device."""
    if here.device.type != "cuda":
        return {}
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=here.device)
    times = []
    for _ in range(5):
        began = here.now()
        there.copy_(host, non_blocking=True)
        times.append(here.now() - began)
    return {"host link": nbytes / statistics.median(times)}
