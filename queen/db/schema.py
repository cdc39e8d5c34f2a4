"""Applies the schema at boot, under any number of brokers booting at once and while others serve.

Each statement of db/sql/*.sql runs in a transaction of its own, with a short lock timeout and retries:
one long transaction that holds the lock of a ``CREATE INDEX IF NOT EXISTS`` while it waits for a stronger
one deadlocks against any running push. A session lock makes brokers take turns.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from importlib import resources

import psycopg

from queen.log import Log

log = Log("boot")

ADVISORY_LOCK = 778120010
_ATTEMPTS = 40
_RETRIED = ("55P03", "40P01")  # lock timeout, deadlock

# What may hide a semicolon: quoted text, quoted names, dollar-quoted bodies and comments.
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|(\$\w*\$).*?\1|--[^\n]*|/\*.*?\*/|;", re.DOTALL)
_INDEX = re.compile(r"\s*CREATE (?:UNIQUE )?INDEX (CONCURRENTLY )?IF NOT EXISTS (\w+)")
_STORAGE = re.compile(r"\s*ALTER TABLE queen\.(\w+) ALTER COLUMN (\w+) SET STORAGE (\w+)")


class SchemaError(Exception):
    """The schema could not be applied; the message names file, statement and the server's reason."""


def statements(script: str) -> Iterator[str]:
    """The statements of a script without their semicolons; leading comments stay with a statement.

    A ``DROP`` is joined with the statement that follows, so that nothing runs between the two.
    """
    start = 0
    held = ""
    for token in _TOKEN.finditer(script):
        if token.group() != ";":
            continue
        text = script[start : token.start()].strip()
        start = token.end()
        if _code(text).upper().startswith("DROP "):
            held += text + ";\n"
        elif _code(text):
            yield held + text
            held = ""
    if _code(held + script[start:]):
        yield (held + script[start:]).strip().rstrip(";")


def _code(text: str) -> str:
    """A statement without the comments in front of it."""
    return re.sub(r"\A(?:\s|--[^\n]*\n?)+", "", text)


def apply(conninfo: str) -> None:
    """Applies every file in order; raises `SchemaError`. Takes as long as locks of others make it take."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (ADVISORY_LOCK,))
        connection.execute("SET lock_timeout = '2s'")
        folder = resources.files("queen.db") / "sql"
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".sql"):
                for number, text in enumerate(statements(file.read_text("utf-8")), 1):
                    _apply_one(connection, file.name, number, text)
        _warn_of_invalid_indexes(connection)


def _apply_one(connection: psycopg.Connection, file: str, number: int, text: str) -> None:
    if _is_done(connection, _code(text)):
        return
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            connection.execute(text.encode())
            return
        except psycopg.Error as error:
            if error.sqlstate not in _RETRIED or attempt == _ATTEMPTS:
                preview = " ".join(_code(text).split())[:100]
                reason = error.diag.message_primary or str(error)
                raise SchemaError(
                    f"{file} statement {number} ({preview}): {reason}{_holders(connection, error)}"
                ) from error
            time.sleep(random.uniform(0.5, 4.0))


def _is_done(connection: psycopg.Connection, code: str) -> bool:
    """Whether a statement that would take a strong lock has nothing left to do."""
    if match := _INDEX.match(code):
        return _one(connection, "SELECT to_regclass('queen.' || %s) IS NOT NULL", match.group(2))
    if match := _STORAGE.match(code):
        table, column, storage = match.groups()
        return _one(
            connection,
            "SELECT attstorage = %s FROM pg_attribute WHERE attrelid = to_regclass('queen.' || %s) AND attname = %s",
            {"EXTERNAL": "e", "EXTENDED": "x", "MAIN": "m", "PLAIN": "p"}[storage],
            table,
            column,
        )
    return False


def _one(connection: psycopg.Connection, query: str, *parameters: str) -> bool:
    row = connection.execute(query.encode(), parameters).fetchone()
    return bool(row and row[0])


def _holders(connection: psycopg.Connection, error: psycopg.Error) -> str:
    """Who holds locks in the schema, for the operator who has to wait for them or end them."""
    if error.sqlstate not in _RETRIED:
        return ""
    rows = connection.execute(
        "SELECT DISTINCT a.pid, a.application_name, a.state, l.relation::regclass::text, l.mode"
        "  FROM pg_locks l JOIN pg_stat_activity a USING (pid) JOIN pg_class c ON c.oid = l.relation"
        " WHERE c.relnamespace = 'queen'::regnamespace AND l.granted AND a.pid <> pg_backend_pid()"
    ).fetchall()
    return "; locks held by " + ", ".join(str(tuple(row)) for row in rows) if rows else ""


def _warn_of_invalid_indexes(connection: psycopg.Connection) -> None:
    for (name,) in connection.execute(
        "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indexrelid"
        " WHERE NOT indisvalid AND c.relnamespace = 'queen'::regnamespace"
    ).fetchall():
        log.warning("invalid index: drop it and boot again to have it rebuilt", index=name)
