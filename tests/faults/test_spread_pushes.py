"""Several producers spread each push over many partitions while groups read: nothing is lost or out of order.

Offsets are given out under the partition's lock, in commit order. An implementation that gives them out
earlier lets a reader pass a message whose transaction commits late.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from urllib.parse import urlencode

import pytest

from tests.conftest import Brokers, Database
from tests.faults.load import Client

QUEUE = "spread"
PARTITIONS = 40
PRODUCERS = 6
PUSHES = 60
GROUPS = ("one", "two")
CONSUMERS = 2  # of each group

Lane = tuple[str, int]  # partition and producer


class Spread:
    """The clients of the run and what they saw."""

    def __init__(self, client: Callable[[int], Client]) -> None:
        self.client = client
        self.errors: list[str] = []
        self.pushed: dict[Lane, list[str]] = defaultdict(list)
        self.seen: dict[str, dict[Lane, list[str]]] = {group: defaultdict(list) for group in GROUPS}
        self.left = dict.fromkeys(GROUPS, PRODUCERS * PUSHES * PARTITIONS)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Register the groups, then let everybody work until all is consumed."""
        for group in GROUPS:
            self.pop(self.client(0), group)
        tasks: list[Callable[[], None]] = [lambda n=n: self.produce(n) for n in range(PRODUCERS)]  # type: ignore[misc]
        for group in GROUPS:
            tasks += [lambda g=group, n=n: self.consume(g, n) for n in range(CONSUMERS)]  # type: ignore[misc]
        threads = [threading.Thread(target=self._guarded, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert self.errors == []
        assert not any(thread.is_alive() for thread in threads), f"left to consume: {self.left}"

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            self.errors.append(repr(error))

    def produce(self, number: int) -> None:
        """Every push has one item for each partition, in an order of its own."""
        client, dice = self.client(number), random.Random(number)
        for k in range(PUSHES):
            partitions = [f"p{p}" for p in range(PARTITIONS)]
            dice.shuffle(partitions)
            items = [
                {"queue": QUEUE, "partition": p, "transactionId": f"{number}-{k}", "payload": number}
                for p in partitions
            ]
            answer = client.request("POST", "/api/v1/push", {"items": items})
            assert answer is not None and answer[0] == 201, answer
            assert {result["status"] for result in answer[1]} == {"queued"}, answer
            for p in partitions:
                self.pushed[p, number].append(f"{number}-{k}")

    def pop(self, client: Client, group: str) -> list[dict[str, str]]:
        query = {
            "consumerGroup": group,
            "subscriptionMode": "all",
            "batch": 200,
            "partitions": 10,
            "wait": "true",
            "timeout": 500,
        }
        answer = client.request("GET", f"/api/v1/pop/queue/{QUEUE}?{urlencode(query)}")
        assert answer is not None and answer[0] in (200, 204), answer
        messages: list[dict[str, str]] = answer[1]["messages"] if answer[0] == 200 else []
        return messages

    def consume(self, group: str, number: int) -> None:
        client = self.client(number)
        while self.left[group] > 0:
            messages = self.pop(client, group)
            if not messages:
                continue
            with self._lock:
                for m in messages:
                    self.seen[group][m["partition"], int(m["data"])].append(m["transactionId"])
                self.left[group] -= len(messages)
            acks = [{name: m[name] for name in ("transactionId", "partitionId", "leaseId")} for m in messages]
            body = {"consumerGroup": group, "acknowledgments": acks}
            answer = client.request("POST", "/api/v1/ack/batch", body)
            assert answer is not None and answer[0] == 200, answer
            assert all(result["success"] for result in answer[1]), answer


@pytest.mark.slow
def test_pushes_spread_over_many_partitions_are_read_whole_and_in_order(brokers: Brokers, database: Database) -> None:
    pair = [brokers(), brokers()]
    run = Spread(lambda number: Client(pair, number))
    run.run()
    for group in GROUPS:
        assert run.seen[group] == run.pushed
    with database.connect() as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row == (0,)
