"""Who is looking at a page or calling the console's API, and what they may do on which cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flask import request

from queen.proxy.clusters import Cluster
from queen.proxy.console.records import Records
from queen.proxy.console.sessions import Sessions
from queen.proxy.console.web import form_token
from queen.proxy.identity import Identity, bearer
from queen.proxy.principals import Session
from queen.proxy.pxdb import Row
from queen.proxy.refusals import Refusal, cluster_suspended, forbidden, unauthorized


class SignInFirst(Exception):
    """A page was asked for without a live session."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person with a live session. ``user`` is their row, ``token`` what their forms must carry."""

    session: Session
    user: Row
    operator: bool
    token: str

    @property
    def id(self) -> str:
        return self.session.user_id


@dataclass(frozen=True, slots=True)
class Seat:
    """A visitor on a cluster, with their role there; ``acting``: only as an operator."""

    visitor: Visitor
    cluster: Cluster
    role: str
    acting: bool

    @property
    def admin(self) -> bool:
        return self.role == "admin"

    def require_admin(self) -> None:
        """Raises `Refusal` 403 for everybody else."""
        if not self.admin:
            raise forbidden("admin role required")


class Visitors:
    """Recognises the people behind requests. Everything may raise `Unavailable`."""

    def __init__(self, sessions: Sessions, records: Records, identity: Identity) -> None:
        self.sessions = sessions
        self._records = records
        self._identity = identity

    def by_cookie(self, environ: dict[str, Any], document: bool = False) -> Visitor:
        """The visitor of the cookie; raises `Refusal` 401, whose text tells what is wrong with it."""
        token = self.sessions.token(environ, document)
        if token is None:
            raise unauthorized("no session")
        try:
            session = self.sessions.session(token)
        except Refusal as error:
            if error.text == "invalid credential":
                raise unauthorized("invalid session") from error
            raise
        return self._visitor(session, token)

    def of_page(self) -> Visitor:
        """The visitor of a page; raises `SignInFirst`."""
        try:
            return self.by_cookie(request.environ, document=True)
        except Refusal as error:
            raise SignInFirst from error

    def of_api(self) -> Seat:
        """Who calls the console's API, on the cluster of the host; raises `Refusal` 401 or 403."""
        environ = request.environ
        credential = bearer(environ.get("HTTP_AUTHORIZATION", "")) or self.sessions.token(environ)
        if not credential:
            raise unauthorized("missing bearer credential")
        if credential.startswith("qk_"):
            raise forbidden("api keys cannot access the console (human session required)")
        visitor = self._visitor(self.sessions.session(credential), credential)
        cluster = self._identity.cluster_of(environ.get("HTTP_HOST", ""))
        if cluster is None:
            # Like a missing credential, so that nobody learns which clusters there are.
            raise Refusal(401, "cluster_unknown", "unknown cluster")
        seat = self._seat(visitor, cluster)
        if seat is None:
            raise forbidden("no role on this cluster")
        if cluster.closed:
            raise cluster_suspended()
        return seat

    def on_page(self, slug: str) -> Seat:
        """The visitor of a cluster's page; raises `SignInFirst`, or a `Refusal` 403 that tells nothing."""
        visitor = self.of_page()
        cluster = self._identity.resolve(slug)
        seat = self._seat(visitor, cluster) if cluster else None
        if seat is None:
            raise forbidden("There is no such cluster, or you have no role on it.")
        return seat

    def here(self) -> Cluster | None:
        """The cluster that the request's host names."""
        return self._identity.cluster_of(request.environ.get("HTTP_HOST", ""))

    def clusters(self, visitor: Visitor) -> list[Row]:
        """What a visitor can open, with the role on each."""
        return self._records.all_clusters() if visitor.operator else self._records.clusters_of(visitor.id)

    def _visitor(self, session: Session, token: str) -> Visitor:
        user = self._records.user(session.user_id)
        if user is None:
            raise unauthorized("session no longer valid")
        operator = self.sessions.operator(session)
        return Visitor(session, user, operator, form_token(token))

    def _seat(self, visitor: Visitor, cluster: Cluster) -> Seat | None:
        session = visitor.session
        if session.cluster is not None and session.cluster not in (cluster.id, cluster.slug):
            raise forbidden("token not valid for this cluster")
        role = session.role if session.cluster else self.sessions.role(session, cluster)
        if visitor.operator:
            return Seat(visitor, cluster, "admin", acting=role is None)
        return Seat(visitor, cluster, role, acting=False) if role else None
