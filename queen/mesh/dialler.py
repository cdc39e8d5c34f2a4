"""The sending side: one greenlet per peer that keeps a connection and writes to it.

A broker sends only on connections that it dialled. Frames wait in a bounded queue; what doesn't fit is
dropped and counted, so that telling a slow or dead peer never delays anybody. What waited for a peer that was
away is discarded when it is back: a stale wake is useless, and a stale flag is harmful.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import gevent
from gevent import socket
from gevent.event import Event

from queen.log import Log
from queen.mesh.frames import Tag, encode
from queen.mesh.seals import Sealer

log = Log("mesh")

_QUEUE_FRAMES = 1024
_QUEUE_BYTES = 32 * 1024 * 1024
_SEND_BYTES = 256 * 1024
_FIRST_DELAY = 0.25
_LAST_DELAY = 5.0
_REFUSED_SECONDS = 2.0  # a connection that ends sooner after its HELLO may have been refused
_REFUSALS = 4  # in a row, after which it was: a peer that restarts hangs up once, and then can't be reached
_HUNG_UP = "peer keeps closing the connection at once: do the secrets differ?"
_ANSWERED = "what is dialled answers, as no peer does: is it a mesh port, and do both or none use TLS?"

_HEARTBEAT = encode(Tag.HEARTBEAT)


class PeerGone(Exception):
    """There is nobody to dial any more, now or later."""


def backoff(attempts: int) -> float:
    """Seconds before the next attempt after so many that failed: 250 ms doubling to 5 s, a fifth at random."""
    delay: float = min(_FIRST_DELAY * 2 ** min(attempts, 10), _LAST_DELAY)
    return max(delay * random.uniform(0.8, 1.0), _FIRST_DELAY)


class Dialler:
    """Keeps one outgoing connection. ``connect`` opens it (raising OSError, or `PeerGone`, which ends the
    dialler), ``hello`` makes its first frame and what seals the others, if anything does. ``heartbeat`` is in
    seconds, as is ``stall``, how long the peer may leave what is written unread. ``warn`` says whether to log
    that the peer hangs up."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], socket.socket],
        hello: Callable[[], tuple[bytes, Sealer | None]],
        heartbeat: float,
        stall: float,
        warn: bool = True,
    ) -> None:
        self.name = name
        self._connect = connect
        self._hello = hello
        self._heartbeat = heartbeat
        self._stall = stall
        self._warn = warn
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._news = Event()
        self._ended = False
        self._answered = False
        self._greenlet: gevent.Greenlet[[], None] | None = None
        self.connected = False
        self.resolved_ip: str | None = None
        self.sent = 0
        self.dropped = 0

    def start(self) -> None:
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """Closes the connection; what still waits is not sent."""
        if self._greenlet is not None:
            self._greenlet.kill(block=False)

    def offer(self, frame: bytes) -> None:
        """Queues a frame to be sent, or drops it when the queue is full. Never waits."""
        if len(self._frames) >= _QUEUE_FRAMES or self._bytes + len(frame) > _QUEUE_BYTES:
            self.dropped += 1
            return
        self._frames.append(frame)
        self._bytes += len(frame)
        self._news.set()

    def _run(self) -> None:
        attempts = 0
        refusals = 0
        warned = False
        while True:
            try:
                held = self._session()
            except PeerGone:
                return
            except (OSError, UnicodeError, gevent.Timeout) as error:
                refusals = 0
                log.debug("dial failed", peer=self.name, error=error)
            except Exception:
                log.exception("dialler failed", peer=self.name)
            else:
                if held >= _REFUSED_SECONDS:
                    attempts = refusals = 0
                    warned = False
                else:
                    refusals += 1
                if self._warn and not warned and refusals >= _REFUSALS:
                    warned = True
                    log.warning(_ANSWERED if self._answered else _HUNG_UP, peer=self.name)
            gevent.sleep(backoff(attempts))
            attempts += 1

    def _session(self) -> float:
        """Connects, and writes until the connection ends. Returns how many seconds it held after HELLO."""
        connection = self._connect()
        started = time.monotonic()
        watcher: gevent.Greenlet[[socket.socket], None] | None = None
        try:
            connection.settimeout(self._stall)
            hello, sealer = self._hello()
            connection.sendall(hello)
            self._ended = self._answered = False
            watcher = gevent.spawn(self._watch, connection)
            self._discard()
            self.resolved_ip = _address(connection)
            self.connected = True
            started = time.monotonic()
            with suppress(OSError):
                self._write(connection, sealer)
            return time.monotonic() - started
        finally:
            self.connected = False
            self.resolved_ip = None
            if watcher is not None:
                watcher.kill(block=False)
            connection.close()

    def _write(self, connection: socket.socket, sealer: Sealer | None) -> None:
        beat = time.monotonic() + self._heartbeat
        while not self._ended:
            self._news.clear()
            while self._frames:
                self._send_some(connection, sealer)
            if (now := time.monotonic()) >= beat:
                connection.sendall(sealer.seal(_HEARTBEAT) if sealer else _HEARTBEAT)
                self.sent += 1
                # Beats that were missed are not made up for.
                beat = max(beat + self._heartbeat, now)
            if not self._ended and not self._frames:
                self._news.wait(max(beat - time.monotonic(), 0))

    def _send_some(self, connection: socket.socket, sealer: Sealer | None) -> None:
        part: list[bytes] = []
        size = 0
        while self._frames and size < _SEND_BYTES:
            frame = self._frames.popleft()
            part.append(sealer.seal(frame) if sealer else frame)
            size += len(frame)
        self._bytes -= size
        try:
            connection.sendall(b"".join(part))
        except BaseException:
            self.dropped += len(part)
            raise
        self.sent += len(part)

    def _watch(self, connection: socket.socket) -> None:
        """Ends the session when the peer closes it. A peer never answers, so anything to read is an end."""
        connection_ended = False
        while not connection_ended:
            try:
                self._answered = bool(connection.recv(1))
                connection_ended = True
            except TimeoutError:
                continue
            except OSError:
                connection_ended = True
        self._ended = True
        self._news.set()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _discard(self) -> None:
        self.dropped += len(self._frames)
        self._frames.clear()
        self._bytes = 0


def _address(connection: socket.socket) -> str | None:
    try:
        where = connection.getpeername()
    except OSError:
        return None
    return str(where[0]) if isinstance(where, tuple) else None
