"""The broker's pool of connections to PostgreSQL.

psycopg's pool keeps them; this class sizes it to what the server offers, hands out connections that are
alive, and speaks the two errors callers know (`Unavailable` and `StatementFailed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from gevent.lock import Semaphore
from psycopg.conninfo import make_conninfo
from psycopg.pq.abc import PGresult
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from queen.db.connection import Connection, Statement
from queen.db.errors import Unavailable
from queen.log import Log
from queen.settings import Settings

log = Log("pool")

_POOL_WAIT_SECONDS = 5.0
_CONNECT_SECONDS = 5
_MINIMUM = 2
_STATEMENTS = 16  # of the data plane at a time
_SPARE = 10  # connections left to operators and tools

# The data plane's tables are always entered by key. A plan made while a table was small must not stay a
# sequential scan when it has grown, and planning or compiling a statement costs more than running it: with
# plans made anew for every call (what PostgreSQL picks for the claim by itself) a pop takes 2.5 ms more.
_OPTIONS = (
    "-c jit=off -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off"
    " -c plan_cache_mode=force_generic_plan -c timezone=UTC -c client_min_messages=warning"
)


def conninfo(settings: Settings) -> str:
    """libpq's connection string. With several hosts only one that accepts writes will do."""
    return make_conninfo(
        host=settings.pg_host,
        port=settings.pg_port,
        user=settings.pg_user,
        password=settings.pg_password,
        dbname=settings.pg_database,
        connect_timeout=_CONNECT_SECONDS,
        application_name=f"queen {settings.server_id}"[:63],
        target_session_attrs="read-write" if "," in settings.pg_host else "any",
        options=_OPTIONS,
        keepalives_idle=30,
        tcp_user_timeout=30_000,
    )


class Database:
    """A pool that grows on demand. `open` before use, `close` at the end."""

    def __init__(self, settings: Settings) -> None:
        self._conninfo = conninfo(settings)
        self._timeout = settings.statement_timeout_ms / 1000
        self.size = settings.pool_size
        self._slots = Semaphore(_STATEMENTS)
        self._pool: ConnectionPool[Connection] | None = None

    def open(self) -> None:
        """Sizes the pool to the server's own limit. Raises `psycopg.OperationalError` if it is away."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            row = connection.execute(
                "SELECT current_setting('max_connections')::int"
                " - current_setting('superuser_reserved_connections')::int"
            ).fetchone()
        offered = max(_MINIMUM, (row[0] if row else 0) - _SPARE)
        if offered < self.size:
            log.warning("DB_POOL_SIZE lowered to what the server offers", wanted=self.size, size=offered)
            self.size = offered
        self._pool = ConnectionPool(
            self._conninfo,
            connection_class=Connection,
            kwargs={"autocommit": True},
            min_size=_MINIMUM,
            max_size=self.size,
            open=True,
            check=self._check,
            configure=self._configure,
            timeout=_POOL_WAIT_SECONDS,
            max_lifetime=3600,
            # Short, so that no back-off is still asleep when PostgreSQL is back: every request that
            # finds the pool empty starts a fresh attempt anyway.
            reconnect_timeout=1.0,
            name="queen",
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(timeout=2)

    @staticmethod
    def _check(connection: Connection) -> None:
        if not connection.idle_and_alive():
            connection.close()  # or the pool would take it back, as it still looks idle
            raise psycopg.OperationalError("connection closed by the server")

    def _configure(self, connection: Connection) -> None:
        connection.statement_seconds = self._timeout

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lends a connection in autocommit mode; raises `Unavailable` when none is to be had in time."""
        connection = self._take()
        try:
            yield connection
        finally:
            self._give(connection)

    def call(self, statement: Statement, parameters: Sequence[bytes | None], seconds: float | None = None) -> PGresult:
        """Runs one stored operation on a connection of the pool (see `Connection.call`).

        A slot comes before the connection: PostgreSQL does more with a few statements at a time than
        with as many as the pool would let in.
        """
        self._slots.acquire()
        try:
            connection = self._take()
            try:
                return connection.call(statement, parameters, seconds)
            finally:
                self._give(connection)
        finally:
            self._slots.release()

    def _take(self) -> Connection:
        if self._pool is None:
            raise Unavailable("the pool is not open")
        try:
            return self._pool.getconn()
        except (PoolTimeout, PoolClosed) as error:
            raise Unavailable(str(error)) from None

    def _give(self, connection: Connection) -> None:
        if self._pool is not None:
            self._pool.putconn(connection)

    def statistics(self) -> dict[str, Any]:
        """psycopg_pool's counters: pool_size, pool_available, requests_waiting and others."""
        return dict(self._pool.get_stats()) if self._pool is not None else {}
