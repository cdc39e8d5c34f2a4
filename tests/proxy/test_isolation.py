"""Two tenants at once: what one does beyond its limits is nothing to the other, and the count is right."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from tests.broker import HOST, Broker, wait_until
from tests.conftest import Database
from tests.proxy.conftest import Stack
from tests.proxy.stage import BROKER, ControlPlane, Proxy, Tenant

PUSHES = 60


@pytest.fixture(scope="module")
def enforcing(
    pxdb: tuple[dict[str, str], str], messages: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack with one broker, whose proxy enforces, and acme with limits far above what it does."""
    directory = tmp_path_factory.mktemp("enforcing")
    environment, conninfo = pxdb
    broker = Broker(directory / "queen-a", messages.environment(), "queen-a")
    proxy = Proxy(directory / "proxy", environment, "proxy")
    control = None
    try:
        broker.start(BROKER)
        proxy.start({"QUEEN_PROXY_ENFORCE": "true", "QUEEN_PROXY_METER_FLUSH_MS": "500"})
        control = ControlPlane(conninfo)
        control.add_cell(f"http://{HOST}:{broker.port}")
        yield Stack([broker], proxy, control, control.bootstrap("acme", "dedicated-s"))
    finally:
        if control:
            control.close()
        for process in (proxy, broker):
            process.kill()


def push_all(stack: Stack, tenant: Tenant) -> list[float]:
    """Push one message after the other; return how long each took."""
    times = []
    for number in range(PUSHES):
        started = time.monotonic()
        response = stack.push(f"orders-{tenant.slug}", number, tenant=tenant, transactionId=str(number))
        times.append(time.monotonic() - started)
        assert response.status == 201, response
    return times


def test_one_over_every_limit_is_nothing_to_the_other(enforcing: Stack) -> None:
    stack = enforcing
    quiet = stack.control.bootstrap("quiet", "dedicated-s")
    loud = stack.control.bootstrap("loud", "free")
    alone = push_all(stack, quiet)
    refused: list[int] = []
    billed = [0]
    stop = threading.Event()

    def shout() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            response = stack.push(f"noise-{number % 40}", *range(3), tenant=loud, partition=str(number))
            refused.append(response.status)
            if response.status == 201:
                billed[0] += sum(item["status"] == "queued" for item in response.json())
            elif response.status == 429:
                assert 1 <= int(response.headers["Retry-After"]) <= 60

    threads = [threading.Thread(target=shout) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: 429 in refused, 30, "loud is over its limits")
        other = stack.control.bootstrap("other", "dedicated-s")
        beside = push_all(stack, other)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert set(refused) <= {201, 403, 429}
    # They share one machine with us: a refusal costs the proxy little, but not nothing.
    assert statistics.median(beside) < 5 * statistics.median(alone) + 0.05
    stack.proxy.restart()
    for tenant, expected in ((quiet, PUSHES), (other, PUSHES), (loud, billed[0])):
        counted = stack.control.one(
            "SELECT coalesce(sum(msgs), 0) FROM queen_proxy.usage_minutes WHERE cluster_id = %s AND op_class = 'push'",
            tenant.cluster_id,
        )
        assert counted == expected, tenant.slug


def test_queues_and_partitions_beyond_the_plan_are_refused(enforcing: Stack) -> None:
    stack = enforcing
    small = stack.control.bootstrap("small", "dedicated-s")
    override = json.dumps({"max_queues": 2, "max_partitions_per_queue": 3, "max_retention_seconds": 100})
    stack.control.one("SELECT queen_proxy.set_limit_override(%s, %s)", small.cluster_id, override)

    def configured() -> bool:
        body = {"queue": "small-a", "options": {"retentionSeconds": 101}}
        response = stack.request("POST", "/api/v1/configure", body, small)
        return response.status == 403 and "exceeds the plan's max_retention_seconds (100s)" in response.json()["error"]

    wait_until(configured, 10, "the override is in force")
    for partition in ("1", "2", "3"):
        assert stack.push("small-a", 1, tenant=small, partition=partition).status == 201
    assert stack.push("small-b", 1, tenant=small).status == 201
    for queue, partition, text in (
        ("small-a", "4", "partition limit reached (3)"),
        ("small-c", "1", "queue limit reached (2)"),
    ):
        response = stack.push(queue, 1, tenant=small, partition=partition)
        assert (response.status, response.json()) == (403, {"code": "quota_exceeded", "error": text})
    assert stack.push("small-a", 1, tenant=small, partition="3").status == 201
