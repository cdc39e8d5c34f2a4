"""The broker's pool of connections to PostgreSQL.

psycopg's pool keeps them; this class sizes it to what the server offers, hands out connections that are
alive, and speaks the two errors callers know (`Unavailable` and `StatementFailed`). It also knows whether
PostgreSQL seemed to be there at the last call, and tells when it is another server than before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from gevent.lock import Semaphore
from psycopg.conninfo import make_conninfo
from psycopg.pq.abc import PGresult
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from queen.db import tls
from queen.db.connection import Connection, Statement
from queen.db.errors import StatementFailed, Unavailable
from queen.log import Log
from queen.settings import Settings

log = Log("pool")

_POOL_WAIT_SECONDS = 5.0
_CONNECT_SECONDS = 5
_PROBE_SECONDS = 1.0
_SILENCE_MS = 10_000  # a server that acknowledges nothing for so long is gone, whatever a statement may take
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
    """libpq's connection string. Of several hosts, and of one name for several, only what takes writes will do."""
    return make_conninfo(
        host=settings.pg_host,
        port=settings.pg_port,
        user=settings.pg_user,
        password=settings.pg_password,
        dbname=settings.pg_database,
        connect_timeout=_CONNECT_SECONDS,
        application_name=f"queen {settings.server_id}"[:63],
        target_session_attrs="read-write",
        options=_OPTIONS,
        keepalives_idle=30,
        tcp_user_timeout=_SILENCE_MS,
        **tls.parameters(settings),
    )


class Database:
    """A pool that grows on demand. `open` before use, `close` at the end."""

    def __init__(self, settings: Settings) -> None:
        self._conninfo = conninfo(settings)
        self._timeout = settings.statement_timeout_ms / 1000
        self.size = settings.pool_size
        self._workers = 1
        self._slots = Semaphore(_STATEMENTS)
        self._pool: ConnectionPool[Connection] | None = None
        self._server: Any = None
        self._watchers: list[Callable[[], None]] = []
        # A hint: whether the last call found PostgreSQL there, and taking writes.
        self.healthy = True
        self.errors = 0  # statements that were refused or lost, and those that got no connection

    def watch_server(self, watcher: Callable[[], None]) -> None:
        """Has ``watcher`` called when another server answers than before: a promoted standby, or after a restart.

        It may lack the last commits of the one before, if that did not wait for standbys or disks. What is
        remembered of them must be forgotten before the new one is asked for anything.
        """
        self._watchers.append(watcher)

    def share(self, workers: int) -> None:
        """The broker has this many workers: each gets its part of the broker's connections. Before `open`."""
        self._workers = max(workers, 1)
        self.size = max(_MINIMUM, self.size // self._workers)

    def open(self) -> None:
        """Sizes the pool to the server's own limit. Raises `psycopg.OperationalError` if it is away."""
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            self._fit(connection)
        self.open_unseen()

    def open_unseen(self) -> None:
        """Opens the pool without looking for a server: calls raise `Unavailable` until there is one."""
        logging.getLogger("psycopg.pool").addFilter(_one_line_in_ten_seconds)
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

    def _fit(self, connection: psycopg.Connection[Any]) -> None:
        """Takes note of which server this is and of what it offers."""
        row = connection.execute(
            "SELECT pg_postmaster_start_time(), current_setting('max_connections')::int"
            " - current_setting('superuser_reserved_connections')::int"
        ).fetchone()
        started, most = row or (None, 0)
        offered = max(_MINIMUM, (most - _SPARE) // self._workers)
        if offered < self.size:
            log.warning(
                "DB_POOL_SIZE lowered to what the server offers", wanted=self.size, size=offered, workers=self._workers
            )
            self.size = offered
            if self._pool is not None:
                self._pool.resize(_MINIMUM, offered)
        if self._server not in (None, started):
            log.warning("another PostgreSQL server answers: it was restarted, or a standby took over", since=started)
            for watcher in self._watchers:
                watcher()
        self._server = started

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(timeout=2)

    def _check(self, connection: Connection) -> None:
        # One to the server before may well be alive: a primary that was put aside still answers reads.
        if connection.server != self._server or not connection.idle_and_alive():
            connection.close()  # or the pool would take it back, as it still looks idle
            raise psycopg.OperationalError("connection closed by the server, or another server took over")

    def _configure(self, connection: Connection) -> None:
        connection.statement_seconds = self._timeout
        self._fit(connection)
        connection.server = self._server

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lends a connection in autocommit mode; raises `Unavailable` when none is to be had in time."""
        connection = self._take()
        try:
            yield connection
            self.healthy = True
        finally:
            self._give(connection)

    def call(self, statement: Statement, parameters: Sequence[bytes | None], seconds: float | None = None) -> PGresult:
        """Runs one stored operation on a connection of the pool (see `Connection.call`).

        A slot comes before the connection: PostgreSQL does more with a few statements at a time than
        with as many as the pool would let in.
        """
        while not self._slots.acquire(timeout=_POOL_WAIT_SECONDS):
            if not self.healthy:  # those with a slot are waiting for a connection
                raise Unavailable("PostgreSQL is away")
        try:
            connection = self._take()
            try:
                result = connection.call(statement, parameters, seconds)
                self.healthy = True
                return result
            except StatementFailed as error:
                self.errors += 1
                if error.away:
                    self.healthy = False
                raise
            finally:
                self._give(connection)
        finally:
            self._slots.release()

    def probe(self) -> bool:
        """Looks whether PostgreSQL is there, for a second or so; sets `healthy`."""
        try:
            connection = self._take(_PROBE_SECONDS)
        except Unavailable:
            return False
        try:
            connection.execute("SELECT 1")
            self.healthy = True
        except psycopg.Error:
            self.healthy = False
        finally:
            self._give(connection)
        return self.healthy

    def _take(self, seconds: float = _POOL_WAIT_SECONDS) -> Connection:
        if self._pool is None:
            raise Unavailable("the pool is not open")
        try:
            return self._pool.getconn(seconds)
        except (PoolTimeout, PoolClosed) as error:
            self.healthy = False
            self.errors += 1
            raise Unavailable(str(error)) from None

    def _give(self, connection: Connection) -> None:
        if self._pool is not None:
            self._pool.putconn(connection)

    def statistics(self) -> dict[str, Any]:
        """psycopg_pool's counters: pool_size, pool_available, requests_waiting and others."""
        return dict(self._pool.get_stats()) if self._pool is not None else {}


def _one_line_in_ten_seconds(record: logging.LogRecord) -> bool:
    """Takes over what psycopg's pool has to say: while PostgreSQL is away it says it many times a second."""
    if record.levelno < logging.WARNING:
        return True
    log.sampled(10, "trouble with connections to PostgreSQL", error=record.getMessage())
    return False
