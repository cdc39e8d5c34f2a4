"""The reference stack as real processes: PostgreSQL, two brokers on one database, and the proxy before them."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.broker import HOST, Broker

CELL_SECRET = "c3" * 32
BROKER = {
    "JWT_ENABLED": "true",
    "JWT_ALGORITHM": "HS256",
    "JWT_SECRET": CELL_SECRET,
    "QUEEN_TENANCY_HEADER": "true",
    "QUEEN_KV_TRUSTED_PROXY": "true",
}


class Proxy(Broker):
    """A proxy: gunicorn processes on a port that stays across restarts."""

    application = "-c conf/gunicorn-proxy.conf.py queen.proxy.wsgi"
    health_path = "/healthz"

    def _defaults(self) -> dict[str, str]:
        return super()._defaults() | {
            "QUEEN_PROXY_PORT": str(self.port),
            "QUEEN_PROXY_BIND_ADDR": HOST,
            "QUEEN_PROXY_SPOOL_DIR": str(self.directory / "spool"),
        }


@dataclass(frozen=True)
class Tenant:
    """What bootstrap_tenant answered, with the slugs that were given."""

    slug: str
    key: str
    tenant_id: str
    cluster_id: str
    user_id: str

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request of this tenant."""
        return {"Host": f"{self.slug}.local.test", "Authorization": f"Bearer {self.key}"}


def cell_token(secret: str = CELL_SECRET) -> str:
    """A token as `openssl` makes one in the walk-through."""

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    head = encoded(b'{"alg":"HS256","typ":"JWT"}')
    claims = encoded(b'{"sub":"queen-proxy","role":"admin"}')
    digest = hmac.new(secret.encode(), f"{head}.{claims}".encode(), hashlib.sha256).digest()
    return f"{head}.{claims}.{encoded(digest)}"


class ControlPlane:
    """The proxy's database as an operator sees it: psql."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self.sql = psycopg.connect(conninfo, autocommit=True)

    def one(self, query: str, *parameters: Any) -> Any:
        """The only value of a query's first row."""
        row = self.sql.execute(query.encode(), parameters).fetchone()
        return row[0] if row else None

    def add_cell(self, base_url: str, slug: str = "local", secret: str | None = None) -> None:
        self.sql.execute(
            "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)"
            " VALUES (%s, 'local', %s, 'shared', %s)",
            (slug, base_url, secret or cell_token()),
        )

    def bootstrap(self, tenant: str, plan: str = "free", cell: str = "local", cluster: str = "") -> Tenant:
        cluster = cluster or f"{tenant}-prod"
        answer = self.one(
            "SELECT queen_proxy.bootstrap_tenant(%s, %s, %s, %s, (SELECT id FROM queen_proxy.cells WHERE slug = %s),"
            " %s, 'initial-password', 'default')",
            tenant,
            f"{tenant} Inc",
            cluster,
            plan,
            cell,
            f"ops@{tenant}.example",
        )
        return Tenant(cluster, answer["api_key"], answer["tenant_id"], answer["cluster_id"], answer["user_id"])

    def close(self) -> None:
        self.sql.close()
