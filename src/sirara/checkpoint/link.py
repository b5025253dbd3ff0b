"""Link: how the keepers of a run talk, over TCP: frames of a JSON header and raw bytes, with a deadline on all of it.

    frame       "SRL1" | u32 length of the header | u64 length of the payload | header, JSON | payload
    handshake   -> who, nonce    <- who, nonce, proof    -> proof    <- {} or refused      proof: HMAC of both nonces
    request     one frame or several; the answer is one frame or several; {"fault": ...} ends it

Both ends prove that they know the run's token, which itself is never sent. Somebody who moves no byte for `idle_s`
has failed, however far the deadline of the whole is; every error names the other end by rank and node.
"""

import contextlib
import fcntl
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sirara.checkpoint.job import fault_fields, fault_from
from sirara.errors import CheckpointError, CommError, CommTimeout, SiraraError

_log = logging.getLogger("sirara")
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"SRL1"
_MOST_HEADER = 1 << 20
_MOST_BUFFERS = 64
MOST_PAYLOAD = 1 << 30
_FAR_AWAY = "198.51.100.1"  # in no network (RFC 5737): only the default route leads there
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface

# What a request that is not well-formed raises where it is read.
_MALFORMED = (KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """One end of a link."""

    run: str
    rank: int
    node: int
    attempt: int

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}" if self.rank >= 0 else f"node {self.node}"


class Connection:
    """A socket whose other end has a name. `until`: when (time.monotonic) all that is being done must have ended."""

    def __init__(self, sock: socket.socket, *, name: str, idle_s: float, until: float | None = None) -> None:
        self._socket, self.name, self.idle_s, self.until = sock, name, idle_s, until
        self.peer: Who | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ---- frames

    def send(self, header: Mapping[str, Any], payload: Sequence[memoryview] = ()) -> None:
        text = json.dumps(header, separators=(",", ":")).encode()
        left = [memoryview(_HEAD.pack(_MAGIC, len(text), sum(b.nbytes for b in payload)) + text)]
        left += [b.cast("B") for b in payload if b.nbytes]
        while left:
            try:
                self._wait("took")
                done = self._socket.sendmsg(left[:_MOST_BUFFERS])
            except (OSError, ValueError) as fault:
                raise self._lost(fault, "took") from fault
            while done:
                step = min(done, len(left[0]))
                done -= step
                left[0] = left[0][step:]
                if not len(left[0]):
                    left.pop(0)

    def receive(self, *, most: int = MOST_PAYLOAD) -> tuple[dict[str, Any], int]:
        """(header, bytes of the payload that follow). Raises what the other end reports as its fault."""
        raw = bytearray(_HEAD.size)
        self.receive_into(memoryview(raw))
        magic, length, payload = _HEAD.unpack(raw)
        if magic != _MAGIC or length > _MOST_HEADER or payload > most:
            raise CommError(
                f"{self.name} does not speak this protocol", code="SR710", why=f"it sent {bytes(raw)!r}"
            )
        text = bytearray(length)
        self.receive_into(memoryview(text))
        try:
            header = json.loads(text)
            if "fault" in header:
                raise _named(fault_from(header["fault"]), self.name)
        except _MALFORMED as fault:
            raise CommError(f"{self.name} sent a header that is none: {fault!r}", code="SR710") from fault
        return header, payload

    def receive_into(self, buffer: memoryview) -> None:
        buffer = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        while len(buffer):
            try:
                self._wait("sent")
                done = self._socket.recv_into(buffer)
            except (OSError, ValueError) as fault:
                raise self._lost(fault, "sent") from fault
            if not done:
                raise CommError(
                    f"{self.name} closed the connection", code="SR711", why=f"{len(buffer)} bytes were due"
                )
            buffer = buffer[done:]

    def receive_payload(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def wait_for_request(self) -> bool:
        """True when there is something to receive, False when the other end is gone; waits as long as it takes."""
        try:
            self._socket.settimeout(None)
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False

    def has_answer(self) -> bool:
        """Whether the other end has said something (or hung up) while we are still sending."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def drain(self) -> None:
        """Says nothing more and reads until the other end hangs up, so that it can read our last words."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(self.idle_s)
            while self._socket.recv(1 << 20):
                pass
        except (OSError, ValueError):
            return

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may not be connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, verb: str) -> None:
        left = self.idle_s if self.until is None else min(self.idle_s, self.until - time.monotonic())
        if left <= 0:
            raise self._too_late(verb)
        self._socket.settimeout(left)

    def _too_late(self, verb: str) -> CommTimeout:
        late = self.until is not None and time.monotonic() >= self.until
        why = "the deadline has passed" if late else f"it {verb} no byte for {self.idle_s:g} s"
        return CommTimeout(f"{self.name} does not answer: {why}", code="SR751")

    def _lost(self, fault: OSError | ValueError, verb: str) -> CommError:
        if isinstance(fault, TimeoutError):
            return self._too_late(verb)
        return CommError(f"the connection to {self.name} is lost: {fault}", code="SR711")


