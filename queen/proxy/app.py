"""Which path goes where: the proxy's own endpoints, the gateway, or the pages behind the sign-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flask import Flask, Response

from queen.log import Log
from queen.proxy.client import Client
from queen.proxy.console import room
from queen.proxy.refusals import Refusal, route_blocked
from queen.proxy.runtime import Runtime

StartResponse = Callable[..., Any]

_OWN = ("/.well-known/jwks.json", "/auth/", "/api/console/", "/console")
_PIPELINE = ("/api/", "/streams/", "/internal/")
_PIPELINE_EXACT = frozenset({"/api", "/health", "/status", "/metrics", "/metrics/prometheus"})

log = Log("http")


class Proxy(Flask):
    """The WSGI application. What is neither the gateway's nor /healthz is served by Flask's views."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__("queen.proxy", static_folder=None)
        self.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
        self.url_map.merge_slashes = False
        self.runtime = runtime
        self.before_request(runtime.wait_ready)
        self.register_error_handler(Refusal, answer)
        self.register_error_handler(404, lambda _: answer(route_blocked()))
        self.register_error_handler(405, lambda _: answer(route_blocked()))
        if runtime.pxdb is None:
            room.close(self)
        else:
            room.install(
                self, runtime.settings, runtime.pxdb, runtime.identity, runtime.gateway, runtime.gateway.blocks.quota
            )

    def wsgi_app(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        client = Client(environ, self.runtime)
        path = client.path
        if path == "/healthz":
            return client.guard(lambda: client.answer(*self.runtime.health()))
        if not path.startswith(_OWN) and (path.startswith(_PIPELINE) or path in _PIPELINE_EXACT):
            return client.guard(lambda: self.runtime.gateway.serve(client))
        return super().wsgi_app(environ, start_response)


def answer(error: Refusal) -> Response:
    """A refusal as an answer of Flask's views."""
    response = Response(error.body, error.status, content_type="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response
