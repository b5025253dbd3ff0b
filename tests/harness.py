"""Run a function on n real gloo ranks and get each rank's value: `run_ranks(n, fn, *args)`.

The ranks are warm Python processes kept by this pytest process (importing torch costs a second each).  A call
hands them the function's file and name, a fresh file store and the arguments; each call has a group of its
own.

    pytest process                         worker r (python tests/harness.py FD)
      Call(rank=r, world, store, fn, args)  ->  init_process_group, fn(*args)
                                            <-  Answer(value) or Answer(traceback, moment of failure)
      Bye (only when every rank answered)   ->  destroy_process_group, reset seeds, dtype, threads

The failure that is shown is the first one in time that is not an echo: a rank whose peer died reports a
broken connection, which explains nothing.  After any failure the workers are killed and the next call starts
new ones, so one test cannot harm another.  Workers die with their parent (PR_SET_PDEATHSIG).
"""

import atexit
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GLOO_TIMEOUT_S = 20.0
START_S = 120.0  # importing torch on a crowded machine
ECHO_S = 0.5  # how long to listen to the other ranks once one has failed
TAIL_BYTES = 4000
# What gloo, the stores and our own translation of them say when the *other* side is the one that failed.
ECHOES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
)


class RankFailed(Exception):
    """The failure of `rank`, the first that failed; `error` is its exception where it could be pickled."""

    def __init__(self, message: str, *, rank: int, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


class RanksTimedOut(RankFailed):
    """The ranks did not answer within the deadline; the message holds the stack of each."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """Values of `fn(*args)` on n gloo ranks, in rank order; `torch.distributed` is initialised when fn runs.

    fn is a module-level function of any file.  Raises RankFailed with the first failing rank's traceback (its
    exception is the cause), RanksTimedOut after deadline_s.
    """
    return _POOL.call(n, fn, args, deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:  # travels as a dict: the two sides know this file by different module names
    rank: int
    world: int
    store: str
    module: str
    file: str
    qualname: str
    sys_path: tuple[str, ...]
    cwd: str
    args: bytes  # pickled apart: its classes may live in the test file, which is imported first


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ok: bool
    value: bytes = b""
    trace: str = ""
    summary: str = ""
    error: bytes = b""
    echo: bool = False
    moment: float = 0.0  # CLOCK_MONOTONIC, comparable between processes of one machine


# ------------------------------------------------------------ pytest process


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    conn: Connection
    output: Any  # an unlinked file: stdout and stderr of the worker
    mark: int = 0
    ready: bool = False

    def tail(self) -> str:
        end = os.fstat(self.output.fileno()).st_size
        start = max(self.mark, end - TAIL_BYTES)
        return os.pread(self.output.fileno(), end - start, start).decode(errors="replace").strip()


@dataclass(slots=True)
class _Pool:
    workers: list[_Worker] = field(default_factory=list)

    def call(self, n: int, fn: Callable[..., Any], args: Sequence[Any], deadline_s: float) -> list[Any]:
        module = sys.modules[fn.__module__]
        if "<" in fn.__qualname__ or not getattr(module, "__file__", None):
            raise TypeError(
                f"run_ranks needs a module-level function of a file, got {fn.__module__}.{fn.__qualname__}"
            )
        self._spawn(n)
        folder = Path(tempfile.mkdtemp(prefix="sirara-ranks-"))
        try:
            for rank, worker in enumerate(self.workers[:n]):
                worker.mark = os.fstat(worker.output.fileno()).st_size
                call = Call(
                    rank=rank,
                    world=n,
                    store=str(folder / "store"),
                    module=fn.__module__,
                    file=str(module.__file__),
                    qualname=fn.__qualname__,
                    sys_path=tuple(sys.path),
                    cwd=os.getcwd(),
                    args=pickle.dumps(tuple(args)),
                )
                worker.conn.send_bytes(pickle.dumps(asdict(call)))
            answers = self._collect(n, deadline_s)
            for worker in self.workers[:n]:
                worker.conn.send_bytes(b"bye")
            return [pickle.loads(answer.value) for answer in answers]
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _spawn(self, n: int) -> None:
        if any(worker.process.poll() is not None for worker in self.workers):
            self.close()
        while len(self.workers) < n:
            self.workers.append(_start_worker())
        for worker in self.workers[:n]:
            if not worker.ready:
                if not worker.conn.poll(START_S):
                    raise RuntimeError(f"a test rank did not start within {START_S:.0f} s\n{worker.tail()}")
                try:
                    worker.conn.recv_bytes()
                except EOFError:
                    raise RuntimeError(f"a test rank ended while starting\n{worker.tail()}") from None
                worker.ready = True

    def _collect(self, n: int, deadline_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + deadline_s
        failed = False
        while len(answers) < n:
            waiting = {self.workers[r].conn: r for r in range(n) if r not in answers}
            heard = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not heard:
                break
            for conn in heard:
                rank = waiting[conn]  # type: ignore[index]
                answers[rank] = self._hear(rank)
                if not answers[rank].ok and not failed:
                    failed, end = True, min(end, time.monotonic() + ECHO_S)
        if failed:
            raise self._failure(answers, n)
        if len(answers) < n:
            raise self._timed_out(answers, n, deadline_s)
        return [answers[rank] for rank in range(n)]

    def _hear(self, rank: int) -> Answer:
        worker = self.workers[rank]
        try:
            return Answer(**pickle.loads(worker.conn.recv_bytes()))
        except (EOFError, ConnectionResetError):
            code = worker.process.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            return Answer(ok=False, summary=how, moment=time.monotonic())

    def _failure(self, answers: dict[int, Answer], n: int) -> RankFailed:
        bad = {rank: answer for rank, answer in answers.items() if not answer.ok}
        # A death is noticed after the echoes it causes, so echoes only count when nothing else failed.
        rank = min(bad, key=lambda r: (bad[r].echo, bad[r].moment))
        first = bad[rank]
        lines = [f"rank {rank} of {n} {first.summary}"]
        lines += [first.trace.rstrip()] if first.trace else []
        if tail := self.workers[rank].tail():
            lines += [f"--- last output of rank {rank}", tail]
        for other in sorted(set(range(n)) - {rank}):
            said = (
                "had not finished"
                if other not in answers
                else bad[other].summary
                if other in bad
                else "had finished"
            )
            lines.append(f"--- rank {other} {said}")
        error = None
        if first.error:
            try:
                error = pickle.loads(first.error)
            except Exception as unreadable:
                lines.append(f"(the exception itself could not be carried over: {unreadable})")
        failure = RankFailed("\n".join(lines), rank=rank, error=error)
        failure.__cause__ = error
        return failure

    def _timed_out(self, answers: dict[int, Answer], n: int, deadline_s: float) -> RanksTimedOut:
        late = [rank for rank in range(n) if rank not in answers]
        for rank in late:
            self.workers[rank].process.send_signal(signal.SIGUSR1)
        stop = time.monotonic() + 2.0
        while time.monotonic() < stop and not all(
            "most recent call first" in self.workers[r].tail() for r in late
        ):
            wait([self.workers[r].conn for r in late], timeout=0.05)
        stacks = "\n".join(f"--- rank {rank}\n{self.workers[rank].tail()}" for rank in late)
        return RanksTimedOut(
            f"ranks {late} of {n} did not answer within {deadline_s:g} s\n{stacks}", rank=late[0]
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.conn.close()
            worker.output.close()
        self.workers.clear()


_POOL = _Pool()
atexit.register(_POOL.close)


def _start_worker() -> _Worker:
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
    )  # fmt: skip
    theirs.close()
    return _Worker(process=process, conn=Connection(ours.detach()), output=output)


# ------------------------------------------------------------ worker


def worker_main(fd: int, parent: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        return
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The script's own folder would shadow modules of the tests; the caller's sys.path comes with each call.
    sys.path.pop(0)
    importlib.import_module("torch.distributed")  # the warm part

    conn = Connection(fd)
    conn.send_bytes(b"ready")
    while True:
        try:
            call = Call(**pickle.loads(conn.recv_bytes()))
        except EOFError:
            return
        environ = dict(os.environ)
        conn.send_bytes(pickle.dumps(asdict(_answer(call))))
        try:
            conn.recv_bytes()
        except EOFError:
            return
        _reset(environ)


def _answer(call: Call) -> Answer:
    import torch.distributed as dist

    try:
        os.chdir(call.cwd)
        sys.path[:] = call.sys_path
        fn = _import(call)
        args = pickle.loads(call.args)
        dist.init_process_group(
            "gloo", store=dist.FileStore(call.store, call.world), rank=call.rank, world_size=call.world,
            timeout=timedelta(seconds=GLOO_TIMEOUT_S),
        )  # fmt: skip
        return Answer(ok=True, value=pickle.dumps(fn(*args)))
    except BaseException as error:
        moment = time.monotonic()
        summary = f"raised {type(error).__name__}: {error}"
        try:
            carried = pickle.dumps(error)
        except Exception:
            carried = b""
        return Answer(
            ok=False,
            trace=traceback.format_exc(),
            summary=summary,
            error=carried,
            echo=_is_echo(error),
            moment=moment,
        )


def _import(call: Call) -> Callable[..., Any]:
    module = sys.modules.get(call.module)
    if module is None or getattr(module, "__file__", None) != call.file:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {call.file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in call.qualname.split("."):
        found = getattr(found, part)
    return found


def _is_echo(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return "CommError" in names or (
        bool(names & {"RuntimeError", "OSError"}) and any(echo in text for echo in ECHOES)
    )


def _reset(environ: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environ)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    worker_main(int(sys.argv[1]), int(sys.argv[2]))
