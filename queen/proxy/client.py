"""The client's side of an exchange: its request as it was sent, its socket, and the answer written to it.

Answers are written in one system call where they fit, since gunicorn's own writing checks every header by
regular expression and sends head and body apart. What gunicorn merges or decodes is not used: the target goes on
as it came.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol, cast

import gevent
from gevent.monkey import get_original
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.workers.base_async import ALREADY_HANDLED

from queen.log import Log
from queen.proxy.refusals import Refusal, too_large

log = Log("http")

Headers = Iterable[tuple[str, str]]

# What gunicorn takes as: the application has written the response itself.
_HANDLED = cast(Iterable[bytes], ALREADY_HANDLED)
_SMALL = 65_536
_DRAIN_BYTES = 1 << 20
_DRAIN_SECONDS = 1.0
_TLS_ALERT = b"\x15"

_socket = get_original("socket", "socket")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Server(Protocol):
    """What a client needs of the process: whether it stops, and the idle connections it keeps count of."""

    stopping: bool
    idle: dict[int, socket.socket]


class Client:
    """One request with the connection it came on."""

    __slots__ = ("_server", "_unread", "connection", "environ", "method", "path", "query", "started", "target")

    def __init__(self, environ: dict[str, Any], server: Server) -> None:
        self.environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        self.connection: socket.socket = environ["gunicorn.socket"]
        self.target = _target(environ)
        self.path, _, self.query = self.target.partition("?")
        self.started = False
        self._server = server
        self._unread = self.has_body
        server.idle.pop(self.connection.fileno(), None)

    @property
    def has_body(self) -> bool:
        return "HTTP_TRANSFER_ENCODING" in self.environ or self.environ.get("CONTENT_LENGTH", "0") not in ("", "0")

    @property
    def length(self) -> int | None:
        """The body's length in bytes; None when it comes in chunks of which the end isn't known."""
        return None if "HTTP_TRANSFER_ENCODING" in self.environ else int(self.environ.get("CONTENT_LENGTH") or 0)

    def body(self, limit: int) -> bytes:
        """The whole body; raises `Refusal` 413 above the limit, 400 for a malformed one, and `ClientGone`."""
        if not self.has_body:
            return b""
        length = self.length
        if length is not None and length > limit:
            raise too_large("request body exceeds cap")
        parts = []
        size = 0
        for part in self.parts():
            size += len(part)
            if size > limit:
                self._unread = True
                raise too_large("request body exceeds cap")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def parts(self) -> Iterator[bytes]:
        """The body as it arrives; raises like `body`, without a limit."""
        stream = self.environ["wsgi.input"]
        left = self.length
        try:
            while left is None or left > 0:
                part: bytes = stream.read(_SMALL if left is None else min(left, _DRAIN_BYTES))
                if not part:
                    if left:
                        raise ClientGone
                    break
                if left is not None:
                    left -= len(part)
                yield part
        except NoMoreData:
            raise ClientGone from None
        except OSError as error:
            if error.errno is not None:
                raise ClientGone from None
            raise Refusal(400, "invalid_request", f"bad body: {error}") from None
        except ParseException as error:
            raise Refusal(400, "invalid_request", f"bad body: {error}") from None
        self._unread = False

    def guard(self, work: Callable[[], None]) -> Iterable[bytes]:
        """Runs ``work``, which answers; turns what it raises into an answer, or hangs up where none can follow."""
        try:
            try:
                work()
            except Refusal as error:
                if self.started:
                    raise ClientGone from None
                self.refuse(error)
            except (ClientGone, OSError, gevent.GreenletExit):
                raise ClientGone from None
            except Exception:
                log.exception("request failed", method=self.method, path=self.path[:200])
                if self.started:
                    raise ClientGone from None
                self.refuse(Refusal(500, "internal", "internal error"))
        except (ClientGone, OSError):
            raise StopIteration from None  # gunicorn closes the connection
        if self._ends:
            raise StopIteration
        self._server.idle[self.connection.fileno()] = self.connection
        return _HANDLED

    def refuse(self, error: Refusal, request_id: str = "") -> None:
        headers = []
        if error.retry_after is not None:
            headers.append(("Retry-After", str(error.retry_after)))
        if request_id:
            headers.append(("x-queen-request-id", request_id))
        self.answer(error.status_line, error.body, headers)

    def answer(self, status: str, body: bytes, headers: Headers = (), content_type: str = "application/json") -> None:
        """An answer of the proxy's own. ``status`` is the code with its phrase; 204 goes without a body."""
        lines = f"HTTP/1.1 {status}\r\nServer: queen-proxy\r\n"
        for name, value in headers:
            lines += f"{name}: {value}\r\n"
        if not status.startswith("204"):
            lines += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        else:
            body = b""
        self.send(lines.encode("latin-1"), body)

    def send(self, head: bytes, body: bytes, ends: bool = False) -> None:
        """Begins an answer: a head of status and header lines, to which those of the connection are added.

        ``ends``: the body ends with the connection. Raises OSError when the client is gone.
        """
        drained = not self._unread or self._drain()
        old = self.environ["SERVER_PROTOCOL"] == "HTTP/1.0"
        close = ends or not drained or self._server.stopping or _is_last(self.environ, old)
        if close:
            head += b"Connection: close\r\n"
        elif old:
            head += b"Connection: keep-alive\r\n"
        self.started = True
        self.connection.sendall(head + b"\r\n" + (b"" if self.method == "HEAD" else body))
        self.environ["queen.close"] = close
        if not drained:
            self._hang_up()

    def write(self, part: bytes) -> None:
        """Goes on with an answer; raises OSError when the client is gone."""
        self.connection.sendall(part)

    @property
    def _ends(self) -> bool:
        return bool(self.environ.get("queen.close", True))

    def _drain(self) -> bool:
        """Reads the rest of a body nobody wants; False when that would take too long."""
        left = self.length
        if left is not None and left > _DRAIN_BYTES:
            return False
        size = 0
        with suppress(Exception), gevent.Timeout(_DRAIN_SECONDS):
            for part in self.parts():
                size += len(part)
                if size > _DRAIN_BYTES:
                    return False
            return True
        return False

    def _hang_up(self) -> None:
        """Ends a connection with an unread body so that the client still sees the answer.

        Closing at once would reset the connection under it.
        """
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        with suppress(Exception), gevent.Timeout(_DRAIN_SECONDS):
            size = 0
            while size < _DRAIN_BYTES and (part := self.connection.recv(_SMALL)):
                size += len(part)


