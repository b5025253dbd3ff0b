"""A stand-in for training, to kill: the real agent and the real worker frame around steps that only talk.

    python fake_training.py agent RUN NPROC [MAX_RESTARTS] [STOP_GRACE_S]      the agent, as `sirara run` is
    one python fake_training.py worker RUN ATTEMPT AGENT RESUME                    one of its workers
    python fake_training.py alone RUN                                          one process without an agent

`fake.json` in the run folder says what happens: {"steps": 50, "save_every": 10, "hang_timeout_s": 60,
"faults": [{"attempt": 1, "rank": 1, "step": 7, "how": "raise" | "usage" | "exit" | "abort" | "hang" |
"deaf"}]}.In a step all ranks tell rank 0 their wishes and wait for the answer, so a rank that stops taking
part blocks the others and one that dies breaks their connections, as in training; torch would only cost time
here.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path

from sirara.config.run_folder import RunFolder
from sirara.errors import CommError, ConfigError, Exit
from sirara.events import JsonLines
from sirara.launch.crash import AttemptFailed, exit_code_of
from sirara.launch.worker import Seat, work


@dataclass(frozen=True, kw_only=True)
class Ending:
    reason: str
    step: int
    loss: float = 1.5
    digest: str = "00ff"
    tokens: int = 0
    grade: str = "exact"
    checkpoint: Path | None = None


def agent(path, nproc, max_restarts=0, stop_grace_s=60.0):
    from sirara.launch.supervise import Crew, supervise

    run = RunFolder(path)

    def command(attempt, resume):
        return [sys.executable, __file__, "worker", path, str(attempt), str(os.getpid()), str(int(resume))]

    crew = Crew(
        nproc=int(nproc), command=command, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        max_restarts=int(max_restarts), stop_grace_s=float(stop_grace_s),
    )  # fmt: skip
    try:
        result = supervise(run, crew, begin=run.begin_attempt, advice=[f"sirara resume {run.id}"])
    except AttemptFailed as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps(result.as_record()))
    return Exit.STOPPED if result.reason == "stopped" else Exit.DONE


def worker(path, attempt, agent_pid, resume):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = json.loads((Path(path) / "fake.json").read_text())
    slow = plan.get("slow_start", {"rank": -1})
    if slow["rank"] == rank:
        threading.Event().wait(slow["seconds"])  # imports that take long
    seat = Seat(
        run=RunFolder(path),
        attempt=int(attempt),
        rank=rank,
        world=world,
        agent=int(agent_pid),
        supervised=True,
        hang_timeout_s=plan.get("hang_timeout_s", 60),
    )
    try:
        work(seat, lambda requests: train(seat, plan, requests, resume == "1"))
    except BaseException as error:
        os._exit(exit_code_of(error))
    return 0


def alone(path):
    plan = json.loads((Path(path) / "fake.json").read_text())
    run = RunFolder(path)
    seat = Seat(run=run, attempt=run.begin_attempt(), hang_timeout_s=plan.get("hang_timeout_s", 60))
    result = work(seat, lambda requests: train(seat, plan, requests, bool(run.committed_steps())))
    return Exit.STOPPED if result.reason == "stopped" else Exit.DONE


def train(seat, plan, requests, resume):
    faults = [f for f in plan.get("faults", []) if f["rank"] == seat.rank and f["attempt"] == seat.attempt]
    if any(fault["step"] == 0 for fault in faults):
        fail(faults[0]["how"])
    talk = join(seat)
    first = max(seat.run.committed_steps(), default=0) if resume else 0
    metrics = JsonLines(seat.run.metrics, attempt=seat.attempt)
    if seat.rank == 0:
        event = {"kind": "resume" if resume else "start", "from_step": first}
        JsonLines(seat.run.events, attempt=seat.attempt).append(event)
    step, wish = first, ""
    for step in range(first + 1, plan["steps"] + 1):
        for fault in faults:
            if fault["step"] == step:
                fail(fault["how"])
        wish = talk(requests())
        if seat.rank == 0:
            metrics.append({"step": step, "train/loss": 1.0 / step, "train/loss_hex": (1.0 / step).hex()})
        if wish or step % plan.get("save_every", 10**9) == 0 or step == plan["steps"]:
            commit(seat, step)
        if wish == "stop":
            break
        threading.Event().wait(plan.get("step_s", 0.005))
    return Ending(reason="stopped" if wish == "stop" else "done", step=step, checkpoint=folder(seat, step))


def join(seat):
    if seat.world == 1:
        return lambda wish: wish
    address = f"\0{seat.run.id}-{seat.attempt}"  # a name, not a file
    if seat.rank == 0:
        listener = Listener(address, "AF_UNIX")
        peers = [listener.accept() for _ in range(1, seat.world)]
    else:
        until(lambda: address[1:] in Path("/proc/net/unix").read_text())
        peers = [Client(address, "AF_UNIX")]

    def talk(wish):
        try:
            if seat.rank > 0:
                peers[0].send(wish)
                return peers[0].recv()
            answer = max(wish, *(peer.recv() for peer in peers))  # "" < "save" < "stop"
            for peer in peers:
                peer.send(answer)
            return answer
        except (EOFError, OSError) as error:
            raise CommError("a peer left during talk", why=str(error)) from error

    return talk


def until(condition):
    while not condition():
        threading.Event().wait(0.01)


def folder(seat, step):
    return seat.run.checkpoints / f"step-{step:09d}"


def commit(seat, step):
    if seat.rank == 0:
        seat.run.check_attempt(seat.attempt)
        folder(seat, step).mkdir(exist_ok=True)
        (folder(seat, step) / "manifest.json").write_text("{}")


def fail(how):
    if how == "raise":
        raise ValueError("boom")
    if how == "usage":
        raise ConfigError("data.seq_len=5000 is longer than model.max_seq=256")
    if how == "exit":
        os._exit(3)
    if how == "abort":
        os.abort()
    if how == "deaf":  # neither steps nor dies
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    threading.Event().wait()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit({"agent": agent, "worker": worker, "alone": alone}[role](*arguments))
