"""Puts the people's room into the proxy's application: sessions for the gateway, and the views for browsers."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from flask import Flask, Response, request, send_from_directory
from werkzeug.exceptions import HTTPException

from queen.log import Log
from queen.proxy.console import pages, words
from queen.proxy.console.api import ConsoleApi, PushBlock
from queen.proxy.console.operators import Operators
from queen.proxy.console.pages import Pages
from queen.proxy.console.passwords import Passwords
from queen.proxy.console.records import Records
from queen.proxy.console.sessions import Sessions
from queen.proxy.console.signin import SignIn
from queen.proxy.console.throttle import networks
from queen.proxy.console.tokens import Signer
from queen.proxy.console.visitors import SignInFirst, Visitors
from queen.proxy.console.web import protect
from queen.proxy.gateway import Gateway
from queen.proxy.identity import Identity
from queen.proxy.pxdb import Pxdb, Unavailable
from queen.proxy.refusals import Refusal, bad_gateway
from queen.proxy.settings import ProxySettings
from queen.settings import SettingsError

boot_log = Log("boot")
log = Log("console")

_STATIC = Path(__file__).with_name("static")
_MOST_BODY = 1 << 18
_JSON = ("/api/", "/auth/me", "/auth/session-token", "/auth/logout", "/auth/google", "/auth/github", "/.well-known/")


def install(
    app: Flask, settings: ProxySettings, pxdb: Pxdb, identity: Identity, gateway: Gateway, push_block: PushBlock
) -> None:
    """Adds the views to the application and the sessions to the identity.

    Raises `SettingsError` for a key that can't sign. Opens nothing.
    """
    try:
        trusted = networks(settings.trusted_proxies)
    except ValueError as error:
        raise SettingsError(f'QUEEN_PROXY_TRUSTED_PROXIES="{settings.trusted_proxies}": {error}') from error
    signer = Signer(settings)
    boot_log.info("jwt identity", mode=signer.mode)
    if signer.mode == "no-identity":
        boot_log.warning("no JWT key: nobody can sign in, only API keys are served (set QUEEN_PROXY_JWT_SECRET)")
    sessions = Sessions(settings, pxdb, signer)
    identity.people = sessions
    records = Records(pxdb)
    words_ = Passwords(pxdb)
    visitors = Visitors(sessions, records, identity)
    app.register_blueprint(SignIn(settings, records, words_, visitors, trusted).blueprint())
    app.register_blueprint(ConsoleApi(records, visitors, push_block).blueprint())
    app.register_blueprint(Pages(records, visitors, words_, gateway, push_block).blueprint())
    app.register_blueprint(Operators(records, visitors).blueprint())
    app.add_url_rule("/console/static/<path:name>", "console_static", _static)
    app.register_error_handler(SignInFirst, lambda _: pages.sign_in_first())
    app.register_error_handler(Refusal, _refusal)
    app.register_error_handler(Unavailable, _unavailable)
    app.register_error_handler(Exception, _fault)
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BODY
    app.after_request(protect)
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.globals["asset"] = _asset
    for function in (words.number, words.size, words.span, words.limit, words.moment):
        app.jinja_env.filters[function.__name__] = function


def close(app: Flask) -> None:
    """Answers the room's addresses where there is no database, and so nobody to sign in."""

    def closed(path: str = "") -> Response:
        raise Refusal(503, "not_configured", "there are no sessions without PXDB_HOST")

    for rule in ("/auth/<path:path>", "/api/console/<path:path>", "/console", "/console/<path:path>", "/"):
        app.add_url_rule(rule, f"closed_{rule}", closed, methods=["GET", "POST", "DELETE"])


def _static(name: str) -> Response:
    response = send_from_directory(_STATIC, name)
    # The address changes with the content.
    response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    return response


@cache
def _asset(name: str) -> str:
    """The address of a file, which tells one version of it from the next."""
    digest = hashlib.sha256((_STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/console/static/{name}?{digest}"


def _wants_json() -> bool:
    return request.path.startswith(_JSON)


def _refusal(error: Refusal) -> Response | tuple[str, int]:
    if _wants_json() or error.status == 429:
        response = Response(error.body, error.status, content_type="application/json")
        if error.retry_after is not None:
            response.headers["Retry-After"] = str(error.retry_after)
        return response
    return pages.error_page(error.status, error.text)


def _fault(error: Exception) -> Response | HTTPException | tuple[str, int]:
    """What nobody foresaw: in the log with all there is to know, in the answer with nothing."""
    if isinstance(error, HTTPException):
        return error
    log.exception("request failed", method=request.method, path=request.path[:200])
    return _refusal(Refusal(500, "internal", "internal error"))


def _unavailable(error: Unavailable) -> Response | tuple[str, int]:
    log.sampled(10, "console: pxdb is away", error=error)
    return _refusal(bad_gateway("the proxy's database gives no answer")) if _wants_json() else pages.away(error)
