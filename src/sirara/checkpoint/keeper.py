"""The keeper: the writer process of one rank, `python -m sirara.checkpoint.keeper FD`. It imports no torch.

    job ─► arena, whole and of this save? ─┬─► hashes and state digest of its pieces (a thread)
                                           └─► files of the step folder, fsynced
        ─► report      rank 0: all reports ─► commit ─► read back ─► retention ─► end of the job

It lives in a session of its own and ignores SIGINT and SIGTERM while a job runs. When the trainer is gone it ends
the job in hand, without waiting long for ranks whose trainers may be gone as well, and leaves.
"""

import contextlib
import ctypes
import json
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from sirara.checkpoint.arena import Arena, ArenaState, claim
from sirara.checkpoint.assembly import Assembly
from sirara.checkpoint.commit import Committer
from sirara.checkpoint.image import ImagePlan, image_plan
from sirara.checkpoint.job import Hello, JobEnd, KeeperSettings, SaveJob, TierResult, fault_fields, fault_from
from sirara.checkpoint.report import Report, assemble, failure_name, report_name, wait_for_reports
from sirara.checkpoint.steps import step_name, temp_name
from sirara.checkpoint.storage import Disk
from sirara.checkpoint.writer import hash_image, write_image
from sirara.config.run_folder import RunFolder
from sirara.errors import InvariantError, SiraraError, StorageError
from sirara.pure.digest import UNSIGNED, Digest, digest_box
from sirara.pure.saveplan import ITEM_BYTES, SavePlan

ORPHAN_S = 10.0
"""How long a committer without a trainer waits for reports, at least: the other trainers may be gone as well."""

_IDLE_CLASS, _CLASS_SHIFT, _WHO_PROCESS = 3, 13, 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}

_log = logging.getLogger("sirara")


class Keeper:
    """Keeps what lies in an arena: hashes it, gives it to the tiers that are due, reports; rank 0 commits.

    Args:  orphaned: whether the trainer is gone.
    """

    def __init__(
        self,
        settings: KeeperSettings,
        *,
        orphaned: Callable[[], bool] = lambda: False,
        disk: Disk | None = None,
    ) -> None:
        self._settings, self._orphaned = settings, orphaned
        self._disk = disk or Disk()
        self._plan = SavePlan.from_bytes(Path(settings.plan).read_bytes())
        self._image = image_plan(self._plan, settings.rank)
        self._assembly = Assembly(self._plan, self._image, Path(settings.memory))
        self._folder = Path(settings.folder)
        run = RunFolder(settings.run_folder) if settings.run_folder else None
        if run is not None:
            run.record_process(settings.attempt, role="writer", rank=settings.rank)
        claim(Path(settings.memory), f"keeper-{settings.rank}", checkpoints=self._folder)
        self._committer = Committer(
            self._disk,
            self._folder,
            run=settings.run,
            attempt=settings.attempt,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.keep_best,
            fence=None if run is None else lambda: run.check_attempt(settings.attempt),
        )
        self._arenas: dict[str, Arena] = {}
        self._files: dict[str, bytes] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="hash")

    @property
    def address(self) -> str:
        """Where keepers of other nodes find this one."""
        return ""

    def keep(self, job: SaveJob) -> JobEnd:
        """Does one job to its end; what fails is in the result."""
        try:
            return self._keep(job)
        except Exception as fault:  # noqa: BLE001  whatever it is, the trainer must hear of it
            _log.exception("the save of step %d failed", job.step)
            return JobEnd(step=job.step, uuid=job.uuid, fault=_as_ours(fault))

    def close(self) -> None:
        self._threads.shutdown()

    def _keep(self, job: SaveJob) -> JobEnd:
        clock = _Clock()
        temp = self._folder / temp_name(job.step, job.uuid)
        with contextlib.ExitStack() as undo:
            undo.push(partial(self._undo, temp))
            data = self._arena(job).data
            self._assembly.fill(
                data, job.uuid, deadline_s=job.deadline_s, orphaned=self._orphaned, orphan_s=ORPHAN_S
            )
            clock.lap("assemble")
            self._write(job, temp, data)
            clock.lap("write")
            if self._settings.rank != 0:
                return JobEnd(step=job.step, uuid=job.uuid, seconds=clock.laps)
            committed = self._commit(job, temp, clock)
        final = self._folder / step_name(job.step)
        self._committer.verify(final)
        self._committer.tidy(job.step, job.uuid, scores=job.scores)
        clock.lap("verify")
        return replace(committed, seconds=clock.laps)

    def _undo(self, temp: Path, kind: object, fault: BaseException | None, trace: object) -> None:
        """What a save that failed leaves to the others: the news, or on rank 0 nothing."""
        if fault is None:
            return
        if self._settings.rank == 0:
            self._committer.abandon(temp)
        else:
            tell_committer(self._disk, temp, self._settings.rank, _as_ours(fault))

    def _write(self, job: SaveJob, temp: Path, data: memoryview) -> None:
        """This rank's part of the step folder, and its report."""
        disk, s, plan, image = self._disk, self._settings, self._plan, self._image
        disk.require(self._folder, int(image.length.sum()))
        if s.world == 1:
            disk.remove_tree(temp)
        disk.make_folder(temp)
        disk.remove(temp / report_name(s.rank))
        if s.rank not in plan.writers:
            return
        # The disk and the hashes work at the same time.
        hashes = self._threads.submit(hash_image, image, data)
        digest = self._threads.submit(_digest, plan, image, data)
        write_image(disk, temp, plan=plan, rank=s.rank, data=data, image=image, uuid=job.uuid, step=job.step)
        report = Report(
            uuid=job.uuid,
            attempt=job.attempt,
            step=job.step,
            rank=s.rank,
            plan=plan.digest,
            lengths=tuple(image.length.tolist()),
            hashes=hashes.result(),
            digest=digest.result().signed(),
        )
        disk.write_file(temp / report_name(s.rank), report.to_bytes())
        disk.sync_folder(temp)

    def _commit(self, job: SaveJob, temp: Path, clock: "_Clock") -> JobEnd:
        committer, final = self._committer, self._folder / step_name(job.step)
        committer.ended.update(job.ended)
        self._files = job.hf_files or self._files
        extras = committer.write_extras(self._plan, temp, self._files)
        reports = wait_for_reports(
            self._plan,
            temp,
            uuid=job.uuid,
            step=job.step,
            deadline_s=job.deadline_s,
            orphaned=self._orphaned,
            # The others write about as much as this rank did.
            orphan_s=max(ORPHAN_S, 4 * sum(clock.laps.values())),
        )
        digest = str(Digest.from_rows(report.digest for report in reports.values()))
        manifest = assemble(
            self._plan,
            reports,
            extras,
            uuid=job.uuid,
            run=self._settings.run,
            attempt=job.attempt,
            step=job.step,
            record={**job.record, "digest": digest},
            aliases=job.aliases,
        )
        committer.commit(temp, final, manifest)
        clock.lap("commit")
        total = self._plan.total_bytes
        return JobEnd(
            step=job.step,
            uuid=job.uuid,
            digest=digest,
            path=str(final),
            total_bytes=total,
            tiers={"disk": TierResult(ok=True, bytes=total, seconds=sum(clock.laps.values()))},
        )

    def _arena(self, job: SaveJob) -> Arena:
        arena = self._arenas.get(job.arena)
        if arena is None or not _same_file(Path(job.arena), arena):
            arena = self._arenas[job.arena] = Arena.open(Path(job.arena))
        head = arena.head
        if (head.state, head.uuid) != (ArenaState.READY, job.uuid):
            raise InvariantError(
                f"the arena does not hold save {job.uuid}",
                where=job.arena,
                why=f"it is {head.state.name} with save {head.uuid}",
            )
        return arena


