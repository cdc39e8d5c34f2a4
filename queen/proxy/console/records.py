"""What the console reads and writes in the proxy's database: users, roles, keys, usage, cells.

Every change goes through the functions that operators call, and leaves an audit row that names the person.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import psycopg
from psycopg.types.json import Jsonb

from queen.proxy.clusters import Cluster
from queen.proxy.principals import ROLES, SCOPES
from queen.proxy.pxdb import Pxdb, Row
from queen.proxy.refusals import Refusal

INVITATION_HOURS = 24

_OPS = "op_class IN ('push', 'txn')"
T = TypeVar("T")
Connection = psycopg.Connection[Row]


def invalid(text: str) -> Refusal:
    return Refusal(400, "invalid_request", text)


def not_found(text: str) -> Refusal:
    return Refusal(404, "not_found", text)


class Records:
    """Reads and writes for the console. Everything raises `Unavailable` while the database is away."""

    def __init__(self, pxdb: Pxdb) -> None:
        self._pxdb = pxdb

    # People.

    def user(self, user_id: str) -> Row | None:
        """A user with the tenant's slug and name."""
        return self._pxdb.row(f"{_USER} WHERE u.id = %s", (uuid.UUID(user_id),))

    def user_by_email(self, email: str) -> Row | None:
        return self._pxdb.row(f"{_USER} WHERE u.email = %s", (_storable(email.strip().lower()),))

    def set_password(self, user_id: str, kept: str) -> None:
        self._pxdb.execute("UPDATE queen_proxy.users SET password_hash = %s WHERE id = %s", (kept, uuid.UUID(user_id)))

    def record(self, tenant_id: str, cluster_id: str | None, user_id: str, action: str, target: str) -> None:
        """Leaves an audit row of what a person did."""
        self._change(lambda connection: _record(connection, tenant_id, cluster_id, user_id, action, target))

    def clusters_of(self, user_id: str) -> list[Row]:
        """The clusters a person has a role on, with the role."""
        return self._pxdb.rows(
            f"{_CLUSTER} JOIN queen_proxy.cluster_roles r ON r.cluster_id = c.id WHERE r.user_id = %s ORDER BY c.slug",
            (uuid.UUID(user_id),),
        )

    def all_clusters(self) -> list[Row]:
        """Every cluster, with the role an operator has: admin."""
        return self._pxdb.rows(f"{_CLUSTER} CROSS JOIN (VALUES ('admin')) AS r(role) ORDER BY c.slug")

    # Keys.

    def keys(self, cluster: Cluster) -> list[Row]:
        """The keys of a cluster, newest first, with who made them."""
        return self._pxdb.rows(
            """SELECT k.id, k.name, k.scopes, k.created_at, k.last_used_at, k.revoked_at, u.email AS created_by
                 FROM queen_proxy.api_keys k LEFT JOIN queen_proxy.users u ON u.id = k.created_by
                WHERE k.cluster_id = %s ORDER BY k.created_at DESC, k.id""",
            (uuid.UUID(cluster.id),),
        )

    def make_key(self, cluster: Cluster, user_id: str, name: Any, scopes: Any) -> tuple[str, str]:
        """Makes a key; returns its id and its plaintext, which is kept nowhere. Raises `Refusal` 400."""
        name = name.strip() if isinstance(name, str) else ""
        if not 1 <= len(name) <= 100 or not name.isprintable():
            raise invalid("name must be a text of 1 to 100 characters")
        if not isinstance(scopes, list) or not scopes or not all(isinstance(scope, str) for scope in scopes):
            raise invalid(f"scopes must be a list of at least one of {', '.join(sorted(SCOPES))}")
        if unknown := sorted(set(scopes) - SCOPES):
            raise invalid(f'unknown scope "{unknown[0]}" (expected {", ".join(sorted(SCOPES))})')
        key = "qk_live_" + base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
        digest = hashlib.sha256(key.encode()).hexdigest()

        def make(connection: Connection) -> str:
            row = connection.execute(
                "SELECT queen_proxy.issue_api_key(%s, %s, %s, %s) AS id",
                (uuid.UUID(cluster.id), name, digest, sorted(set(scopes))),
            ).fetchone()
            assert row
            connection.execute(
                "UPDATE queen_proxy.api_keys SET created_by = %s WHERE id = %s", (uuid.UUID(user_id), row["id"])
            )
            _record(connection, cluster.tenant_id, cluster.id, user_id, "console_api_key_issued", str(row["id"]))
            return str(row["id"])

        return self._change(make), key

    def revoke_key(self, cluster: Cluster, user_id: str, key_id: str) -> None:
        """Ends a key of this cluster; raises `Refusal` 400 for no id and 404 for no live key of it here."""
        try:
            identifier = uuid.UUID(key_id)
        except ValueError:
            raise invalid("the key id must be a UUID") from None

        def revoke(connection: Connection) -> None:
            # The function looks keys up by id alone: whose it is, is asked here.
            found = connection.execute(
                """SELECT 1 FROM queen_proxy.api_keys
                    WHERE id = %s AND cluster_id = %s AND revoked_at IS NULL FOR UPDATE""",
                (identifier, uuid.UUID(cluster.id)),
            ).fetchone()
            if not found:
                raise not_found("no such active api key on this cluster")
            connection.execute("SELECT queen_proxy.revoke_api_key(%s)", (identifier,))
            _record(connection, cluster.tenant_id, cluster.id, user_id, "console_api_key_revoked", key_id)

        self._change(revoke)

    # Members.

    def members(self, cluster: Cluster) -> list[Row]:
        """The people with a role on a cluster; ``can_sign_in`` is false until an invited one set a password."""
        return self._pxdb.rows(
            """SELECT u.id AS user_id, u.email, r.role, r.created_at AS granted_at,
                      u.password_hash IS NOT NULL
                      OR EXISTS (SELECT 1 FROM queen_proxy.identities i WHERE i.user_id = u.id) AS can_sign_in
                 FROM queen_proxy.cluster_roles r JOIN queen_proxy.users u ON u.id = r.user_id
                WHERE r.cluster_id = %s ORDER BY u.email""",
            (uuid.UUID(cluster.id),),
        )

    def grant(self, cluster: Cluster, actor_id: str, email: Any, role: Any) -> Row:
        """Gives somebody of the tenant a role; returns user_id, email and role.

        Raises `Refusal` 404 for an address without a user in this tenant, 400 for the last admin's demotion.
        """
        return self._change(lambda connection: _grant(connection, cluster, actor_id, email, role))

    def invite(self, cluster: Cluster, actor_id: str, email: str, role: str) -> tuple[Row, str | None]:
        """Gives a role, to a new user if need be; returns who, and the token of a link to set a password with.

        The token is None when the person can sign in already. Raises `Refusal` 400.
        """

        def invite(connection: Connection) -> tuple[Row, str | None]:
            address = _email(email)
            found = connection.execute(
                "SELECT id, tenant_id, password_hash FROM queen_proxy.users WHERE email = %s", (address,)
            ).fetchone()
            if found is None:
                connection.execute(
                    "SELECT queen_proxy.create_user(%s, %s, NULL, 'local')", (uuid.UUID(cluster.tenant_id), address)
                )
            elif str(found["tenant_id"]) != cluster.tenant_id:
                raise invalid(f"{address} can't be invited here: the address belongs to another organisation")
            member = _grant(connection, cluster, actor_id, address, role)
            if found and found["password_hash"]:
                return member, None
            token = secrets.token_urlsafe(32)
            # A new link takes the place of an older one.
            connection.execute("DELETE FROM queen_proxy.invitations WHERE user_id = %s", (member["user_id"],))
            connection.execute(
                """INSERT INTO queen_proxy.invitations (user_id, token_hash, created_by, expires_at)
                   VALUES (%s, %s, %s, now() + make_interval(hours => %s))""",
                (member["user_id"], _digest(token), uuid.UUID(actor_id), INVITATION_HOURS),
            )
            return member, token

        return self._change(invite)

    def remove(self, cluster: Cluster, actor_id: str, email: Any) -> Row:
        """Takes a role away; returns user_id and email. Raises `Refusal` 404, or 400 for the last admin."""

        def remove(connection: Connection) -> Row:
            address = _email(email)
            member = _member(connection, cluster, address)
            if member is None or member["role"] is None:
                raise not_found("no such member on this cluster")
            if member["role"] == "admin" and _admins(connection, cluster) <= 1:
                raise invalid("cannot remove the last admin of this cluster")
            connection.execute("SELECT queen_proxy.revoke_cluster_role(%s, %s)", (uuid.UUID(cluster.id), address))
            _record(connection, cluster.tenant_id, cluster.id, actor_id, "console_member_revoked", address)
            return member

        return self._change(remove)

    def invited(self, token: str) -> Row | None:
        """Whom a link invites, while it is good."""
        return self._pxdb.row(
            """SELECT u.id, u.email, u.tenant_id
                 FROM queen_proxy.invitations i JOIN queen_proxy.users u ON u.id = i.user_id
                WHERE i.token_hash = %s AND i.used_at IS NULL AND i.expires_at > now()""",
            (_digest(token),),
        )

    def accept(self, token: str, kept: str) -> Row | None:
        """Sets the password of whom a link invites, once; None when the link is used or too old."""

        def accept(connection: Connection) -> Row | None:
            row = connection.execute(
                """UPDATE queen_proxy.invitations SET used_at = now()
                    WHERE token_hash = %s AND used_at IS NULL AND expires_at > now() RETURNING user_id""",
                (_digest(token),),
            ).fetchone()
            if row is None:
                return None
            return connection.execute(
                "UPDATE queen_proxy.users SET password_hash = %s WHERE id = %s RETURNING id, email, tenant_id",
                (kept, row["user_id"]),
            ).fetchone()

        return self._change(accept)

    # Usage.

    def month_messages(self, cluster: Cluster) -> int:
        """Messages that count for this month's quota."""
        row = self._pxdb.row(
            "SELECT queen_proxy.cluster_month_msgs(%s, date_trunc('month', now() AT TIME ZONE 'UTC')::date) AS msgs",
            (uuid.UUID(cluster.id),),
        )
        return int(row["msgs"]) if row else 0

    def usage(self, cluster: Cluster, hours: int) -> list[Row]:
        """Usage by minute and class of operation, oldest first."""
        return self._pxdb.rows(
            """SELECT minute, op_class AS op, reqs, msgs, bytes_in, bytes_out FROM queen_proxy.usage_minutes
                WHERE cluster_id = %s AND minute >= now() - make_interval(hours => %s) ORDER BY minute, op_class""",
            (uuid.UUID(cluster.id), hours),
        )

    def usage_in_steps(self, cluster: Cluster, hours: int, minutes: int) -> list[Row]:
        """Pushed and delivered messages and requests in steps of so many minutes, one row each, oldest first."""
        query = f"""WITH steps AS (
                  SELECT generate_series(
                    date_bin(make_interval(mins => %(minutes)s), now() - make_interval(hours => %(hours)s), %(origin)s),
                    now(), make_interval(mins => %(minutes)s)) AS step)
                SELECT step, coalesce(sum(msgs) FILTER (WHERE {_OPS}), 0)::bigint AS pushed,
                       coalesce(sum(msgs) FILTER (WHERE op_class = 'delivery'), 0)::bigint AS delivered,
                       coalesce(sum(reqs), 0)::bigint AS reqs
                  FROM steps LEFT JOIN queen_proxy.usage_minutes m
                    ON m.cluster_id = %(cluster)s AND m.minute >= step
                   AND m.minute < step + make_interval(mins => %(minutes)s)
                 GROUP BY step ORDER BY step"""
        parameters = {
            "minutes": minutes,
            "hours": hours,
            "cluster": uuid.UUID(cluster.id),
            "origin": datetime(2000, 1, 1, tzinfo=UTC),
        }
        return self._pxdb.run(lambda connection: connection.execute(query.encode(), parameters).fetchall())

    # The cell, for operators.

    def cells(self) -> list[Row]:
        return self._pxdb.rows(
            """SELECT l.slug, l.region, l.class, l.base_url, l.status, l.broker_version, l.created_at,
                      l.cell_secret IS NOT NULL AS has_token, count(c.id) AS clusters
                 FROM queen_proxy.cells l LEFT JOIN queen_proxy.clusters c ON c.cell_id = l.id
                GROUP BY l.id ORDER BY l.slug"""
        )

    def tenants(self) -> list[Row]:
        """The tenants with their clusters, each with its plan and cell."""
        return self._pxdb.rows(
            """SELECT t.slug, t.name, t.status, t.created_at,
                      (SELECT count(*) FROM queen_proxy.users u WHERE u.tenant_id = t.id) AS users,
                      coalesce(jsonb_agg(jsonb_build_object(
                          'slug', c.slug, 'status', c.status, 'plan', p.code, 'cell', l.slug,
                          'overrides', c.limit_overrides <> '{}') ORDER BY c.slug)
                          FILTER (WHERE c.id IS NOT NULL), '[]') AS clusters
                 FROM queen_proxy.tenants t
                 LEFT JOIN queen_proxy.clusters c ON c.tenant_id = t.id
                 LEFT JOIN queen_proxy.plans p ON p.id = c.plan_id
                 LEFT JOIN queen_proxy.cells l ON l.id = c.cell_id
                GROUP BY t.id ORDER BY t.slug"""
        )

    def plans(self) -> list[Row]:
        return self._pxdb.rows(
            """SELECT p.*, (SELECT count(*) FROM queen_proxy.clusters c WHERE c.plan_id = p.id) AS clusters
                 FROM queen_proxy.plans p ORDER BY p.max_req_per_sec NULLS LAST, p.code"""
        )

    def _change(self, work: Callable[[Connection], T]) -> T:
        try:
            return self._pxdb.transaction(work)
        except psycopg.errors.RaiseException as error:
            raise invalid((error.diag.message_primary or "refused").partition(": ")[2]) from error


