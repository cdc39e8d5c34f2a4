"""PostgreSQL is away for a while under load, and a broker is killed meanwhile: what was answered is delivered."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections import Counter
from typing import Any

import psycopg
import pytest

from queen.db.embedded import EmbeddedServer
from tests.broker import HOST, Broker, wait_until
from tests.conftest import Brokers
from tests.faults.log_check import Log

SECONDS = float(os.environ.get("QUEEN_TEST_OUTAGE_SECONDS", "3"))


class Producer(threading.Thread):
    """Pushes numbers to a partition of its own through one broker, each until it is answered."""

    def __init__(self, broker: Broker, name: str, batch: int) -> None:
        super().__init__(name=name)
        self._broker = broker
        self._batch = batch
        self.accepted: list[str] = []
        self.statuses: Counter[str] = Counter()
        self.odd: list[Any] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection(HOST, self._broker.port, timeout=30)
        number = 0
        while not self.stopping.is_set():
            keys = [f"{self.name}-{number + k}" for k in range(self._batch)]
            items = [{"queue": "work", "partition": self.name, "transactionId": key, "payload": key} for key in keys]
            try:
                connection.request("POST", "/api/v1/push", json.dumps({"items": items}))
                response = connection.getresponse()
                status, body = response.status, response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.stopping.wait(0.05)
                continue
            if status == 503:  # it is just starting
                self.stopping.wait(0.05)
                continue
            statuses = [result["status"] for result in json.loads(body)] if status == 201 else [f"{status} {body!r}"]
            self.statuses.update(statuses)
            if not set(statuses) <= {"queued", "duplicate", "buffered"}:
                self.odd.append(statuses)
                break
            self.accepted += keys
            number += self._batch
            self.stopping.wait(0.02)
        connection.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_outage_under_load_loses_repeats_and_reorders_nothing(brokers: Brokers, embedded: EmbeddedServer) -> None:
    pair = [brokers({"FILE_BUFFER_EVENTS_PER_FILE": "200"}, postgres=embedded.environment())]
    # This one is to start without PostgreSQL too.
    pair.append(brokers({"QUEEN_APPLY_SCHEMA": "0"}, postgres=embedded.environment()))
    producers = [Producer(pair[k % 2], f"p{k}", 1 + 9 * (k // 4)) for k in range(8)]
    for producer in producers:
        producer.start()
    try:
        wait_until(lambda: all(len(p.accepted) > 20 for p in producers), 60, "all producers are at work")
        embedded.stop("immediate")
        wait_until(lambda: all(p.statuses["buffered"] > 20 for p in producers), 60, "pushes are buffered")
        threading.Event().wait(SECONDS / 2)
        pair[1].kill()
        pair[1].start({"QUEEN_APPLY_SCHEMA": "0"}, wait=False)
        counts = [len(p.accepted) for p in producers]
        wait_until(
            lambda: all(len(p.accepted) > count + 20 for p, count in zip(producers, counts, strict=True)),
            60,
            "the killed broker buffers again",
        )
        threading.Event().wait(SECONDS / 2)
        embedded.start()
        queued = [p.statuses["queued"] for p in producers]
        wait_until(
            lambda: all(p.statuses["queued"] > count + 20 for p, count in zip(producers, queued, strict=True)),
            120,
            "pushes go straight again",
        )
    finally:
        for producer in producers:
            producer.stopping.set()
        for producer in producers:
            producer.join()
    assert [producer.odd for producer in producers] == [[]] * len(producers)
    for broker in pair:
        wait_until(
            lambda broker=broker: broker.request("GET", "/api/v1/status/buffers").json()["pending"] == 0,  # type: ignore[misc]
            60,
            f"{broker.name} has drained",
        )
    with psycopg.connect(embedded.dsn(), autocommit=True) as connection:
        log = Log.read(connection)
    assert log.violations() == []
    assert log.repeats() == []
    for producer in producers:
        stored = [m.transaction_id for m in log.messages if m.partition == producer.name]
        pushed = producer.accepted
        # The last request may have been carried out without its answer having been seen.
        assert stored[: len(pushed)] == pushed
        assert len(stored) <= len(pushed) + 10
    print(Counter({key: n for p in producers for key, n in p.statuses.items()}), [len(p.accepted) for p in producers])
