"""What the tests of the spool share: pushes to one queue, and what became of them."""

from __future__ import annotations

from typing import Any

from tests.broker import Broker, wait_until


def item(key: str, partition: str = "p", **fields: Any) -> dict[str, Any]:
    """A message that carries its own key."""
    return {"queue": "q", "partition": partition, "transactionId": key, "payload": {"k": key}, **fields}


def statuses(answer: list[dict[str, Any]]) -> list[str]:
    return [result["status"] for result in answer]


def buffers(broker: Broker) -> dict[str, Any]:
    """The state of the spool."""
    answer: dict[str, Any] = broker.request("GET", "/api/v1/status/buffers").json()
    return answer


def wait_drained(broker: Broker, timeout: float = 60) -> None:
    """Wait until nothing is spooled and the database is there."""

    def drained() -> bool:
        state = buffers(broker)
        return state["pending"] == 0 and state["dbHealthy"]

    wait_until(drained, timeout, "the spool is empty")


def consume(broker: Broker, partition: str = "p", queue: str = "q") -> list[dict[str, Any]]:
    """Take all that is there, in order."""
    found: list[dict[str, Any]] = []
    while messages := broker.pop(queue, partition, batch=1000, autoAck=True, subscriptionMode="all"):
        found += messages
    return found
