"""A connection's statements: each has its whole time, and one that passes it is given up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from queen.db.connection import Connection, Statement
from queen.db.errors import ConnectionLost
from tests.conftest import Database

NAP = Statement("nap", "SELECT pg_sleep(0.1)")
LONG_NAP = Statement("long_nap", "SELECT pg_sleep(1.5)")
SLEEP = Statement("sleep", "SELECT pg_sleep(60)")


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with Connection.connect(database.conninfo, autocommit=True) as connection:
        yield connection


def test_a_statement_does_not_use_up_the_time_of_the_next_one(connection: Connection) -> None:
    connection.statement_seconds = 2.0
    for _ in range(30):  # three seconds in all
        connection.call(NAP, ())
    assert not connection.closed


def test_a_statement_that_takes_too_long_is_cancelled_and_its_connection_closed(
    connection: Connection, database: Database
) -> None:
    connection.statement_seconds = 0.2
    with pytest.raises(ConnectionLost):
        connection.call(SLEEP, ())
    assert connection.closed
    with database.connect() as other:
        running = b"SELECT count(*) FROM pg_stat_activity WHERE query = %s AND state = 'active'"
        while other.execute(running, (SLEEP.sql,)).fetchone() != (0,):
            pass


def test_a_call_may_have_a_time_of_its_own(connection: Connection) -> None:
    connection.statement_seconds = 1.0
    connection.call(LONG_NAP, (), seconds=60.0)
    assert not connection.closed
