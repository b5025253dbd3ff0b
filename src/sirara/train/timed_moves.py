"""Jobs that time what is no unit of a model: exchanges and letters between ranks, passes over flat buffers, and, once,
the disk and the link between host and device."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from sirara.comm.group import Comm
from sirara.comm.header import Tag
from sirara.comm.mail import Mail
from sirara.comm.world import axis_comm
from sirara.config.schema import RunConfig
from sirara.parallel.reduce import Pool
from sirara.plan.profile import Move, Rate, wide_of
from sirara.pure.families import ModelShape
from sirara.train.agree import grain_sums
from sirara.train.optim import make_optimizer
from sirara.train.precision import precision_of
from sirara.train.ranges import Range
from sirara.train.rounds import Job, Place, Say

Tensor = torch.Tensor

ELEMENTS = 1 << 22
"""Of a flat buffer: 16 MiB in fp32, more than a core's cache."""
EXCHANGED = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
"""Bytes that each rank receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedMove:
    """A job among `ranks` ranks and what it moves; `share`: of a run's time that one move takes."""

    job: Job
    kind: str
    ranks: int
    bytes: int
    share: float = 1.0

    def row(self, place: Place) -> Move:
        """What was found.  Collective."""
        mine = self.job.times.get("", [])
        if self.kind == "letter" and place.world.rank:
            mine = []
        seconds = max(place.typical(mine) * self.share, 1e-7)
        across = place.world.local_size < self.ranks
        return Move(kind=self.kind, ranks=self.ranks, across=across, bytes=self.bytes, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRate:
    """A job and what one run of it counts: elements, or FLOPs of products and attention."""

    job: Job
    kind: str
    counts: float

    def row(self, place: Place) -> Rate:
        """What was found.  Collective."""
        seconds = max(place.typical(self.job.times.get("", [])), 1e-9)
        return Rate(kind=self.kind, processes=self.job.active, per_s=self.counts / seconds)


def moves(
    place: Place, config: RunConfig, shape: ModelShape, *, ranks: int, threads: int
) -> Iterator[TimedMove]:
    """Exchanges and rows among the first `ranks` ranks; letters where they are two.  Collective."""
    size = place.world.size
    group = axis_comm(place.comm, [list(range(ranks)), *[[r] for r in range(ranks, size)]])

    def job(what: str, run: Callable[[], None]) -> Job:
        return Job(what=f"{what} among {ranks} ranks", run=run, active=ranks, threads=threads)

    for nbytes in EXCHANGED:
        part = max(1, nbytes // 4 // (ranks - 1))
        full = torch.zeros(ranks * part, device=place.device)

        def exchange(full: Tensor = full) -> None:
            group.all_gather_shards("calibrate", full, tag=1).wait()

        sent = part * 4 * (ranks - 1)
        yield TimedMove(
            job=job(f"exchange of {sent:,} bytes", exchange), kind="exchange", ranks=ranks, bytes=sent
        )
    row = torch.zeros(512, dtype=torch.float64, device=place.device)

    def rows() -> None:
        group.gather_rows("calibrate", row)

    yield TimedMove(job=job("a small gather", rows), kind="rows", ranks=ranks, bytes=4096)
    if ranks == 2:
        weights = precision_of(config.train.precision).weights
        boundary = config.train.micro_batch * config.data.seq_len * shape.hidden
        for elements in (boundary // 16, boundary):
            tensor = torch.zeros(max(1, elements), dtype=weights, device=place.device)
            sent = tensor.numel() * tensor.element_size()
            letters = _letters(place, group, tensor)
            # To the other rank and back.
            yield TimedMove(
                job=job(f"letter of {sent:,} bytes", letters), kind="letter", ranks=2, bytes=sent, share=0.5
            )


def _letters(place: Place, group: Comm, tensor: Tensor) -> Callable[[], None]:
    rank, mail = place.world.rank, Mail(group, device=place.device)
    number = 0

    def run() -> None:
        nonlocal number
        number += 1
        there, back = Tag(False, 0, number), Tag(True, 1, number)
        coming = mail.expect(1 - rank, back if rank == 0 else there, shape=tensor.shape, dtype=tensor.dtype)
        if rank == 0:
            mail.send(1, there, tensor)
            coming.wait()
        else:
            coming.wait()
            mail.send(0, back, tensor)
        mail.finish()

    return run


def passes(
    place: Place, config: RunConfig, shape: ModelShape, *, active: int, threads: int
) -> Iterator[TimedRate]:
    """Sums, copies, norms and updates on flat buffers, products and attention of the model's shapes."""
    device, train = place.device, config.train
    kind = precision_of(train.precision)
    pool = Pool(device)
    a, b = (torch.zeros(ELEMENTS, dtype=kind.sums, device=device) for _ in range(2))
    low = torch.zeros(ELEMENTS, dtype=kind.weights, device=device)
    tokens = train.micro_batch * config.data.seq_len
    x, w = (torch.randn(n, shape.hidden, device=device).to(kind.weights) for n in (tokens, shape.ffn))
    heads = (train.micro_batch, shape.heads, config.data.seq_len, shape.head_dim)
    q = torch.randn(heads, device=device).to(kind.weights)

    wide, own = wide_of(train.precision), train.precision

    def rate(name: str, dtype: str, counts: float, call: Callable[[], object]) -> TimedRate:
        def run() -> None:
            call()

        job = Job(what=f"{name} {dtype}, {active} at once", run=run, active=active, threads=threads)
        return TimedRate(job=job, kind=f"{name} {dtype}", counts=counts)

    yield rate("add", wide, ELEMENTS, lambda: a.add_(b))
    yield rate("copy", wide, ELEMENTS, lambda: a.copy_(b))
    yield rate("norm", wide, ELEMENTS, lambda: grain_sums([a], []))
    yield rate("product", own, 2.0 * tokens * shape.hidden * shape.ffn, lambda: x @ w.t())
    yield rate(
        "attention",
        own,
        2.0 * tokens * config.data.seq_len * shape.heads * shape.head_dim,
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    )
    if kind.weights != kind.sums:
        yield rate("add low", own, ELEMENTS, lambda: pool.add(a, low))
        yield rate("round", own, ELEMENTS, lambda: low.copy_(a))
    o = train.optimizer
    if o.name != "muon":
        optimizer = make_optimizer(name=o.name, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
        states = {name: torch.zeros_like(a) for name in optimizer.state_names}
        part = Range(weights_U=a.clone(), grad_U=b, state=states, decay=True)
        yield rate(
            f"update {o.name}", wide, ELEMENTS, lambda: optimizer.update([part], lr=0.0, update=1, shrink=1.5)
        )


def disk(say: Say, nbytes: int = 64 << 20) -> dict[str, float]:
    """Bytes per second of a written and fsynced file in the working folder, and of reading it afresh."""
    try:
        return _disk(say, nbytes)
    except OSError as error:
        say(f"disk: not measured, {Path.cwd()} cannot be written to: {error.strerror}")
        return {}


def _disk(say: Say, nbytes: int) -> dict[str, float]:
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


def host_link(place: Place, nbytes: int = 256 << 20) -> dict[str, float]:
    """Bytes per second of a copy from pinned host memory to the device; nothing where the device is the host."""
    if place.device.type != "cuda":
        return {}
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=place.device)
    times = []
    for _ in range(5):
        began = place.now()
        there.copy_(host, non_blocking=True)
        times.append(place.now() - began)
    return {"host link": nbytes / statistics.median(times)}
