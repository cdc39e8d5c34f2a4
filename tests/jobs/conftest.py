"""The jobs in the test's own process, on the databases and brokers of tests/engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from queen.db.connection import Statement
from queen.db.database import conninfo
from queen.jobs.lock import SessionLock
from queen.jobs.retention import LOCK, Retention, Swept
from queen.jobs.retention import log as retention_log
from queen.settings import Settings
from tests.engine.conftest import Connections, Lab, append, broker, lab, module_lab, queue

__all__ = ["broker", "lab", "module_lab", "queue"]  # fixtures


class Counting(Connections):
    """Connections that count the statements they run, by name."""

    def __init__(self, conninfo: str) -> None:
        super().__init__(conninfo)
        self.statements: list[str] = []

    def call(self, statement: Statement, parameters: Sequence[bytes | None], *more: Any) -> Any:
        self.statements.append(statement.name)
        return super().call(statement, parameters, *more)


class Sweeper:
    """A retention job over a lab."""

    def __init__(self, lab: Lab, **variables: str) -> None:
        settings = Settings.read({**lab.database.environment(), **variables})
        self.connections = Counting(conninfo(settings))
        self.lock = SessionLock(conninfo(settings), LOCK, retention_log)
        self.stopping = False
        self.job = Retention(settings, self.connections, self.lock, lambda: self.stopping)  # type: ignore[arg-type]

    def cycle(self) -> Swept:
        swept = self.job.cycle()
        assert swept is not None, "another test holds the lock"
        return swept

    def close(self) -> None:
        self.lock.close()
        self.connections.close()


class Sweepers:
    """Makes retention jobs, and ends them after the test."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._made: list[Sweeper] = []

    def __call__(self, **variables: str) -> Sweeper:
        self._made.append(Sweeper(self._lab, **variables))
        return self._made[-1]

    def close(self) -> None:
        for sweeper in self._made:
            sweeper.close()


@pytest.fixture
def sweepers(lab: Lab) -> Iterator[Sweepers]:
    made = Sweepers(lab)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def sweeper(sweepers: Sweepers) -> Sweeper:
    return sweepers()


def fill(lab: Lab, queue: str, *ages: float, partition: str = "Default", count: int = 2) -> None:
    """Append a segment of `count` messages for each age in seconds, the oldest first."""
    written = 0
    for age, following in zip(ages, [*ages[1:], 0.0], strict=True):
        keys = [f"{written + k}" for k in range(count)]
        append(lab.operations, queue, *keys, partition=partition)
        written += count
        lab.age(queue, age - following, partition)


def put_cursor(lab: Lab, queue: str, group: str, committed: int, partition: str = "Default") -> None:
    lab.execute(
        "INSERT INTO queen.log_consumers (partition_id, consumer_group, committed) VALUES (%s, %s, %s)"
        " ON CONFLICT (partition_id, consumer_group) DO UPDATE SET committed = EXCLUDED.committed",
        lab.partition_id(queue, partition),
        group,
        committed,
    )


def live_offsets(lab: Lab, queue: str, partition: str = "Default") -> list[int]:
    """The first offset of each segment that is left."""
    return [
        base
        for (base,) in lab.rows(
            "SELECT base_offset FROM queen.log_segments WHERE partition_id = %s ORDER BY 1",
            lab.partition_id(queue, partition),
        )
    ]


def history(lab: Lab, queue: str, partition: str = "Default") -> list[tuple[str, int]]:
    return [
        tuple(row)
        for row in lab.rows(
            "SELECT retention_type, messages_deleted FROM queen.retention_history WHERE partition_id = %s ORDER BY id",
            lab.partition_id(queue, partition),
        )
    ]


@pytest.fixture
def nothing_stored(lab: Lab) -> None:
    """The database without the queues of other tests: a cycle is over all of them."""
    lab.execute("DELETE FROM queen.queues")
    lab.execute("DELETE FROM queen.log_txns")
    lab.execute("DELETE FROM queen.retention_history")
