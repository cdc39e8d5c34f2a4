"""Engines in the test's own process, on a database that the tests of a module share.

An `Engine` needs no HTTP and no process: two of them on one database are two brokers with memories of
their own, and what they are asked runs in greenlets of the test. Each test keeps to queue names of its
own. What only real processes can show is in tests/faults.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import gevent
import msgspec
import psycopg
import pytest
from gevent.pool import Group as Greenlets
from psycopg.pq.abc import PGresult
from psycopg.rows import namedtuple_row
from pytest_postgresql.executors import NoopExecutor
from pytest_postgresql.janitor import DatabaseJanitor

from queen.db.connection import Connection, Statement
from queen.db.database import conninfo
from queen.db.errors import Unavailable
from queen.db.operations import Operations
from queen.db.records import SegmentWrite, SegmentWritten, Subscription
from queen.engine import frames
from queen.engine.ack import AckItem, ItemResult
from queen.engine.engine import Engine
from queen.engine.identifiers import DEFAULT_TENANT, Minter, fingerprint, uuid_text
from queen.engine.pop import PopRequest
from queen.engine.push import Item, Outcome
from queen.engine.transaction import Committed, Push
from queen.engine.waiting import Client
from queen.settings import Settings
from tests.conftest import Database
from tests.faults.ledger import Ledger
from tests.faults.log_check import Log

TENANT = DEFAULT_TENANT
GROUP = "g"

_numbers = itertools.count(1)
_minter = Minter()

T = TypeVar("T")


class Connections:
    """Stands in for the broker's pool: a connection for every statement under way, however many.

    The pool itself starts threads, which only a patched process can wait for.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self.away = False
        self.healthy = True

    def watch_server(self, watcher: Callable[[], None]) -> None:
        """The server stays the same."""

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self.away:
            raise Unavailable("away")
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            yield connection
        finally:
            if not connection.closed:
                self._idle.append(connection)

    def call(self, statement: Statement, parameters: Sequence[bytes | None], *more: Any) -> PGresult:
        with self.connection() as connection:
            return connection.call(statement, parameters, *more)

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._idle.clear()
        self._all.clear()

    def _connect(self) -> Connection:
        connection = Connection.connect(self._conninfo, autocommit=True)
        self._all.append(connection)
        return connection


@dataclass(frozen=True, slots=True)
class Message:
    """A delivered message with the offset that clients never see."""

    offset: int
    transaction_id: str
    message_id: str
    partition: str
    partition_id: str
    lease: str
    created_at: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Address:
    """What an ack needs to know of a message, for messages that nobody popped."""

    transaction_id: str
    partition_id: str
    lease: str = ""