class Peer:
    """The far keeper, as a client: connects when first asked, again after a fault. One request at a time."""

    def __init__(self, address: str, *, me: Who, name: str, token: str, idle_s: float) -> None:
        self.address, self.name = address, name
        self._me, self._token, self._idle_s = me, token, idle_s
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def ask(
        self,
        request: Mapping[str, Any],
        payload: Sequence[memoryview] = (),
        *,
        until: float,
        talk: Callable[[Connection], None] | None = None,
        idle_s: float | None = None,
    ) -> tuple[dict[str, Any], bytearray]:
        """Sends a request and returns the answer and its payload.

        Args:  talk: sends or receives more frames, after the request and before the answer.
               idle_s: for this request, when it takes the other end long to think.
        Raises:  CommError, CommTimeout; the fault that the other end reports, naming it in `where`.
        """
        with self._lock:
            connection = self._connection or self._connect(until)
            self._connection = None
            connection.until, connection.idle_s = until, idle_s or self._idle_s
            try:
                connection.send(request, payload)
                if talk is not None:
                    talk(connection)
                header, size = connection.receive()
                answer = connection.receive_payload(size)
            except SiraraError:
                connection.close()
                raise
            self._connection = connection
            return header, answer

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self, until: float) -> Connection:
        host, _, port = self.address.rpartition(":")
        left = min(self._idle_s, until - time.monotonic())
        try:
            if left <= 0:
                raise TimeoutError("the deadline has passed")
            sock = socket.create_connection((host, int(port)), timeout=left)
        except TimeoutError as fault:
            raise CommTimeout(
                f"{self.name} cannot be reached at {self.address} within {max(left, 0):g} s", code="SR751"
            ) from fault
        except (OSError, ValueError) as fault:
            raise CommError(
                f"{self.name} cannot be reached at {self.address}: {fault}", code="SR711"
            ) from fault
        connection = Connection(sock, name=self.name, idle_s=self._idle_s, until=until)
        try:
            _introduce(connection, self._me, self._token)
        except SiraraError:
            connection.close()
            raise
        return connection


class Server:
    """Answers the requests of other keepers, each connection in a thread of its own.

    handler(request, payload size, connection): reads the payload and answers; what it raises is told to the other end.
    """

    def __init__(
        self,
        handler: Callable[[dict[str, Any], int, Connection], None],
        *,
        me: Who,
        token: str,
        host: str,
        idle_s: float,
    ) -> None:
        self._handler, self._me, self._token, self._idle_s = handler, me, token, idle_s
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.create_server((host, 0), backlog=256)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._open)
        with contextlib.suppress(OSError):  # nobody may be accepting
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, where = self._socket.accept()
            except OSError:
                return
            connection = Connection(sock, name=f"{where[0]}:{where[1]}", idle_s=self._idle_s)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="link", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.until = time.monotonic() + self._idle_s
            connection.peer = _admit(connection, self._me, self._token)
            connection.name = str(connection.peer)
            connection.until = None
            while connection.wait_for_request():
                request, size = connection.receive()
                self._answer(request, size, connection)
        except SiraraError as fault:
            if not self._closed:
                _log.warning("a keeper's request failed: %s", fault.what)
            try:
                connection.send({"fault": fault_fields(fault)})
            except CommError:
                _log.debug("%s cannot be told", connection.name)
            else:
                connection.drain()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(self, request: dict[str, Any], size: int, connection: Connection) -> None:
        try:
            self._handler(request, size, connection)
        except _MALFORMED as fault:
            raise CommError(
                f"{connection.name} asked for something that cannot be understood: {fault!r}", code="SR710"
            ) from fault


