"""What PostgreSQL counts by itself: commits, write transactions, bytes of write-ahead log."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psycopg
from psycopg.conninfo import make_conninfo

_SAMPLE = """
    select s.xact_commit,
           pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
           (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint
      from pg_stat_database s
     where s.datname = current_database()
"""


@dataclass(frozen=True)
class Counters:
    """Cumulative figures of one database (the log and the transaction numbers: of its server)."""

    commits: int
    write_transactions: int
    wal_bytes: int


class Database:
    """A connection of the generator's own, used only at the edges of a measurement."""

    def __init__(self, conninfo: str) -> None:
        self._connection = psycopg.connect(conninfo, autocommit=True, application_name="bench")
        self.version = self._connection.info.parameter_status("server_version") or "?"
        self.backend = self._connection.info.backend_pid

    def counters(self) -> Counters:
        """Read the counters.

        A backend publishes its commits at most once a second, so their number trails by up to a
        second at both edges of a measurement; the other two figures are exact.
        """
        row = self._connection.execute(_SAMPLE).fetchone()
        assert row is not None
        return Counters(*row)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def conninfo_from_environment() -> str | None:
    """The connection string of the PG_* variables that the broker reads, or None without PG_HOST."""
    host = os.environ.get("PG_HOST")
    if not host:
        return None
    settings: dict[str, str] = {
        "host": host,
        "port": os.environ.get("PG_PORT") or "5432",
        "user": os.environ.get("PG_USER") or "postgres",
        "password": os.environ.get("PG_PASSWORD") or "postgres",
        "dbname": os.environ.get("PG_DATABASE") or os.environ.get("PG_DB") or "postgres",
        "target_session_attrs": "read-write",
        "connect_timeout": "5",
    }
    return make_conninfo(**settings)
