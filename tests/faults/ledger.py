"""A ledger of every change of a cursor or partition row, kept by triggers while a test runs.

A row's changes are numbered under its lock, so the ledger is the exact history that brokers only see
parts of: who held which lease when, and each step of each cursor. `violations` reads it against the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

_INSTALL = """
CREATE SCHEMA ledger;
CREATE TABLE ledger.cursors (
    seq bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(), last_offset bigint,
    old queen.log_consumers, new queen.log_consumers);
CREATE TABLE ledger.partitions (
    seq bigserial PRIMARY KEY, old queen.log_partitions, new queen.log_partitions);
CREATE TABLE ledger.rewrites (what text);
CREATE FUNCTION ledger.note_cursor() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.cursors (old, new, last_offset)
    VALUES (CASE WHEN TG_OP <> 'INSERT' THEN OLD END, CASE WHEN TG_OP <> 'DELETE' THEN NEW END,
            (SELECT p.last_offset FROM queen.log_partitions p
              WHERE p.id = CASE WHEN TG_OP = 'DELETE' THEN OLD.partition_id ELSE NEW.partition_id END));
    RETURN NULL;
END $$;
CREATE FUNCTION ledger.note_partition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.partitions (old, new) VALUES (OLD, NEW);
    RETURN NULL;
END $$;
CREATE FUNCTION ledger.note_rewrite() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.rewrites VALUES (TG_TABLE_NAME);
    RETURN NULL;
END $$;
CREATE TRIGGER ledger_cursor AFTER INSERT OR UPDATE OR DELETE ON queen.log_consumers
    FOR EACH ROW EXECUTE FUNCTION ledger.note_cursor();
CREATE TRIGGER ledger_partition AFTER UPDATE ON queen.log_partitions
    FOR EACH ROW EXECUTE FUNCTION ledger.note_partition();
CREATE TRIGGER ledger_rewrite AFTER UPDATE ON queen.log_segments
    FOR EACH ROW EXECUTE FUNCTION ledger.note_rewrite();
CREATE TRIGGER ledger_rewrite AFTER UPDATE ON queen.log_txns
    FOR EACH ROW EXECUTE FUNCTION ledger.note_rewrite();
"""

_REMOVE = """
DROP TRIGGER ledger_cursor ON queen.log_consumers;
DROP TRIGGER ledger_partition ON queen.log_partitions;
DROP TRIGGER ledger_rewrite ON queen.log_segments;
DROP TRIGGER ledger_rewrite ON queen.log_txns;
DROP SCHEMA ledger CASCADE;
"""

_CURSORS = """
SELECT l.seq, l.at, l.last_offset, l.old IS DISTINCT FROM NULL AS had, l.new IS DISTINCT FROM NULL AS has,
       coalesce((l.new).partition_id, (l.old).partition_id)::text || '/'
           || coalesce((l.new).consumer_group, (l.old).consumer_group) AS cursor,
       (l.old).committed AS was, (l.new).committed AS now,
       (l.old).batch_end AS old_end, (l.new).batch_end AS new_end,
       (l.old).worker_id AS old_worker, (l.new).worker_id AS new_worker,
       (l.old).lease_expires_at AS old_expiry, (l.new).lease_expires_at AS new_expiry,
       (l.old).lease_acquired_at AS old_acquired, (l.new).lease_acquired_at AS new_acquired,
       (l.old).batch_retry_count AS old_retries, (l.new).batch_retry_count AS new_retries,
       (l.old).total_consumed AS old_consumed, (l.new).total_consumed AS new_consumed
  FROM ledger.cursors l ORDER BY l.seq
"""

_PARTITIONS = """
SELECT (new).id, (old).log_start AS was, (new).log_start AS now, (old).last_offset AS old_last,
       (new).last_offset AS new_last
  FROM ledger.partitions ORDER BY seq
