"""The broker's side of an exchange: connections kept alive, failover between the addresses of a cell, time.

A cell's base_url names all its brokers: one name with several addresses, or several hosts separated by commas.
Pinned, a new connection goes to the address that worked last; the others stand by. What may be sent twice is
decided by what the broker may have seen: nothing that was sent is sent again, but for reads and for pops whose
batch comes back by itself when its lease ends. A push never.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from queen.log import Log
from queen.proxy.refusals import bad_gateway

log = Log("upstream")

_IDLE_MOST = 64
_FAILED_SECONDS = 10.0
_UNHEARD_MS = 10_000
_READ = 65_536


class Unreachable(Exception):
    """No address of the cell can be connected to."""


class Broken(Exception):
    """The connection ended, or spoke nonsense, before the answer was whole."""


class TimedOut(Exception):
    """No byte came in the time there was."""


class Address(NamedTuple):
    family: int
    sockaddr: tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True)
class Outgoing:
    """A request for the broker: head and body as bytes, or a body that is read while it is sent.

    ``budget`` is the patience in seconds, for the answer's head and then for each further byte. ``idempotent``
    tells that it may be sent again when a kept connection turns out dead, ``leased`` that it may even be sent
    again after it reached a broker that died.
    """

    head: bytes
    body: bytes
    budget: float
    parts: Iterator[bytes] | None = None
    bare: bool = False
    idempotent: bool = False
    leased: bool = False


class Reply:
    """A broker's answer, read on demand. Its headers are as they came, in their order."""

    def __init__(self, connection: Connection, bare: bool, budget: float) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.begun = False
        self._bare = bare
        self._budget = budget
        self._head_done = False
        self._again = False
        self._parts: list[bytes] = []
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)

    # Called by the parser.

    def on_status(self, text: bytes) -> None:
        self.reason += text

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._head_done = True
            # Asked later the parser has forgotten the head.
            self._again = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._head_done:
            self.complete = True
        else:  # an informational one: the real one follows
            self.headers = []
            self.reason = b""

    # Called by whoever waits for the answer.

    def read_head(self, deadline: float) -> None:
        """Reads until status and headers are there; raises `TimedOut` or `Broken`."""
        while not self._head_done:
            self._read(deadline - time.monotonic())
        if self._bare and not self.complete:
            # An answer to a HEAD ends with its head, whatever length it tells.
            self.complete = True

    def parts(self) -> Iterator[bytes]:
        """The body as it arrives; raises `TimedOut` or `Broken`."""
        while True:
            if self._parts:
                parts, self._parts = self._parts, []
                yield parts[0] if len(parts) == 1 else b"".join(parts)
            if self.complete:
                return
            self._read(self._budget)

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, its name in lower case."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    def close(self) -> None:
        """Gives the connection back if it can serve again, else ends it."""
        self._connection.finish(self.complete and self._again and not self._bare)

    def _read(self, seconds: float) -> None:
        data = self._connection.receive(seconds)
        try:
            if data:
                self.begun = True
                self._parser.feed_data(data)
                return
            # Without length or chunks the end of the connection is the end of the body.
            if self._head_done and not self.complete and not self._framed():
                self.complete = True
                return
        except httptools.HttpParserError as error:
            raise Broken(f"not HTTP: {error}") from error
        raise Broken("connection closed")

    def _framed(self) -> bool:
        names = {name.lower() for name, _ in self.headers}
        return b"content-length" in names or b"transfer-encoding" in names


