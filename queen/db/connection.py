"""One PostgreSQL connection as a greenlet uses it.

psycopg's own wait builds a selector for every query; under gevent that costs more than the query's
protocol work. Here a connection keeps one watcher of its socket and parks the greenlet on the hub, and
the data plane's calls go straight to libpq with binary parameters (9 instead of 36 microseconds of CPU a
round trip, measured with ``select 1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from gevent import getcurrent
from gevent.hub import get_hub
from gevent.monkey import get_original
from psycopg import errors, generators
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult

from queen.db.errors import ConnectionLost, StatementFailed
from queen.log import Log

log = Log("db")

_READ = 1
_POLLIN = 1
_poll = get_original("select", "poll")  # gevent's own would switch greenlets
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that is prepared once on every connection that runs it."""

    name: str
    sql: str


class _StatementTimeout(BaseException):
    """Raised by the hub in a greenlet whose statement ran too long."""


class Connection(psycopg.Connection[Any]):
    """A connection whose waits are the hub's, with a direct binary call for prepared statements.

    ``statement_seconds`` bounds every wait: a statement running longer is cancelled on the server and
    the connection is closed, since nobody knows how far it came.
    """

    statement_seconds: float = 30.0
    server: Any = None  # which one it leads to, for its owner
    _watcher: Any = None
    _timer: Any = None
    _known: set[str]

    def wait(self, gen: Any, interval: float = 0.0, timeout: float | None = None) -> Any:
        try:
            state = next(gen)
        except StopIteration as done:
            return done.value
        hub = get_hub()
        if self._watcher is None:
            self._watcher = hub.loop.io(self.pgconn.socket, _READ)
            self._timer = hub.loop.timer(self.statement_seconds, self.statement_seconds)
        timer = self._timer if timeout is None else hub.loop.timer(timeout, timeout)
        # `again`, since `start` would go on with what the statement before left of the time.
        timer.again(getcurrent().throw, _StatementTimeout)
        try:
            while True:
                hub.wait(self._watcher if state == _READ else hub.loop.io(self.pgconn.socket, state))
                state = gen.send(state)
        except StopIteration as done:
            return done.value
        except _StatementTimeout:
            self._give_up()
            raise errors.QueryCanceled("statement timeout") from None
        except BaseException:
            # A killed greenlet leaves its statement half way: the connection is of no further use.
            if self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self._give_up()
            raise
        finally:
            if timer is not self._timer:
                timer.close()
            else:
                timer.stop()

    def _give_up(self) -> None:
        """Cancels what runs on the server and closes: a connection in an unknown state is not reused."""
        log.sampled(30, "statement-timeout cancel", timeout_s=self.statement_seconds)
        with suppress(Exception):
            self.cancel_safe(timeout=_CANCEL_SECONDS)
        self.close()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._timer.close()
            self._watcher = self._timer = None
        super().close()

    def idle_and_alive(self) -> bool:
        """Whether nothing waits to be read: on an idle connection that would be the server's farewell."""
        if self.pgconn.status != ConnStatus.OK:
            return False
        poll = _poll()
        poll.register(self.pgconn.socket, _POLLIN)
        return not poll.poll(0)

    def call(self, statement: Statement, parameters: Sequence[bytes | None], seconds: float | None = None) -> PGresult:
        """Runs a prepared statement with binary parameters and a binary result, in its own transaction.

        ``seconds`` replaces ``statement_seconds`` for this call.

        Raises `StatementFailed` with the server's primary message, and `ConnectionLost` when the
        outcome is unknown.
        """
        try:
            if not hasattr(self, "_known"):
                self._known = set()
            if statement.name not in self._known:
                self.pgconn.send_prepare(statement.name.encode(), statement.sql.encode())
                self._result(self.wait(generators.execute(self.pgconn)))
                self._known.add(statement.name)
            self.pgconn.send_query_prepared(statement.name.encode(), parameters, [1] * len(parameters), result_format=1)
            return self._result(self.wait(generators.execute(self.pgconn), timeout=seconds))
        except psycopg.Error as error:
            raise ConnectionLost(str(error) or "connection lost", error.sqlstate or "") from None

    def _result(self, results: list[PGresult]) -> PGresult:
        result = results[-1]
        if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            return result
        info = errors.error_from_result(result, encoding="utf-8").diag
        message, state = info.message_primary or "", info.sqlstate or ""
        # 57P0x: the server shuts the session down; the statement did not commit, the connection is gone.
        # 25006: the server became a standby; the next connection goes to the one that takes writes.
        if state.startswith("57P0") or state == "25006" or self.pgconn.status != ConnStatus.OK:
            self.close()
            raise ConnectionLost(message, state)
        raise StatementFailed(message, state, info.message_detail or "")
