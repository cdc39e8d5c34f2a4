"""What gunicorn's gevent worker does otherwise for a broker, whatever command line started it.

gunicorn answers a malformed request by itself, with a page of HTML; clients of the broker read JSON. It
tells nobody of a connection before there is a request on it, and waits for it when it stops. And when it
closes its port it leaves to the kernel who has connected but was not accepted yet, and the kernel resets them.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar

import gunicorn.util
from gevent.monkey import get_original
from gevent.server import StreamServer
from gunicorn.workers import ggevent
from gunicorn.workers.ggevent import GeventWorker

from queen import codec

_socket = get_original("socket", "socket")


def install(connected: Callable[[socket.socket], None]) -> None:
    """Changes the worker's class, and has ``connected`` called with each connection before its first request."""
    handle = GeventWorker.handle

    def handle_known(self: GeventWorker, listener: socket.socket, client: socket.socket, addr: Any) -> None:
        connected(client)
        handle(self, _Listener(listener), client, addr)  # type: ignore[arg-type]

    GeventWorker.handle = handle_known  # type: ignore[method-assign]
    gunicorn.util.write_error = _write_error
    ggevent.StreamServer = _Server  # type: ignore[attr-defined,assignment]


class _Listener:
    """A listening socket that still tells its address when it is closed.

    gunicorn asks for it with each connection, and one that was accepted last would be dropped.
    """

    _addresses: ClassVar[dict[int, Any]] = {}

    def __init__(self, listener: socket.socket) -> None:
        self._number = id(listener)

    @classmethod
    def note(cls, listener: socket.socket) -> None:
        cls._addresses[id(listener)] = listener.getsockname()

    def getsockname(self) -> Any:
        return self._addresses[self._number]


class _Server(StreamServer):
    """Takes everybody who has connected before it closes."""

    def __init__(self, listener: socket.socket, *arguments: Any, **options: Any) -> None:
        _Listener.note(listener)
        super().__init__(listener, *arguments, **options)

    def close(self) -> None:
        if not self.closed:
            self.max_accept = 1 << 16
            self._do_read()  # type: ignore[attr-defined]
        super().close()


def _write_error(sock: socket.socket, status_int: int, reason: str, mesg: str) -> None:
    """The answer to what is no request: gunicorn's words in the broker's shape. The connection ends."""
    body = codec.dumps({"error": mesg or reason})
    head = (
        f"HTTP/1.1 {status_int} {HTTPStatus(status_int).phrase}\r\nServer: queen\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    gunicorn.util.write_nonblock(sock, head.encode("latin-1") + body)


def configuration() -> Any:
    """gunicorn's configuration in this worker, or None elsewhere: its signal handler is the only door to it."""
    worker = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(worker, "cfg", None)


def end_of_requests(number: int) -> None:
    """Lets gunicorn read the end of a connection, given by its file number, on which it waits for more.

    Through a copy of the socket, since gevent's own shutdown raises an error in the greenlet that reads. What
    the client has sent already is still read.
    """
    with suppress(OSError), _socket(fileno=os.dup(number)) as copy:
        copy.shutdown(socket.SHUT_RD)
