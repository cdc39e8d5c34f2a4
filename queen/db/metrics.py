"""What workers write of themselves, and its removal. All of it raises what `Database.call` raises."""

from __future__ import annotations

from queen.db import binary
from queen.db.connection import Statement
from queen.db.database import Database

_PURGE = Statement("metrics_purge", "SELECT queen.metrics_purge_step_v1($1::timestamptz, $2::int)")


def purge(database: Database, before: int, limit: int) -> int:
    """Deletes what is older than a time, at most ``limit`` rows of each table; returns how many."""
    result = database.call(_PURGE, (binary.int8(before), binary.int4(limit)))
    return binary.read_int8(result.get_value(0, 0) or b"")
