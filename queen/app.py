"""The Flask application: blueprints, error shapes, and routing on the raw request target.

Two things differ from stock Flask. Paths are matched as they were sent and decoded segment by segment
afterwards, so ``a%2Fb`` is one queue name; and views marked `queen.api.http.direct` are called with a
thin request, without Flask's contexts, which cost more than such a view itself.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast
from urllib.parse import quote

import gevent
from flask import Flask
from gunicorn.workers.base_async import ALREADY_HANDLED
from werkzeug.exceptions import MethodNotAllowed, NotFound
from werkzeug.routing import RequestRedirect

from queen import codec
from queen.api import blueprints
from queen.api.answers import Answer, Refusal
from queen.api.http import Environ, Host, decode_segment
from queen.auth.denied import Denied
from queen.auth.levels import Demand, demand_of_nothing, demand_of_route
from queen.engine.waiting import ClientGone
from queen.log import Log

StartResponse = Callable[..., Any]
Match = tuple[Callable[..., Any] | None, tuple[str, ...], Answer | None, Demand]

NOT_FOUND = Answer(404, b'{"error":"Not Found","code":"no_such_route"}')
NO_PAGE = Answer(404, b"Not Found", content_type="text/plain; charset=utf-8")
# What gunicorn takes as: the application has written the response itself.
HANDLED = cast(Iterable[bytes], ALREADY_HANDLED)
_DRAIN_BYTES = 1 << 20
_DRAIN_SECONDS = 1.0

log = Log("http")


class Broker(Flask):
    """The WSGI application of one worker."""

    def __init__(self, host: Host) -> None:
        super().__init__("queen", static_folder=None)
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        self.url_map.merge_slashes = False
        self.host = host
        self.match = lru_cache(maxsize=16384)(self._match)
        self._access_log = logging.getLogger("gunicorn.access")
        for blueprint in blueprints():
            self.register_blueprint(blueprint)
        for rule in self.url_map.iter_rules():
            if getattr(self.view_functions[rule.endpoint], "no_head", False) and rule.methods:
                rule.methods.discard("HEAD")
        self._adapter = self.url_map.bind("")

    def wsgi_app(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method: str = environ["REQUEST_METHOD"]
        path, _, query = _target(environ).partition("?")
        client: socket.socket | None = environ.get("gunicorn.socket")
        if client is not None:
            self.host.idle.pop(client.fileno(), None)
        answer: Answer
        unread = False
        try:
            view, arguments, refusal, demand = self.match(method, path)
            caller = self.host.admit(environ, path, demand) if self.host.guarded else None
            if refusal is not None:
                answer = refusal
            elif view is None:
                return super().wsgi_app(environ, start_response)
            else:
                answer = view(self.host.request(environ, query, caller), *arguments)
        except Refusal as error:
            answer = error.answer()
            unread = error.unread
        except Denied as error:
            answer = Answer(error.status, codec.dumps({"error": error.message}))
            unread = bool(environ.get("CONTENT_LENGTH", "0").strip("0")) or "HTTP_TRANSFER_ENCODING" in environ
        except ClientGone:
            return _hang_up()
        except Exception:
            # The answer tells nothing of the statement or of secrets: those are in the log.
            log.exception("request failed", method=method, path=path[:200])
            answer = Answer(500, b'{"error":"internal error"}')
        return self._send(environ, start_response, client, answer, unread)

    def _match(self, method: str, path: str) -> Match:
        """The direct view of a route with its decoded path segments, or the answer that refuses it, and what the
        route asks of callers. A route without direct view has neither view nor answer.
        """
        try:
            if not path.startswith("/") or path.startswith("//"):
                raise NotFound  # the adapter would read it as if it had one slash
            rule, arguments = self._adapter.match(path, method=method, return_rule=True)
        except MethodNotAllowed as error:
            allowed = ", ".join(sorted(error.valid_methods or ()))
            return None, (), Answer(405, headers=(("Allow", allowed),)), demand_of_nothing(path)
        except (NotFound, RequestRedirect):
            page = method in ("GET", "HEAD") and not path.startswith(("/api/", "/auth/"))
            return None, (), NO_PAGE if page and path not in ("/api", "/auth") else NOT_FOUND, demand_of_nothing(path)
        demand = demand_of_route(method, rule.rule)
        view = self.view_functions[rule.endpoint]
        if not getattr(view, "direct", False):
            return None, (), None, demand
        try:
            return view, tuple(decode_segment(text) for text in arguments.values()), None, demand
        except Refusal as error:
            return None, (), error.answer(), demand

    def _send(
        self,
        environ: Environ,
        start_response: StartResponse,
        client: socket.socket | None,
        answer: Answer,
        unread: bool,
    ) -> Iterable[bytes]:
        """Writes an answer in one system call where gunicorn lets the application do so.

        gunicorn's own response writing checks every header by regular expression and sends head and
        body apart; doing without it saves a tenth of a small request's cost. With an access log
        configured the stock way is taken, since only that way writes to it. ``unread`` tells that the
        request's body was left on the connection, which then ends.
        """
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" or answer.status == 204 else answer.body
        if client is None or self._access_log.handlers:
            headers = list(answer.headers)
            if answer.status != 204:
                headers += [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
            start_response(answer.status_line, headers)
            if client is not None:
                self.host.idle[client.fileno()] = client
            return LastAnswer(body, environ, client) if unread and client is not None else [body]
        close = unread or self.host.stopping or _is_last(environ)
        _write(client, _head(environ, answer, close) + body)
        if unread:
            _drain(environ, client)
        if close:
            return _hang_up()
        self.host.idle[client.fileno()] = client
        return HANDLED


def _write(client: socket.socket, response: bytes) -> None:
    """Sends a response. gevent's `sendall` asks the kernel for the buffer's size first, each time."""
    sent = client.send(response)
    if sent < len(response):
        client.sendall(memoryview(response)[sent:])


def _hang_up() -> Iterable[bytes]:
    """Has gunicorn close the connection, whatever else the client sent on it."""
    raise StopIteration


def _is_last(environ: Environ) -> bool:
    """Whether the client will send no more requests on the connection."""
    old: bool = environ["SERVER_PROTOCOL"] == "HTTP/1.0"
    header: str | None = environ.get("HTTP_CONNECTION")
    if header is None:
        return old
    options = {option.strip() for option in header.lower().split(",")}
    return "close" in options or (old and "keep-alive" not in options)


def _head(environ: Environ, answer: Answer, close: bool) -> bytes:
    lines = f"HTTP/1.1 {answer.status_line}\r\nServer: queen\r\n"
    if close:
        lines += "Connection: close\r\n"
    elif environ["SERVER_PROTOCOL"] == "HTTP/1.0":
        lines += "Connection: keep-alive\r\n"
    for name, value in answer.headers:
        lines += f"{name}: {value}\r\n"
    if answer.status != 204:
        lines += f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
    return f"{lines}\r\n".encode("latin-1")


class LastAnswer:
    """The body of a response written by gunicorn, which closes the connection after it."""

    def __init__(self, body: bytes, environ: Environ, client: socket.socket) -> None:
        self._body = body
        self._environ = environ
        self._client = client

    def __iter__(self) -> Iterator[bytes]:
        return iter((self._body,))

    def close(self) -> None:
        _drain(self._environ, self._client)
        _hang_up()


def _drain(environ: Environ, client: socket.socket) -> None:
    """Ends a connection, reading a little of the unread body first so that the client sees the answer.

    Closing at once would reset the connection under the answer; reading on without bound is what
    gunicorn would do.
    """
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
    with suppress(Exception), gevent.Timeout(_DRAIN_SECONDS, False):  # type: ignore[arg-type]
        left = _DRAIN_BYTES
        while left > 0 and (part := environ["wsgi.input"].read(min(left, 65536))):
            left -= len(part)
    with suppress(OSError):
        client.shutdown(socket.SHUT_RD)


def _target(environ: Environ) -> str:
    """The request target as sent, from its path on: gunicorn keeps it; elsewhere it is put together."""
    target: str = environ.get("RAW_URI") or ""
    if not target:
        path = quote(environ.get("PATH_INFO", "").encode("latin-1"), safe="/:@!$&'()*+,;=~")
        target = f"{path}?{environ.get('QUERY_STRING', '')}"
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target


def create_app(host: Host) -> Broker:
    """The application over a host whose engine runs, or will once the worker started it."""
    return Broker(host)