class Connection:
    """A connection to one address, used for one exchange at a time."""

    __slots__ = ("_pool", "_socket", "_timeout", "address", "reused")

    def __init__(self, pool: Upstream, connection: socket.socket, address: Address) -> None:
        self._pool = pool
        self._socket = connection
        self._timeout: float | None = None
        self.address = address
        self.reused = False

    def send(self, data: bytes, seconds: float) -> None:
        """Sends all of it; raises `TimedOut` or `Broken`."""
        self._set_timeout(seconds)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise TimedOut from None
        except OSError as error:
            raise Broken(str(error)) from error

    def receive(self, seconds: float) -> bytes:
        """What comes next, empty at the end; raises `TimedOut` or `Broken`."""
        if seconds <= 0:
            raise TimedOut
        self._set_timeout(seconds)
        try:
            return self._socket.recv(_READ)
        except TimeoutError:
            raise TimedOut from None
        except OSError as error:
            raise Broken(str(error)) from error

    def alive(self) -> bool:
        """Whether a connection at rest is silent and open: one that can be read was closed by its peer."""
        try:
            self._socket._sock.recv(1, socket.MSG_PEEK)  # type: ignore[attr-defined]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def finish(self, again: bool) -> None:
        if again:
            self._pool.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Ends it at once, also while another greenlet reads from it."""
        with suppress(OSError):
            self._socket.close()

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds


class Hold:
    """The exchange's connection of the moment, which can be ended from elsewhere: then nothing is sent again.

    ``stopped`` tells that the proxy itself ended it, so that there is somebody to answer.
    """

    __slots__ = ("_connection", "aborted", "stopped")

    def __init__(self) -> None:
        self.aborted = False
        self.stopped = False
        self._connection: Connection | None = None

    def take(self, connection: Connection) -> None:
        self._connection = connection

    def abort(self) -> None:
        self.aborted = True
        if self._connection is not None:
            self._connection.close()


class Upstream:
    """The brokers of one cell."""

    def __init__(self, base_url: str, connect_seconds: float, spread: bool = False) -> None:
        self.authority, self._hosts = _authority(base_url)
        self._connect_seconds = connect_seconds
        self._spread = spread
        self._idle: list[Connection] = []
        self._pinned: Address | None = None
        self._failed: dict[Address, float] = {}
        self._known: dict[tuple[str, int], list[Address]] = {}
        self._turn = 0

    def exchange(self, outgoing: Outgoing, hold: Hold | None = None) -> Reply:
        """Sends a request and reads the answer's head, on another connection or address where that is allowed.

        Raises `Unreachable`, `TimedOut`, or `Broken`, also when the hold was aborted.
        """
        deadline = time.monotonic() + outgoing.budget
        idempotent, leased = outgoing.idempotent, outgoing.leased
        fresh = False
        while True:
            connection = (None if fresh else self._take()) or self._connect(deadline)
            if hold is not None:
                hold.take(connection)
                if hold.aborted:
                    connection.close()
                    raise Broken("aborted")
            reply = Reply(connection, outgoing.bare, outgoing.budget)
            try:
                self._send(connection, outgoing, deadline)
                reply.read_head(deadline)
                return reply
            except Broken as error:
                connection.close()
                if reply.begun or (hold is not None and hold.aborted):
                    raise
                self._suspect(connection)
                if connection.reused and idempotent:
                    idempotent = False
                elif not connection.reused and leased:
                    leased = False
                else:
                    raise
                fresh = True
                log.debug("sending again", address=_text(connection.address), error=error)
            except BaseException:
                connection.close()
                raise

    def keep(self, connection: Connection) -> None:
        """Keeps a connection at rest for the next request."""
        self._failed.pop(connection.address, None)
        if len(self._idle) < _IDLE_MOST:
            connection.reused = True
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Ends the connections at rest."""
        while self._idle:
            self._idle.pop().close()

    def _send(self, connection: Connection, outgoing: Outgoing, deadline: float) -> None:
        if outgoing.parts is None:
            connection.send(outgoing.head + outgoing.body, max(deadline - time.monotonic(), 0.001))
            return
        connection.send(outgoing.head, outgoing.budget)
        for part in outgoing.parts:
            connection.send(part, outgoing.budget)

    def _take(self) -> Connection | None:
        """A kept connection that lives."""
        while self._idle:
            # The oldest in spreading, so that all take their turn; else the one used last.
            connection = self._idle.pop(0) if self._spread else self._idle.pop()
            if connection.alive():
                return connection
            connection.close()
        return None

    def _connect(self, deadline: float) -> Connection:
        reasons = []
        for address in self._addresses():
            patience = min(self._connect_seconds, deadline - time.monotonic())
            if patience <= 0:
                raise TimedOut
            try:
                connection = _open(address, patience)
            except OSError as error:
                self._failed[address] = time.monotonic()
                reasons.append(f"{_text(address)}: {error}")
                continue
            self._failed.pop(address, None)
            self._pinned = address
            return Connection(self, connection, address)
        raise Unreachable("; ".join(reasons) or "no address")

    def _suspect(self, connection: Connection) -> None:
        """A connection that died tells of its broker only if it was new: kept ones end in many harmless ways."""
        if not connection.reused:
            self._failed[connection.address] = time.monotonic()

    def _addresses(self) -> list[Address]:
        """The cell's addresses in the order to try them."""
        found: list[Address] = []
        for host in self._hosts:
            found += self._resolve(host)
        if not found:
            raise Unreachable(f"{self.authority} has no address")
        if self._spread:
            self._turn += 1
            turn = self._turn % len(found)
            found = found[turn:] + found[:turn]
        elif self._pinned in found:
            found.remove(self._pinned)
            found.insert(0, self._pinned)
        now = time.monotonic()
        return sorted(found, key=lambda address: now - self._failed.get(address, -_FAILED_SECONDS) < _FAILED_SECONDS)

    def _resolve(self, host: tuple[str, int]) -> list[Address]:
        """A name's addresses of this moment; when it can't be resolved, those of the last time it could."""
        try:
            answers = socket.getaddrinfo(*host, type=socket.SOCK_STREAM, flags=_flags(host[0]))
            self._known[host] = list(dict.fromkeys(Address(answer[0], answer[4]) for answer in answers))  # type: ignore[arg-type]
        except OSError as error:
            log.sampled(10, "the cell's name can't be resolved", host=host[0], error=error)
        return self._known.get(host, [])


def _flags(host: str) -> int:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return 0
    return socket.AI_NUMERICHOST


def _open(address: Address, seconds: float) -> socket.socket:
    connection = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished is noticed by the kernel, long before a long poll's time is over.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
        connection.connect(address.sockaddr)
    except BaseException:
        connection.close()
        raise
    return connection


def _authority(base_url: str) -> tuple[str, list[tuple[str, int]]]:
    """What a base_url names, as a Host header and as hosts with ports; raises `Refusal` 502."""
    hosts = []
    try:
        url = urlsplit(base_url.strip())
        if url.scheme != "http" or url.path not in ("", "/") or url.query or url.fragment or "@" in url.netloc:
            raise ValueError
        for part in url.netloc.split(","):
            one = urlsplit(f"http://{part}")
            if not one.hostname:
                raise ValueError
            hosts.append((one.hostname, one.port or 80))
    except ValueError:
        log.sampled(10, "a cell's base_url is not http://host[:port]", base_url=base_url)
        raise bad_gateway("bad upstream uri") from None
    return url.netloc.split(",")[0], hosts


def _text(address: Address) -> str:
    return f"{address.sockaddr[0]}:{address.sockaddr[1]}"
