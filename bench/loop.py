"""One epoll loop that drives many keep-alive HTTP/1.1 connections.

A *client* is a generator: it yields ``(kind, request bytes)`` and is sent ``(status, body)``, so a
scenario reads like the calls of one user while the loop pays one ``send`` and one ``recv`` a request.
A client that yields ``None`` is idle until somebody calls :meth:`Connection.resume`.

A status of 0 means that the connection broke before the answer was complete; the body is the reason.
"""

from __future__ import annotations

import errno
import heapq
import re
import select
import socket
import time
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

Request = tuple[int, bytes]
Response = tuple[int, bytes]
Client = Generator[Request | None, Response, None]

PUSH, POP, EMPTY_POP, ACK, OTHER = range(5)
KIND_NAMES = ("push", "pop", "empty pop", "ack", "get")

_RECEIVE_BYTES = 1 << 18
_RECONNECT_NS = 200_000_000
_NO_ANSWER: Response = (0, b"")
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"Content-Length: "
_LENGTH_ANY_CASE = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked", re.IGNORECASE)
_INCOMPLETE = -1


class BadResponse(Exception):
    """The peer does not speak the HTTP/1.1 that this loop understands."""


def answer_length(data: bytes | bytearray) -> tuple[int, int]:
    """Where the body of the answer in `data` starts, and the length of the whole answer.

    A length of -1 stands for "the head is not complete yet", or for a chunked body, whose length is
    not known until its last chunk is here (then the start is above 0).
    """
    end = data.find(_HEAD_END)
    if end < 0:
        return 0, _INCOMPLETE
    start = end + 4
    found = data.find(_LENGTH, 0, start)
    if found >= 0:
        return start, start + int(data[found + 16 : data.find(b"\r", found)])
    status = data[9:12]
    if status in (b"204", b"304"):
        return start, start
    match = _LENGTH_ANY_CASE.search(data, 0, start)
    if match:
        return start, start + int(match[1])
    if _CHUNKED.search(data, 0, start):
        return start, _INCOMPLETE
    raise BadResponse(f"no length: {bytes(data[:end])!r}")


def dechunk(data: bytes | bytearray, start: int) -> tuple[bytes, int] | None:
    """The body of a chunked answer and where the answer ends, or None while it is incomplete."""
    parts: list[bytes] = []
    position = start
    while True:
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return None
        size = int(data[position:line_end].split(b";", 1)[0], 16)
        position = line_end + 2
        if size == 0:
            break
        if len(data) < position + size + 2:
            return None
        parts.append(bytes(data[position : position + size]))
        position += size + 2
    while True:  # trailer lines, up to the empty one
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return None
        if line_end == position:
            return b"".join(parts), position + 2
        position = line_end + 2


