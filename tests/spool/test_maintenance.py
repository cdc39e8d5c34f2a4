"""Push maintenance: every push goes to the disk, and comes back when it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.broker import Broker, wait_until
from tests.conftest import Brokers
from tests.spool.conftest import buffers, consume, item, statuses, wait_drained

ROUTE = "/api/v1/system/maintenance"


def maintenance(broker: Broker, enabled: bool) -> None:
    assert broker.request("POST", ROUTE, {"enabled": enabled}).status == 200


def files(broker: Broker) -> list[Path]:
    return sorted((broker.directory / "buffers").glob("queen-*"))


def test_every_push_is_diverted_and_comes_back_in_order(broker: Broker) -> None:
    maintenance(broker, True)
    answers = [
        broker.push([item(f"m{k}"), item(f"m{k}"), {"queue": "q", "partition": "p", "payload": k}]) for k in range(3)
    ]
    assert [statuses(answer) for answer in answers] == [["buffered"] * 3] * 3
    assert broker.push([]) == []
    assert broker.pop("q", "p", subscriptionMode="all") == []
    state = broker.request("GET", ROUTE).json()
    assert state["bufferedMessages"] == state["bufferStats"]["pendingCount"] == 9
    assert state["bufferHealthy"] is True
    maintenance(broker, False)
    wait_drained(broker)
    messages = consume(broker)
    expected = [(answer[k]["message_id"], answer[k]["transaction_id"]) for answer in answers for k in (0, 2)]
    assert [(m["id"], m["transactionId"]) for m in messages] == expected, "the first of two with one id wins"
    assert files(broker) == []


def test_a_push_after_it_goes_behind_what_it_left(broker: Broker) -> None:
    maintenance(broker, True)
    for k in range(30):
        broker.push([item(f"m{k}")])
    maintenance(broker, False)
    for k in range(30, 60):
        assert statuses(broker.push([item(f"m{k}")])) in (["queued"], ["buffered"])
    wait_drained(broker)
    assert [m["transactionId"] for m in consume(broker)] == [f"m{k}" for k in range(60)]


def test_who_waits_is_woken_by_what_is_drained(broker: Broker) -> None:
    found: list[object] = []
    waiting = threading.Thread(
        target=lambda: found.append(broker.pop("q", wait=True, timeout=20_000, subscriptionMode="all"))
    )
    waiting.start()
    maintenance(broker, True)
    broker.push([item("a")])
    maintenance(broker, False)
    waiting.join(30)
    assert [m["transactionId"] for m in found[0]] == ["a"]  # type: ignore[attr-defined]


def test_a_push_that_the_disk_refuses_is_told_and_the_next_is_taken(brokers: Brokers) -> None:
    broker = brokers({"FILE_BUFFER_MAX_MB": "1"})
    maintenance(broker, True)
    big = item("big") | {"payload": "x" * 1_100_000}
    response = broker.request("POST", "/api/v1/push", {"items": [item("a"), big]})
    assert response.status == 500
    assert statuses(response.json()) == ["failed", "failed"]
    assert statuses(broker.push([item("b")])) == ["buffered"]
    assert buffers(broker) == {"pending": 1, "failed": 2, "dbHealthy": True, "worker": 0}
    maintenance(broker, False)
    wait_drained(broker)
    assert [m["transactionId"] for m in consume(broker)] == ["b"]


def test_it_outlives_a_restart_and_a_kill(brokers: Brokers) -> None:
    broker = brokers()
    maintenance(broker, True)
    broker.push([item("a")])
    broker.restart()
    assert [path.suffix for path in files(broker)] == [".buf"]
    assert statuses(broker.push([item("b")])) == ["buffered"]
    broker.kill()
    broker.restart()
    assert buffers(broker)["pending"] == 2, "nothing is drained, at the start neither"
    assert statuses(broker.push([item("c")])) == ["buffered"]
    maintenance(broker, False)
    wait_drained(broker)
    assert [m["transactionId"] for m in consume(broker)] == ["a", "b", "c"]


def test_a_second_broker_on_the_directory_refuses_to_start(brokers: Brokers) -> None:
    broker = brokers()
    shared = str(broker.directory / "buffers")
    second = brokers({"FILE_BUFFER_DIR": shared}, wait=False)
    wait_until(lambda: not second.running, 30, "the second one ends")
    assert f"FATAL: FILE_BUFFER_DIR {shared} is in use by another broker" in second.log()
    assert broker.request("GET", "/health").status == 200


def test_workers_have_a_file_each_and_one_drains(brokers: Brokers) -> None:
    broker = brokers(workers=2)
    maintenance(broker, True)
    pushed = [f"m{k}" for k in range(100)]

    def two_workers_write() -> bool:
        for _ in range(20):
            key = f"m{len(pushed)}"
            pushed.append(key)
            assert statuses(broker.push([item(key, key)])) == ["buffered"]
        return len(files(broker)) == 2

    wait_until(lambda: broker.request("GET", ROUTE).json()["maintenanceMode"], 10, "all know the flag")
    pushed.clear()
    wait_until(two_workers_write, 60, "both workers have buffered")
    assert buffers(broker)["pending"] == len(pushed), "any worker tells for all"
    maintenance(broker, False)
    wait_until(lambda: not files(broker), 60, "all files are drained")
    for key in pushed:
        assert [m["transactionId"] for m in consume(broker, key)] == [key]


KEY = "00" * 32


@pytest.mark.parametrize("known", [True, False])
def test_what_is_secret_in_the_database_is_secret_on_the_disk(brokers: Brokers, known: bool) -> None:
    broker = brokers({"QUEEN_ENCRYPTION_KEY": KEY})
    configured = {"queue": "q", "options": {"encryptionEnabled": True}}
    assert broker.request("POST", "/api/v1/configure", configured).status in (200, 201)
    if known:
        assert statuses(broker.push([item("first")])) == ["queued"]
    maintenance(broker, True)
    assert statuses(broker.push([item("secret")])) == ["buffered"]
    (path,) = files(broker)
    assert b'"encrypted":true,"payload":{"encrypted":' in path.read_bytes()
    assert b'{"k"' not in path.read_bytes()
    maintenance(broker, False)
    wait_drained(broker)
    assert consume(broker)[-1]["data"] == {"k": "secret"}


def test_nothing_secret_is_written_without_a_key(brokers: Brokers) -> None:
    broker = brokers({"QUEEN_ENCRYPTION_KEY": KEY})
    configured = {"queue": "q", "options": {"encryptionEnabled": True}}
    assert broker.request("POST", "/api/v1/configure", configured).status in (200, 201)
    other = brokers()
    assert other.request("POST", "/api/v1/push", {"items": [item("a")]}).status == 400  # it knows now
    maintenance(other, True)
    response = other.request("POST", "/api/v1/push", {"items": [item("a")]})
    assert response.status == 400
    assert "is encrypted and this broker has no QUEEN_ENCRYPTION_KEY" in response.json()["error"]
    assert files(other) == []
    mixed = other.request("POST", "/api/v1/push", {"items": [item("a"), {"queue": "open", "payload": 1}]})
    assert mixed.status == 500
    assert statuses(mixed.json()) == ["failed", "buffered"]