def tell_committer(disk: Disk, temp: Path, rank: int, fault: SiraraError) -> None:
    """Says in the folder of a save that this rank's part failed: the committer need not wait for its deadline."""
    try:
        disk.write_file(temp / failure_name(rank), str(fault).encode())
    except StorageError:
        _log.warning("rank %d could not tell rank 0 that its part of the save failed", rank)


def _same_file(path: Path, arena: Arena) -> bool:
    """Whether the file was not made anew since it was mapped."""
    return arena.size == path.stat().st_size


def _digest(plan: SavePlan, image: ImagePlan, data: memoryview) -> Digest:
    """The part of the state digest that lies in an image: every element is in one piece of one rank."""
    total = Digest()
    for piece, at in zip(plan.pieces_of.get(image.rank, ()), image.position.tolist(), strict=True):
        tensor = plan.tensors[piece.tensor]
        item = ITEM_BYTES[tensor.dtype]
        bits = np.frombuffer(data, UNSIGNED[item], count=piece.length // item, offset=at)
        total += digest_box(tensor.name, tensor.shape, piece.box, bits)
    return total


def _as_ours(fault: BaseException) -> SiraraError:
    return fault if isinstance(fault, SiraraError) else fault_from(fault_fields(fault))


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._at
        self._at = now


# ---- the process


class _Signals:
    """SIGINT and SIGTERM wait for the end of a job."""

    def __init__(self) -> None:
        self.working = False
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True
        if not self.working:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.working = True
        try:
            yield
        finally:
            self.working = False


def be_modest(nice: int) -> None:
    """Training comes first: lowest CPU priority, and the disk when nobody else wants it."""
    os.nice(nice)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _IDLE_CLASS << _CLASS_SHIFT)


def serve(connection: socket.socket) -> None:
    """Does jobs until the trainer hangs up."""
    signals = _Signals()
    lines = _lines(connection)
    settings = KeeperSettings.from_fields(next(lines))
    be_modest(settings.nice)
    keeper = Keeper(settings, orphaned=lambda: _hung_up(connection))
    try:
        _say(connection, Hello(pid=os.getpid(), address=keeper.address).to_line())
        for fields in lines:
            with signals.held():
                end = keeper.keep(SaveJob.from_fields(fields))
            _say(connection, end.to_line())
            if signals.asked:
                return
    finally:
        keeper.close()


def _lines(connection: socket.socket) -> Iterator[dict]:
    with connection.makefile("rb") as file:
        for line in file:
            yield json.loads(line)


def _say(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(line)


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    logging.basicConfig(format="%(asctime)s writer %(levelname)s %(message)s", level=logging.INFO)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