@dataclass
class Tally:
    """The answers of one kind of request, in order of arrival, in nanoseconds."""

    latencies: array[float] = field(default_factory=lambda: array("d"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    broken: int = 0


class Connection:
    """One socket and the client that talks over it."""

    __slots__ = ("_client", "_kind", "_loop", "_partial", "_request", "_started", "_unsent", "idle", "sock")

    def __init__(self, loop: Loop, client: Client) -> None:
        self._loop = loop
        self._client = client
        self._kind = OTHER
        self._request = b""
        self._unsent = b""
        self._partial: bytearray | None = None
        self._started = 0
        self.idle = False
        self.sock: socket.socket | None = None

    def start(self) -> None:
        """Connect and let the client make its first request."""
        self._loop.running += 1
        self.connect()
        self._advance(None)

    def connect(self) -> None:
        """Open the socket; on failure the loop tries again a little later."""
        try:
            sock = socket.create_connection(self._loop.address, timeout=5)
        except OSError as error:
            self._loop.connect_failed(self, error)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._loop.watch(self, sock)
        if self._request:
            self._send(self._request)

    def close(self) -> None:
        """Forget the socket."""
        if self.sock is not None:
            self._loop.forget(self.sock)
            self.sock.close()
            self.sock = None
        self._partial = None
        self._unsent = b""

    def resume(self) -> None:
        """Wake a client that yielded None."""
        self.idle = False
        self._advance(_NO_ANSWER)

    def ready(self, mask: int) -> None:
        """The socket can be read or written."""
        if mask & select.EPOLLOUT:
            self._flush()
        if mask & ~select.EPOLLOUT:
            self._receive()

    def _advance(self, response: Response | None) -> None:
        try:
            request = self._client.send(response)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            self._loop.running -= 1
            self.close()
            return
        if request is None:
            self.idle = True
            return
        self._kind, self._request = request
        self._started = time.perf_counter_ns()
        if self.sock is not None:
            self._send(self._request)

    def _send(self, data: bytes) -> None:
        sock = self.sock
        assert sock is not None
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(str(error))
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.want_write(sock, True)

    def _flush(self) -> None:
        data, self._unsent = self._unsent, b""
        if self.sock is not None:
            self._loop.want_write(self.sock, False)
            if data:
                self._send(data)

    def _receive(self) -> None:
        sock = self.sock
        if sock is None:
            return
        try:
            data = sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(str(error))
            return
        if not data:
            self._lost("closed by the broker")
            return
        if self._partial is None:
            self._take(data)
        else:
            self._partial += data
            self._take(self._partial)

    def _take(self, data: bytes | bytearray) -> None:
        """Hand a complete answer to the client, or keep what is here of it."""
        try:
            start, end = answer_length(data)
            if start and end == _INCOMPLETE:
                whole = dechunk(data, start)
                if whole is not None:
                    self._answer(data, *whole)
                    return
            elif 0 <= end <= len(data):
                self._answer(data, bytes(data[start:end]), end)
                return
        except (BadResponse, ValueError) as error:
            self._lost(f"bad response: {error}")
            return
        if self._partial is None:
            self._partial = bytearray(data)

    def _answer(self, data: bytes | bytearray, body: bytes, end: int) -> None:
        if end < len(data):
            self._lost(f"bytes after the end of the answer: {bytes(data[: end + 80])!r}")
            return
        loop = self._loop
        loop.now = now = time.perf_counter_ns()
        status = int(data[9:12])
        tally = loop.tallies[EMPTY_POP if status == 204 else self._kind]
        tally.latencies.append(now - self._started)
        tally.starts.append(self._started)
        self._partial = None
        self._request = b""
        self._advance((status, body))

    def _lost(self, reason: str) -> None:
        """The connection broke: reconnect, and tell the client if it waited for an answer."""
        waited = bool(self._request)
        self._request = b""
        self.close()
        self._loop.reconnects += 1
        self.connect()
        if waited:
            self._loop.tallies[self._kind].broken += 1
            self._advance((0, reason.encode()))


class Loop:
    """The epoll loop, its connections and its tallies by kind of request."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.tallies = [Tally() for _ in KIND_NAMES]
        self.running = 0
        self.reconnects = 0
        self.refused = 0
        self.last_refusal = ""
        self.now = time.perf_counter_ns()
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        self._retry: list[tuple[int, int, Connection]] = []
        self._connections: list[Connection] = []

    def add(self, client: Client) -> Connection:
        """Open a connection for `client` and start it."""
        connection = Connection(self, client)
        self._connections.append(connection)
        connection.start()
        return connection

    def watch(self, connection: Connection, sock: socket.socket) -> None:
        """Start to listen to a new socket."""
        self._ready[sock.fileno()] = connection.ready
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def forget(self, sock: socket.socket) -> None:
        """Stop to listen to a socket that is about to be closed."""
        self._ready.pop(sock.fileno(), None)
        self._epoll.unregister(sock.fileno())

    def want_write(self, sock: socket.socket, wanted: bool) -> None:
        """Ask for (or no longer ask for) a call when the socket takes more bytes."""
        self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def connect_failed(self, connection: Connection, error: OSError) -> None:
        """Remember to connect again; being out of descriptors is our own fault and fatal."""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise error
        self.refused += 1
        self.last_refusal = str(error)
        due = time.perf_counter_ns() + _RECONNECT_NS
        heapq.heappush(self._retry, (due, id(connection), connection))

    def run(self, seconds: float, tick: Callable[[int], int | None] | None = None) -> None:
        """Serve events until `seconds` are over or no client is left.

        `tick` is called between events with the time in nanoseconds, and returns when it wants to be
        called next, or None to end here.
        """
        deadline = time.perf_counter_ns() + int(seconds * 1e9)
        ready = self._ready
        poll = self._epoll.poll
        while self.running:
            now = time.perf_counter_ns()
            if now >= deadline:
                return
            until = deadline
            if tick:
                wanted = tick(now)
                if wanted is None:
                    return
                until = min(deadline, wanted)
            if self._retry:
                until = min(until, self._reconnect(now))
            for fd, mask in poll(max(0.0, (until - now) / 1e9), 512):
                call = ready.get(fd)
                if call is not None:
                    call(mask)

    def close(self) -> None:
        """Close every connection, whatever its client waits for."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._epoll.close()

    def _reconnect(self, now: int) -> int:
        while self._retry and self._retry[0][0] <= now:
            heapq.heappop(self._retry)[2].connect()
        return self._retry[0][0] if self._retry else now
