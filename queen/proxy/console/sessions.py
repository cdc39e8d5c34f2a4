"""Sessions of people: whose a token is, whether it was ended, and what the person may do on a cluster.

This is what the gateway asks of people (`queen.proxy.principals.People`). Answers are kept in memory for a
while, and for longer while the database is away.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from werkzeug.http import parse_cookie

from queen.log import Log
from queen.proxy.clusters import Cluster
from queen.proxy.console.tokens import Signer
from queen.proxy.principals import Session
from queen.proxy.pxdb import Pxdb, Unavailable
from queen.proxy.refusals import unauthorized
from queen.proxy.settings import ProxySettings

log = Log("sessions")

_ROLE_SECONDS = 30.0
_DENIED_SECONDS = 60.0
_MOST = 50_000

_REVOKED = "SELECT 1 FROM queen_proxy.revoked_tokens WHERE jti = %s"
_ROLE = """SELECT u.is_operator, r.role FROM queen_proxy.users u
    LEFT JOIN queen_proxy.cluster_roles r ON r.user_id = u.id AND r.cluster_id = %s WHERE u.id = %s"""
_OPERATOR = "SELECT is_operator FROM queen_proxy.users WHERE id = %s"
_END = "SELECT queen_proxy.revoke_session(%s, to_timestamp(%s), 'user', %s)"


@dataclass(slots=True)
class _Entry:
    value: Any
    until: float


class _Memory:
    """Answers of the database for a time, the oldest of too many forgotten."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, grace: float = 0.0) -> Any:
        """The answer, None when there is none that is at most ``grace`` too old."""
        entry = self._entries.get(key)
        return None if entry is None or time.monotonic() > entry.until + grace else entry.value

    def put(self, key: Hashable, value: Any) -> None:
        self._entries.pop(key, None)
        self._entries[key] = _Entry(value, time.monotonic() + self._seconds)
        while len(self._entries) > _MOST:
            self._entries.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        self._entries.pop(key, None)


class Sessions:
    """Verifies, ends and judges sessions. Implements `People`."""

    def __init__(self, settings: ProxySettings, pxdb: Pxdb, signer: Signer) -> None:
        self._settings = settings
        self._pxdb = pxdb
        self._grace = settings.stale_grace_ms / 1000
        self.signer = signer
        self._denied = _Memory(_DENIED_SECONDS)
        self._roles = _Memory(_ROLE_SECONDS)
        self._operators = _Memory(_ROLE_SECONDS)

    def session(self, token: str) -> Session:
        """The session of a token; raises `Refusal` 401 for a bad, expired or ended one."""
        claims = self.signer.verify(token)
        # A token made from a cookie ends with it.
        if self._is_denied(claims.jti) or (claims.parent and self._is_denied(claims.parent)):
            raise unauthorized("session no longer valid")
        # The role of a cookie's token is a placeholder: only one that names a cluster is trusted with it.
        role = claims.role if claims.cluster else None
        return Session(claims.user_id, claims.jti, claims.expires_at, claims.cluster, role)

    def role(self, session: Session, cluster: Cluster) -> str | None:
        """The person's role on a cluster, None without one; raises `Refusal` 401 when the person is gone.

        Raises `Unavailable` when neither database nor memory knows.
        """
        key = (session.user_id, cluster.id)
        known: str | None = self._roles.get(key)
        if known is not None:
            return known
        try:
            row = self._pxdb.row(_ROLE, (uuid.UUID(cluster.id), uuid.UUID(session.user_id)))
        except Unavailable:
            if (stale := self._roles.get(key, self._grace)) is None:
                raise
            return str(stale)
        if row is None:
            raise unauthorized("session no longer valid")
        if row["role"] is None:
            self._roles.drop(key)
            return None
        self._roles.put(key, row["role"])
        return str(row["role"])

    def operator(self, session: Session) -> bool:
        """Whether the person is an operator, and operators are let in on this cell; raises `Unavailable`."""
        if not self._settings.operator_enabled:
            return False
        known: bool | None = self._operators.get(session.user_id)
        if known is not None:
            return known
        try:
            row = self._pxdb.row(_OPERATOR, (uuid.UUID(session.user_id),))
        except Unavailable:
            if (stale := self._operators.get(session.user_id, self._grace)) is None:
                raise
            return bool(stale)
        operator = bool(row and row["is_operator"])
        self._operators.put(session.user_id, operator)
        return operator

    def token(self, environ: dict[str, Any], document: bool = False) -> str | None:
        """The session token in the cookie, if the request may use it.

        A browser's navigation carries no credential on the API's paths; on a page (``document``) it does. That
        closes the one cross-site request that a cookie of SameSite=Lax goes along with.
        """
        if not document and str(environ.get("HTTP_SEC_FETCH_MODE", "")).strip().lower() == "navigate":
            return None
        try:
            value = parse_cookie(environ).get(self._settings.cookie_name, "").strip()
        except UnicodeDecodeError:  # no cookie of ours
            return None
        return value if value and not value.startswith("qk_") else None

    def end(self, session: Session) -> None:
        """Ends a session, here at once and elsewhere within a minute; raises `Unavailable`."""
        self._denied.put(session.jti, True)
        self._pxdb.execute(_END, (session.jti, session.expires_at, uuid.UUID(session.user_id)))
        log.info("session revoked on logout", user=session.user_id)

    def forget_role(self, user_id: str, cluster: Cluster) -> None:
        """Has the next request read a role that was changed just now."""
        self._roles.drop((user_id, cluster.id))

    def _is_denied(self, jti: str) -> bool:
        known: bool | None = self._denied.get(jti)
        if known is not None:
            return known
        try:
            denied = self._pxdb.row(_REVOKED, (jti,)) is not None
        except Unavailable as error:
            log.sampled(30, "the deny-list can't be read", strict=self._settings.revocation_strict, error=error)
            return self._settings.revocation_strict
        self._denied.put(jti, denied)
        return denied
