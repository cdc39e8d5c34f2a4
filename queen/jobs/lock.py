"""An advisory lock that lets one broker of all do a job at a time."""

from __future__ import annotations

import psycopg

from queen.db.connection import Connection
from queen.log import Log

# The server looks after a peer that doesn't answer: a machine that died frees its locks within half a minute.
_KEEPALIVE = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"


class SessionLock:
    """A session lock on a connection of its own that runs nothing else, and so holds up nobody's DDL.

    The server frees it when the connection ends, so a killed holder leaves nothing behind.
    """

    def __init__(self, conninfo: str, number: int, log: Log) -> None:
        options = psycopg.conninfo.conninfo_to_dict(conninfo).get("options") or ""
        self._conninfo = psycopg.conninfo.make_conninfo(conninfo, options=f"{options} {_KEEPALIVE}")
        self._number = number
        self._log = log
        self._connection: Connection | None = None

    @property
    def held(self) -> bool:
        """Whether the server has not hung up since `acquire`. Asks nothing of it."""
        return self._connection is not None and self._connection.idle_and_alive()

    def acquire(self) -> bool:
        """Tries, without waiting; whether it is ours. Raises `psycopg.Error` without a server."""
        if not self.held:
            self.close()
            self._connection = Connection.connect(self._conninfo, autocommit=True)
        return bool(self._ask("SELECT pg_try_advisory_lock(%s)"))

    def release(self) -> None:
        """Gives it back. Never raises: a connection that can't is closed, which frees it as well."""
        try:
            if not self._ask("SELECT pg_advisory_unlock(%s)"):
                self._log.warning("pg_advisory_unlock reported not-held (lock-protocol invariant broken)")
        except psycopg.Error as error:
            self._log.warning("lock's connection is lost, and the lock with it", error=str(error).strip())
            self.close()
        except BaseException:  # killed while it waited for the answer
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection, and the lock if it is held."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, query: str) -> object:
        assert self._connection is not None
        try:
            row = self._connection.execute(query.encode(), (self._number,)).fetchone()
        except BaseException:
            self.close()  # whether it is held now is unknown: the end of the session settles it
            raise
        return row[0] if row else None