class Watch:
    """Calls back, in the hub, when a client closes its connection while its answer is waited for."""

    __slots__ = ("_gone", "_socket", "_watcher")

    def __init__(self, client: Client, gone: Callable[[], None]) -> None:
        self._socket = client.connection
        self._gone = gone
        self._watcher = gevent.get_hub().loop.io(self._socket.fileno(), 1)

    def __enter__(self) -> Watch:
        self._watcher.start(self._readable)
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.stop()
        self._watcher.close()

    def _readable(self) -> None:
        if left(self._socket):
            self._gone()
        # What can be read may be the next request: then nothing more can be told from here.
        self._watcher.stop()


def left(connection: socket.socket) -> bool:
    """Whether the other end has closed, without taking anything from the connection."""
    try:
        with _socket(fileno=os.dup(connection.fileno())) as copy:
            data = copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    # Under TLS the end is announced by an alert, which is what is read here then.
    return not data or (data == _TLS_ALERT and hasattr(connection, "cipher"))


def end_of_requests(connection: socket.socket) -> None:
    """Lets gunicorn read the end of an idle connection, on which it would wait for a next request."""
    with suppress(OSError), _socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RD)


def _is_last(environ: dict[str, Any], old: bool) -> bool:
    """Whether the client will send no more requests on the connection."""
    header: str | None = environ.get("HTTP_CONNECTION")
    if header is None:
        return old
    options = {option.strip() for option in header.lower().split(",")}
    return "close" in options or (old and "keep-alive" not in options)


def _target(environ: dict[str, Any]) -> str:
    """The request target as sent, from its path on."""
    target: str = environ["RAW_URI"]
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target
