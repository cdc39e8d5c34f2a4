"""/auth/*: signing in and out, who one is, and the link by which an invited person sets a password."""

from __future__ import annotations

import time
from collections.abc import Callable

import gevent
import psycopg
from flask import Blueprint, Response, make_response, redirect, render_template, request

from queen import codec
from queen.log import Log
from queen.proxy.clusters import worst
from queen.proxy.console import passwords
from queen.proxy.console.passwords import Passwords
from queen.proxy.console.records import Records
from queen.proxy.console.throttle import Network, Throttle, client_address
from queen.proxy.console.visitors import Visitor, Visitors
from queen.proxy.console.web import check_origin, clear_cookie, safe_next, set_cookie
from queen.proxy.principals import Session
from queen.proxy.pxdb import Row, Unavailable
from queen.proxy.refusals import Refusal, rate_limited
from queen.proxy.settings import ProxySettings

log = Log("signin")

_WRONG = "Invalid email or password."
_STALE_LINK = "This link was used already, or is too old. Ask for a new one."
_SHORT_TOKEN_SECONDS = 900
# A wrong attempt takes at least so long, whatever was wrong with it.
_WRONG_SECONDS = 0.4

Page = str | Response


class SignIn:
    """The views below /auth."""

    def __init__(
        self,
        settings: ProxySettings,
        records: Records,
        words: Passwords,
        visitors: Visitors,
        trusted: list[Network],
    ) -> None:
        self._settings = settings
        self._records = records
        self._passwords = words
        self._visitors = visitors
        self._sessions = visitors.sessions
        self._trusted = trusted
        self._throttle = Throttle()

    def blueprint(self) -> Blueprint:
        """The routes."""
        routes: list[tuple[str, str, Callable[..., Page | tuple[Page, int]]]] = [
            ("GET", "/auth/login", self.form),
            ("POST", "/auth/login", self.sign_in),
            ("POST", "/auth/logout", self.sign_out),
            ("GET", "/auth/me", self.me),
            ("GET", "/auth/session-token", self.session_token),
            ("GET", "/auth/invite/<token>", self.invitation),
            ("POST", "/auth/invite/<token>", self.accept),
            ("GET", "/.well-known/jwks.json", self.jwks),
        ]
        blueprint = Blueprint("signin", __name__)
        for method, rule, view in routes:
            blueprint.add_url_rule(rule, view.__name__, view, methods=[method])
        for provider in ("google", "github"):
            for rule in (f"/auth/{provider}", f"/auth/{provider}/callback"):
                blueprint.add_url_rule(rule, rule.replace("/", "_"), _not_configured, methods=["GET"])
        return blueprint

    def form(self) -> Page:
        """The sign-in page; whoever has a session is sent on."""
        target = safe_next(request.args.get("next"))
        try:
            self._visitors.by_cookie(request.environ, document=True)
        except (Refusal, Unavailable):
            return render_template("login.html", next=target, error=None, email="")
        return _go(target)

    def sign_in(self) -> Page | tuple[Page, int]:
        started = time.monotonic()
        check_origin()
        self._count_attempt()
        email, password = request.form.get("email", ""), request.form.get("password", "")
        target = safe_next(request.form.get("next"))
        user = self._records.user_by_email(email)
        if not self._passwords.verify(password, user["password_hash"] if user else None) or user is None:
            gevent.sleep(max(0.0, _WRONG_SECONDS - (time.monotonic() - started)))
            log.info("sign-in refused", ip=self._address())
            return render_template("login.html", next=target, error=_WRONG, email=email), 401
        if self._passwords.outdated(user["password_hash"]):
            self._records.set_password(str(user["id"]), self._passwords.hash(password))
        response = _go(target)
        self._begin(response, user)
        return response

    def sign_out(self) -> Response:
        """Ends the cookie's session. Always well, whatever was presented."""
        check_origin()
        response = _go("/auth/login") if request.form.get("page") else _json({"ok": True})
        clear_cookie(response, self._settings)
        try:
            token = self._sessions.token(request.environ, document=True)
            if token is not None:
                self._sessions.end(self._sessions.session(token))
        except (Refusal, Unavailable, psycopg.Error) as error:
            log.info("sign-out without a session to end", reason=error)
        return response

    def me(self) -> Response:
        """Who the cookie stands for and what they can open: what a dashboard derives its buttons from."""
        return _json(self._describe(self._visitors.by_cookie(request.environ, document=True)))

    def session_token(self) -> Response:
        """A token for 15 minutes, for programs that can't send the cookie. It ends with the cookie's session."""
        visitor = self._visitors.by_cookie(request.environ)
        token = self._sessions.signer.mint(visitor.id, _SHORT_TOKEN_SECONDS, parent=visitor.session.jti)
        return _json({"token": token, "expires_in": _SHORT_TOKEN_SECONDS})

    def invitation(self, token: str) -> Page | tuple[Page, int]:
        """The page on which an invited person sets a password."""
        person = self._records.invited(token)
        status = 200 if person else 404
        error = None if person else _STALE_LINK
        return render_template("invite.html", person=person, token=token, error=error), status

    def accept(self, token: str) -> Page | tuple[Page, int]:
        check_origin()
        self._count_attempt()
        person = self._records.invited(token)
        if person is None:
            return render_template("invite.html", person=None, token=token, error=_STALE_LINK), 404
        password = request.form.get("password", "")
        fault = passwords.fault(password)
        if password != request.form.get("again", ""):
            fault = fault or "The two passwords differ."
        if fault:
            return render_template("invite.html", person=person, token=token, error=fault), 400
        user = self._records.accept(token, self._passwords.hash(password))
        if user is None:  # somebody was faster
            return render_template("invite.html", person=None, token=token, error=_STALE_LINK), 404
        response = _go("/console")
        self._begin(response, user)
        return response

    def jwks(self) -> Response:
        return _json(self._sessions.signer.jwks())

    def _begin(self, response: Response, user: Row) -> None:
        user_id = str(user["id"])
        set_cookie(response, self._settings, self._sessions.signer.mint(user_id, self._settings.jwt_ttl_s))
        self._records.record(str(user["tenant_id"]), None, user_id, "login", user["email"])

    def _describe(self, visitor: Visitor) -> dict[str, object]:
        session = visitor.session
        clusters = self._visitors.clusters(visitor)
        here = self._visitors.here()
        opened = next((row for row in clusters if here and str(row["id"]) == here.id), None)
        return {
            "user_id": visitor.id,
            "email": visitor.user["email"],
            "tenant_slug": visitor.user["tenant_slug"],
            "is_operator": visitor.user["is_operator"],
            "operator_enabled": self._settings.operator_enabled,
            "operator_live": visitor.operator,
            "acting_cluster": {"id": str(opened["id"]), "slug": opened["slug"]} if opened else None,
            "clusters": [
                {
                    "id": str(row["id"]),
                    "slug": row["slug"],
                    "role": row["role"],
                    "tenant_slug": row["tenant_slug"],
                    "tenant_id": str(row["tenant_id"]),
                    "status": worst(row["tenant_status"], row["status"]),
                    "cell_slug": row["cell_slug"],
                }
                for row in clusters
            ],
            "act_cluster_header": "x-queen-act-cluster",
            "role": _placeholder(session),
            "cluster": session.cluster,
        }

    def _count_attempt(self) -> None:
        if seconds := self._throttle.wait(self._address()):
            log.sampled(10, "too many login attempts", ip=self._address())
            raise rate_limited("too many login attempts", seconds)

    def _address(self) -> str:
        return client_address(request.environ, self._trusted)


def _placeholder(session: Session) -> str:
    """The role in the token, which says nothing unless the token names a cluster."""
    return session.role or "viewer"


def _not_configured() -> Response:
    raise Refusal(404, "not_configured", "this way to sign in is not configured")


def _go(target: str) -> Response:
    return make_response(redirect(target, 303))


def _json(value: object) -> Response:
    return Response(codec.dumps(value), content_type="application/json")