class LocalBroker:
    """One broker in this process, asked in the terms of a client. Groups start at the oldest message
    unless told otherwise."""

    def __init__(self, engine: Engine, connections: Connections) -> None:
        self.engine = engine
        self.connections = connections
        self.operations: Operations = engine.operations

    def push(self, queue: str, *ids: str, partition: str = "Default", payload: bytes = b"{}") -> list[Outcome]:
        """Push a message for each transaction id, in one request."""
        return self.push_items([(queue, partition, key) for key in ids], payload)

    def push_items(self, items: Iterable[tuple[str, str, str | None]], payload: bytes = b"{}") -> list[Outcome]:
        """Push (queue, partition, transaction id) in one request."""
        pusher = self.engine.pusher
        request = pusher.prepare(
            TENANT,
            [Item(name, msgspec.Raw(payload), partition, key) for name, partition, key in items],
            None,
        )
        pusher.submit(request, request.groups)
        request.wait()
        return request.close()

    def accept(self, queue: str, *ids: str, partition: str = "Default") -> list[str]:
        """Push messages that must all be queued; returns their message ids."""
        outcomes = self.push(queue, *ids, partition=partition)
        assert [o.status for o in outcomes] == ["queued"] * len(ids)
        return [o.message_id for o in outcomes]

    def pop(
        self,
        queue: str | None = None,
        partition: str | None = None,
        group: str = GROUP,
        batch: int = 200,
        partitions: int = 1,
        lease: int = 0,
        auto_ack: bool = False,
        timeout: float | None = None,
        mode: str = "all",
        start: str = "",
        namespace: str = "",
        task: str = "",
    ) -> list[Message]:
        """Pop from a queue, one of its partitions or (no queue) a namespace and task; waits only with a
        timeout."""
        request = PopRequest(
            TENANT,
            Subscription(group.encode(), mode.encode(), start.encode()),
            batch,
            partitions,
            lease,
            auto_ack,
            timeout is not None,
            timeout or 0.0,
            Client(None),
        )
        popper = self.engine.popper
        if queue is None:
            popped = popper.discovery(request, namespace.encode(), task.encode())
        elif partition is None:
            popped = popper.wildcard(request, queue.encode())
        else:
            popped = popper.pinned(request, queue.encode(), partition.encode())
        if popped is None:
            return []
        return [
            Message(
                claim.base + claim.start + k,
                frame.transaction_id.decode(),
                uuid_text(frame.message_id),
                claim.partition.decode(),
                uuid_text(claim.partition_id),
                popped.lease_id.decode(),
                claim.created_at,
                frame.payload,
            )
            for claim, encoded in ((delivery.claim, delivery.frames) for delivery in popped.deliveries)
            for k, frame in enumerate(map(frames.decode, encoded))
        ]

    def ack(
        self,
        acks: Sequence[tuple[Message | Address, str | None]],
        group: str = GROUP,
        lease: str | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> list[ItemResult]:
        """Ack messages with a status each, in one call; under their own leases unless one is given."""
        return self.engine.acker.ack(TENANT, ack_items(acks, group, lease, errors))

    def complete(self, messages: Sequence[Message], group: str = GROUP) -> None:
        """Ack messages as completed, which must succeed."""
        results = self.ack([(m, "completed") for m in messages], group)
        assert [r.error for r in results] == [None] * len(messages)

    def drain(self, queue: str, group: str = GROUP, batch: int = 200, partitions: int = 64) -> list[Message]:
        """Pop and complete until nothing is left; returns everything in order of delivery."""
        everything: list[Message] = []
        while messages := self.pop(queue, group=group, batch=batch, partitions=partitions, timeout=0.3):
            everything += messages
            self.complete(messages, group)
        return everything

    def transact(
        self,
        pushes: Sequence[tuple[str, str, str | None]] = (),
        acks: Sequence[tuple[Message | Address, str | None]] = (),
        group: str = GROUP,
        leases: Sequence[str] = (),
    ) -> Committed:
        """Push (queue, partition, transaction id) and ack in one transaction; raises when refused."""
        return self.engine.transactor.commit(
            TENANT,
            [Push(q.encode(), p.encode(), b"{}", None if key is None else key.encode()) for q, p, key in pushes],
            ack_items(acks, group, None, None),
            leases,
            None,
        )


def ack_items(
    acks: Sequence[tuple[Message | Address, str | None]],
    group: str,
    lease: str | None,
    errors: Mapping[str, str] | None,
) -> list[AckItem]:
    """Return acks as the engine takes them."""
    return [
        AckItem(
            message.transaction_id,
            message.partition_id,
            group,
            message.lease if lease is None else lease,
            status,
            (errors or {}).get(message.transaction_id),
        )
        for message, status in acks
    ]


class Lab:
    """A database with brokers in this process, and SQL to look behind them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.sql: psycopg.Connection[Any] = database.connect(row_factory=namedtuple_row)
        self.connections = self.connect()
        self.operations = Operations(self.connections)  # type: ignore[arg-type]
        self._pools = [self.connections]
        self._engines: list[Engine] = []

    def connect(self) -> Connections:
        """Return connections with the options of a broker's."""
        return Connections(conninfo(Settings.read(self.database.environment())))

    def broker(self, **variables: str) -> LocalBroker:
        """Start one more broker, configured by environment variables. It looks for news more often than usual."""
        defaults = {**self.database.environment(), "POP_WAIT_MAX_INTERVAL_MS": "100"}
        settings = Settings.read({**defaults, **variables})
        connections = self.connect()
        self._pools.append(connections)
        engine = Engine(settings, connections)  # type: ignore[arg-type]
        engine.start()
        self._engines.append(engine)
        return LocalBroker(engine, connections)

    def stop_brokers(self) -> None:
        for engine in self._engines:
            engine.stop()
        for connections in self._pools[1:]:
            connections.close()
        self._engines.clear()
        del self._pools[1:]

    def close(self) -> None:
        self.stop_brokers()
        self.connections.close()
        self.sql.close()

    # Looking

    def rows(self, query: str, *parameters: Any) -> list[Any]:
        return self.sql.execute(query.encode(), parameters).fetchall()

    def one(self, query: str, *parameters: Any) -> Any:
        """Return the only row of a query, or its value when it has one column."""
        row = self.sql.execute(query.encode(), parameters).fetchone()
        return row[0] if row is not None and len(row) == 1 else row

    def execute(self, query: str, *parameters: Any) -> None:
        self.sql.execute(query.encode(), parameters)

    def partition(self, queue: str, partition: str = "Default") -> Any:
        """Return a partition's row."""
        return self.one(
            "SELECT p.* FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = %s AND p.name = %s",
            queue,
            partition,
        )

    def partition_id(self, queue: str, partition: str = "Default") -> str:
        return str(self.partition(queue, partition).id)

    def cursor(self, queue: str, partition: str = "Default", group: str = GROUP) -> Any:
        """Return a group's cursor row, or None."""
        return self.one(
            "SELECT c.* FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id"
            " JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = %s AND p.name = %s AND c.consumer_group = %s",
            queue,
            partition,
            group,
        )

    def committed(self, queue: str, partition: str = "Default", group: str = GROUP) -> int | None:
        cursor = self.cursor(queue, partition, group)
        return None if cursor is None else int(cursor.committed)

    def dead_letters(self, queue: str, group: str = GROUP) -> list[Any]:
        """Return the dead letters of a group on a queue, by offset."""
        return self.rows(
            "SELECT d.* FROM queen.log_dlq d JOIN queen.log_partitions p ON p.id = d.partition_id"
            " JOIN queen.queues q ON q.id = p.queue_id"
            ' WHERE q.name = %s AND d.consumer_group = %s ORDER BY d."offset"',
            queue,
            group,
        )

    # Changing

    def configure(self, queue: str, **options: Any) -> None:
        """Configure a queue as another broker would: nobody in this process is told."""
        self.one(
            "SELECT queen.configure_queue_v1(%s, %s::jsonb, %s::uuid, false)::text",
            queue,
            psycopg.types.json.Jsonb(options),
            uuid_text(TENANT),
        )

    def delete_queue(self, queue: str) -> None:
        self.one("SELECT queen.delete_queue_v1(%s, %s::uuid)", queue, uuid_text(TENANT))

    def seek(self, queue: str, group: str = GROUP, at: str | None = None) -> None:
        """Seek a group to a time, or to the end."""
        self.one(
            "SELECT queen.log_seek_consumer_group_v1(%s::uuid, %s, %s, %s, %s)",
            uuid_text(TENANT),
            queue,
            group,
            at is None,
            at,
        )

    def delete_group(self, queue: str, group: str = GROUP, metadata: bool = True) -> None:
        self.one(
            "SELECT queen.delete_consumer_group_for_queue_v1(%s::uuid, %s, %s, %s)",
            uuid_text(TENANT),
            queue,
            group,
            metadata,
        )

    def expire_leases(self, queue: str, group: str = GROUP) -> None:
        """Let every lease of a group on a queue run out now."""
        self.execute(
            "UPDATE queen.log_consumers c SET lease_expires_at = clock_timestamp() - interval '1 ms'"
            " FROM queen.log_partitions p, queen.queues q"
            " WHERE p.id = c.partition_id AND q.id = p.queue_id AND q.name = %s AND c.consumer_group = %s"
            " AND c.worker_id IS NOT NULL",
            queue,
            group,
        )

    def drop_front(self, queue: str, below: int, partition: str = "Default", hashes: bool = False) -> None:
        """Remove whole segments below an offset, as retention does; their hash rows too if asked."""
        pid = self.partition_id(queue, partition)
        with self.sql.transaction():
            self.execute("DELETE FROM queen.log_segments WHERE partition_id = %s AND end_offset < %s", pid, below)
            self.execute(
                "UPDATE queen.log_partitions p SET (log_start, oldest_live_at) = ("
                " SELECT coalesce(min(s.base_offset), p.last_offset + 1), min(s.created_at)"
                "  FROM queen.log_segments s WHERE s.partition_id = p.id) WHERE p.id = %s",
                pid,
            )
            if hashes:
                self.execute("DELETE FROM queen.log_txns WHERE partition_id = %s AND end_offset < %s", pid, below)
                self.execute(
                    "UPDATE queen.log_partitions p SET (txns_start, oldest_txn_at) = ("
                    " SELECT coalesce(min(t.base_offset), p.last_offset + 1), min(t.created_at)"
                    "  FROM queen.log_txns t WHERE t.partition_id = p.id) WHERE p.id = %s",
                    pid,
                )

    def age(self, queue: str, seconds: float, partition: str = "Default") -> None:
        """Make everything a partition holds older by so many seconds."""
        pid = self.partition_id(queue, partition)
        for table in ("log_segments", "log_txns"):
            self.execute(
                f"UPDATE queen.{table} SET created_at = created_at - make_interval(secs => %s) WHERE partition_id = %s",
                seconds,
                pid,
            )
        self.execute(
            "UPDATE queen.log_partitions SET oldest_live_at = oldest_live_at - make_interval(secs => %s),"
            " oldest_txn_at = oldest_txn_at - make_interval(secs => %s) WHERE id = %s",
            seconds,
            seconds,
            pid,
        )

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Record every change of a cursor or partition meanwhile."""
        ledger = Ledger(self.database.connect)
        try:
            yield ledger
        finally:
            ledger.close()

    @contextmanager
    def broken(self, function: str, *changes: tuple[str, str]) -> Iterator[None]:
        """Replace text of a stored function meanwhile: a rule is broken on purpose.

        Raises AssertionError when the text isn't there: the breakage must be written anew.
        """
        source = self.one(
            "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = %s ORDER BY p.pronargs DESC", function
        )
        changed = source
        for old, new in changes:
            assert old in changed, f"{function} has no {old!r} to break"
            changed = changed.replace(old, new)
        self.sql.execute(changed.encode())
        try:
            yield
        finally:
            self.sql.execute(source.encode())


def write(queue: str, *ids: str, partition: str = "Default", payload: bytes = b"{}") -> SegmentWrite:
    """Return a segment as a broker hands it to SQL, one frame for each transaction id."""
    keys = [key.encode() for key in ids]
    return SegmentWrite(
        TENANT,
        queue.encode(),
        partition.encode(),
        len(keys),
        b"".join(map(fingerprint, keys)),
        frames.pack([frames.encode_frame(_minter.mint(), key, payload) for key in keys], 0),
    )


def append(operations: Operations, queue: str, *ids: str, partition: str = "Default") -> SegmentWritten:
    """Append one segment past every broker's memory."""
    (written,) = operations.push([write(queue, *ids, partition=partition)])
    return written


def together(*tasks: Callable[[], T], timeout: float = 60.0) -> list[T]:
    """Run tasks as greenlets and return their results; raises the first error, or on timeout."""
    greenlets = Greenlets()
    running = [greenlets.spawn(task) for task in tasks]
    with gevent.Timeout(timeout):
        gevent.joinall(running, raise_error=True)
    return [greenlet.value for greenlet in running]


def ids(messages: Iterable[Message]) -> list[str]:
    return [message.transaction_id for message in messages]


def offsets(messages: Iterable[Message]) -> list[int]:
    return [message.offset for message in messages]


@contextmanager
def new_lab(template: NoopExecutor) -> Iterator[Lab]:
    """Make a database with the schema, and drop it afterwards."""
    name = f"queen_test_{os.getpid()}_engine_{next(_numbers)}"
    janitor = DatabaseJanitor(
        host=template.host,
        port=template.port,
        user=template.user,
        password=template.password,
        dbname=name,
        template_dbname=template.template_dbname,
    )
    with janitor:
        lab = Lab(Database(template, name))
        try:
            yield lab
        finally:
            lab.close()


@dataclass
class Rough:
    """A rough run, and what it left behind."""

    lab: Lab
    findings: list[str]
    delivered: list[tuple[str, list[Message]]]  # group and batch, in the order of their arrival

    def happened(self) -> tuple[int, int, int, int]:
        """Return how often a batch was delivered, a message filed, a retry charged and a lease taken over."""
        taken_over = "(old).worker_id <> (new).worker_id"
        return (
            len(self.delivered),
            self.lab.one("SELECT count(*) FROM queen.log_dlq"),
            self.lab.one("SELECT count(*) FROM ledger.cursors WHERE (new).batch_retry_count > 0"),
            self.lab.one(f"SELECT count(*) FROM ledger.cursors WHERE {taken_over}"),
        )

    def broken(self, rule: str) -> list[str]:
        return [finding for finding in self.findings if finding.startswith(rule)]


ROUGH = (200, 10, 10, 10)  # what `Rough.happened` must pass


@pytest.fixture(scope="session")
def rough(schema_template: NoopExecutor) -> Iterator[Rough]:
    """Two brokers, two groups, and ten consumers that complete, fail, forget and auto-ack at random while
    messages come in and leases run out; with the ledger kept."""
    with new_lab(schema_template) as lab, lab.ledger() as ledger:
        brokers = [lab.broker(), lab.broker(QUEEN_HOTLIST="0")]
        lab.configure("rough", retryLimit=1)
        run = Rough(lab, [], [])
        ended = False

        def producer() -> None:
            """Goes on until it was rough enough, however fast this machine is today."""
            nonlocal ended
            for k in range(5000):
                brokers[k % 2].push("rough", *(f"m{k}-{n}" for n in range(1 + k % 3)), partition=f"p{k % 3}")
                if k % 50 == 49 and all(n > least for n, least in zip(run.happened(), ROUGH, strict=True)):
                    break
            ended = True

        def consumer(number: int) -> Callable[[], None]:
            dice = random.Random(number)
            group, broker = "gh"[number % 2], brokers[number // 2 % 2]

            def consume() -> None:
                idle = 0
                while idle < 3:
                    partition = dice.choice((None, f"p{dice.randrange(3)}"))
                    batch, lanes = dice.randint(1, 6), dice.randint(1, 3)
                    auto = number == 0
                    popped = broker.pop(
                        "rough",
                        partition,
                        group,
                        batch,
                        lanes,
                        lease=1,
                        auto_ack=auto,
                        timeout=dice.choice((None, 0.3)),
                    )
                    if popped:
                        run.delivered.append((group, popped))
                        whole = [(m, "completed") for m in popped]
                        some = [(m, dice.choice(("completed", "completed", "failed", "retry", "dlq"))) for m in popped]
                        choice = dice.random()
                        if auto or choice > 0.9:
                            pass  # nothing to do, or forgotten
                        elif choice < 0.5:
                            broker.ack(whole, group)
                        elif choice < 0.7:
                            for k in range(dice.randint(0, len(whole))):
                                broker.ack(whole[k : k + 1], group)
                        else:
                            broker.ack(some, group)
                    idle = 0 if popped or not ended else idle + 1
                    gevent.sleep(0)

            return consume

        def reaper() -> None:
            """Ends leases, forgotten ones and others."""
            while not ended:
                lab.expire_leases("rough", "g")
                gevent.sleep(0.05)

        together(producer, reaper, *(consumer(number) for number in range(10)))
        lab.stop_brokers()
        run.findings = ledger.violations() + Log.read(lab.sql).violations()
        yield run


@pytest.fixture(scope="module")
def module_lab(schema_template: NoopExecutor) -> Iterator[Lab]:
    with new_lab(schema_template) as lab:
        yield lab


@pytest.fixture
def lab(module_lab: Lab) -> Iterator[Lab]:
    """The module's database; brokers started in a test end with it."""
    try:
        yield module_lab
    finally:
        module_lab.stop_brokers()


@pytest.fixture
def broker(lab: Lab) -> LocalBroker:
    """One broker in this process."""
    return lab.broker()


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses."""
    return f"queue-{next(_numbers)}"
