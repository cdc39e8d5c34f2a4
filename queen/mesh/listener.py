"""The receiving side: accepted connections, from their HELLO to their end.

Nothing is ever answered, not even a refusal. What one who has not shown the secret can cost is bounded: a
few seconds, a few kilobytes, and one of a fixed number of connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import gevent
from gevent import socket
from gevent.lock import BoundedSemaphore
from gevent.server import StreamServer
from gevent.ssl import SSLContext

from queen.log import Log
from queen.mesh.frames import BadFrame, FrameReader, Unwelcome
from queen.mesh.hello import Doorkeeper, Hello, Refused
from queen.mesh.peers import AllowList
from queen.mesh.seals import SealCheck

log = Log("mesh")

_HELLO_SECONDS = 5.0
_HELLO_BYTES = 4096
_LARGE_AT_ONCE = 2
_LARGE_SECONDS = 5.0


class Receiver(Protocol):
    """What becomes of the frames of an accepted connection."""

    def opened(self, hello: Hello) -> Callable[[int, bytes], None]:
        """A dialler was let in. Returns what takes each of its frames, and may raise `Unwelcome`."""

    def closed(self, hello: Hello) -> None:
        """Its connection is over."""


class Connection:
    """One accepted connection."""

    __slots__ = ("authenticated", "greenlet", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.greenlet = cast("gevent.Greenlet[..., None]", gevent.getcurrent())
        self.authenticated = False


class Listener:
    """Serves a listening socket. ``idle`` is in seconds: an honest peer sends a heartbeat far more often."""

    def __init__(
        self,
        doorkeeper: Doorkeeper,
        receiver: Receiver,
        idle: float,
        most: int,
        allow: AllowList | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        self._doorkeeper = doorkeeper
        self._receiver = receiver
        self._idle = idle
        self._most = most
        self._allow = allow
        self._tls = tls
        self._large = BoundedSemaphore(_LARGE_AT_ONCE)
        self._open: dict[Connection, None] = {}
        self._dialled_by: dict[tuple[str, str], Connection] = {}  # where each process has one connection only
        self._server: StreamServer | None = None
        self.received = 0
        self.handshake_failures = 0
        self.frames_rejected = 0
        self.peers_refused = 0

    def start(self, bound: socket.socket) -> None:
        """Begins to accept on a bound socket that listens."""
        self._server = StreamServer(bound, self._accepted)
        self._server.start()

    def stop(self) -> None:
        """Closes the listening socket and every connection."""
        if self._server is not None:
            self._server.stop(timeout=0)
            self._server = None
        for connection in list(self._open):
            connection.greenlet.kill(block=False)

    def __len__(self) -> int:
        return len(self._open)

    def _accepted(self, raw: socket.socket, where: object) -> None:
        address = str(where[0]) if isinstance(where, tuple) else "a sibling"
        try:
            if self._allow is not None and not self._allow.allows(address):
                self.peers_refused += 1
                log.sampled(10, "connection refused: not in QUEEN_MESH_ALLOW", address=address)
                return
            if not self._make_room():
                self.peers_refused += 1
                log.sampled(10, "connection refused: there are too many", address=address, open=len(self._open))
                return
            connection = Connection(raw)
            self._open[connection] = None
            try:
                self._serve(connection, address)
            finally:
                self._open.pop(connection, None)
                connection.socket.close()
        except OSError:
            pass  # it ended, in one way or another
        except Exception:
            log.exception("mesh connection failed", address=address)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Held by a connection that reads a large frame. One that takes too long gives it up, and ends."""
        with self._large, gevent.Timeout(_LARGE_SECONDS, BadFrame("too slow")):
            yield

    def _make_room(self) -> bool:
        """Whether one more connection may be served. The oldest without a HELLO goes first."""
        if len(self._open) < self._most:
            return True
        for connection in self._open:
            if not connection.authenticated:
                del self._open[connection]
                connection.greenlet.kill(block=False)
                return True
        return False

    def _serve(self, connection: Connection, address: str) -> None:
        try:
            with gevent.Timeout(_HELLO_SECONDS):
                reader, hello = self._handshake(connection)
        except (BadFrame, Refused, OSError, gevent.Timeout) as error:
            self.handshake_failures += 1
            reason = "no HELLO in time" if isinstance(error, gevent.Timeout) else error
            log.sampled(10, "handshake refused", address=address, reason=reason)
            return
        if hello.replayed:
            log.sampled(10, "HELLO was used before", address=address, peer=hello.server_id)
        connection.authenticated = True
        with self._only_one(connection, hello):
            take = self._receiver.opened(hello)
            try:
                self._read(reader, hello, take)
            except Unwelcome as error:
                self.frames_rejected += 1
                log.sampled(10, "connection closed", peer=hello.server_id, address=address, reason=error)
            finally:
                self._receiver.closed(hello)

    @contextmanager
    def _only_one(self, connection: Connection, hello: Hello) -> Iterator[None]:
        """Held by a connection. If its frames are sealed, an older one of the same process ends."""
        if not hello.seal_key:
            yield
            return
        dialler = (hello.server_id, hello.instance)
        if (older := self._dialled_by.get(dialler)) is not None:
            log.sampled(10, "connection replaced by a newer one of the same worker", peer=hello.server_id)
            older.greenlet.kill(block=False)
        self._dialled_by[dialler] = connection
        try:
            yield
        finally:
            if self._dialled_by.get(dialler) is connection:
                del self._dialled_by[dialler]

    def _read(self, reader: FrameReader, hello: Hello, take: Callable[[int, bytes], None]) -> None:
        """Takes frames until the connection ends, or breaks off, or is silent for too long. Raises `Unwelcome`."""
        seals = SealCheck(hello.seal_key) if hello.seal_key else None
        while True:
            try:
                with gevent.Timeout(self._idle):
                    frame = reader.read()
            except gevent.Timeout:
                return
            except BadFrame:
                self.frames_rejected += 1
                return
            if frame is None:
                return
            self.received += 1
            if seals is not None:
                seals.check(*frame)
            take(*frame)

    def _handshake(self, connection: Connection) -> tuple[FrameReader, Hello]:
        raw = connection.socket
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            raw = connection.socket = self._tls.wrap_socket(raw, server_side=True)
        reader = FrameReader(raw.recv, self._turn)
        frame = reader.read(_HELLO_BYTES)
        if frame is None:
            raise Refused("closed before its HELLO")
        return reader, self._doorkeeper.admit(*frame)
