"""Everything at once on two brokers: no deadlock, whatever meets whatever, and nobody is answered an error.

The lock order is one for all operations. QUEEN_TEST_MIXED_SECONDS lets the mix run longer than a suite may.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.conftest import Brokers, Database
from tests.faults.load import Client

SECONDS = float(os.environ.get("QUEEN_TEST_MIXED_SECONDS", "10"))
QUEUES = ("a", "b", "c")
PARTITIONS = 12
GROUPS = ("g", "h")
OPTIONS = {
    "retryLimit": 1,
    "retentionEnabled": True,
    "retentionSeconds": 2,
    "completedRetentionSeconds": 1,
    "dedupWindowSeconds": 2,
}


class Mix:
    """Clients that each do one thing over and over, to any queue, partition and group."""

    def __init__(self, client: Callable[[int], Client]) -> None:
        self.client = client
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self._until = time.monotonic() + SECONDS

    def run(self) -> None:
        for queue in QUEUES:
            self.ask(self.client(0), "configure", "POST", "/api/v1/configure", {"queue": queue, "options": OPTIONS})
        tasks = (
            [self.push] * 4
            + [self.consume] * 4
            + [self.transact] * 2
            + [self.seek, self.seek_partition, self.delete_group, self.delete_queue, self.look]
        )
        threads = [
            threading.Thread(target=self._repeat, args=(task, number), daemon=True) for number, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 60)
        assert not any(thread.is_alive() for thread in threads)

    def _repeat(self, task: Callable[[Client, random.Random], None], number: int) -> None:
        client, dice = self.client(number), random.Random(number)
        while time.monotonic() < self._until:
            try:
                task(client, dice)
            except Exception as error:
                self.errors.append(f"{task.__name__}: {error!r}")

    def ask(self, client: Client, what: str, method: str, target: str, body: Any = None) -> Any:
        answer = client.request(method, target, body)
        if answer is None or answer[0] >= 400:
            self.errors.append(f"{what}: {answer}")
            return None
        self.done[what] += 1
        return answer[1]

    def push(self, client: Client, dice: random.Random) -> None:
        items = [
            {"queue": dice.choice(QUEUES), "partition": f"p{dice.randrange(PARTITIONS)}", "payload": "x" * 100}
            for _ in range(dice.choice((1, 10, 50)))
        ]
        answer = self.ask(client, "push", "POST", "/api/v1/push", {"items": items})
        self.errors += [f"push: {result}" for result in answer or () if result["status"] != "queued"]

    def pop(self, client: Client, dice: random.Random, group: str) -> list[dict[str, Any]]:
        query = {
            "consumerGroup": group,
            "subscriptionMode": "all",
            "batch": 50,
            "partitions": dice.choice((1, 5)),
            "leaseSeconds": 1,
        }
        where = f"/api/v1/pop/queue/{dice.choice(QUEUES)}"
        if dice.random() < 0.2:
            where += f"/partition/p{dice.randrange(PARTITIONS)}"
        answer = self.ask(client, "pop", "GET", f"{where}?{urlencode(query)}")
        messages: list[dict[str, Any]] = answer["messages"] if answer else []
        return messages

    def consume(self, client: Client, dice: random.Random) -> None:
        """Ack a batch, or fail it; the lease may be over, or its group gone."""
        group = dice.choice(GROUPS)
        messages = self.pop(client, dice, group)
        status = dice.choice(("completed", "completed", "completed", "failed", "retry", "dlq"))
        if messages and dice.random() < 0.9:
            acks = [
                {"status": status, **{name: m[name] for name in ("transactionId", "partitionId", "leaseId")}}
                for m in messages
            ]
            what = "ack" if status == "completed" else "nack"
            body = {"consumerGroup": group, "acknowledgments": acks}
            answer = self.ask(client, what, "POST", "/api/v1/ack/batch", body)
            self.errors += [f"ack: {r}" for r in answer or () if "flush failed" in (r["error"] or "")]

    def transact(self, client: Client, dice: random.Random) -> None:
        """Move a batch to other lanes, from which other transactions take."""
        group = dice.choice(GROUPS)
        messages = self.pop(client, dice, group)
        if not messages:
            return
        addresses = [{name: m[name] for name in ("transactionId", "partitionId", "leaseId")} for m in messages]
        operations: list[dict[str, Any]] = [{"type": "ack", "consumerGroup": group, **a} for a in addresses]
        operations += [
            {"type": "push", "queue": dice.choice(QUEUES), "partition": f"p{dice.randrange(PARTITIONS)}", "payload": 1}
            for _ in range(5)
        ]
        answer = self.ask(client, "transaction", "POST", "/api/v1/transaction", {"operations": operations})
        if answer and not answer["success"] and answer["reason"] == "db_error":
            self.errors.append(f"transaction: {answer}")

    def seek(self, client: Client, dice: random.Random) -> None:
        where = f"/api/v1/consumer-groups/{dice.choice(GROUPS)}/queues/{dice.choice(QUEUES)}/seek"
        self._seek(client, dice, where)

    def seek_partition(self, client: Client, dice: random.Random) -> None:
        partition = f"p{dice.randrange(PARTITIONS)}"
        group, queue = dice.choice(GROUPS), dice.choice(QUEUES)
        self._seek(client, dice, f"/api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek")

    def _seek(self, client: Client, dice: random.Random, where: str) -> None:
        body = {"toEnd": True} if dice.random() < 0.5 else {"timestamp": "2020-01-01T00:00:00Z"}
        answer = client.request("POST", where, body)
        if answer is None or answer[0] not in (200, 404):  # the queue or partition may have been deleted
            self.errors.append(f"seek: {answer}")
        self.done["seek"] += 1
        time.sleep(0.05)

    def delete_group(self, client: Client, dice: random.Random) -> None:
        where = f"/api/v1/consumer-groups/{dice.choice(GROUPS)}/queues/{dice.choice(QUEUES)}"
        self.ask(client, "delete group", "DELETE", f"{where}?deleteMetadata=true")
        time.sleep(0.2)

    def delete_queue(self, client: Client, dice: random.Random) -> None:
        queue = dice.choice(QUEUES)
        self.ask(client, "delete queue", "DELETE", f"/api/v1/resources/queues/{queue}")
        self.ask(client, "configure", "POST", "/api/v1/configure", {"queue": queue, "options": OPTIONS})
        time.sleep(0.5)

    def look(self, client: Client, dice: random.Random) -> None:
        for target in ("resources/queues", "consumer-groups", "dlq", f"resources/queues/{dice.choice(QUEUES)}/depth"):
            answer = client.request("GET", f"/api/v1/{target}")
            if answer is None or answer[0] not in (200, 404):
                self.errors.append(f"look: {target}: {answer}")
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_no_mix_of_operations_deadlocks_or_fails(brokers: Brokers, database: Database) -> None:
    often = {"RETENTION_INTERVAL": "300", "STATS_INTERVAL_MS": "500"}
    pair = [brokers(env=often), brokers(env=often)]
    mix = Mix(lambda number: Client(pair, number))
    mix.run()
    wanted = {"push", "pop", "ack", "nack", "transaction", "seek", "delete group", "delete queue"}
    assert {what for what in wanted if not mix.done[what]} == set(), mix.done
    assert mix.errors == []
    with database.connect() as connection:
        row = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row == (0,), mix.done
