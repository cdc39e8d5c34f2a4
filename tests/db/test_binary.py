"""PostgreSQL's binary formats, against a real server: it reads what we write, and we read what it writes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.pq import ExecStatus

from queen.db import binary
from tests.conftest import Database

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

int4s = st.integers(-(2**31), 2**31 - 1)
int8s = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
blobs = st.binary(max_size=50)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC))


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as connection:
        connection.execute("SET timezone = 'Asia/Kolkata'")
        yield connection


def ask(connection: psycopg.Connection[Any], query: str, *parameters: bytes | None) -> bytes | None:
    """Run a query with binary parameters and return its one value in binary."""
    formats = [1] * len(parameters)
    result = connection.pgconn.exec_params(query.encode(), parameters, param_formats=formats, result_format=1)
    assert result.status == ExecStatus.TUPLES_OK, result.error_message
    return result.get_value(0, 0)


def decoded(connection: psycopg.Connection[Any], data: bytes, kind: str) -> Any:
    """What psycopg reads of an array that the server has read from ours and stored."""
    connection.execute(
        "CREATE TEMPORARY TABLE IF NOT EXISTS sent (number serial, bytea bytea[], text text[], uuid uuid[])"
    )
    column = kind.removesuffix("[]")
    insert = f"INSERT INTO sent ({column}) VALUES ($1)".encode()
    result = connection.pgconn.exec_params(insert, [data], param_formats=[1])
    assert result.status == ExecStatus.COMMAND_OK, result.error_message
    row = connection.execute(f"SELECT {column} FROM sent ORDER BY number DESC LIMIT 1".encode(), binary=True).fetchone()
    assert row is not None
    return row[0]


def text_of(connection: psycopg.Connection[Any], expression: str, parameter: bytes) -> str:
    """What the server makes of a parameter, as text."""
    return (ask(connection, f"SELECT ({expression})::text", parameter) or b"").decode()


def written(values: list[Any]) -> str:
    """An array of numbers as the server writes it."""
    return "{" + ",".join(map(str, values)) + "}"


def test_integers_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    @given(int4s, int8s)
    def check(small: int, large: int) -> None:
        assert ask(connection, "SELECT $1::int4", binary.int4(small)) == binary.int4(small)
        assert text_of(connection, "$1::int4", binary.int4(small)) == str(small)
        assert text_of(connection, "$1::int8", binary.int8(large)) == str(large)
        assert binary.read_int4(binary.int4(small)) == small
        assert binary.read_int8(binary.int8(large)) == large

    check()


def test_booleans_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    for value in (True, False):
        assert text_of(connection, "$1::bool", binary.boolean(value)) == str(value).lower()
        assert ask(connection, f"SELECT {value}") == binary.boolean(value)


def test_arrays_of_integers_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    @given(st.lists(int4s, max_size=20), st.lists(int8s, max_size=20))
    def check(small: list[int], large: list[int]) -> None:
        for values, oid, encode, decode in (
            (small, "int4", binary.int4s, binary.read_int4s),
            (large, "int8", binary.int8s, binary.read_int8s),
        ):
            data = encode(values)
            assert text_of(connection, f"$1::{oid}[]", data) == written(values)
            assert ask(connection, f"SELECT $1::{oid}[]", data) == data
            answer = ask(connection, f"SELECT '{written(values)}'::{oid}[]")
            assert answer is not None
            assert (answer, decode(answer)) == (data, values)

    check()


def test_arrays_of_bytes_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    @given(st.lists(st.none() | blobs, max_size=10))
    def check(values: list[bytes | None]) -> None:
        data = binary.byteas(values)
        assert ask(connection, "SELECT $1::bytea[]", data) == data
        assert decoded(connection, data, "bytea[]") == values

    check()


def test_arrays_of_texts_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    @given(st.lists(st.none() | texts, max_size=10))
    def check(values: list[str | None]) -> None:
        data = binary.texts([None if value is None else value.encode() for value in values])
        assert ask(connection, "SELECT $1::text[]", data) == data
        assert decoded(connection, data, "text[]") == values

    check()


def test_arrays_of_uuids_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    @given(st.lists(st.none() | st.uuids(), max_size=10))
    def check(values: list[uuid.UUID | None]) -> None:
        data = binary.uuids([None if value is None else value.bytes for value in values])
        assert ask(connection, "SELECT $1::uuid[]", data) == data
        assert decoded(connection, data, "uuid[]") == values

    check()


def test_long_arrays_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    values = list(range(100_000))
    assert binary.read_int4s(ask(connection, "SELECT $1::int4[]", binary.int4s(values)) or b"") == values
    blobs = [bytes(16)] * 100_000
    count = ask(connection, "SELECT cardinality($1::bytea[])", binary.byteas(blobs))
    assert binary.read_int4(count or b"") == 100_000


def test_times_are_the_servers(connection: psycopg.Connection[Any]) -> None:
    wire = "to_char(%s AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"

    @given(moments)
    def check(moment: datetime) -> None:
        microseconds = (moment - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        data = binary.int8(microseconds)
        answer = ask(connection, f"SELECT '{moment.isoformat()}'::timestamptz")
        assert answer == data
        assert binary.read_timestamp(data) == moment
        assert binary.timestamp_text(microseconds) == text_of(connection, wire % "$1::timestamptz", data)
        assert datetime.fromisoformat(binary.timestamp_text(microseconds)) == moment

    check()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_what_does_not_fit_is_an_error(value: int) -> None:
    for encode in (binary.int4, lambda number: binary.int4s([number])):
        with pytest.raises(Exception, match=r"format requires|argument out of range|int too large"):
            encode(value)
