"""What workers write of themselves, and its removal. All of it raises what `Database.call` raises."""

from __future__ import annotations

from typing import Any

from queen import codec
from queen.db import binary
from queen.db.connection import Statement
from queen.db.database import Database

_PURGE = Statement("metrics_purge", "SELECT queen.metrics_purge_step_v1($1::timestamptz, $2::int)")

_RECORD = Statement(
    "metrics_record", "SELECT queen.metrics_record_v1($1::text::jsonb, $2::text::jsonb, $3::text::jsonb)"
)
_SUMMARY = Statement("metrics_summary", "SELECT queen.metrics_summary_v1()::text")


def record(database: Database, worker: dict[str, Any], system: dict[str, Any], queues: list[dict[str, Any]]) -> None:
    """Stores what a worker measured since it last did, under the names of the tables' columns."""
    database.call(_RECORD, tuple(codec.dumps(part) for part in (worker, system, queues)))


def summary(database: Database) -> dict[str, Any]:
    """What all workers together did since the database was made, and its queues in their last minute."""
    found: dict[str, Any] = codec.loads(database.call(_SUMMARY, ()).get_value(0, 0) or b"{}")
    return found


def purge(database: Database, before: int, limit: int) -> int:
    """Deletes what is older than a time, at most ``limit`` rows of each table; returns how many."""
    result = database.call(_PURGE, (binary.int8(before), binary.int4(limit)))
    return binary.read_int8(result.get_value(0, 0) or b"")