_USER = """SELECT u.id, u.email, u.password_hash, u.is_operator, u.tenant_id,
    t.slug AS tenant_slug, t.name AS tenant_name
    FROM queen_proxy.users u JOIN queen_proxy.tenants t ON t.id = u.tenant_id"""
_CLUSTER = """SELECT c.id, c.slug, r.role, t.slug AS tenant_slug, t.name AS tenant_name, c.tenant_id, c.status,
    t.status AS tenant_status, l.slug AS cell_slug, p.code AS plan
    FROM queen_proxy.clusters c JOIN queen_proxy.tenants t ON t.id = c.tenant_id
    JOIN queen_proxy.cells l ON l.id = c.cell_id JOIN queen_proxy.plans p ON p.id = c.plan_id"""


def _grant(connection: Connection, cluster: Cluster, actor_id: str, email: Any, role: Any) -> Row:
    address = _email(email)
    if role not in ROLES:
        raise invalid(f"role must be one of {', '.join(sorted(ROLES))}")
    member = _member(connection, cluster, address)
    if member is None:
        raise not_found("no such user in this tenant")
    if member["role"] == "admin" and role != "admin" and _admins(connection, cluster) <= 1:
        raise invalid("cannot demote the last admin of this cluster")
    connection.execute("SELECT queen_proxy.grant_cluster_role(%s, %s, %s)", (uuid.UUID(cluster.id), address, role))
    _record(connection, cluster.tenant_id, cluster.id, actor_id, "console_member_granted", address, {"role": role})
    return {**member, "role": role}


