"""What the fault tests share: a run of two brokers under load, and its judgement."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.broker import Broker, wait_until
from tests.faults.ledger import Ledger
from tests.faults.load import LANES, RELAYED, WORK, Load
from tests.faults.log_check import Log

_DRAIN_SECONDS = 40.0


class Run:
    """Two brokers under load, with a ledger; strike in between, then call `judge`."""

    def __init__(self, brokers: list[Broker], connect: Callable[..., psycopg.Connection[Any]]) -> None:
        """Start the load. Takes what opens a connection to the database in autocommit mode."""
        self.brokers = brokers
        self.connect = connect
        self.ledger = Ledger(connect)
        self.load = Load(brokers)
        self.load.start()
        self._probes = 0

    def wait_serving(self, broker: Broker, timeout: float) -> float:
        """Push through one broker until it is accepted; returns the seconds that took."""
        started = time.monotonic()
        self._probes += 1
        item = {"queue": "probe", "transactionId": f"probe-{self._probes}", "payload": None}

        def accepted() -> bool:
            try:
                response = broker.request("POST", "/api/v1/push", {"items": [item]}, timeout=timeout)
            except OSError:
                return False
            return response.status == 201 and response.json()[0]["status"] in ("queued", "duplicate")

        wait_until(accepted, timeout, f"{broker.name} serves")
        return time.monotonic() - started

    def wait_busy(self, pushes: int = 20, deliveries: int = 10) -> None:
        """Wait until the load has got on by so much."""
        history = self.load.history
        wanted = (len(history.pushes) + pushes, len(history.deliveries) + deliveries)
        wait_until(
            lambda: len(history.pushes) >= wanted[0] and len(history.deliveries) >= wanted[1],
            20,
            f"progress; errors: {self.load.errors}",
        )

    def judge(self) -> list[str]:
        """End the load when everything is consumed; returns every finding."""
        self.load.stop_producing()
        wait_until(self._all_consumed, _DRAIN_SECONDS, "every group has consumed everything")
        self.load.stop()
        with self.connect() as connection:
            log = Log.read(connection)
        history = self.load.history
        return [
            *log.violations(),
            *log.repeats(),
            *log.missing(history.accepted()),
            *history.violations(log.messages, self.load.groups),
            *self.ledger.violations(),
            *_relayed_wrongly(log),
        ]

    def _all_consumed(self) -> bool:
        with self.connect() as connection:
            row = connection.execute(
                "SELECT count(*) FILTER (WHERE c.committed = p.last_offset) FROM queen.queues q"
                " JOIN queen.log_partitions p ON p.queue_id = q.id JOIN queen.log_consumers c ON c.partition_id = p.id"
                " WHERE q.name = %s AND c.consumer_group = ANY (%s)",
                (WORK, list(self.load.groups)),
            ).fetchone()
        return row is not None and row[0] == len(LANES) * len(self.load.groups)


def _relayed_wrongly(log: Log) -> list[str]:
    """The relay moved each message once and in order, in one transaction with its ack (T1, T2)."""
    lanes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for message in log.messages:
        lanes[message.queue, message.partition].append(message.transaction_id)
    return [
        f"T1: {lane} was relayed as {len(lanes[RELAYED, lane])} of {len(lanes[WORK, lane])} messages, or out of order"
        for lane in LANES
        if lanes[RELAYED, lane] != lanes[WORK, lane]
    ]


@pytest.fixture
def rounds() -> int:
    """How often to strike; QUEEN_TEST_FAULT_ROUNDS lets more rounds be run by hand."""
    return int(os.environ.get("QUEEN_TEST_FAULT_ROUNDS", "20"))
