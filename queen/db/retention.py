"""The stored steps of retention, one function each. Times are microseconds of PostgreSQL's epoch.

All of them raise what `Database.call` raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg.pq.abc import PGresult

from queen.db import binary
from queen.db.connection import Statement
from queen.db.database import Database

_NOW = Statement("retention_now", "SELECT clock_timestamp()")
_DUE = Statement(
    "retention_due",
    "SELECT queue_id, at, partition_id, all_cutoff, completed_cutoff, due, more"
    " FROM queen.log_retention_due_v1($1::timestamptz, $2::bool, $3::uuid, $4::timestamptz, $5::uuid, $6::int)",
)
_TXNS_DUE = Statement(
    "retention_txns_due",
    "SELECT queue_id, at, partition_id, cutoff, NULL::timestamptz, true,"
    " row_number() OVER (ORDER BY queue_id, at, partition_id) = $5::int"
    " FROM queen.log_txns_due_v1($1::timestamptz, $2::uuid, $3::timestamptz, $4::uuid, $5::int)",
)
_STEP = Statement(
    "retention_step",
    "SELECT segments, done FROM queen.log_retention_step_v1($1::uuid, $2::timestamptz, $3::timestamptz, $4::int)",
)
_EVICT = Statement(
    "retention_evict", "SELECT segments, done FROM queen.log_evict_max_wait_step_v1($1::uuid, $2::timestamptz, $3::int)"
)
_PURGE = Statement(
    "retention_purge", "SELECT purged, done FROM queen.log_txns_purge_step_v1($1::uuid, $2::timestamptz, $3::int)"
)
_CLEANUP = Statement(
    "retention_cleanup",
    "SELECT seen, removed, at, id"
    " FROM queen.log_partition_cleanup_step_v1($1::timestamptz, $2::timestamptz, $3::uuid, $4::int)",
)
_WALK = Statement("retention_walk", "SELECT seen, mended, id FROM queen.log_watermark_walk_step_v1($1::uuid, $2::int)")


@dataclass(slots=True)
class Due:
    """A partition with something to delete, and its place in the order of the walk.

    ``cutoff`` lets everything older go, ``completed_cutoff`` what every group has completed. ``more``: the
    page ended here, and others may follow; such a one may itself have nothing, and then is not ``due``.
    """

    queue_id: bytes
    at: int
    partition_id: bytes
    cutoff: int | None
    completed_cutoff: int | None
    due: bool
    more: bool


@dataclass(slots=True)
class Place:
    """Where the cleanup or the watermark walk goes on; and what the step before found and changed."""

    seen: int
    changed: int
    at: int | None
    partition_id: bytes | None


def now(database: Database) -> int:
    """The database's clock."""
    return binary.read_int8(database.call(_NOW, ()).get_value(0, 0) or b"")


def retention_due(database: Database, at: int, evict: bool, after: Due | None, limit: int) -> list[Due]:
    """A page of partitions whose oldest message reached the age of its queue's rules, or of its eviction."""
    place = _place(after)
    return _due(database.call(_DUE, (binary.int8(at), binary.boolean(evict), *place, binary.int4(limit))))


def txns_due(database: Database, at: int, after: Due | None, limit: int) -> list[Due]:
    """A page of partitions that have hash rows nobody needs."""
    return _due(database.call(_TXNS_DUE, (binary.int8(at), *_place(after), binary.int4(limit))))


def retention_step(database: Database, due: Due, limit: int) -> tuple[int, bool]:
    """Deletes by the two rules; how many segments, and whether that was all for now."""
    parameters = (due.partition_id, _time(due.cutoff), _time(due.completed_cutoff), binary.int4(limit))
    return _step(database.call(_STEP, parameters))


def evict_step(database: Database, due: Due, limit: int) -> tuple[int, bool]:
    """Deletes what waited too long; how many segments, and whether that was all for now."""
    return _step(database.call(_EVICT, (due.partition_id, _time(due.cutoff), binary.int4(limit))))


def purge_step(database: Database, due: Due, limit: int) -> tuple[int, bool]:
    """Deletes hash rows; how many, and whether that was all for now."""
    return _step(database.call(_PURGE, (due.partition_id, _time(due.cutoff), binary.int4(limit))))


def cleanup_step(database: Database, cutoff: int, after: Place | None, limit: int) -> Place:
    """Removes partitions among the next that are empty since before the cutoff."""
    at, partition = (None, None) if after is None else (after.at, after.partition_id)
    result = database.call(_CLEANUP, (binary.int8(cutoff), _time(at), partition, binary.int4(limit)))
    seen, removed, last, partition_id = (result.get_value(0, column) for column in range(4))
    return Place(
        binary.read_int4(seen or b""),
        binary.read_int4(removed or b""),
        None if last is None else binary.read_int8(last),
        partition_id,
    )


def walk_step(database: Database, after: Place | None, limit: int) -> Place:
    """Checks the ages of the next partitions."""
    result = database.call(_WALK, (None if after is None else after.partition_id, binary.int4(limit)))
    seen, mended, partition_id = (result.get_value(0, column) for column in range(3))
    return Place(binary.read_int4(seen or b""), binary.read_int4(mended or b""), None, partition_id)


def _place(after: Due | None) -> tuple[bytes | None, bytes | None, bytes | None]:
    return (None, None, None) if after is None else (after.queue_id, binary.int8(after.at), after.partition_id)


def _time(at: int | None) -> bytes | None:
    return None if at is None else binary.int8(at)


def _due(result: PGresult) -> list[Due]:
    get = result.get_value
    rows = []
    for r in range(result.ntuples):
        cutoff, completed = get(r, 3), get(r, 4)
        rows.append(
            Due(
                get(r, 0) or b"",
                binary.read_int8(get(r, 1) or b""),
                get(r, 2) or b"",
                None if cutoff is None else binary.read_int8(cutoff),
                None if completed is None else binary.read_int8(completed),
                get(r, 5) == binary.TRUE,
                get(r, 6) == binary.TRUE,
            )
        )
    return rows


def _step(result: PGresult) -> tuple[int, bool]:
    return binary.read_int4(result.get_value(0, 0) or b""), result.get_value(0, 1) == binary.TRUE
