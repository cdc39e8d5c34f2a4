"""What the tests share: a PostgreSQL server, a fresh database each, and brokers to talk to.

The server is an embedded one, started on first use and gone at the end, unless QUEEN_TEST_PG_HOST
(with _PORT, _USER and _PASSWORD) names another. QUEEN_TEST_PG_BIN is the directory of other PostgreSQL
binaries to run it, and the `embedded` servers, with.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pytest_postgresql import factories
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from queen.db import schema
from queen.db.embedded import EmbeddedServer
from tests.broker import Broker

_database_numbers = itertools.count(1)


@dataclass(frozen=True)
class ServerAddress:
    """The PostgreSQL server of the run, with the fields that pytest-postgresql asks a server for."""

    host: str
    port: int
    user: str
    password: str
    options: str = ""
    maintenance_dbname: str = "postgres"
    template_dbname: str | None = None


@dataclass(frozen=True)
class Database:
    """A database of one test."""

    server: NoopExecutor
    name: str

    @property
    def conninfo(self) -> str:
        """Its connection string, for psycopg."""
        return psycopg.conninfo.make_conninfo(
            host=self.server.host,
            port=self.server.port,
            user=self.server.user,
            password=self.server.password,
            dbname=self.name,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables that point a broker at it."""
        return {
            "PG_HOST": self.server.host,
            "PG_PORT": str(self.server.port),
            "PG_USER": self.server.user,
            "PG_PASSWORD": self.server.password or "",
            "PG_DATABASE": self.name,
        }

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Return a new connection, in autocommit mode unless told otherwise; the caller closes it."""
        return psycopg.connect(self.conninfo, **{"autocommit": True, **options})


class Brokers:
    """Starts brokers for one test, and remembers them so that they are stopped after it."""

    def __init__(self, directory: Path, request: pytest.FixtureRequest) -> None:
        self._directory = directory
        self._request = request
        self.started: list[Broker] = []

    def __call__(
        self,
        env: Mapping[str, str] | None = None,
        workers: int = 1,
        postgres: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Broker:
        """Start one more broker and return it, healthy unless `wait` is false.

        Takes extra variables, the number of workers, and the PG_* variables of the database: that of
        the fixture `database` by default, `embedded.environment()` for a server of the test's own.
        """
        if postgres is None:
            postgres = self._request.getfixturevalue("database").environment()
        name = f"broker-{len(self.started) + 1}"
        broker = Broker(self._directory / name, postgres, name)
        self.started.append(broker)
        return broker.start(env, workers, wait)

    def kill(self) -> None:
        """End all of them; a test that cares how a broker stops calls its `stop`."""
        for broker in self.started:
            broker.kill()


def _embedded_server() -> EmbeddedServer:
    """Return a new server, not started, in a directory that the server's account can enter."""
    binaries = os.environ.get("QUEEN_TEST_PG_BIN")
    directory = Path(tempfile.mkdtemp(prefix="queen-test-pg-"))
    return EmbeddedServer(directory, bin_dir=Path(binaries) if binaries else None)


def _apply_schema(host: str, port: int, user: str, dbname: str, password: str, **_: Any) -> None:
    """Bring a new database to the broker's schema; pytest-postgresql calls it on the template."""
    schema.apply(psycopg.conninfo.make_conninfo(host=host, port=port, user=user, dbname=dbname, password=password))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[ServerAddress]:
    """The server that the tests share. A test that stops or kills one uses `embedded`."""
    if host := os.environ.get("QUEEN_TEST_PG_HOST"):
        yield ServerAddress(
            host,
            int(os.environ.get("QUEEN_TEST_PG_PORT", "5432")),
            os.environ.get("QUEEN_TEST_PG_USER", "postgres"),
            os.environ.get("QUEEN_TEST_PG_PASSWORD", ""),
        )
        return
    server = _embedded_server()
    try:
        server.start()
        yield ServerAddress(server.host, server.port, server.user, server.password)
    finally:
        server.destroy()


# Makes the template database, with the schema, once in a run.
schema_template = factories.postgresql_noproc(dbname="queen_test", load=[_apply_schema], depends_on="postgres_server")


@pytest.fixture
def database(schema_template: NoopExecutor) -> Iterator[Database]:
    """A fresh database with the schema applied, for this test alone."""
    name = f"queen_test_{os.getpid()}_{next(_database_numbers)}"
    janitor = DatabaseJanitor(
        host=schema_template.host,
        port=schema_template.port,
        user=schema_template.user,
        password=schema_template.password,
        dbname=name,
        template_dbname=schema_template.template_dbname,
    )
    with janitor:
        yield Database(schema_template, name)


@pytest.fixture
def embedded() -> Iterator[EmbeddedServer]:
    """A started PostgreSQL server of this test's own, to stop and kill; its database is empty."""
    server = _embedded_server()
    try:
        server.start()
        yield server
    finally:
        server.destroy()


@pytest.fixture
def brokers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Brokers]:
    """Call it to start a broker; call it again for another on the same database."""
    starter = Brokers(tmp_path, request)
    try:
        yield starter
    finally:
        starter.kill()


@pytest.fixture
def broker(brokers: Brokers) -> Broker:
    """One healthy broker with one worker on a fresh database."""
    return brokers()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add what the brokers wrote to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    brokers = getattr(item, "funcargs", {}).get("brokers")
    if report.when == "call" and report.failed and brokers:
        for broker in brokers.started:
            lines = broker.log().splitlines()[-200:]
            report.sections.append((f"log of {broker.name}", "\n".join(lines)))
