"""Brings the proxy's database to its schema: each file of sql/ once, in the order of their names."""

from __future__ import annotations

from importlib import resources

import psycopg

from queen.log import Log

log = Log("boot")

_LOCK = 778120021


def apply(conninfo: str) -> None:
    """Applies what is missing; proxies that boot at once take turns. Raises `psycopg.Error`."""
    folder = resources.files("queen.proxy") / "sql"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    with psycopg.connect(conninfo) as connection:
        connection.execute("SET LOCAL statement_timeout = 0")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        done = _applied(connection)
        for file in files:
            name = file.name.removesuffix(".sql")
            if name not in done:
                # Without parameters a text of several statements goes as it is.
                connection.execute(file.read_text("utf-8").encode())
                connection.execute("INSERT INTO queen_proxy.schema_migrations (name) VALUES (%s)", (name,))
                log.info("migration applied", name=name)


def _applied(connection: psycopg.Connection) -> set[str]:
    row = connection.execute("SELECT to_regclass('queen_proxy.schema_migrations') IS NOT NULL").fetchone()
    if not row or not row[0]:
        return set()
    return {name for (name,) in connection.execute("SELECT name FROM queen_proxy.schema_migrations")}
