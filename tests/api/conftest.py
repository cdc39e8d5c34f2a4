"""One broker and one database for all tests of a module: each test keeps to names of its own.

What a test needs to find in the database is laid there in SQL, row by row, since offsets, ages and
leases are then exactly what it says.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg.types.json import Json
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from tests.broker import Broker, Response
from tests.conftest import Database

DEFAULT_TENANT = uuid.UUID("00000000-0000-0000-0000-000000000001")
OTHER_TENANT = uuid.UUID("00000000-0000-0000-0000-0000000000aa")

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Api:
    """A broker with its database: requests on one side, rows on the other."""

    broker: Broker
    database: Database
    sql: psycopg.Connection[Any]

    def request(self, method: str, target: str, body: Any = None) -> Response:
        """Send one request; the target goes as it is."""
        return self.broker.request(method, target, body)

    def get(self, target: str) -> Any:
        """Return the decoded body of a GET that answers 200."""
        response = self.request("GET", target)
        assert response.status == 200, response
        return response.json()

    def post(self, target: str, body: Any = None) -> Any:
        """Return the decoded body of a POST that answers 200."""
        response = self.request("POST", target, body)
        assert response.status == 200, response
        return response.json()

    def one(self, query: str, *parameters: Any) -> Any:
        """Return the only value of a query's first row, or its row when it has several."""
        row = self.sql.execute(query.encode(), parameters).fetchone()
        return row[0] if row is not None and len(row) == 1 else row

    def count(self, table: str, where: str, *parameters: Any) -> int:
        """Return how many rows of a table of the schema match."""
        return int(self.one(f"SELECT count(*) FROM queen.{table} WHERE {where}", *parameters))

    def make_queue(self, name: str, tenant: uuid.UUID = DEFAULT_TENANT, **columns: Any) -> uuid.UUID:
        """Create a queue, as a push does, and return its id."""
        return self._insert("queues", id=uuid.uuid4(), tenant_id=tenant, name=name, **columns)

    def make_partition(
        self,
        queue: uuid.UUID,
        name: str = "Default",
        sizes: tuple[int, ...] = (),
        ages: tuple[float, ...] = (),
        start: int = 0,
    ) -> uuid.UUID:
        """Create a partition with segments of these sizes and ages in seconds, and return its id.

        Offsets below `start` were deleted by retention; every payload byte counts one.
        """
        last = start + sum(sizes) - 1
        partition = self._insert(
            "log_partitions", id=uuid.uuid4(), queue_id=queue, name=name, last_offset=last, log_start=start
        )
        base = start
        for size, age in itertools.zip_longest(sizes, ages, fillvalue=0):
            for table, column, data in (
                ("log_segments", "blob", b"x" * int(size)),
                ("log_txns", "hashes", os.urandom(16 * int(size))),
            ):
                self.sql.execute(
                    f"INSERT INTO queen.{table} (partition_id, base_offset, end_offset, created_at, {column})"
                    " VALUES (%s, %s, %s, now() - make_interval(secs => %s), %s)".encode(),
                    (partition, base, base + int(size) - 1, age, data),
                )
            base += int(size)
        return partition

    def make_cursor(self, partition: uuid.UUID, group: str, committed: int, **columns: Any) -> None:
        """Give a group a cursor in a partition."""
        self._insert("log_consumers", partition_id=partition, consumer_group=group, committed=committed, **columns)

    def make_lease(
        self, partition: uuid.UUID, group: str, committed: int, batch_end: int, seconds: float = 300
    ) -> None:
        """Give a group a cursor with a lease that ends in so many seconds; or ended, when negative."""
        self.make_cursor(partition, group, committed, batch_end=batch_end, worker_id=str(uuid.uuid4()))
        self.sql.execute(
            "UPDATE queen.log_consumers SET lease_acquired_at = now(),"
            " lease_expires_at = now() + make_interval(secs => %s)"
            " WHERE partition_id = %s AND consumer_group = %s",
            (seconds, partition, group),
        )

    def register(self, queue: uuid.UUID, group: str, tenant: uuid.UUID = DEFAULT_TENANT, **columns: Any) -> None:
        """Store a group's subscription to a queue."""
        defaults = {"subscription_mode": "all", "subscription_timestamp": "1970-01-01T00:00:00Z"}
        self._insert(
            "consumer_groups_metadata",
            id=uuid.uuid4(),
            tenant_id=tenant,
            queue_id=queue,
            consumer_group=group,
            **{**defaults, **columns},
        )

    def make_dead_letter(self, partition: uuid.UUID, transaction_id: str, **columns: Any) -> uuid.UUID:
        """File a dead letter and return its id."""
        defaults = {"consumer_group": "g", "offset": 0, "payload": "{}", "error": "no", "retry_count": 0}
        return self._insert(
            "log_dlq",
            id=uuid.uuid4(),
            partition_id=partition,
            message_id=uuid.uuid4(),
            transaction_id=transaction_id,
            **{**defaults, **columns},
        )

    def _insert(self, table: str, **columns: Any) -> Any:
        """Insert a row and return its first column."""
        values = [Json(value) if isinstance(value, dict) else value for value in columns.values()]
        names = ", ".join(f'"{name}"' for name in columns)
        holes = ", ".join(["%s"] * len(columns))
        first = next(iter(columns))
        query = f"INSERT INTO queen.{table} ({names}) VALUES ({holes}) RETURNING {first}"
        return self.one(query, *values)


def segment(text: str) -> str:
    """Return a name as one segment of a path."""
    return quote(text, safe="")


@pytest.fixture(scope="module")
def api(schema_template: NoopExecutor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A healthy broker on a fresh database, shared by the tests of a module."""
    name = f"queen_test_{os.getpid()}_api_{next(_numbers)}"
    janitor = DatabaseJanitor(
        host=schema_template.host,
        port=schema_template.port,
        user=schema_template.user,
        password=schema_template.password,
        dbname=name,
        template_dbname=schema_template.template_dbname,
    )
    with janitor:
        database = Database(schema_template, name)
        broker = Broker(tmp_path_factory.mktemp("broker"), database.environment())
        try:
            broker.start()
            with database.connect() as sql:
                yield Api(broker, database, sql)
        finally:
            broker.kill()


@pytest.fixture
def name() -> str:
    """A name that no other test uses, for a queue or a group."""
    return f"name-{next(_numbers)}"
