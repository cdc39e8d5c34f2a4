"""Clients that push, consume and relay through all brokers at once, and write down what they saw.

They are as stubborn as clients should be: what was not answered is sent again with the same ids, to the
next broker.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from tests.broker import HOST, Broker
from tests.faults.history import Ack, Delivery, History, Push

WORK = "work"
RELAYED = "relayed"
LANES = ("p0", "p1", "p2")
LEASE_SECONDS = 3
_TIMEOUT = 10.0


class Client:
    """Keep-alive connections to several brokers; it goes to the next one now and then, and after a failure.

    Brokers hear of each other's acks late, so a client that always went to the next would mostly wait.
    """

    def __init__(self, brokers: Sequence[Broker], first: int) -> None:
        self._ports = [broker.port for broker in brokers]
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._turn = first
        self._dice = random.Random(first)
        self.port = 0  # of the broker that was asked last

    def request(self, method: str, target: str, body: Any = None) -> tuple[int, Any] | None:
        """Return status and decoded body, or None when no answer came."""
        self._turn += self._dice.random() < 0.1
        port = self.port = self._ports[self._turn % len(self._ports)]
        connection = self._connections.get(port)
        if connection is None:
            connection = self._connections[port] = http.client.HTTPConnection(HOST, port, timeout=_TIMEOUT)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
            return response.status, json.loads(data) if data else None
        except (OSError, http.client.HTTPException):
            connection.close()
            del self._connections[port]
            self._turn += 1
            time.sleep(0.01)  # a dead port refuses at once
            return None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class Load:
    """Producers, consumers of two groups, and a relay, each in a thread."""

    def __init__(self, brokers: Sequence[Broker], producers: int = 4, consumers: int = 2) -> None:
        """Describe the load; nothing runs yet. Takes the number of producers, and of consumers a group."""
        self.history = History()
        self.errors: list[str] = []
        self.groups = {"one": WORK, "two": WORK, "relay": WORK}
        self._brokers = brokers
        self._producing = threading.Event()
        self._consuming = threading.Event()
        tasks: list[tuple[Callable[[Client, int], None], int]] = [
            *((self._produce, number) for number in range(producers)),
            *((self._consume, number) for number in range(2 * consumers)),
            (self._relay, 0),
            (self._relay, 1),
        ]
        self._threads = [threading.Thread(target=self._run, args=task, daemon=True) for task in tasks]
        self._producers = producers

    def start(self) -> None:
        """Register the groups and let the clients go."""
        client = Client(self._brokers, 0)
        body = {"queue": WORK, "options": {"retryLimit": 1_000_000}}
        assert client.request("POST", "/api/v1/configure", body) is not None
        for group in self.groups:
            query = urlencode({"consumerGroup": group, "subscriptionMode": "all"})
            assert client.request("GET", f"/api/v1/pop/queue/{WORK}?{query}") == (204, None)
        client.close()
        self._producing.set()
        self._consuming.set()
        for thread in self._threads:
            thread.start()

    def stop_producing(self) -> None:
        """End the producers, each with an accepted push."""
        self._producing.clear()
        for thread in self._threads[: self._producers]:
            thread.join(30)

    def stop(self) -> None:
        """End everybody. Raises AssertionError when a client saw what a broker must never answer."""
        self.stop_producing()
        self._consuming.clear()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.errors == []

    def _run(self, task: Callable[[Client, int], None], number: int) -> None:
        client = Client(self._brokers, number)
        try:
            task(client, number)
        except Exception as error:
            self.errors.append(f"{task.__name__} {number}: {error!r}")
        finally:
            client.close()

    def _produce(self, client: Client, number: int) -> None:
        """Push to one lane, one request after the other, each until all of it is accepted."""
        dice = random.Random(number)
        lane = (WORK, LANES[number % len(LANES)])
        count = 0
        while self._producing.is_set():
            keys = [f"{number}-{count + k}" for k in range(dice.choice((1, 1, 1, 5, 20)))]
            items = [{"queue": WORK, "partition": lane[1], "transactionId": key, "payload": {"k": key}} for key in keys]
            while True:
                answer = client.request("POST", "/api/v1/push", {"items": items})
                if answer is None or answer[0] in (500, 503):
                    continue
                assert answer[0] == 201, answer
                results = answer[1]
                assert [r["transaction_id"] for r in results] == keys
                for k, result in enumerate(results):
                    self.history.pushes.append(
                        Push(str(number), count + k, lane, keys[k], result["status"], result["message_id"], client.port)
                    )
                statuses = {r["status"] for r in results}
                assert statuses <= {"queued", "duplicate", "buffered", "failed"}, results
                if "failed" not in statuses:
                    break
            count += len(keys)
            # Or consumers would fall behind for ever. They stand still while pushes are buffered.
            time.sleep(0.1 if "buffered" in statuses else 0.005)

    def _pop(self, client: Client, group: str, **parameters: Any) -> list[tuple[Delivery, list[dict[str, Any]]]]:
        """Pop and record; returns the delivery of each partition with its messages."""
        query = {"consumerGroup": group, "leaseSeconds": LEASE_SECONDS, "wait": "true", "timeout": 500, **parameters}
        asked = time.monotonic()
        answer = client.request("GET", f"/api/v1/pop/queue/{WORK}?{urlencode(query)}")
        answered = time.monotonic()
        if answer is None or answer[0] != 200:
            assert answer is None or answer[0] in (204, 500, 503), answer
            return []
        lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for message in answer[1]["messages"]:
            lanes[message["partition"]].append(message)
        popped = []
        for partition, messages in lanes.items():
            delivery = Delivery(
                asked,
                answered,
                group,
                (WORK, partition),
                messages[0]["leaseId"],
                LEASE_SECONDS,
                [m["id"] for m in messages],
                [m["transactionId"] for m in messages],
            )
            self.history.deliveries.append(delivery)
            popped.append((delivery, messages))
        return popped

    def _consume(self, client: Client, number: int) -> None:
        """Pop and mostly ack: some of a batch first, with a nack behind, late, or not at all."""
        dice = random.Random(1000 + number)
        group = ("one", "two")[number % 2]
        while self._consuming.is_set():
            for delivery, messages in self._pop(client, group, batch=dice.choice((5, 30, 100)), partitions=2):
                choice = dice.random()
                if choice < 0.03:
                    continue  # forgotten: the lease runs out
                if choice < 0.2 and len(messages) > 1:
                    half = len(messages) // 2
                    self._ack(client, delivery, messages[:half])
                    if choice < 0.1:
                        self._ack(client, delivery, messages[half:], dice.choice(("retry", "failed")))
                        continue
                    messages = messages[half:]
                self._ack(client, delivery, messages)

    def _ack(
        self, client: Client, delivery: Delivery, messages: list[dict[str, Any]], status: str = "completed"
    ) -> None:
        """Ack a part of a delivery until it is answered; a nack gives back its first message."""
        nack = status != "completed"
        if nack:
            messages = messages[:1]
        completed = [] if nack else [m["id"] for m in messages]
        ends = nack or messages[-1]["id"] == delivery.message_ids[-1]
        body = {
            "consumerGroup": delivery.group,
            "acknowledgments": [
                {"transactionId": m["transactionId"], "partitionId": m["partitionId"], "leaseId": m["leaseId"]}
                | {"status": status}
                for m in messages
            ],
        }
        for _ in range(20):
            ack = Ack(time.monotonic(), completed, ends)
            delivery.acks.append(ack)
            answer = client.request("POST", "/api/v1/ack/batch", body)
            if answer is None or answer[0] in (500, 503):
                continue
            assert answer[0] == 200, answer
            errors = {r["error"] for r in answer[1]}
            if errors == {None}:
                ack.answered = time.monotonic()
                return
            if not errors & {"pool", "ack flush failed; lease will expire and redeliver"}:
                return  # refused: the lease is over, or an unanswered ack was carried out

    def _relay(self, client: Client, number: int) -> None:
        """Move messages on, in transactions of pushes and acks."""
        while self._consuming.is_set():
            for delivery, messages in self._pop(client, "relay", batch=50):
                operations = [
                    {
                        "type": "push",
                        "queue": RELAYED,
                        "partition": delivery.lane[1],
                        "payload": {},
                        "transactionId": m["transactionId"],
                    }
                    for m in messages
                ] + [
                    {
                        "type": "ack",
                        "transactionId": m["transactionId"],
                        "partitionId": m["partitionId"],
                        "consumerGroup": "relay",
                        "leaseId": m["leaseId"],
                    }
                    for m in messages
                ]
                ack = Ack(time.monotonic(), delivery.message_ids, True)
                delivery.acks.append(ack)
                answer = client.request("POST", "/api/v1/transaction", {"operations": operations})
                if answer is None or answer[0] in (500, 503):
                    continue
                assert answer[0] == 200, answer
                if answer[1]["success"]:
                    ack.answered = time.monotonic()
                else:
                    assert answer[1]["reason"] in ("duplicate", "ack_rejected", "db_error"), answer
