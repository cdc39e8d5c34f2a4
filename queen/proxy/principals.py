"""Who sends a request, and what they may do.

A program shows an API key of one cluster; a person shows a session, whose right on a cluster is a role there.
What is behind a session (signing, sign-in, the deny-list) is `People`'s, which the room of the people
implements and the gateway only asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from queen.proxy.clusters import Cluster
from queen.proxy.refusals import unauthorized
from queen.proxy.routes import Class, Route

SCOPES = frozenset({"produce", "consume", "admin", "read"})
ROLES = frozenset({"admin", "producer", "consumer", "viewer"})

_SCOPES_OF = {
    Class.PRODUCE: frozenset({"produce"}),
    Class.CONSUME: frozenset({"consume"}),
    Class.QUEUE_ADMIN: frozenset({"admin"}),
    Class.READ: frozenset({"read", "admin"}),
}
_ROLES_OF = {
    Class.PRODUCE: frozenset({"admin", "producer"}),
    Class.CONSUME: frozenset({"admin", "consumer"}),
    Class.QUEUE_ADMIN: frozenset({"admin"}),
    Class.READ: ROLES,
}
_WRITING = frozenset({"produce", "consume"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that lives: the cluster it belongs to for good, and its scopes."""

    id: str
    cluster: Cluster
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Session:
    """A person's session whose token was verified. ``cluster`` and ``role`` only from a token that names them."""

    user_id: str
    jti: str
    expires_at: int
    cluster: str | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request acts as on its cluster: a key with scopes, or a person with a role."""

    scopes: frozenset[str] | None = None
    role: str | None = None
    operator: bool = False

    def may(self, route: Route) -> bool:
        """Whether the request's class is open to them; operators' routes and blocked ones are not asked here."""
        if self.scopes is not None:
            if route.of is Class.GATED:
                return bool(self.scopes & (SCOPES if route.kind == "read" else _WRITING))
            return bool(self.scopes & _SCOPES_OF.get(route.of, frozenset()))
        if route.of is Class.OPERATOR:
            return self.operator
        if route.of is Class.GATED:
            return self.role in ROLES and (route.kind == "read" or self.role != "viewer")
        return self.role in _ROLES_OF.get(route.of, frozenset())


class People(Protocol):
    """What the gateway asks about sessions."""

    def session(self, token: str) -> Session:
        """The session of a token; raises `Refusal` 401 for a bad, expired or revoked one."""

    def role(self, session: Session, cluster: Cluster) -> str | None:
        """The person's role on a cluster, None without one; raises `Refusal` 401 when the person is gone."""

    def operator(self, session: Session) -> bool:
        """Whether the person is an operator, and operators are let in on this cell."""

    def token(self, environ: dict[str, Any], document: bool = False) -> str | None:
        """The session token in the cookie, if the request may use it.

        A browser's navigation carries no credential on the API's paths; on a page (``document``) it does.
        """


class Nobody:
    """Where nobody can sign in, such as without a database: every session is refused."""

    def session(self, token: str) -> Session:
        raise unauthorized("invalid credential")

    def role(self, session: Session, cluster: Cluster) -> str | None:
        return None

    def operator(self, session: Session) -> bool:
        return False

    def token(self, environ: dict[str, Any], document: bool = False) -> str | None:
        return None