def own_host(other: str) -> str:
    """The address by which this machine reaches `other` (a name or an address): others reach it by the same.

    A name that stands for a loopback address here is this machine's own one (Debian has it at 127.0.1.1): other
    machines know that name by an address in the network, so this machine's first one is taken, loopback only if there
    is none. "localhost" and loopback addresses, said as such, mean that all ranks are on this machine: they stay.
    """
    try:
        address = socket.gethostbyname(other)
        found = _address_towards(address)
    except OSError as fault:
        raise CommError(f"no network leads to {other}: {fault}", code="SR711") from fault
    is_own_name = found.startswith("127.") and other not in ("localhost", address)
    return next(_addresses(), found) if is_own_name else found


def _address_towards(address: str) -> str:
    """The source of what is sent there; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def _addresses() -> Iterator[str]:
    """This machine's IPv4 addresses but loopback: that of the default route, then those of its interfaces."""
    with contextlib.suppress(OSError):  # there may be no default route
        yield _address_towards(_FAR_AWAY)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this one has no address
                raw = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found = socket.inet_ntoa(raw[20:24])
                if not found.startswith("127."):
                    yield found


# ---- handshake


def _proof(token: str, side: str, a: str, b: str) -> str:
    return hmac.new(token.encode(), f"{side}\0{a}\0{b}".encode(), "sha256").hexdigest()


def _introduce(connection: Connection, me: Who, token: str) -> None:
    mine = secrets.token_hex(16)
    connection.send({**asdict(me), "nonce": mine})
    header, _ = connection.receive(most=0)
    theirs, proof = str(header.get("nonce")), str(header.get("proof"))
    if not hmac.compare_digest(proof, _proof(token, "server", mine, theirs)):
        raise CommError(f"{connection.name} does not know this run's token", code="SR712")
    connection.send({"proof": _proof(token, "client", mine, theirs)})
    header, _ = connection.receive(most=0)
    found = (header.get("rank"), header.get("node"))
    if connection.name != f"node {found[1]}" and connection.name != f"rank {found[0]} on node {found[1]}":
        raise CommError(
            f"{connection.name} was called, rank {found[0]} on node {found[1]} answers", code="SR712"
        )


def _admit(connection: Connection, me: Who, token: str) -> Who:
    header, _ = connection.receive(most=0)
    try:
        who = Who(**{name: header[name] for name in ("run", "rank", "node", "attempt")})
        theirs = str(header["nonce"])
    except _MALFORMED as fault:
        raise CommError(f"{connection.name} did not say who it is", code="SR712") from fault
    mine = secrets.token_hex(16)
    connection.send({"nonce": mine, "proof": _proof(token, "server", theirs, mine)})
    header, _ = connection.receive(most=0)
    if not hmac.compare_digest(str(header.get("proof")), _proof(token, "client", theirs, mine)):
        raise CommError(f"{who} does not know this run's token", code="SR712")
    if who.run != me.run:
        raise CheckpointError(f"{who} belongs to run {who.run!r}, {me} to run {me.run!r}", code="SR512")
    if who.attempt < me.attempt:
        raise CheckpointError(
            f"{who} belongs to attempt {who.attempt}, attempt {me.attempt} owns the run now", code="SR512"
        )
    connection.send({"rank": me.rank, "node": me.node})
    return who


def _named(fault: SiraraError, name: str) -> SiraraError:
    """The fault as the other end tells it, with its name where it happened."""
    where = f"{name}: {fault.where}" if fault.where else name
    return type(fault)(fault.what, code=fault.code, where=where, why=fault.why, try_=fault.try_)