def _member(connection: Connection, cluster: Cluster, email: str) -> Row | None:
    """A user of the cluster's tenant with the role on it, which may be None."""
    return connection.execute(
        """SELECT u.id AS user_id, u.email, r.role FROM queen_proxy.users u
             LEFT JOIN queen_proxy.cluster_roles r ON r.user_id = u.id AND r.cluster_id = %s
            WHERE u.email = %s AND u.tenant_id = %s""",
        (uuid.UUID(cluster.id), email, uuid.UUID(cluster.tenant_id)),
    ).fetchone()


def _admins(connection: Connection, cluster: Cluster) -> int:
    """How many admins there are, none of whom another transaction can remove meanwhile."""
    rows = connection.execute(
        "SELECT 1 FROM queen_proxy.cluster_roles WHERE cluster_id = %s AND role = 'admin' ORDER BY user_id FOR UPDATE",
        (uuid.UUID(cluster.id),),
    ).fetchall()
    return len(rows)


def _record(
    connection: Connection,
    tenant_id: str,
    cluster_id: str | None,
    user_id: str,
    action: str,
    target: str,
    meta: dict[str, Any] | None = None,
) -> None:
    connection.execute(
        "SELECT queen_proxy.record_operation(%s, %s, 'user', %s, %s, %s, %s)",
        (
            uuid.UUID(tenant_id),
            uuid.UUID(cluster_id) if cluster_id else None,
            uuid.UUID(user_id),
            action,
            target,
            Jsonb(meta or {}),
        ),
    )


def _email(text: Any) -> str:
    address = text.strip().lower() if isinstance(text, str) else ""
    if not 3 <= len(address) <= 254 or "@" not in address[1:-1] or " " in address or not address.isprintable():
        raise invalid("email must be an address, such as name@example.org")
    return address


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _storable(text: str) -> str:
    """A text that the database takes: it has no NUL."""
    return text.replace("\x00", "")
