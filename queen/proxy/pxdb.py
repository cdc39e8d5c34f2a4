"""The proxy's own PostgreSQL database: a small pool, with a bound on everything.

A database that hangs must not hold the requests that ask it, so connecting, waiting for a connection and each
statement end within PXDB_TIMEOUT_MS, as `Unavailable`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import gevent
import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from queen.log import Log
from queen.proxy.settings import ProxySettings

log = Log("pxdb")

Row = dict[str, Any]
T = TypeVar("T")

# What a server that is away, starting, stopping or read-only says; anything else is about the statement.
_AWAY = ("08", "57", "53", "25006", "58")
# After a failure nobody waits for the next one for so long.
_SILENCE_SECONDS = 0.5


class Unavailable(Exception):
    """The database gave no answer: it is away, too slow or full."""


class Pxdb:
    """Statements on the proxy's database. `open` before use.

    ``away`` tells that the last statement got no answer.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self._seconds = settings.pxdb_timeout_ms / 1000
        self.away = False
        self._silent_until = 0.0
        self._root_file: str | None = None
        self.conninfo = self._conninfo("queen-proxy", settings.pxdb_timeout_ms)
        self._pool: ConnectionPool[psycopg.Connection[Row]] | None = None

    def open(self) -> None:
        """Starts the pool; it connects by itself, and again when the server comes back."""
        self._pool = ConnectionPool(
            self.conninfo,
            min_size=1,
            max_size=self.settings.pxdb_pool_size,
            timeout=self._seconds,
            reconnect_timeout=0,
            max_idle=300,
            max_lifetime=3600,
            kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": 3},
            check=ConnectionPool.check_connection,
            open=True,
            name="pxdb",
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(timeout=1)

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """The rows of a statement, which commits by itself.

        Raises `Unavailable`, or another `psycopg.Error` when the database refuses the statement.
        """
        return self.run(lambda connection: connection.execute(query.encode(), parameters).fetchall())

    def row(self, query: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row, or None; raises like `rows`."""
        rows = self.rows(query, parameters)
        return rows[0] if rows else None

    def execute(self, query: str, parameters: Sequence[Any] = ()) -> None:
        """A statement without rows; raises like `rows`."""

        def run(connection: psycopg.Connection[Row]) -> None:
            connection.execute(query.encode(), parameters)

        self.run(run)

    def transaction(self, work: Callable[[psycopg.Connection[Row]], T]) -> T:
        """What ``work`` returns, its statements committed together; raises like `rows`."""

        def run(connection: psycopg.Connection[Row]) -> T:
            with connection.transaction():
                return work(connection)

        return self.run(run)

    def run(self, work: Callable[[psycopg.Connection[Row]], T]) -> T:
        """Lends a connection to ``work``; raises `Unavailable` when the database gives no answer in time."""
        if self._pool is None:
            raise Unavailable("the database is not open")
        if time.monotonic() < self._silent_until:
            raise Unavailable("the database is away")
        try:
            result = self._run(self._pool, work)
        except Unavailable:
            self.away = True
            self._silent_until = time.monotonic() + _SILENCE_SECONDS
            raise
        except psycopg.Error:
            self.away = False
            raise
        self.away = False
        return result

    def _run(self, pool: ConnectionPool[psycopg.Connection[Row]], work: Callable[[psycopg.Connection[Row]], T]) -> T:
        connection: psycopg.Connection[Row] | None = None
        alarm = gevent.Timeout(2 * self._seconds + 1)
        alarm.start()
        try:
            connection = pool.getconn()
            return work(connection)
        except (PoolTimeout, PoolClosed, TooManyRequests) as error:
            raise Unavailable(str(error)) from error
        except psycopg.Error as error:
            if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
                raise Unavailable(str(error).strip()) from error
            raise
        except gevent.Timeout as error:
            if error is not alarm:
                raise
            if connection is not None:
                connection.close()
            raise Unavailable("no answer in time") from error
        finally:
            alarm.close()
            if connection is not None:
                pool.putconn(connection)

    def listener(self) -> psycopg.Connection[Any]:
        """A connection of its own, for LISTEN. Raises `psycopg.Error`."""
        return psycopg.connect(self._conninfo("queen-proxy-listen", 0), autocommit=True)

    def wait(self, seconds: float) -> None:
        """Waits until the database answers; raises the last `psycopg.Error` when it doesn't in the time."""
        deadline = time.monotonic() + seconds
        pause = 0.25
        while True:
            try:
                with psycopg.connect(self.conninfo, autocommit=True) as connection:
                    connection.execute("SELECT 1")
                return
            except psycopg.OperationalError as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning("pxdb is away; trying again", error=str(error).strip())
            gevent.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _conninfo(self, application: str, statement_timeout_ms: int) -> str:
        s = self.settings
        options = f"-c timezone=UTC -c statement_timeout={statement_timeout_ms}"
        return make_conninfo(
            host=s.pxdb_host,
            port=s.pxdb_port,
            user=s.pxdb_user,
            password=s.pxdb_password,
            dbname=s.pxdb_db,
            connect_timeout=max(2, round(self._seconds)),
            application_name=application,
            options=options,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=max(s.pxdb_timeout_ms, 5000),
            **self._tls(),
        )

    def _tls(self) -> dict[str, str]:
        s = self.settings
        if not s.pxdb_use_ssl:
            return {"sslmode": "prefer"}
        if s.pxdb_ssl_root_cert:
            if not s.pxdb_ssl_reject_unauthorized:
                log.warning("PXDB_SSL_ROOT_CERT outranks PXDB_SSL_REJECT_UNAUTHORIZED=false: the chain is checked")
            return {"sslmode": "verify-full", "sslrootcert": self._root()}
        if s.pxdb_ssl_reject_unauthorized:
            return {"sslmode": "verify-full", "sslrootcert": "system"}
        return {"sslmode": "require"}

    def _root(self) -> str:
        """The path of a file with the CA's certificate: libpq takes no content."""
        if self._root_file is None:
            descriptor, self._root_file = tempfile.mkstemp(prefix="queen-proxy-ca-", suffix=".pem")
            with os.fdopen(descriptor, "w") as file:
                file.write(self.settings.pxdb_ssl_root_cert)
        return self._root_file