"""


class Ledger:
    """The ledger of one database. It opens a connection for every question: the server may come and go."""

    def __init__(self, connect: Callable[..., psycopg.Connection[Any]]) -> None:
        """Begin to record. Takes what opens a connection in autocommit mode."""
        self._connect = connect
        self._run(_INSTALL)

    def close(self) -> None:
        """Stop recording and forget."""
        self._run(_REMOVE)

    def cursors(self) -> list[Any]:
        """Return every change of a cursor, oldest first."""
        return self._rows(_CURSORS)

    def _run(self, script: str) -> None:
        with self._connect() as connection:
            connection.execute(script.encode())

    def _rows(self, query: str) -> list[Any]:
        with self._connect(row_factory=namedtuple_row) as connection:
            return connection.execute(query.encode()).fetchall()

    def violations(self, backwards: bool = False) -> list[str]:
        """Return what breaks a rule, each line beginning with the rule's number.

        Cursors may only go back when `backwards` says that the test seeks or deletes groups.
        """
        found = []
        for row in self.cursors():
            found += [f"{rule}: {row.cursor} at step {row.seq}: {text}" for rule, text in _step(row, backwards)]
        for row in self._rows(_PARTITIONS):
            if row.now < row.was:
                found.append(f"L4: {row.id}: log_start went back from {row.was} to {row.now}")
            if row.new_last < row.old_last:
                found.append(f"L3: {row.id}: last_offset went back from {row.old_last} to {row.new_last}")
        for row in self._rows("SELECT what, count(*) AS times FROM ledger.rewrites GROUP BY what"):
            found.append(f"L8: {row.what} was updated {row.times} times")
        return found


def _step(row: Any, backwards: bool) -> list[tuple[str, str]]:
    """Judge one change of one cursor."""
    if not row.has:
        return []
    found = []
    if row.last_offset is not None and row.now > row.last_offset:
        found.append(("A2", f"committed {row.now} is beyond the last offset {row.last_offset}"))
    if not row.had:
        return found
    claimed = row.new_worker is not None and row.new_acquired != row.old_acquired
    live = row.old_worker is not None and row.old_expiry is not None and row.old_expiry >= row.at
    if claimed:
        if row.old_worker is not None and row.old_expiry is not None and row.old_expiry >= row.new_acquired:
            found.append(("C1", f"{row.new_worker} took the lease of {row.old_worker}, live until {row.old_expiry}"))
        if row.now != row.was:
            found.append(("C3", f"a claim moved committed from {row.was} to {row.now}"))
        if row.new_end is None or not row.now < row.new_end <= row.last_offset:
            found.append(("C3", f"leased up to {row.new_end} with {row.now} committed of {row.last_offset}"))
        if row.new_retries != row.old_retries:
            found.append(("A6", f"a claim changed the retry count from {row.old_retries} to {row.new_retries}"))
    moved_by_seek = backwards and row.new_worker is None and row.new_retries == 0
    if row.now < row.was and not moved_by_seek:
        found.append(("A1", f"committed went back from {row.was} to {row.now}"))
    if live and not claimed and row.old_end is not None and row.now > row.old_end and not moved_by_seek:
        found.append(("A2", f"committed {row.now} is beyond the leased batch, which ended at {row.old_end}"))
    if row.new_retries > row.old_retries:
        if row.new_retries != row.old_retries + 1:
            found.append(("A6", f"the retry count went from {row.old_retries} to {row.new_retries}"))
        if row.new_worker is not None:
            found.append(("A6", "a retry was charged without a release"))
    if row.old_worker is not None and row.new_worker == row.old_worker and not claimed:
        # A test ends a lease by moving it into the past; a broker never does.
        if row.new_expiry is not None and row.old_expiry is not None and row.at <= row.new_expiry < row.old_expiry:
            found.append(("C1", f"a lease was shortened from {row.old_expiry} to {row.new_expiry}"))
        if row.new_end != row.old_end:
            found.append(("C3", f"a live batch's end moved from {row.old_end} to {row.new_end}"))
    return found
