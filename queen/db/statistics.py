"""The statistics of queues: computed by one broker at a time, for all.

Both computations return None when another broker is at it, and raise what `Database.call` raises.
"""

from __future__ import annotations

from typing import Any

from queen import codec
from queen.db import binary
from queen.db.connection import Statement
from queen.db.database import Database

_SECONDS = 600.0  # a database of millions of partitions takes its time

# The lock ends with the transaction, and the statement is one.
_REFRESH = Statement(
    "refresh_stats",
    "SELECT CASE WHEN pg_try_advisory_xact_lock(737002) THEN queen.log_refresh_all_stats_v1()::text END",
)
_RETAINED = Statement(
    "refresh_retained_bytes",
    "SELECT CASE WHEN pg_try_advisory_xact_lock(737003) THEN queen.log_refresh_retained_bytes_v1() END",
)


def refresh(database: Database) -> dict[str, Any] | None:
    """Computes the statistics; what was changed."""
    text = database.call(_REFRESH, (), _SECONDS).get_value(0, 0)
    return None if text is None else codec.loads(text)


def refresh_retained_bytes(database: Database) -> int | None:
    """Adds up what is stored; for how many queues it changed."""
    count = database.call(_RETAINED, (), _SECONDS).get_value(0, 0)
    return None if count is None else binary.read_int4(count)


def refresh_now(database: Database) -> str:
    """Computes the statistics, after whoever is at it; what was changed, as JSON.

    Raises `Unavailable` without a connection, else `psycopg.Error`.
    """
    with database.connection() as connection, connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(737002)")
        row = connection.execute("SELECT queen.log_refresh_all_stats_v1()::text").fetchone()
    return str(row[0]) if row else "{}"
